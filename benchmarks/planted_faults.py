"""Damage an exported EAGLE-3 head as real converters and engines have, and see which check notices.

    python benchmarks/planted_faults.py --head outputs/eagle3_smollm2_served/head --json FILE

Every fault is planted in a copy of the export. Three checks look at it: the importer reads the copy; the export check
drafts along answers with it; vLLM serves it, and its acceptance is compared with our decoder's, which has the original
head. The text of every answer is compared too. The record is written after every fault, and the same command continues
after an interruption.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import at_least, entry_point, new_record, parser, print_table
from safetensors.torch import load_file, save_file
from served import Served, acceptance, equal_texts
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json, write_json
from drafthead.eval.lossless.export_check import check_export
from drafthead.eval.prompts.suites import load_suite
from drafthead.eval.trees.answers import FinishedAnswer, base_answers
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode
from drafthead.models.formats import all_formats
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree

Config, Tensors = dict[str, Any], dict[str, Tensor]
CONFIG, WEIGHTS = "config.json", "model.safetensors"
TOLERANCE = 0.02
"""Largest accepted deviation of tau, as ``engine.tolerance``."""


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


def leave_layers_out(config: Config, _: Tensors) -> None:
    """Drop the ids of the layers that the head reads, so that an engine assumes its default."""
    for node in (config, config.get("eagle_config", {})):
        node.pop(LAYER_IDS, None)


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
    "layers not named": leave_layers_out,
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
    folder: Path, base: BaseModel, head: DraftHead, answers: Sequence[FinishedAnswer], expected: Sequence[str]
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
    check = check_export(base, head, reloaded, answers, torch.float32)
    return {"import": "; ".join(notes), "export check": "; ".join(check.failures())}


def main(given: Sequence[str] | None = None) -> None:
    """Try every fault that the record lacks, and print the table."""
    options = parser(__doc__)
    options.set_defaults(json=Path("planted_faults.json"))
    add = options.add_argument
    add("--head", required=True, metavar="DIR", help="an EAGLE-3 head that vLLM loads")
    add("--prompts", type=int, default=8, metavar="N", help="of spec_bench_like's test half; default 8")
    add("--max-new-tokens", type=int, default=48, metavar="N")
    add("--python", default="", help="the interpreter in which vLLM is installed")
    arguments = options.parse_args(given)
    at_least(arguments, 1, "prompts", "max_new_tokens")
    base, head = load_base_and_head(arguments.head)
    record = read_json(arguments.json) if arguments.json.exists() else new_record("planted_faults") | {"faults": {}}
    record |= {"prompts": arguments.prompts, "max_new_tokens": arguments.max_new_tokens}
    for name, row in tried(base, head, arguments, [name for name in FAULTS if name not in record["faults"]]):
        record["faults"][name] = row
        write_json(arguments.json, record)
    print_table("planted faults", table(record))


def tried(base: BaseModel, head: DraftHead, arguments: Any, names: Sequence[str]) -> Any:
    """Yield each fault's name and record."""
    new = arguments.max_new_tokens
    ids = [base.prompt_ids(p.messages) for p in load_suite("spec_bench_like", arguments.prompts, 0, split="test")]
    plain = [decode(base, None, prompt, max_new_tokens=new) for prompt in ids]
    served = Served("vllm", base, head, min(head.config.trained_positions, head.depth), arguments.python)
    assert served.target is not None
    fitted = served.target.fitted(head)
    chain = DraftConfig(tree=TokenTree.chain(served.drafts))
    ours = acceptance([decode(base, fitted, prompt, max_new_tokens=new, draft_config=chain) for prompt in ids])
    texts = base_answers(base, suite="spec_bench_like", limit=4, max_new_tokens=32, split="dev")
    with tempfile.TemporaryDirectory() as tmp:
        export = Path(tmp) / "export"
        served.export(export)
        expected = all_formats()["eagle3"].read(export).notes
        for name in names:
            folder = Path(tmp) / name.replace(" ", "_")
            planted(export, folder, FAULTS[name])
            row: dict[str, Any] = examine(folder, base, fitted, texts, expected)
            version, answers = served.answers(folder, ids, new)
            theirs = acceptance(answers)
            far = abs(theirs["tau"] - ours["tau"]) > TOLERANCE * ours["tau"]
            row |= {"vllm": version, "engine": theirs, "ours": ours, "eval engines=": far}
            yield name, row | {"texts": equal_texts(base, ids, plain, answers)}


def share(counts: Mapping[str, Any]) -> str:
    """Return the share of steps that accepted their first draft."""
    return f"{(counts['accepted'] or [0])[0] / max(1, counts['steps']):.0%}"


def table(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row of cells per fault."""
    rows = []
    for name, row in record["faults"].items():
        texts, verdict = row["texts"], row["import"]
        rows.append(
            {
                "fault": name,
                "answers equal": f"{texts['same'] + texts['near_ties']} of {texts['of']}",
                "first draft accepted": share(row["engine"]),
                "tau": f"{row['engine']['tau']:.2f}",
                "import": "refuses" if verdict.startswith("refused") else "note" if verdict else "–",
                "export check": "fails" if row["export check"] else "–",
                "eval engines=": "fails" if row["eval engines="] else "–",
            }
        )
    return rows


if __name__ == "__main__":
    entry_point(main)
