"""The Kangaroo adapter's layout against a plain loader of it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import FORMATS, recognise
from drafthead.models.heads.kangaroo import KangarooConfig, KangarooHead
from support import randomised, row_of

TinyBase = Callable[..., BaseModel]
FORMAT = FORMATS["kangaroo"]
IDS = [5, 17, 99, 42, 7, 250, 3]


def trained(base: BaseModel) -> KangarooHead:
    return randomised(KangarooConfig(exit_layer=1, num_draft_tokens=4, confidence_threshold=0.3).build(base).eval())


def logits_of(base: BaseModel, head: KangarooHead) -> Tensor:
    batch = row_of([IDS], padding=0)
    return head.output_head(0).logits(head.hidden_states(batch, base.features(batch, head.spec)))[0].detach()


def plain_adapter(folder: Path, base: BaseModel) -> Tensor:
    """``norm(x + attention(norm(x)))`` over what leaves the exit layer, then the base's head."""
    config = json.loads((folder / "config.json").read_text())
    w = load_file(folder / "model.safetensors")

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"])

    states = base.model.model(torch.tensor([IDS]), output_hidden_states=True, use_cache=False).hidden_states
    x = states[config["exit_layer"]][0].float()
    time, size = len(x), config["head_dim"]
    read = norm(x, w.pop("layers.0.input_layernorm.weight"))
    q, k, v = (
        F.linear(read, w.pop(f"layers.0.self_attn.{p}_proj.weight")).view(time, -1, size).transpose(0, 1) for p in "qkv"
    )
    turns = torch.arange(time)[:, None] * config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    cos, sin = turns.cos().repeat(1, 2), turns.sin().repeat(1, 2)
    q, k = (t * cos + torch.cat([-t[..., size // 2 :], t[..., : size // 2]], -1) * sin for t in (q, k))
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    scores = q @ k.repeat_interleave(groups, 0).mT / size**0.5 + torch.full((time, time), -torch.inf).triu(1)
    mixed = scores.softmax(-1) @ v.repeat_interleave(groups, 0)
    x = x + F.linear(mixed.transpose(0, 1).flatten(1), w.pop("layers.0.self_attn.o_proj.weight"))
    logits = F.linear(norm(x, w.pop("norm.weight")), base.head.weight)
    assert not w, f"nobody reads {sorted(w)}"
    return logits


def test_engine_and_round_trip_give_the_heads_logits(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    head = trained(base)
    FORMAT.export(head, tmp_path)
    wanted = logits_of(base, head)
    assert torch.allclose(plain_adapter(tmp_path, base), wanted, atol=1e-4)
    again = FORMAT.load(tmp_path, base)
    assert isinstance(again, KangarooHead) and again.config == head.config
    assert torch.equal(logits_of(base, again), wanted)
    assert recognise(json.loads((tmp_path / "config.json").read_text()), "x") is FORMAT


def test_a_published_config_does_not_say_where_to_exit(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    FORMAT.export(trained(base), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for key in ("exit_layer", "num_tokens", "threshold"):
        del content[key]
    (tmp_path / "config.json").write_text(json.dumps(content))
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="has None as exit_layer"):
        FORMAT.load(tmp_path, base)
    head = FORMAT.attach(FORMAT.read(tmp_path, {"exit_layer": 1, "rms_norm_eps": 9.9999999e-07}), base)
    assert head.config == KangarooConfig(exit_layer=1)
    with pytest.raises(UserError, match="must be below the base's 3 layers"):
        FORMAT.attach(FORMAT.read(tmp_path, {"exit_layer": 3}), base)
    with pytest.raises(UserError, match="has a layer with rope_theta 500000.0, random-llama one with 10000.0"):
        FORMAT.attach(FORMAT.read(tmp_path, {"exit_layer": 1, "rope_theta": 5e5}), base)


def test_a_draft_vocabulary_is_refused(tiny_base: TinyBase, tmp_path: Path) -> None:
    head = KangarooConfig(exit_layer=1, draft_vocab_size=50).build(tiny_base(), torch.arange(50))
    with pytest.raises(UserError, match="the format kangaroo cannot hold this head: .*head.draft_vocab_size=null"):
        FORMAT.export(head, tmp_path)
