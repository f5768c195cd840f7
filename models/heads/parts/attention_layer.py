"""Attention, MLP and norm of layers that a head trains itself; weights are named as in Llama checkpoints.

``inference`` of each is its form for drafting: packed copies of the weights, fewer and larger products.

Shape legend: B batch, T time, H query heads, G key/value heads, E head width, I input width, D base width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.layers import attention_sizes, smallest
from drafthead.models.cache.kv_cache import CacheShape, KVCache, RaggedCache
from drafthead.models.kernels.fused import FusedAttention, FusedMLP, FusedRMSNorm, rotate
from drafthead.models.kernels.linear import can_prepack

Layer = Callable[[Tensor, Tensor, Tensor | None, KVCache | RaggedCache], Tensor]
"""(inputs [B, P, I], positions [B, P], mask, cache) -> [B, P, D]; writes one layer's keys and values into the cache."""


class HeadAttention(nn.Module):
    """Grouped-query attention without biases, of the base's sizes and with its rotary embedding."""

    def __init__(
        self, base: BaseModel, input_width: int | None = None, qk_norm: bool = False, layer_idx: int = 0
    ) -> None:
        """In float32 on the base's device; inputs have the base's width unless ``input_width`` says otherwise.

        ``qk_norm``: norm every head's queries and keys before they are rotated (Qwen3). ``layer_idx``: its place among
        the layers of one cache.
        """
        super().__init__()
        if getattr(base.model.model, "rotary_emb", None) is None:
            raise UserError(
                f"{base.model.config.model_type} has no rotary embedding, which a head's attention takes from its "
                "base; choose a head without attention (medusa, hydra, mlp_speculator)"
            )
        heads, (kv_heads, head_dim) = base.model.config.num_attention_heads, attention_sizes(base.model.config)
        rotary = _rotary(base, heads, head_dim)
        width = input_width or base.hidden_size
        self.kv_heads, self.grouped = kv_heads, heads != kv_heads
        # What FusedAttention asks of a stock module.
        self.layer_idx, self.head_dim, self.scaling = layer_idx, head_dim, head_dim**-0.5
        with torch.device(base.device):
            self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
            self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
            self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
            self.o_proj = nn.Linear(heads * head_dim, base.hidden_size, bias=False)
        if qk_norm:
            self.q_norm, self.k_norm = HeadRMSNorm(base, head_dim), HeadRMSNorm(base, head_dim)
        self._rotary = (rotary,)  # the base's: in a tuple, it is no part of this module

    def cache_shape(self, dtype: torch.dtype, device: torch.device, layers: int = 1) -> CacheShape:
        """What a cache of so many layers like this one must hold."""
        return CacheShape(layers=layers, heads=self.kv_heads, head_dim=self.head_dim, dtype=dtype, device=device)

    def rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, T, E] at ``positions`` ([B, T] int64), in the dtype of ``x``."""
        found: tuple[Tensor, Tensor] = self._rotary[0](x, position_ids=positions)
        return found

    def states(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, H, T, E] and keys, and values [B, G, T, E], of inputs [B, T, I]."""
        query = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        if hasattr(self, "q_norm"):
            query = self.q_norm(query)
        return rotate(query, *self.rotation(x, positions)).transpose(1, 2), *self.keys_values(x, positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, G, T, E] of inputs [B, T, I]."""
        key, value = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.k_proj, self.v_proj))
        if hasattr(self, "k_norm"):
            key = self.k_norm(key)
        return rotate(key, *self.rotation(x, positions)).transpose(1, 2), value.transpose(1, 2)

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | RaggedCache | None = None
    ) -> Tensor:
        """[B, T, I] at ``positions`` [B, T] int64 -> [B, T, D].

        ``mask``: [B, 1, T, keys] additive, or None when every query sees all keys; ``cache``: with these T positions
        reserved, None in training.
        """
        query, key, value = self.states(x, positions)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        return self.output(query, key, value, mask)

    def output(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of given states, projected: [B, T, D]."""
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=self.grouped)
        return self.join(out)

    def join(self, attended: Tensor) -> Tensor:
        """What the heads put out, [B, H, T, E], projected: [B, T, D]."""
        projected: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return projected

    def inference(self, dtype: torch.dtype | None = None) -> Layer:
        """``forward`` with weights packed as ``dtype`` (None: as they are) where that is possible."""
        if dtype is None and not can_prepack(self.q_proj.weight):
            return self.forward
        fused = FusedAttention(self, dtype)
        return lambda x, positions, mask, cache: fused(x, self.rotation(x, positions), mask, cache)[0]


