"""Medusa's published layouts against what their loaders ask for, stated here a second time and in plain torch.

The loaders below are a few lines each. Names and config keys of FasterDecoding's and vLLM's are as their sources have
them; what TGI's V1 and V2 classes compute is from memory.
"""

import json
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import all_formats, recognise
from drafthead.models.formats.format import Unsupported, with_full_vocabulary
from drafthead.models.formats.medusa import VllmMedusaFormat
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead
from drafthead.models.heads.medusa2 import Medusa2Config
from plain_heads import rewrite
from support import TinyBase, randomised, refuses

CASES = [
    {"num_draft_tokens": 3, "num_layers": 1},
    {"num_draft_tokens": 2, "num_layers": 3},
    {"num_draft_tokens": 2, "num_layers": 1, "own_lm_head": False},
    {"num_draft_tokens": 2, "num_layers": 2, "own_lm_head": False},
    {"num_draft_tokens": 2, "num_layers": 2, "tie_blocks": True},
]


def trained(base: BaseModel, d2t: Tensor | None = None, **settings: Any) -> MedusaHead:
    return randomised(MedusaConfig(**settings).build(base, d2t).eval(), 0.3)


def logits_of(head: MedusaHead, hidden: Tensor) -> Tensor:
    last_tokens = torch.zeros(len(hidden), dtype=torch.int64)
    return head.projections.logits(head.all_inputs(hidden, last_tokens, head.depth), None)


