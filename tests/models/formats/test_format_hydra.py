"""Hydra's published layout against a plain loader, which reads the folder alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import FORMATS
from plain_heads import (
    DRAFTED,
    PlainLayer,
    check_refused,
    check_round_trip,
    deep_base,
    hydra,
    logits_of,
    rewrite,
    states,
)
from support import TinyBase

HYDRA = FORMATS["hydra"]


@torch.inference_mode()
def hydra_engine(folder: Path, base: BaseModel) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    layer = PlainLayer(load_file(folder / "hydra_lm_head.safetensors"), base.model.config.to_dict())
    hidden, dropouts = states(base)[-1][0], config["hydra_head_arch"] == "prefix-mlp"
    if dropouts:
        prefix = "prefix_embeding_layer.layers.0."
        hidden = hidden + layer.attention(layer.norm(hidden, f"{prefix}input_layernorm"), f"{prefix}self_attn.")
        hidden = hidden + layer.mlp(layer.norm(hidden, f"{prefix}post_attention_layernorm"), f"{prefix}mlp.")
        hidden = layer.norm(hidden, "prefix_embeding_layer.norm")

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, layer.get(f"{name}.weight"), layer.get(f"{name}.bias"))

    logits = []
    for k in range(config["hydra_num_heads"]):
        x = torch.cat([hidden[-1], *(base.embedding[token] for token in DRAFTED[: k + 1])])
        for j in range(config["hydra_num_layers"]):
            name = f"hydra_mlp.{k}.{2 * j + 1 if dropouts else j}"
            x = (x if j else linear(x, f"{name}.res_connection")) + F.silu(linear(x, f"{name}.linear"))
        logits.append(linear(x, f"hydra_lm_head.{k}.1" if dropouts else f"hydra_lm_head.{k}"))
    assert not layer.unread, f"nobody reads {sorted(layer.unread)}"
    return torch.stack(logits)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_layers": 3, "prefix_layer": True, "dropout": 0.2},
        {"num_layers": 3, "tie_blocks": True, "projection_bias": True},
        {"num_layers": 2, "own_lm_head": False},
    ],
)
def test_engine_and_round_trip_give_the_heads_logits(tmp_path: Path, settings: dict[str, Any]) -> None:
    check_round_trip(HYDRA, hydra_engine, hydra(deep_base(), **settings), tmp_path)


def test_hydra_files_of_others(tiny_base: TinyBase, tmp_path: Path) -> None:
    """Whatever their prefix layer is called, and with the embedding that nothing reads."""
    base = tiny_base()
    head = hydra(base, prefix_layer=True)
    HYDRA.export(head, tmp_path)
    tensors = load_file(tmp_path / "hydra_lm_head.safetensors")
    theirs = {name.replace("prefix_embeding_layer.", "prefix.model."): t for name, t in tensors.items()}
    theirs |= {"prefix.model.embed_tokens.weight": torch.ones(3), "prefix.model.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(tmp_path, theirs)
    assert torch.equal(logits_of(base, HYDRA.load(tmp_path, base)), logits_of(base, head))


@pytest.mark.parametrize("prefix_layer", [False, True])
def test_hydra_modules_are_counted_with_dropouts_or_without(
    tiny_base: TinyBase, tmp_path: Path, prefix_layer: bool
) -> None:
    """Older code has no dropout modules, newer code may have them in all heads; some files have no biases."""
    base = tiny_base()
    head = hydra(base, num_layers=3, prefix_layer=prefix_layer)
    HYDRA.export(head, tmp_path)

    def other(name: str) -> str:
        kind, k, *rest = name.split(".")
        if kind == "hydra_mlp":
            number = (int(rest[0]) - 1) // 2 if prefix_layer else 2 * int(rest[0]) + 1
            return ".".join([kind, k, str(number), *rest[1:]])
        if kind == "hydra_lm_head":
            return ".".join([kind, k, rest[-1]] if prefix_layer else [kind, k, "1", rest[-1]])
        return name

    tensors = {other(n): t for n, t in load_file(tmp_path / "hydra_lm_head.safetensors").items()}
    rewrite(tmp_path, {n: t for n, t in tensors.items() if not (n.startswith("hydra_lm") and n.endswith("bias"))})
    assert torch.equal(logits_of(base, HYDRA.load(tmp_path, base)), logits_of(base, head))


def test_hydra_refusals(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    with pytest.raises(UserError, match=r"reads embeddings of unit length, .*\(head.unit_embeddings=false\)"):
        HYDRA.export(hydra(base, unit_embeddings=True), tmp_path)
    scaled = hydra(base)
    scaled.target_lm_head = type(scaled.target_lm_head)(weight=scaled.target_lm_head.weight, scale=0.5)
    with pytest.raises(UserError, match="scales or caps its logits"):
        HYDRA.export(scaled, tmp_path)
    HYDRA.export(hydra(base, prefix_layer=True), tmp_path)
    tensors = load_file(tmp_path / "hydra_lm_head.safetensors")
    tensors["prefix_embeding_layer.layers.0.self_attn.k_proj.weight"] = torch.ones(32, 32)
    rewrite(tmp_path, tensors)
    with pytest.raises(UserError, match=r"k_proj.weight is \(32, 32\), not \(16, 32\)\]; name the base"):
        HYDRA.load(tmp_path, base)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"hydra_head_arch": "eagle-attn"}, "has hydra_head_arch 'eagle-attn'"),
        ({"grounded_heads": False}, "and grounded_heads False"),
        ({"hydra_num_heads": 4}, "missing .hydra_lm_head.3.1.bias"),
    ],
)
def test_a_config_that_would_draft_wrongly_is_refused(
    tiny_base: TinyBase, tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    check_refused(HYDRA, hydra(tiny_base(), prefix_layer=True), tmp_path, config, says)
