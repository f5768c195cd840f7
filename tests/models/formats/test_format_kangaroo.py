"""Kangaroo's published layout against a plain loader; heads that no format of their kind can hold."""

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
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig
from plain_heads import PlainLayer, check_refused, check_round_trip, deep_base, kangaroo, rewrite, states
from support import TinyBase

KANGAROO = FORMATS["kangaroo"]


@torch.inference_mode()
def kangaroo_engine(folder: Path, base: BaseModel) -> Tensor:
    """``norm(x + attention(norm(x)))`` over what leaves the exit layer, then the base's head."""
    config = json.loads((folder / "config.json").read_text())
    layer = PlainLayer(load_file(folder / "model.safetensors"), config, config["rope_theta"])
    x = states(base)[config["exit_layer"]][0].float()
    x = x + layer.attention(layer.norm(x, "layers.0.input_layernorm"), "layers.0.self_attn.")
    logits = F.linear(layer.norm(x, "norm"), base.lm_head.weight)
    assert not layer.unread, f"nobody reads {sorted(layer.unread)}"
    return logits


def test_engine_and_round_trip_give_the_heads_logits(tmp_path: Path) -> None:
    check_round_trip(KANGAROO, kangaroo_engine, kangaroo(deep_base()), tmp_path)


def test_a_published_kangaroo_does_not_say_where_to_exit(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    KANGAROO.export(kangaroo(base), tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(tmp_path, weights, **dict.fromkeys(("exit_layer", "num_tokens", "threshold")))
    with pytest.raises(UserError, match="has None as exit_layer"):
        KANGAROO.load(tmp_path, base)
    head = KANGAROO.attach(KANGAROO.read(tmp_path, {"exit_layer": 1, "rms_norm_eps": 9.9999999e-07}), base)
    assert head.config == KangarooConfig(exit_layer=1)


def test_more_heads_that_a_format_cannot_hold(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    for form, config in (
        (KANGAROO, KangarooConfig(exit_layer=1, draft_vocab_size=50)),
        (FORMATS["hydra"], HydraConfig(draft_vocab_size=50)),
        (FORMATS["mlp_speculator"], MLPSpeculatorConfig(draft_vocab_size=50)),
    ):
        head = config.build(base, torch.arange(50))
        says = f"{form.name} cannot hold this head: it drafts over 50 of 300 ids, .*\\(head.draft_vocab_size=null\\)"
        with pytest.raises(UserError, match=says):
            form.export(head, tmp_path)
    with pytest.raises(
        UserError,
        match="medusa holds heads of the class MedusaHead, this is a MLPSpeculatorHead: export it to=mlp_",
    ):
        FORMATS["medusa"].export(head, tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"exit_layer": 3}, "must be below the base's 3 layers"),
        ({"rope_theta": 5e5}, "has a layer with rope_theta 500000.0, random-llama one with 10000.0"),
    ],
)
def test_a_config_that_would_draft_wrongly_is_refused(
    tiny_base: TinyBase, tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    check_refused(KANGAROO, kangaroo(tiny_base()), tmp_path, config, says)
