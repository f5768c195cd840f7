"""Damage an exported EAGLE-3 head as real converters and engines have, and see which check notices.

    python benchmarks/planted_faults.py --json docs/results/planted_faults.json

A head is fitted to the base's answers to a few prompts, so that it drafts well there and a fault shows in acceptance.
Every fault is planted in a copy of its export. Three checks look at it: the importer reads the copy; the export check
drafts along answers with it; vLLM serves it, and its acceptance is compared with our decoder's, which has the original
head. The text of every answer is compared too. The record is written after every fault, and the same command continues
after an interruption.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from common import at_least, entry_point, new_record, parser, print_table
from safetensors.torch import load_file, save_file
from served import Served, acceptance, equal_texts
from torch import Tensor

from drafthead.data.answers.store import Answer
from drafthead.data.batch import TrainBatch
from drafthead.engines.process import EngineError
from drafthead.errors import UserError
from drafthead.eval.lossless.export_check import check_export
from drafthead.eval.lossless.self_check import fitted
from drafthead.files.local import read_json, write_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode
from drafthead.models.formats import all_formats
from drafthead.models.heads.eagle3 import Eagle3Config, Eagle3Head
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base
from drafthead.models.token_tree import TokenTree

Config: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, Tensor]
CONFIG, WEIGHTS = "config.json", "model.safetensors"
TOLERANCE = 0.02
"""Largest accepted deviation of tau and of the share of steps that accept a draft, as ``engine.tolerance``."""
PROMPTS = (
    "Why is the sky blue?",
    "Write a story about a lost dog.",
    "Explain how bread is baked.",
    "Describe a day at the sea.",
)
STEPS = 20
"""Training steps of the head: enough to draft well, too few to be always right."""


def shift_layers(by: int) -> Callable[[Config, Tensors], None]:
    """Return a fault that names hidden states ``by`` layers from the trained ones."""

    def plant(config: Config, _: Tensors) -> None:
        def moved(node: Any) -> Any:
            if isinstance(node, dict):
                return {key: moved_ids(value) if key == LAYER_IDS else moved(value) for key, value in node.items()}
            return node

        def moved_ids(ids: list[int]) -> list[int]:
            return [layer + by for layer in ids]

        config.update(moved(config))

    return plant


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def contradict(config: Config, _: Tensors) -> None:
    """Name other layers in one of the two places that engines read."""
    config["eagle_config"][LAYER_IDS] = [layer + 1 for layer in config["eagle_config"][LAYER_IDS]]


def ids_for_offsets(_: Config, tensors: Tensors) -> None:
    """Store token ids where engines expect offsets from the draft ids."""
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def shift_vocabulary(_: Config, tensors: Tensors) -> None:
    """Give every draft id the token of its neighbour."""
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    tensors["d2t"] = ids.roll(1) - torch.arange(len(ids))


def ones(name: str) -> Callable[[Config, Tensors], None]:
    """Return a fault that leaves a norm's weights out."""

    def plant(_: Config, tensors: Tensors) -> None:
        tensors[name] = torch.ones_like(tensors[name])

    return plant


def permute_rotary(_: Config, tensors: Tensors) -> None:
    """Order the query's and the key's rotary pairs as GGUF files of Llama do (interleaved, not in halves)."""
    for name in ("midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight"):
        weight = tensors[name]
        heads = weight.shape[0] // HEAD_DIM
        halves = weight.view(heads, 2, HEAD_DIM // 2, -1)
        tensors[name] = halves.transpose(1, 2).reshape(weight.shape).contiguous()


HEAD_DIM = 64


def reorder_states(_: Config, tensors: Tensors) -> None:
    """Join the hidden states of the three layers in the reverse order."""
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(3, 1)[::-1], 1).contiguous()


def swap_halves(_: Config, tensors: Tensors) -> None:
    """Swap the gate and the up projection of the MLP."""
    gate, up = "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def setting(**values: Any) -> Callable[[Config, Tensors], None]:
    """Return a fault that changes keys of config.json."""
    return lambda config, _: config.update(values)


