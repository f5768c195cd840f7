"""Heads with every weight drawn, and plain torch to compute them from an exported folder or their weights alone.

Names and the order of operations are those of the engines and of the methods' authors (docs/reference/formats.md says
how sure they are).
"""

import json
import math
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import Tensor

from drafthead.data.batch import HiddenStates
from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import recognise
from drafthead.models.formats.format import Format
from drafthead.models.heads.eagle3 import Eagle3Config, Eagle3Head
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig, KangarooHead
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.kernels.packed import PackedMask
from support import TINY, drafted_logits, random_base, randomised, row_of

IDS = [5, 17, 99, 42, 7, 250, 3]
DRAFTED = [8, 120, 64]


@cache
def deep_base(model_type: str = "llama") -> BaseModel:
    """Six layers, so that three of them can be read below the last."""
    return random_base(TINY | {"model_type": model_type, "num_hidden_layers": 6})


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


@torch.no_grad()
def states(base: BaseModel, ids: list[int] = IDS) -> tuple[Tensor, ...]:
    """What every layer puts out for the text, and last what the final norm does."""
    out = base.model.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return (*out.hidden_states, out.last_hidden_state)


def logits_of(base: BaseModel, head: DraftHead) -> Tensor:
    """[K, W] after the text, and then after given drafts; Kangaroo's first one, which needs no cache of the base."""
    outputs = states(base)
    layers = [outputs[i] for i in head.spec.layers]
    base_hidden = HiddenStates(final=outputs[-1], layers=torch.cat(layers, -1) if layers else None)
    if isinstance(head, KangarooHead):
        row = row_of([IDS], padding=0)
        hidden = head.adapter(base_hidden.layer(0), row.position_ids, PackedMask.of(row.document_ids))
        return head.output_head(0).logits(hidden)[0].detach()
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

    def heads(self, x: Tensor, name: str) -> Tensor:
        """[H, T, E] queries, keys or values; normed where the file has a norm for them."""
        outputs = F.linear(x, self.get(f"{name}_proj.weight")).unflatten(-1, (-1, self.size)).transpose(0, 1)
        return self.norm(outputs, f"{name}_norm") if f"{name}_norm.weight" in self.w else outputs

    def attention(self, x: Tensor, prefix: str, window: int | None = None) -> Tensor:
        at = torch.arange(len(x))
        q, k, v = (self.heads(x, f"{prefix}{p}") for p in "qkv")
        seen = (at <= at[:, None]) & (at > at[:, None] - (window or len(x)))
        return self.attend(self.rotated(q, at), self.rotated(k, at), v, seen, prefix)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, prefix: str) -> Tensor:
        k, v = (tensor.repeat_interleave(self.groups, 0) for tensor in (k, v))
        mixed = (q @ k.mT / self.size**0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v
        return F.linear(mixed.transpose(0, 1).flatten(1), self.get(f"{prefix}o_proj.weight"))

    def rotated(self, x: Tensor, at: Tensor, factors: Tensor | float = 1.0) -> Tensor:
        """``x`` [H, T, E] turned by its positions [T]."""
        turns = at[:, None] * self.theta ** (-torch.arange(0, self.size, 2) / self.size) / factors
        cos, sin = turns.cos(), turns.sin()
        a, b = (x[..., ::2], x[..., 1::2]) if self.pairs else x.chunk(2, -1)
        parts = a * cos - b * sin, b * cos + a * sin
        return torch.stack(parts, -1).flatten(-2) if self.pairs else torch.cat(parts, -1)

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate, up = (F.linear(x, self.get(f"{prefix}{p}_proj.weight")) for p in ("gate", "up"))
        return F.linear(F.silu(gate) * up, self.get(f"{prefix}down_proj.weight"))

    def decoder(self, x: Tensor, prefix: str) -> Tensor:
        x = x + self.attention(self.norm(x, f"{prefix}input_layernorm"), f"{prefix}self_attn.")
        return x + self.mlp(self.norm(x, f"{prefix}post_attention_layernorm"), f"{prefix}mlp.")


def rewrite(folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> None:
    """Other tensors, and other keys (None: without it) of the config."""
    content = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    if tensors is not None:
        save_file(tensors, next(folder.glob("*.safetensors")))


def of_head(head: DraftHead) -> PlainLayer:
    """Over the weights of a head itself."""
    weights = {"lm_head.weight": head.target_lm_head.weight, **head.state_dict()}
    del weights["d2t"]
    config = head.base.model.config
    return PlainLayer(weights, config.to_dict(), config.rope_parameters["rope_theta"])


def over_all_ids(logits: Tensor, base: BaseModel, targets: Tensor) -> Tensor:
    """[K, W] -> [K, V]; an id that cannot be drafted has -inf."""
    return torch.full((len(logits), base.vocab_size), -torch.inf).index_copy(1, targets, logits)


def eagle_chain(
    layer: PlainLayer,
    base: BaseModel,
    taps: list[Tensor],
    config: dict[str, Any],
    ids: list[int] = IDS,
    drafts: list[int] = DRAFTED,
) -> Tensor:
    """[K, W] after a text whose states are ``taps`` [T, D], and along ``drafts``."""
    if config["fc_norm"]:
        taps = [layer.norm(tap, f"fc_norm.{n}") for n, tap in enumerate(taps)]
    inputs = torch.cat(taps, -1)
    if config["norm_before_fc"]:
        inputs = layer.norm(inputs, "input_norm")
    base_hidden, tokens, logits = F.linear(inputs, layer.get("fc.weight")), ids[1:], []
    for draft in drafts:
        tokens = [*tokens, draft]
        embedded = base.embedding[torch.tensor(tokens)]
        both = [layer.norm(embedded, "midlayer.input_layernorm"), layer.norm(base_hidden, "midlayer.hidden_norm")]
        residual = both[1] if config["norm_before_residual"] else base_hidden
        hidden = residual + layer.attention(torch.cat(both, -1), "midlayer.self_attn.", config.get("window"))
        hidden = hidden + layer.mlp(layer.norm(hidden, "midlayer.post_attention_layernorm"), "midlayer.mlp.")
        normed = layer.norm(hidden, "norm")
        logits.append(F.linear(normed[-1], layer.get("lm_head.weight")))
        base_hidden = torch.cat([base_hidden, (normed if config["norm_output"] else hidden)[-1:]])
    assert not layer.unread, f"nobody reads {sorted(layer.unread)}"
    return torch.stack(logits)


def drafted_block(
    layer: PlainLayer, base: BaseModel, block: dict[str, Any], ids: list[int] = IDS, drafts: list[int] = DRAFTED
) -> Tensor:
    """[K, W] of one pass over a block after the text, each draft corrected by the token before it."""
    outputs = states(base, ids)
    context = layer.norm(
        F.linear(torch.cat([outputs[n][0] for n in block["layers"]], -1), layer.get("fc.weight")), "hidden_norm"
    )
    time, slots = len(ids), block["size"]
    x = base.embedding[torch.tensor([drafts[0], *[block["mask"]] * (slots - 1)])]
    if "slot_state.weight" in layer.w:
        x = outputs[-1][0, -1] + F.linear(unit(x), layer.get("slot_state.weight")) + layer.get("slot_offset")
    everywhere, factors = torch.arange(time + slots), block.get("factors", 1.0)
    at = everywhere[time:]
    for n in range(block["num_layers"]):
        window = block["windows"][n] if "windows" in block else None
        causal = window is not None if block["causal"] == "sliding" else block["causal"]
        seen = everywhere <= (at[:, None] if causal else time + slots)
        seen = seen & (everywhere > at[:, None] - (window or time + slots))
        name = f"layers.{n}.self_attn."
        normed = layer.norm(x, f"layers.{n}.input_layernorm")
        both = torch.cat([context, normed])
        q, k, v = (layer.heads(tensor, f"{name}{p}") for tensor, p in ((normed, "q"), (both, "k"), (both, "v")))
        q, k = layer.rotated(q, at, factors), layer.rotated(k, everywhere, factors)
        x = x + layer.attend(q, k, v, seen, name)
        x = x + layer.mlp(layer.norm(x, f"layers.{n}.post_attention_layernorm"), f"layers.{n}.mlp.")
    whole = "lm_head.weight" not in layer.w
    weight = base.stock().get_output_embeddings().weight if whole else layer.get("lm_head.weight")
    last = layer.norm(x, "norm")[slots - len(drafts) :]
    logits = F.linear(last, weight)
    if "markov_head.markov_w1.weight" in layer.w:
        before = layer.get("markov_head.markov_w1.weight")[torch.tensor(drafts)]
        if "markov_head.gate_proj.weight" in layer.w:
            gate = [layer.get(f"markov_head.gate_proj.{kind}") for kind in ("weight", "bias")]
            before = before * F.linear(torch.cat([last, before], -1), *gate).sigmoid()
        logits = logits + F.linear(before, layer.get("markov_head.markov_w2.weight"))
    unread = {name for name in layer.unread if not name.startswith(("confidence_head", "conf_proj"))}
    assert not unread, f"nobody reads {sorted(unread)}"
    return logits * block.get("scale", 1.0)


def unit(x: Tensor) -> Tensor:
    """``x`` with a root mean square of 1."""
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def mlp_chain(
    layer: PlainLayer, config: MLPSpeculatorConfig, base: BaseModel, h: Tensor, tokens: list[int]
) -> list[Tensor]:
    """The published forward pass at one place, over the weights by our names; ``tokens`` start with x_{t+1}."""
    n, d = config.num_draft_tokens, config.inner_dim or len(h)
    s = 0.5 ** (0.5 / n)
    alpha = math.sqrt((1 - s**2) * (d / 2)) / s

    def norm(x: Tensor, name: str) -> Tensor:
        x = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        return x * layer.get(f"cells.{name}.weight") + layer.get(f"cells.{name}.bias")

    def embedding(name: str, token: int) -> Tensor:
        if config.own_embedding:
            return layer.get(f"{name}.weight")[token]
        return layer.get(f"{name}.linear.weight") @ (base.embedding[token] / base.embedding[token].norm())

    def gate(name: str, i: int, state: Tensor, token: int) -> Tensor:
        source = "forget" if config.tie_lstm_embs else name
        projected = layer.get(f"cells.proj.{name}.{min(i, 1)}.weight") @ state
        return projected + alpha * embedding(f"cells.emb.{source}", token)

    state, cell, logits = h, torch.zeros(d), []
    if config.scale_input:
        state = h * (h.pow(2).mean() + 1e-6).rsqrt() / math.sqrt(2)
    for i in range(n):
        stage = 0 if config.tie_weights else i
        if config.cell == "rnn":
            row = min(i, 1) if config.tie_weights else i
            z = embedding(f"cells.emb.{stage}", tokens[i])
            state = F.gelu(norm(layer.get(f"cells.proj.{row}.weight") @ state + alpha * z, f"ln.{stage}"))
        else:
            f, u, o = (torch.sigmoid(gate(g, i, state, tokens[i])) for g in ("forget", "input", "output"))
            cell = cell * f + F.gelu(norm(gate("cell", i, state, tokens[i]), "cell_ln")) * u
            state = F.gelu(norm(cell, "state_ln")) * o
        if config.own_lm_head:
            logits.append(layer.get(f"projections.weights.{stage}") @ state)
        else:
            logits.append(layer.get("lm_head.weight") @ (h + layer.get(f"outputs.{stage}.weight") @ state))
    return logits


LLAMACPP_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{tensor}": f"self_attn.{tensor}_proj" for tensor in "qkv"},
    **{f"ffn_{tensor}": f"mlp.{tensor}_proj" for tensor in ("gate", "up", "down")},
    "output_norm": "norm",
    "output": "lm_head",
}


def read_llamacpp(folder: Path, names: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """What ``head.gguf`` says, its sizes by their names elsewhere, and its tensors by the names of safetensors."""
    reader = gguf.GGUFReader(folder / "head.gguf")
    keys = {name: field.contents() for name, field in reader.fields.items()}
    sizes = {"head_dim": "attention.key_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon"}
    sizes |= {"num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv"}
    config = {name: keys[f"{keys['general.architecture']}.{key}"] for name, key in sizes.items()}
    tensors = {}
    for entry in reader.tensors:
        block, name = re.fullmatch(r"(blk\.\d+\.)?(.+)", entry.name).groups()  # type: ignore[union-attr]
        ours = names.get(name.removesuffix(".weight"))
        name = (block or "").replace("blk", "layers") + (f"{ours}.weight" if ours else name)
        tensors[name] = torch.from_numpy(np.array(entry.data))
    return keys, config, tensors


def unknown_tokenizer() -> Any:
    """Return a tokenizer whose way to split words llama.cpp does not know."""
    tokenizer = deepcopy(tiny_tokenizer())
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


def check_round_trip(form: Format, engine: Callable[..., Tensor], head: DraftHead, folder: Path) -> None:
    """What a plain loader computes from the exported folder, and what it is when it is read again, is the head."""
    base = head.base
    form.export(head, folder)
    expected, outputs = logits_of(base, head), engine(folder, base)
    if outputs.shape != expected.shape:
        assert int(outputs.isfinite().sum()) == expected.numel()
        outputs = outputs[:, head.d2t]
    assert torch.allclose(outputs, expected, atol=1e-3, rtol=1e-3)
    again = form.load(folder, base)
    assert type(again) is type(head) and torch.equal(again.d2t, head.d2t)
    assert torch.allclose(logits_of(base, again), expected, atol=1e-5)
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
