"""Hydra's published layout against a plain loader of it: names as the authors' modules have them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.data.batch import Features
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import FORMATS, recognise
from drafthead.models.heads.hydra import HydraConfig, HydraHead
from support import drafted_logits, randomised

TinyBase = Callable[..., BaseModel]
FORMAT = FORMATS["hydra"]
IDS = [5, 17, 99, 42, 7, 250, 3]
DRAFTED = [8, 120, 64]


def trained(base: BaseModel, **settings: Any) -> HydraHead:
    return randomised(HydraConfig(num_draft_tokens=3, **settings).build(base).eval())


def final_states(base: BaseModel) -> Tensor:
    found: Tensor = base.model.model(torch.tensor([IDS]), use_cache=False).last_hidden_state
    return found


def logits_of(base: BaseModel, head: HydraHead) -> Tensor:
    """[K, V] after the text, and then after given drafts."""
    return drafted_logits(head, IDS, Features(final=final_states(base)), DRAFTED)


@torch.inference_mode()
def engine(folder: Path, base: BaseModel) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    w = load_file(folder / "hydra_lm_head.safetensors")
    hidden = final_states(base)[0]
    if config["hydra_head_arch"] == "prefix-mlp":
        hidden = prefix(w, hidden, base)
    logits, dropouts = [], config["hydra_head_arch"] == "prefix-mlp"
    for k in range(config["hydra_num_heads"]):
        x = torch.cat([hidden[-1], *(base.embedding[token] for token in DRAFTED[: k + 1])])
        for j in range(config["hydra_num_layers"]):
            name = f"hydra_mlp.{k}.{2 * j + 1 if dropouts else j}"
            through = f"{name}.res_connection"
            kept = x if j else F.linear(x, w.pop(f"{through}.weight"), w.pop(f"{through}.bias"))
            x = kept + F.silu(F.linear(x, w.pop(f"{name}.linear.weight"), w.pop(f"{name}.linear.bias")))
        name = f"hydra_lm_head.{k}.1" if dropouts else f"hydra_lm_head.{k}"
        logits.append(F.linear(x, w.pop(f"{name}.weight"), w.pop(f"{name}.bias")))
    assert not w, f"nobody reads {sorted(w)}"
    return torch.stack(logits)


def prefix(w: dict[str, Tensor], x: Tensor, base: BaseModel) -> Tensor:
    """A Llama decoder layer and a norm, with the base's sizes."""
    config, layer = base.model.config, "prefix_embeding_layer.layers.0."
    time, size = len(x), config.head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return w.pop(name) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps)

    read = norm(x, f"{layer}input_layernorm.weight")
    q, k, v = (
        F.linear(read, w.pop(f"{layer}self_attn.{p}_proj.weight")).view(time, -1, size).transpose(0, 1) for p in "qkv"
    )
    turns = torch.arange(time)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = turns.cos().repeat(1, 2), turns.sin().repeat(1, 2)
    q, k = (t * cos + torch.cat([-t[..., size // 2 :], t[..., : size // 2]], -1) * sin for t in (q, k))
    groups = config.num_attention_heads // config.num_key_value_heads
    scores = q @ k.repeat_interleave(groups, 0).mT / size**0.5 + torch.full((time, time), -torch.inf).triu(1)
    mixed = (scores.softmax(-1) @ v.repeat_interleave(groups, 0)).transpose(0, 1).flatten(1)
    x = x + F.linear(mixed, w.pop(f"{layer}self_attn.o_proj.weight"))
    read = norm(x, f"{layer}post_attention_layernorm.weight")
    gate, up = (F.linear(read, w.pop(f"{layer}mlp.{p}_proj.weight")) for p in ("gate", "up"))
    return norm(
        x + F.linear(F.silu(gate) * up, w.pop(f"{layer}mlp.down_proj.weight")), "prefix_embeding_layer.norm.weight"
    )


CASES = [
    {},
    {"num_layers": 3, "prefix_layer": True, "dropout": 0.2},
    {"num_layers": 3, "tie_blocks": True, "projection_bias": True},
    {"num_layers": 2, "own_lm_head": False},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_engine_and_round_trip_give_the_heads_logits(
    tiny_base: TinyBase, tmp_path: Path, settings: dict[str, Any]
) -> None:
    base = tiny_base()
    head = trained(base, **settings)
    FORMAT.export(head, tmp_path)
    wanted = logits_of(base, head)
    assert torch.allclose(engine(tmp_path, base), wanted, atol=1e-3, rtol=1e-3)
    again = FORMAT.load(tmp_path, base)
    assert isinstance(again, HydraHead)
    assert torch.allclose(logits_of(base, again), wanted, atol=1e-5)
    if head.config.own_lm_head:
        assert again.config == head.config
    assert recognise(json.loads((tmp_path / "config.json").read_text()), "x") is FORMAT


def test_files_of_others(tiny_base: TinyBase, tmp_path: Path) -> None:
    """Whatever their prefix layer is called, and with the embedding that nothing reads."""
    base = tiny_base()
    head = trained(base, prefix_layer=True)
    FORMAT.export(head, tmp_path)
    tensors = load_file(tmp_path / "hydra_lm_head.safetensors")
    theirs = {name.replace("prefix_embeding_layer.", "prefix.model."): t for name, t in tensors.items()}
    theirs |= {"prefix.model.embed_tokens.weight": torch.ones(3), "prefix.model.rotary_emb.inv_freq": torch.ones(4)}
    save_file(theirs, tmp_path / "hydra_lm_head.safetensors")
    again = FORMAT.load(tmp_path, base)
    assert torch.equal(logits_of(base, again), logits_of(base, head))  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix_layer", [False, True])
def test_modules_are_counted_with_dropouts_or_without(tiny_base: TinyBase, tmp_path: Path, prefix_layer: bool) -> None:
    """Older code has no dropout modules, newer code may have them in all heads."""
    base = tiny_base()
    head = trained(base, num_layers=3, prefix_layer=prefix_layer)
    FORMAT.export(head, tmp_path)
    tensors = load_file(tmp_path / "hydra_lm_head.safetensors")

    def other(name: str) -> str:
        kind, k, *rest = name.split(".")
        if kind == "hydra_mlp":
            return ".".join(
                [kind, k, str((int(rest[0]) - 1) // 2 if prefix_layer else 2 * int(rest[0]) + 1), *rest[1:]]
            )
        if kind == "hydra_lm_head":
            return ".".join([kind, k, rest[-1]] if prefix_layer else [kind, k, "1", rest[-1]])
        return name

    save_file({other(name): t for name, t in tensors.items()}, tmp_path / "hydra_lm_head.safetensors")
    assert torch.equal(logits_of(base, FORMAT.load(tmp_path, base)), logits_of(base, head))  # type: ignore[arg-type]


def test_refusals(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    with pytest.raises(UserError, match=r"reads embeddings of unit length, .*\(head.unit_embeddings=false\)"):
        FORMAT.export(trained(base, unit_embeddings=True), tmp_path)
    with pytest.raises(UserError, match="drafts over 50 of 300 ids, .*head.draft_vocab_size=null"):
        FORMAT.export(HydraConfig(draft_vocab_size=50).build(base, torch.arange(50)), tmp_path)
    scaled = trained(base)
    scaled.target_lm_head = type(scaled.target_lm_head)(weight=scaled.target_lm_head.weight, scale=0.5)
    with pytest.raises(UserError, match="scales or caps its logits"):
        FORMAT.export(scaled, tmp_path)
    FORMAT.export(trained(base, prefix_layer=True), tmp_path)
    with pytest.raises(UserError, match="has hydra_head_arch 'eagle-attn'"):
        FORMAT.read(tmp_path, {"hydra_head_arch": "eagle-attn"})
    with pytest.raises(UserError, match="and grounded_heads False"):
        FORMAT.read(tmp_path, {"grounded_heads": False})
    with pytest.raises(UserError, match="missing .hydra_lm_head.3.1.weight"):
        FORMAT.read(tmp_path, {"hydra_num_heads": 4})
    tensors = load_file(tmp_path / "hydra_lm_head.safetensors")
    for part in ("k", "v"):
        tensors[f"prefix_embeding_layer.layers.0.self_attn.{part}_proj.weight"] = torch.ones(32, 32)
    save_file(tensors, tmp_path / "hydra_lm_head.safetensors")
    with pytest.raises(UserError, match=r"k_proj.weight is \(32, 32\), and beside this base it would be \(16, 32\)"):
        FORMAT.load(tmp_path, base)
