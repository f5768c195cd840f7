"""Causal self-attention for layers that a head trains itself, with the base's rotary embedding.

Shape legend: B batch, T time, H query heads, G key/value heads, E head width, I input width, D base width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.kv_cache import CacheShape, KVCache, RaggedCache
from drafthead.models.kernels.fused import FusedAttention, rotate
from drafthead.models.kernels.linear import can_prepack

Layer = Callable[[Tensor, Tensor, Tensor | None, KVCache | RaggedCache], Tensor]
"""(inputs [B, P, I], positions [B, P], mask, cache) -> [B, P, D]: writes one layer's states into the cache."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of an attention: those of the base's own layers."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, base: BaseModel) -> "AttentionShape":
        """The shape of a layer of ``base``."""
        settings = base.model.config
        heads = settings.num_attention_heads
        return cls(
            width=base.hidden_size,
            heads=heads,
            kv_heads=getattr(settings, "num_key_value_heads", None) or heads,
            head_dim=getattr(settings, "head_dim", None) or base.hidden_size // heads,
        )

    def cache_shape(self, dtype: torch.dtype, device: torch.device) -> CacheShape:
        """What a cache of one such layer must hold."""
        return CacheShape(layers=1, heads=self.kv_heads, head_dim=self.head_dim, dtype=dtype, device=device)


class HeadAttention(nn.Module):
    """Grouped-query attention without biases; names of its weights as in Llama checkpoints."""

    def __init__(self, base: BaseModel, input_width: int | None = None) -> None:
        """For ``base``, in float32 on its device.

        Args:
            base: gives sizes and the rotary embedding.
            input_width: I; by default the base's width.

        Raises:
            UserError: the base has no rotary embedding.
        """
        super().__init__()
        shape = AttentionShape.of(base)
        rotary = getattr(base.model.model, "rotary_emb", None)
        if rotary is None:
            raise UserError(
                f"{base.model.config.model_type} has no rotary embedding, which a head's attention takes from its "
                "base; choose a head without attention (medusa, hydra, mlp_speculator)"
            )
        width = input_width or shape.width
        self.shape = shape
        # What FusedAttention asks of a stock module.
        self.layer_idx, self.head_dim, self.scaling = 0, shape.head_dim, shape.head_dim**-0.5
        with torch.device(base.device):
            self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
            self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
            self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
            self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self._rotary = (rotary,)  # the base's: in a tuple, it is no part of this module

    def rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, T, E] at ``positions`` ([B, T] int64), in the dtype of ``x``."""
        found: tuple[Tensor, Tensor] = self._rotary[0](x, position_ids=positions)
        return found

    def states(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, H, T, E] and keys, and values [B, G, T, E], of inputs [B, T, I]."""
        turns = self.rotation(x, positions)
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.shape.head_dim)) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(query, *turns).transpose(1, 2), rotate(key, *turns).transpose(1, 2), value.transpose(1, 2)

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | RaggedCache | None = None
    ) -> Tensor:
        """[B, T, I] -> [B, T, D].

        Args:
            x: inputs.
            positions: [B, T] int64.
            mask: [B, 1, T, keys] additive, or None when every query sees all keys.
            cache: one layer, opened for these T positions; None in training.
        """
        query, key, value = self.states(x, positions)
        if cache is not None:
            key, value = cache.update(key, value, 0)
        return self.output(query, key, value, mask)

    def inference(self, dtype: torch.dtype | None = None) -> "Layer":
        """``forward`` over a cache, with its weights packed for few rows where that is possible (a copy).

        ``dtype``: of the copy; by default as the weights are.
        """
        if dtype is None and not can_prepack(self.q_proj.weight):
            return self.forward
        fused = FusedAttention(self, dtype)
        return lambda x, positions, mask, cache: fused(x, self.rotation(x, positions), mask, cache)[0]

    def output(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of given states, projected: [B, T, D]."""
        grouped = self.shape.heads != self.shape.kv_heads
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class HeadRMSNorm(nn.Module):
    """Root-mean-square norm with a scale, the statistics in float32; ``FusedRMSNorm`` is its form for drafting."""

    def __init__(self, width: int, eps: float, device: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class HeadMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` without biases; names of its weights as in Llama checkpoints.

    ``FusedMLP`` is its form for drafting.
    """

    act_fn = staticmethod(F.silu)

    def __init__(self, width: int, inner: int, device: Any = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False, device=device)
        self.up_proj = nn.Linear(width, inner, bias=False, device=device)
        self.down_proj = nn.Linear(inner, width, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        down: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down


def norm_eps(base: BaseModel) -> float:
    """Epsilon of the base's norms."""
    return float(getattr(base.model.config, "rms_norm_eps", 1e-6))
