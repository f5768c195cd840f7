"""MTP layers in checkpoints: read, compared with transformers' own MTP, and written back, for tiny random bases."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from mtp_checkpoint import ADDED, BASE, LAYERS, base_of, checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from drafthead.data.batch import HiddenStatesSpec
from drafthead.eval.config import SuiteConfig
from drafthead.eval.trees.finished_answers import base_answers
from drafthead.files.local import read_json
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode
from drafthead.models.formats import format_named, recognise
from drafthead.models.heads.mtp import MtpHead
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.token_tree import TokenTree
from support import call, cases, drafted_logits, fitted, random_ids, randomised, refuses, rows_of

Script = Callable[[str], ModuleType]
MTP = format_named("mtp")
PROMPT = [5, 6, 7] * 4


@pytest.fixture
def stock_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers knows MTP layers by the literal numbers of published checkpoints."""
    for kind in ("deepseek_v3", "glm4_moe"):
        model = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(kind))]
        monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}\..*"])
    yield


def learnt(head: MtpHead, texts: list[list[int]]) -> MtpHead:
    return fitted(head, rows_of(texts), 60, lr=5e-3).eval()


def stored(folder: Path) -> dict[str, Tensor]:
    return {f"{name}/{key}": tensor for name in (BASE, ADDED) for key, tensor in load_file(folder / name).items()}


@cases("kind", "deepseek_v3", "glm4_moe")
def test_drafts_as_transformers_does(kind: str, script: Script, tmp_path: Path, stock_names: None) -> None:
    """Logits of the first two drafts, and with a trained layer the text and the accepted drafts of every step."""
    base = checkpoint(script("base_shapes").SHAPES[kind], tmp_path / "base")
    assert recognise(read_json(tmp_path / "base" / "config.json"), "") is MTP
    head = MTP.load(tmp_path / "base", base)
    assert isinstance(head, MtpHead)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model, cache = MtpModel.from_pretrained(stock), MtpCache(config=stock.config.get_mtp_config())
    ids, last = random_ids(14), 12
    hidden = base.hidden_states(rows_of([ids]), HiddenStatesSpec())
    with torch.no_grad():
        places, tokens = torch.arange(1, last + 1)[None], torch.tensor([ids[1 : last + 1]])
        out = model.forward_layer(0, hidden.final[:, :last].clone(), places, cache, input_ids=tokens)
        again = model.forward_layer(0, out[:, -1:], places[:, -1:] + 1, cache, input_ids=torch.tensor([ids[-1:]]))
        expected = stock.lm_head(torch.cat([out[:, -1:], again], 1))[0]
        actual = drafted_logits(head, ids[:last], hidden.map(lambda states: states[:, :last]), ids[last:])
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)

    greedy = decode(base, None, PROMPT, max_new_tokens=30, ignore_eos=True).tokens
    MTP.export(learnt(head, [PROMPT + greedy]), tmp_path / "learnt")
    base = base_of(tmp_path / "learnt")
    head = MTP.load(tmp_path / "learnt", base)
    chain = DraftConfig(tree=TokenTree.chain(1))
    result = decode(base, head, PROMPT, max_new_tokens=30, draft_config=chain, ignore_eos=True)
    accepted: list[int] = []
    candidates = MTPCandidateGenerator.get_candidates

    def counted(self: Any, *args: Any, n_last_matches: int, **kwargs: Any) -> Any:
        accepted.append(int(n_last_matches))
        return candidates(self, *args, n_last_matches=n_last_matches, **kwargs)

    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "learnt", dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MTPCandidateGenerator, "get_candidates", counted)
        text = stock.generate(
            torch.tensor([PROMPT]), use_mtp=True, do_sample=False, max_new_tokens=30, eos_token_id=None
        )
    assert text[0, len(PROMPT) :].tolist() == result.tokens
    ours = [step.accepted for step in result.steps]
    assert accepted[2:][: len(ours) - 1] == ours[:-1] and sum(ours) > 5