FAULTS: dict[str, Callable[[Config, Tensors], None]] = {
    "none": lambda config, tensors: None,
    "layers off by one (+1)": shift_layers(1),
    "layers off by one (-1)": shift_layers(-1),
    "two lists of layers, differing": contradict,
    "states joined in reverse order": reorder_states,
    "token ids in place of offsets": ids_for_offsets,
    "draft vocabulary shifted by one": shift_vocabulary,
    "a norm left out": ones("midlayer.hidden_norm.weight"),
    "rotary pairs interleaved": permute_rotary,
    "another rotary base": setting(
        **{"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    ),
    "gate and up projections swapped": swap_halves,
}
"""Name -> the change of config.json and of the tensors."""


def planted(export: Path, folder: Path, fault: Callable[[Config, Tensors], None]) -> None:
    """Copy the exported head to ``folder`` and plant the fault there."""
    shutil.copytree(export, folder)
    config, tensors = read_json(folder / CONFIG), load_file(folder / WEIGHTS)
    fault(config, tensors)
    write_json(folder / CONFIG, config)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def examine(
    folder: Path, base: BaseModel, head: DraftHead, answers: Sequence[Answer], expected: Sequence[str]
) -> dict[str, str]:
    """Return what the importer and the export check say of the head in ``folder``; "" if they notice nothing.

    ``expected`` are the importer's notes about the undamaged export.
    """
    target = all_formats()["eagle3"]
    try:
        notes = [note for note in target.read(folder).notes if note not in expected]
        reloaded = target.load(folder, base)
    except UserError as error:
        return {"import": f"refused: {error}", "export check": "refused"}
    check = check_export(head, reloaded, answers, torch.float32)
    return {"import": "; ".join(notes), "export check": "; ".join(check.failures())}


def main(given: Sequence[str] | None = None) -> None:
    """Try every fault that the record lacks, and print the table."""
    options = parser(__doc__)
    options.set_defaults(json=Path("planted_faults.json"))
    add = options.add_argument
    add("--max-new-tokens", type=int, default=128, metavar="N")
    add("--python", default="", help="the interpreter in which vLLM is installed")
    arguments = options.parse_args(given)
    at_least(arguments, 2, "max_new_tokens")
    base = load_base("embedded:smollm2")
    record = read_json(arguments.json) if arguments.json.exists() else new_record("planted_faults") | {"faults": {}}
    record |= {"prompts": len(PROMPTS), "max_new_tokens": arguments.max_new_tokens}
    for name, row in tried(base, arguments, [name for name in FAULTS if name not in record["faults"]]):
        record["faults"][name] = row
        write_json(arguments.json, record)
    print_table("planted faults", table(record))


def fitted_head(base: BaseModel, answers: Sequence[list[int]]) -> Eagle3Head:
    """Return an EAGLE-3 head that drafts ``answers`` (with their prompts) well."""
    used = {token for text in answers for token in text}
    others = (token for token in range(40, 4096) if token not in used)
    ids = torch.tensor(sorted([*used, *islice(others, 1024 - len(used))]))
    torch.manual_seed(0)
    # Drafts in float32, as an engine's: ``auto`` may draft in int8 on this CPU.
    config = Eagle3Config(num_draft_tokens=3, ttt_steps=3, draft_vocab_size=1024, own_lm_head=False, draft_dtype=None)
    head = config.build(base, ids)
    assert isinstance(head, Eagle3Head)
    return fitted(head, TrainBatch.of(answers, 0, 0), STEPS, lr=2e-3)


def tried(base: BaseModel, arguments: Any, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each fault's name and record."""
    new = arguments.max_new_tokens
    ids = [base.prompt_ids([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    plain = [decode(base, None, prompt, max_new_tokens=new) for prompt in ids]
    texts = [Answer.of([*prompt, *answer.tokens], len(prompt)) for prompt, answer in zip(ids, plain, strict=True)]
    head = fitted_head(base, [text.ids for text in texts])
    served = Served("vllm", base, head, 3, arguments.python)
    chain = DraftConfig(tree=TokenTree.chain(served.drafts))
    ours = acceptance([decode(base, head, prompt, max_new_tokens=new, draft_config=chain) for prompt in ids])
    with tempfile.TemporaryDirectory() as tmp:
        export = Path(tmp) / "export"
        served.export(export)
        expected = all_formats()["eagle3"].read(export).notes
        for name in names:
            folder = Path(tmp) / name.replace(" ", "_")
            planted(export, folder, FAULTS[name])
            row: dict[str, Any] = examine(folder, base, head, texts, expected)
            try:
                version, answers = served.answers(folder, ids, new)
            except EngineError as error:
                row |= {"engine": None, "error": str(error)[:300], "eval engines=": True, "texts": None}
            else:
                theirs = acceptance(answers)
                row |= {"vllm": version, "engine": theirs, "eval engines=": differs(theirs, ours)}
                row["texts"] = equal_texts(base, ids, plain, answers)
            yield name, row | {"ours": ours}


def differs(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Return True if acceptance deviates too far, by the limits of ``drafthead eval engines=``."""
    shares = [[count / max(1, one["steps"]) for count in one["accepted"]] for one in (theirs, ours)]
    far = any(abs(a - b) > TOLERANCE for a, b in zip(*shares, strict=True))
    return far or abs(theirs["tau"] - ours["tau"]) > TOLERANCE * ours["tau"]


def share(counts: Mapping[str, Any] | None) -> str:
    """Return the share of steps that accepted their first draft; "–" if the engine ended."""
    if counts is None:
        return "–"
    return f"{(counts['accepted'] or [0])[0] / max(1, counts['steps']):.0%}"


def table(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row of cells per fault."""
    rows = []
    for name, row in record["faults"].items():
        texts, verdict = row["texts"], row["import"]
        rows.append(
            {
                "fault": name,
                "answers equal": f"{texts['same'] + texts['near_ties']} of {texts['of']}" if texts else "vLLM ends",
                "first draft accepted": share(row["engine"]),
                "tau": f"{row['engine']['tau']:.2f}" if row["engine"] else "–",
                "import": "refuses" if verdict.startswith("refused") else "note" if verdict else "–",
                "export check": "fails" if row["export check"] else "–",
                "eval engines=": "fails" if row["eval engines="] else "–",
            }
        )
    return rows


if __name__ == "__main__":
    entry_point(main)
