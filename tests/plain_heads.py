"""Heads with every weight drawn, and plain torch to compute them from an exported folder alone.

Names and the order of operations are those of the engines and of the methods' authors (docs/formats.md says how sure
they are).
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from drafthead.data.batch import HiddenStates
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.config import BaseConfig
from drafthead.models.formats import recognise
from drafthead.models.formats.contract import Format
from drafthead.models.heads.common.contract import DraftHead
from drafthead.models.heads.eagle3 import Eagle3Config, Eagle3Head
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig, KangarooHead
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig
from support import TINY, drafted_logits, randomised, row_of

IDS = [5, 17, 99, 42, 7, 250, 3]


DRAFTED = [8, 120, 64]


@cache
def deep_base(model_type: str = "llama") -> BaseModel:
    """Six layers, so that three of them can be read below the last."""
    shape = {**TINY, "model_type": model_type, "num_hidden_layers": 6}
    return BaseModel.load(BaseConfig(random=True, shape=shape, tokenizer="builtin:tiny", dtype="float32", seed=0))


def eagle(base: BaseModel, d2t: Tensor | None = None, **settings: Any) -> Eagle3Head:
    settings = {"layers": [1, 2], "draft_vocab_size": None if d2t is None else len(d2t), **settings}
    config = Eagle3Config(num_draft_tokens=3, ttt_steps=2, intermediate_size=64, **settings)
    return randomised(config.build(base, d2t).eval())


def hydra(base: BaseModel, **settings: Any) -> DraftHead:
    return randomised(HydraConfig(num_draft_tokens=3, **settings).build(base).eval())


def kangaroo(base: BaseModel) -> DraftHead:
    return randomised(KangarooConfig(exit_layer=1, num_draft_tokens=4, confidence_threshold=0.3).build(base).eval())


def mlp(base: BaseModel, **settings: Any) -> DraftHead:
    return randomised(MLPSpeculatorConfig(**settings).build(base).eval())


def states(base: BaseModel) -> tuple[Tensor, ...]:
    """What every layer puts out for the text, and last what the final norm does."""
    out = base.model.model(torch.tensor([IDS]), output_hidden_states=True, use_cache=False)
    return (*out.hidden_states, out.last_hidden_state)


def logits_of(base: BaseModel, head: DraftHead) -> Tensor:
    """[K, W] after the text, and then after given drafts; Kangaroo's first one, which needs no cache of the base."""
    found = states(base)
    layers = [found[i] for i in head.spec.layers]
    base_hidden = HiddenStates(final=found[-1], layers=torch.cat(layers, -1) if layers else None)
    if isinstance(head, KangarooHead):
        return head.output_head(0).logits(head.hidden_states(row_of([IDS], padding=0), base_hidden))[0].detach()
    chain = [*DRAFTED, 7, 250][: head.depth] if isinstance(head.config, MLPSpeculatorConfig) else DRAFTED
    return drafted_logits(head, IDS, base_hidden, chain)


class PlainLayer:
    """A Llama decoder layer in plain torch over the tensors of a file; notes which of them are read."""

    def __init__(self, w: dict[str, Tensor], config: Any, theta: float = 10000.0, pairs: bool = False) -> None:
        self.w, self.unread, self.pairs = w, set(w), pairs
        self.size, self.eps, self.theta = config["head_dim"], config["rms_norm_eps"], theta
        self.groups = config["num_attention_heads"] // config["num_key_value_heads"]

    def get(self, name: str) -> Tensor:
        self.unread.discard(name)
        return self.w[name]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.get(f"{name}.weight") * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def attention(self, x: Tensor, prefix: str) -> Tensor:
        time, size = len(x), self.size
        q, k, v = (
            F.linear(x, self.get(f"{prefix}{p}_proj.weight")).view(time, -1, size).transpose(0, 1) for p in "qkv"
        )
        turns = torch.arange(time)[:, None] * self.theta ** (-torch.arange(0, size, 2) / size)
        q, k = (self.rotated(t, turns.cos(), turns.sin()) for t in (q, k))
        scores = q @ k.repeat_interleave(self.groups, 0).mT / size**0.5
        mixed = (scores + torch.full((time, time), -torch.inf).triu(1)).softmax(-1) @ v.repeat_interleave(
            self.groups, 0
        )
        return F.linear(mixed.transpose(0, 1).flatten(1), self.get(f"{prefix}o_proj.weight"))

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = (x[..., ::2], x[..., 1::2]) if self.pairs else x.chunk(2, -1)
        parts = a * cos - b * sin, b * cos + a * sin
        return torch.stack(parts, -1).flatten(-2) if self.pairs else torch.cat(parts, -1)

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate, up = (F.linear(x, self.get(f"{prefix}{p}_proj.weight")) for p in ("gate", "up"))
        return F.linear(F.silu(gate) * up, self.get(f"{prefix}down_proj.weight"))