def faster_decoding(folder: Path, lm_head: Tensor, hidden: Tensor) -> Tensor:
    """``Sequential(*[ResBlock] * L, Linear)`` filled by name; the later recipe ends in the base's head."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    logits = []
    for k in range(config["medusa_num_heads"]):
        x = hidden
        for j in range(config["medusa_num_layers"]):
            x = x + F.silu(F.linear(x, tensors.pop(f"{k}.{j}.linear.weight"), tensors.pop(f"{k}.{j}.linear.bias")))
        last = f"{k}.{config['medusa_num_layers']}.weight"
        logits.append(F.linear(x, tensors.pop(last) if config["version"] == "1" else lm_head))
    assert not tensors, f"nobody reads {sorted(tensors)}"
    return torch.stack(logits, 1)


def tgi(folder: Path, lm_head: Tensor, hidden: Tensor) -> Tensor:
    """V1 is tried first; without a projection V2 reads one block of all heads as one product."""
    config = json.loads((folder / "config.json").read_text())
    assert "architectures" not in config and config["base_model_name_or_path"]
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    heads = range(config["medusa_num_heads"])
    if f"0.{config['medusa_num_layers']}.weight" in tensors:
        return faster_decoding(folder, lm_head, hidden)
    assert config["medusa_num_layers"] == 1
    weight = torch.cat([tensors[f"{k}.0.linear.weight"] for k in heads])
    bias = torch.cat([tensors[f"{k}.0.linear.bias"] for k in heads])
    residual = F.silu(F.linear(hidden, weight, bias)).unflatten(-1, (len(heads), -1))
    return F.linear(hidden[:, None] + residual, lm_head)


def vllm(folder: Path, lm_head: Tensor, hidden: Tensor) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "medusa" and config["architectures"] == ["MedusaModel"]
    for key in list(config):  # what its config class does to every key
        if "num" in key and "heads" in key:
            config["num_heads"] = config.pop(key)
        elif "num" in key and "layers" in key:
            config["num_hidden_layers"] = config.pop(key)
    tensors = load_file(folder / "model.safetensors")
    truncated = config.get("truncated_vocab_size") or config["vocab_size"]
    token_map = tensors.pop("token_map") if truncated < config["vocab_size"] else None
    logits = []
    shared = tensors.pop("lm_heads.0.weight") if config.get("original_lm_head", False) else None
    for k in range(config["num_heads"]):
        x = hidden
        for j in range(config["num_hidden_layers"]):
            name = f"blocks.{k}.layers.{j}"
            bias = tensors.pop(f"{name}.bias") if config.get("medusa_fc_bias", False) else None
            x = x + F.silu(F.linear(x, tensors.pop(f"{name}.weight"), bias))
        weight = tensors.pop(f"lm_heads.{k}.weight") if shared is None else shared
        assert weight.shape == (truncated, config["hidden_size"])
        scores = config.get("logit_scale", 1.0) * F.linear(x, weight)
        if token_map is not None:
            scores = torch.full((len(x), config["vocab_size"]), -torch.inf).index_copy(1, token_map, scores)
        logits.append(scores)
    assert not tensors, f"nobody reads {sorted(tensors)}"
    return torch.stack(logits, 1)


ENGINES = {"medusa": faster_decoding, "tgi_medusa": tgi, "vllm_medusa": vllm}


@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("name", ENGINES)
def test_engine_and_round_trip(tiny_base: TinyBase, tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    base = tiny_base()
    head = trained(base, **settings)
    if name == "tgi_medusa" and not head.config.own_lm_head and head.config.num_layers > 1:
        with pytest.raises(UserError, match="2 blocks per head"):
            all_formats()[name].export(head, tmp_path)
        return
    all_formats()[name].export(head, tmp_path)
    hidden = torch.randn(4, base.hidden_size, generator=torch.Generator().manual_seed(2))
    expected = logits_of(head, hidden)
    assert torch.allclose(ENGINES[name](tmp_path, base.lm_head.weight, hidden), expected, atol=1e-5)
    again = all_formats()[name].load(tmp_path, base)
    assert isinstance(again, MedusaHead) and again.config == head.config
    assert torch.equal(logits_of(again, hidden), expected)
    content = json.loads((tmp_path / "config.json").read_text())
    assert recognise(content, "x").name == name.removeprefix("tgi_")


class WithTokenMap(VllmMedusaFormat):
    """The layout of older versions of vLLM, which loaded a draft vocabulary."""

    def unsupported(self, head: MedusaHead) -> Unsupported:
        yield from ()


def test_a_draft_vocabulary_is_refused_and_files_that_have_one_are_read(tiny_base: TinyBase, tmp_path: Path) -> None:
    base, d2t, form = tiny_base(), torch.arange(1, 300, 3), all_formats()["vllm_medusa"]
    for own_lm_head in (True, False):
        head = trained(base, d2t, num_draft_tokens=2, own_lm_head=own_lm_head, draft_vocab_size=100)
        with pytest.raises(UserError, match=r"over 100 of 300 ids.*\(head.draft_vocab_size=null or to=vllm_m"):
            all_formats()["medusa"].export(head, tmp_path / "refused")
        offered = "head.draft_vocab_size=null" if own_lm_head else "vocabulary=full"
        refuses(rf"vLLM 0.32.0 does not load a token_map \({offered}\)", form.export, head, tmp_path / "refused")
        folder = tmp_path / str(own_lm_head)
        WithTokenMap().export(head, folder)
        hidden = torch.randn(3, base.hidden_size)
        expected = logits_of(head, hidden)
        assert torch.allclose(vllm(folder, base.lm_head.weight, hidden)[..., d2t], expected, atol=1e-5)
        again = all_formats()["vllm_medusa"].load(folder, base)
        assert torch.equal(again.d2t, d2t) and torch.equal(logits_of(again, hidden), expected)


def test_over_the_full_vocabulary_the_drafted_ids_keep_their_logits(tiny_base: TinyBase, tmp_path: Path) -> None:
    base, d2t, form = tiny_base(), torch.arange(1, 300, 3), all_formats()["vllm_medusa"]
    head = trained(base, d2t, num_draft_tokens=2, own_lm_head=False, draft_vocab_size=100)
    wide, hidden = form.fitted(head), torch.randn(3, base.hidden_size)
    assert len(wide.d2t) == 300 and wide.config.draft_vocab_size is None
    assert torch.allclose(logits_of(wide, hidden)[..., d2t], logits_of(head, hidden), atol=1e-6)
    form.export(wide, tmp_path)
    assert torch.allclose(vllm(tmp_path, base.lm_head.weight, hidden), logits_of(wide, hidden), atol=1e-5)
    narrow = trained(base, d2t, num_draft_tokens=2, own_lm_head=True, draft_vocab_size=100)
    assert form.fitted(narrow) is narrow, "output rows for the other ids would be untrained"
    assert with_full_vocabulary(wide) is wide and len(with_full_vocabulary(head).d2t) == 300
    refuses("vocabulary=full", with_full_vocabulary, narrow)


def test_what_no_medusa_format_has_is_refused_in_one_message(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    for name in ENGINES:
        with pytest.raises(UserError, match="heads.* read the last token"):
            all_formats()[name].export(trained(base, num_draft_tokens=1, reads_last_token=True), tmp_path)
    settings = {"num_layers": 3, "own_lm_head": False, "reads_last_token": True, "draft_vocab_size": 100}
    with pytest.raises(UserError) as refusal:
        all_formats()["tgi_medusa"].export(trained(base, torch.arange(100), num_draft_tokens=2, **settings), tmp_path)
    for key in ("reads_last_token=false", "draft_vocab_size=null", "own_lm_head=true", "num_layers=1"):
        assert f"head.{key}" in str(refusal.value) and "\n" not in str(refusal.value)
    capped = trained(tiny_base(seed=5), num_draft_tokens=1)
    capped.target_lm_head = type(capped.target_lm_head)(weight=capped.target_lm_head.weight, softcap=30.0)
    with pytest.raises(UserError, match="scales or caps its logits"):
        all_formats()["medusa"].export(capped, tmp_path)
    with pytest.raises(UserError, match="caps its logits, and the format does not"):
        all_formats()["vllm_medusa"].export(capped, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("config", [MedusaConfig, Medusa2Config])
def test_a_base_with_an_adapter_must_be_written_too(
    tiny_base: TinyBase, tmp_path: Path, config: type[MedusaConfig]
) -> None:
    base = copy(tiny_base())
    base.config = replace(base.config, adapter="somewhere/adapter")
    head = config(num_draft_tokens=1).build(base)
    with pytest.raises(UserError, match="merged_base=true.*base_name="):
        all_formats()["medusa"].export(head, tmp_path)
    all_formats()["medusa"].export(head, tmp_path, base_name="user/tuned")
    assert json.loads((tmp_path / "config.json").read_text())["base_model_name_or_path"] == "user/tuned"


def test_tgi_checks_a_config(tiny_base: TinyBase, tmp_path: Path) -> None:
    all_formats()["tgi_medusa"].export(trained(tiny_base(), num_draft_tokens=1), tmp_path)
    for config, says in (
        ({"base_model_name_or_path": None}, "TGI needs base_model_name_or_path"),
        ({"architectures": ["MedusaModel"]}, "a config.json with architectures"),
    ):
        with pytest.raises(UserError, match=says):
            all_formats()["tgi_medusa"].read(tmp_path, config)


def published(folder: Path, base: BaseModel, **settings: Any) -> tuple[MedusaHead, dict[str, Tensor]]:
    head = trained(base, **settings)
    all_formats()["medusa"].export(head, folder)
    return head, load_file(folder / "medusa_lm_head.safetensors")


def test_published_defects(tiny_base: TinyBase, tmp_path: Path) -> None:
    """Import 5 heads whose config says 2, one block with several names, and a complete Medusa-2 model."""
    base = tiny_base()
    head, tensors = published(tmp_path, base, num_draft_tokens=5, num_layers=2, tie_blocks=True)
    assert torch.equal(tensors["0.0.linear.weight"], tensors["0.1.linear.weight"])
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    whole = {f"medusa_head.{k}": v for k, v in tensors.items()} | {"model.norm.weight": torch.ones(3)}
    save_file(whole, tmp_path / "medusa_lm_head.safetensors")
    checkpoint = all_formats()["medusa"].read(tmp_path)
    notes = ("1 tensors of the base", "medusa_num_heads 2, but the weights hold 5", "medusa_num_layers None")
    assert all(expected in note for expected, note in zip(notes, checkpoint.notes, strict=True))
    again = all_formats()["medusa"].attach(checkpoint, base)
    hidden = torch.randn(2, base.hidden_size)
    assert again.config == head.config
    assert torch.equal(logits_of(again, hidden), logits_of(head, hidden))  # type: ignore[arg-type]


def test_vllm_files_of_others(tiny_base: TinyBase, tmp_path: Path) -> None:
    """Import a prefix, no biases, and full projections with a token map."""
    base, d2t = tiny_base(), torch.arange(0, 300, 2)
    head = trained(base, d2t, num_draft_tokens=2, draft_vocab_size=150)
    with torch.no_grad():
        for k in range(2):
            head.blocks[k][0].linear.bias.zero_()  # type: ignore[index]
    WithTokenMap().export(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for k in range(2):
        rows = tensors.pop(f"lm_heads.{k}.weight")
        tensors[f"lm_heads.{k}.weight"] = torch.zeros(300, base.hidden_size).index_copy(0, d2t, rows)
        del tensors[f"blocks.{k}.layers.0.bias"]
    rewrite(tmp_path, {f"medusa_heads.{k}": v for k, v in tensors.items()}, medusa_fc_bias=None)
    hidden = torch.randn(2, base.hidden_size)
    again = all_formats()["vllm_medusa"].load(tmp_path, base)
    assert torch.equal(logits_of(again, hidden), logits_of(head, hidden))  # type: ignore[arg-type]


def test_bad_folders_are_named(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    medusa = all_formats()["medusa"]
    tensors = published(tmp_path, base, num_draft_tokens=2)[1]
    file = tmp_path / "medusa_lm_head.safetensors"
    file.rename(tmp_path / "medusa_lm_head.pt")
    refuses(r"medusa_lm_head.pt: pickles", medusa.read, tmp_path)
    (tmp_path / "medusa_lm_head.pt").unlink()
    refuses(r"no medusa_lm_head.safetensors \(it holds config.json\)", medusa.read, tmp_path)
    file.write_bytes(b"no")
    refuses("cannot be read", medusa.read, tmp_path)
    lost = {k: v for k, v in tensors.items() if k != "1.0.linear.bias"}
    narrow = {k: torch.zeros([16 if s == 32 else s for s in v.shape]) for k, v in tensors.items()}
    for changed, says in (
        (lost | {"2.extra": torch.ones(1)}, r"missing \[1.0.linear.bias, .*unknown \[2.extra\]"),
        (tensors | {"1.1.weight": torch.ones(300, 16)}, r"shape \[1.1.weight is \(300, 16\), not \(300, 32\)\]"),
        (narrow, r"0.0.linear.weight is \(16, 16\), not \(32, 32\)"),
    ):
        save_file(changed, file)
        refuses(says, medusa.load, tmp_path, base)


def test_shards_are_read_and_stay_in_their_folder(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    head, tensors = published(tmp_path, base, num_draft_tokens=2)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    names = sorted(tensors)
    shards = {n: f"part-{i % 2}.safetensors" for i, n in enumerate(names)}
    for shard in set(shards.values()):
        save_file({n: tensors[n] for n in names if shards[n] == shard}, tmp_path / shard)
    index = tmp_path / "medusa_lm_head.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    hidden = torch.randn(2, base.hidden_size)
    again = all_formats()["medusa"].load(tmp_path, base)
    assert torch.equal(logits_of(again, hidden), logits_of(head, hidden))  # type: ignore[arg-type]
    index.write_text(json.dumps({"weight_map": {"a": "../part-0.safetensors"}}))
    with pytest.raises(UserError, match="must list only files of its folder"):
        all_formats()["medusa"].load(tmp_path, base)


# GGUF files have no config.json, and that of a checkpoint with an MTP layer is the base's.
@pytest.mark.parametrize("name", sorted(set(all_formats()) - {"gguf", "gguf_dspark", "mtp"}))
def test_an_import_may_override_the_keys_that_a_format_reads(tiny_base: TinyBase, tmp_path: Path, name: str) -> None:
    base, form = tiny_base(), all_formats()[name]
    settings: dict[str, dict[str, Any]] = {"dspark": {"tied_markov": False}}
    settings["dflash"] = {"markov_rank": 0, "confidence": False, "anchor_predicts": False}
    settings["transformers"] = settings["dflash"]
    layers = {"layers": [1, 2]} if hasattr(form.head_config(), "layers") else {}
    head = randomised(form.head_config(**layers, **settings.get(name, {})).build(base).eval())
    form.export(head, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert not form.read(tmp_path).notes
    (tmp_path / "config.json").write_text(json.dumps({"base_model_name_or_path": "x"}))
    again = form.attach(form.read(tmp_path, {k: v for k, v in content.items() if k in form.config_keys}), base)
    assert all(torch.equal(value, head.state_dict()[key]) for key, value in again.state_dict().items())
    refuses(f"{name} does not use config.bogus", form.read, tmp_path, {"bogus": 1})