@cases("kind, own_prefix", ("deepseek_v3", False), ("glm4_moe", False), ("gemma", True), ("qwen3_next", True))
def test_there_and_back(kind: str, own_prefix: bool, script: Script, tmp_path: Path) -> None:
    """An export has the same bits, and replaces the stale copy. Some norms are stored as offsets from one."""
    shape = script("base_shapes").SHAPES[kind]
    if kind == "qwen3_next":
        shape = shape | {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
    base = checkpoint(shape, tmp_path / "base", own_prefix)
    head = MTP.load(tmp_path / "base", base)
    MTP.export(head, tmp_path / "out")
    before, after = stored(tmp_path / "base"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    (stale,) = changed
    assert stale.startswith(BASE) and torch.equal(after[stale], before[stale.replace(BASE, ADDED)])
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in (tmp_path / "base").iterdir()}
    name = "mtp.pre_fc_norm_hidden.weight" if own_prefix else f"model.layers.{LAYERS}.hnorm.weight"
    weight = before[f"{ADDED}/{name}"].float() + own_prefix
    assert torch.equal(head.get_parameter("hnorm.weight"), weight)

    batch = rows_of([random_ids(12)])
    out = randomised(head, 0.1).loss(batch, base.hidden_states(batch, head.spec), LossConfig())
    torch.autograd.backward(out.loss_sum)
    assert all(parameter.grad is not None for parameter in head.parameters())
    MTP.export(head, tmp_path / "other")
    again = MTP.load(tmp_path / "other", base)
    for key, tensor in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], tensor, rtol=2**-7, atol=2**-7)


@pytest.mark.slow
def test_the_way_in_which_states_are_read_is_measured(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = checkpoint(script("base_shapes").SHAPES["llama"], tmp_path / "base")
    head = MTP.load(tmp_path / "base", base)
    assert isinstance(head, MtpHead)
    answers = base_answers(base, SuiteConfig(suite="builtin", limit=3, max_new_tokens=40))
    other = head.reading(before_final_norm=True, norm_output=False)
    MTP.export(learnt(other, [answer.ids for answer in answers]), tmp_path / "learnt")
    named = [f"base.name={tmp_path / 'learnt'}", "base.tokenizer=builtin:tiny", "base.dtype=float32"]
    call("import", f"from={tmp_path / 'learnt'}", *named, f"out={tmp_path / 'head'}")
    settings = read_json(tmp_path / "head" / "config.json")["settings"]
    assert settings["before_final_norm"] and not settings["norm_output"]
    lengths = read_json(tmp_path / "head" / "import.json")["mean_accepted_length"]
    assert len(lengths) == 4 and max(lengths.values()) > 1.2
    assert "if it reads states before the base's final norm" in capsys.readouterr().out
    options = ["to=mtp", f"out={tmp_path / 'out'}", "suite=builtin", "limit=2", "max_new_tokens=16"]
    call("export", f"head={tmp_path / 'head'}", *options)
    assert "ignores before_final_norm silently" in capsys.readouterr().out


@cases(
    "change, says",
    (lambda tensors: tensors.pop("mtp.fc.weight"), "no tensors for eh_proj.weight"),
    (lambda tensors: tensors.update({"mtp.layers.0.self_attn.gate.weight": torch.ones(2)}), "has not: .*gate"),
    (lambda tensors: tensors.pop("mtp.layers.0.mlp.up_proj.weight"), "lacks the weight .*up_proj"),
    (lambda tensors: tensors.update({"mtp.norm.weight": torch.ones(3)}), r"norm.weight \[3\], expected \[64\]"),
    (
        lambda tensors: tensors.update({"mtp.fc.weight": tensors["mtp.fc.weight"].to(torch.float8_e4m3fn)}),
        "as F8_E4M3; use one without quantised weights",
    ),
)
def test_other_layers_are_refused(
    change: Callable[[dict[str, Tensor]], object], says: str, script: Script, tmp_path: Path
) -> None:
    base = checkpoint(script("base_shapes").SHAPES["llama"], tmp_path, own_prefix=True)
    head = MTP.load(tmp_path, base)
    tensors = load_file(tmp_path / BASE) | load_file(tmp_path / ADDED)
    change(tensors)
    for name in (BASE, ADDED, "model.safetensors.index.json"):
        (tmp_path / name).unlink()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    refuses(says, MTP.load, tmp_path, base)
    if "F8" not in says:
        refuses("no tensors|differ in|export it for its own base", MTP.export, head, tmp_path / "out")