class HeadRMSNorm(nn.RMSNorm):
    """Root-mean-square norm with a scale, the statistics in float32."""

    eps: float

    def __init__(self, base: BaseModel, width: int | None = None) -> None:
        """With the base's epsilon, of its width unless ``width`` says otherwise."""
        super().__init__(width or base.hidden_size, norm_eps(base), device=base.device)

    def inference(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The same in fewer operations; its weight keeps its dtype."""
        return FusedRMSNorm(self)


class HeadMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` without biases."""

    act_fn = staticmethod(F.silu)

    def __init__(self, base: BaseModel, inner: int | None = None) -> None:
        """Of inner width ``inner``, or the base's."""
        super().__init__()
        width, device = base.hidden_size, base.device
        inner = inner or smallest(base.model.config, "intermediate_size") or 4 * width
        self.gate_proj = nn.Linear(width, inner, bias=False, device=device)
        self.up_proj = nn.Linear(width, inner, bias=False, device=device)
        self.down_proj = nn.Linear(inner, width, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        down: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down

    def inference(self, dtype: torch.dtype | None = None) -> nn.Module:
        """With gate and up as one product."""
        return FusedMLP(self, dtype)


def _rotary(base: BaseModel, heads: int, head_dim: int) -> nn.Module:
    """The rotary embedding of a head's layer of these sizes: the base's, or one of a Llama."""
    if rotates_like_llama(base, head_dim):
        stock: nn.Module = base.model.model.rotary_emb
        return stock
    settings = LlamaConfig(
        hidden_size=base.hidden_size,
        num_attention_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=base.max_context,
        rope_parameters=head_rope(base),
    )
    with torch.device(base.device):
        own: nn.Module = LlamaRotaryEmbedding(settings)
    return own


def rotates_like_llama(base: BaseModel, head_dim: int) -> bool:
    """Whether the base's rotary embedding is a Llama's.

    Others rotate a part of a head, pair neighbours, return complex numbers, or have a rotation for each kind of layer.
    """
    try:
        probe = torch.zeros(1, 1, base.hidden_size, dtype=base.dtype, device=base.device)
        turns = base.model.model.rotary_emb(probe, position_ids=torch.ones(1, 1, dtype=torch.int64, device=base.device))
        if isinstance(turns, Tensor) or not all(turn.shape == (1, 1, head_dim) for turn in turns):
            return False
        return base.device.type == "meta" or all(torch.equal(*turn.chunk(2, -1)) for turn in turns)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
        return False


def head_rope(base: BaseModel) -> dict[str, Any]:
    """Rotary settings of a head's layer: the base's where it is a Llama's, otherwise theta alone.

    Where kinds of layer differ, theta is that of those which see the whole text.
    """
    config = base.model.config
    ropes: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rotates_like_llama(base, attention_sizes(config)[1]):
        return ropes
    found = ropes.get("full_attention") or next((part for part in ropes.values() if isinstance(part, dict)), ropes)
    theta = found.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    return {"rope_type": "default", "rope_theta": float(theta)}


class HeadDecoderLayer(nn.Module):
    """Attention and MLP, each of a norm of what it is added to; names of its weights as in Llama checkpoints."""

    def __init__(self, base: BaseModel, inner: int | None = None, qk_norm: bool = False, layer_idx: int = 0) -> None:
        """With an MLP of width ``inner`` or the base's; it begins as the identity."""
        super().__init__()
        self.input_layernorm = HeadRMSNorm(base)
        self.self_attn = HeadAttention(base, qk_norm=qk_norm, layer_idx=layer_idx)
        self.post_attention_layernorm = HeadRMSNorm(base)
        self.mlp = HeadMLP(base, inner)
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | RaggedCache | None = None
    ) -> Tensor:
        """[B, T, D] -> [B, T, D], with ``positions``, ``mask`` and ``cache`` as ``HeadAttention`` has them."""
        return self.add_mlp(x, self.self_attn(self.input_layernorm(x), positions, mask, cache))

    def states(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``HeadAttention.states`` of what it reads, [B, T, D]."""
        return self.self_attn.states(self.input_layernorm(x), positions)

    def add_mlp(self, x: Tensor, attended: Tensor) -> Tensor:
        """What it puts out, of its input and what attention adds to it: [B, T, D]."""
        x = x + attended
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def attend_block(
    query: Tensor,
    text_key: Tensor,
    text_value: Tensor,
    mask: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor | None = None,
) -> Tensor:
    """Attention to the text, and of every query to the drafted positions of its own place: [B, H, S, P, E].

    Args:
        query: [B, H, S, P, E], P queries at each of S places.
        text_key: [B, G, T, E].
        text_value: [B, G, T, E].
        mask: [B, 1, S, T] additive, of the text.
        keys: [B, G, S, Q, E], of the Q drafted positions at each place.
        values: [B, G, S, Q, E].
        seen: [P, Q] bool, which of them a query sees; None: all.
    """
    groups, time = text_key.shape[1:3]
    rows, heads, count, block, width = query.shape
    query = query.reshape(rows, groups, -1, width) * width**-0.5  # [B, G, R * S * P, E]
    grouped = (rows, groups, heads // groups, count, block)
    to_text = (query @ text_key.transpose(2, 3)).view(*grouped, time) + mask[:, :, None, :, None]
    to_own = torch.einsum("bgrspe,bgsqe->bgrspq", query.view(*grouped, width), keys)
    if seen is not None:
        to_own = to_own.masked_fill(~seen, -torch.inf)
    scores = torch.cat([to_text, to_own], -1)
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(query.dtype)
    out = (weights[..., :time].flatten(2, 4) @ text_value).view(*grouped, width)
    out += torch.einsum("bgrspq,bgsqe->bgrspe", weights[..., time:], values)
    return out.flatten(1, 2)


def norm_eps(base: BaseModel) -> float:
    """Epsilon of the base's norms."""
    return float(getattr(base.model.config, "rms_norm_eps", None) or 1e-6)