def rewrite(folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> None:
    """Other tensors, and other keys (None: without it) of the config."""
    content = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    if tensors is not None:
        save_file(tensors, next(folder.glob("*.safetensors")))


def eagle_chain(
    layer: "PlainLayer", base: BaseModel, base_hidden: Tensor, targets: Tensor, config: dict[str, Any]
) -> Tensor:
    """[K, V] from the features of the text [T, D]; ``targets`` [W] are the ids that can be drafted."""
    tokens, logits = [*IDS[1:], DRAFTED[0]], []
    for step in range(3):
        embedded = base.embedding[torch.tensor(tokens)]
        both = [layer.norm(embedded, "midlayer.input_layernorm"), layer.norm(base_hidden, "midlayer.hidden_norm")]
        residual = both[1] if config["norm_before_residual"] else base_hidden
        hidden = residual + layer.attention(torch.cat(both, -1), "midlayer.self_attn.")
        hidden = hidden + layer.mlp(layer.norm(hidden, "midlayer.post_attention_layernorm"), "midlayer.mlp.")
        normed = layer.norm(hidden, "norm")
        drafted = F.linear(normed[-1], layer.get("lm_head.weight"))
        logits.append(torch.full((base.vocab_size,), -torch.inf).index_copy(0, targets, drafted))
        if step < 2:
            tokens.append(DRAFTED[step + 1])
            base_hidden = torch.cat([base_hidden, (normed if config["norm_output"] else hidden)[-1:]])
    assert not layer.unread, f"nobody reads {sorted(layer.unread)}"
    return torch.stack(logits)


def check_round_trip(form: Format, engine: Callable[..., Tensor], head: DraftHead, folder: Path) -> None:
    """What a plain loader computes from the exported folder, and what it is when it is read again, is the head."""
    base = deep_base()
    form.export(head, folder)
    wanted, found = logits_of(base, head), engine(folder, base)
    if found.shape != wanted.shape:
        assert int(found.isfinite().sum()) == wanted.numel()
        found = found[:, head.d2t]
    assert torch.allclose(found, wanted, atol=1e-3, rtol=1e-3)
    again = form.load(folder, base)
    assert type(again) is type(head) and torch.equal(again.d2t, head.d2t)
    assert torch.allclose(logits_of(base, again), wanted, atol=1e-5)
    if getattr(head.config, "own_lm_head", True):
        rewritten = ("inner_dim", "tied_markov")  # another size or form of the same weights
        same: Any = {name: getattr(again.config, name) for name in rewritten if hasattr(again.config, name)}
        assert again.config == replace(head.config, **same)
    if (folder / "config.json").is_file():
        assert recognise(json.loads((folder / "config.json").read_text()), "x") is form


def check_refused(form: Format, head: DraftHead, folder: Path, config: dict[str, Any], says: str) -> None:
    """A folder whose config says something else than its weights, or than the base, is refused by name."""
    form.export(head, folder)
    with pytest.raises(UserError, match=says):
        form.attach(form.read(folder, config), head.base)
