"""Attention, MLP and norm of layers that a head trains itself; weights are named as in Llama checkpoints.

``inference`` of each is its form for drafting: packed copies of the weights, fewer and larger products.

Shape legend: B batch, T time, H query heads, G key/value heads, E head width, I input width, D base width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.layers import attention_sizes
from drafthead.models.cache.kv_cache import CacheShape, KVCache, RaggedCache
from drafthead.models.kernels.fused import FusedAttention, FusedMLP, FusedRMSNorm, rotate
from drafthead.models.kernels.linear import can_prepack

Layer = Callable[[Tensor, Tensor, Tensor | None, KVCache | RaggedCache], Tensor]
"""(inputs [B, P, I], positions [B, P], mask, cache) -> [B, P, D]; writes one layer's keys and values into the cache."""


class HeadAttention(nn.Module):
    """Grouped-query attention without biases, of the base's sizes and with its rotary embedding."""

    def __init__(self, base: BaseModel, input_width: int | None = None) -> None:
        """In float32 on the base's device; inputs have the base's width unless ``input_width`` says otherwise."""
        super().__init__()
        rotary = getattr(base.model.model, "rotary_emb", None)
        if rotary is None:
            raise UserError(
                f"{base.model.config.model_type} has no rotary embedding, which a head's attention takes from its "
                "base; choose a head without attention (medusa, hydra, mlp_speculator)"
            )
        heads, (kv_heads, head_dim) = base.model.config.num_attention_heads, attention_sizes(base.model.config)
        width = input_width or base.hidden_size
        self.kv_heads, self.grouped = kv_heads, heads != kv_heads
        # What FusedAttention asks of a stock module.
        self.layer_idx, self.head_dim, self.scaling = 0, head_dim, head_dim**-0.5
        with torch.device(base.device):
            self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
            self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
            self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
            self.o_proj = nn.Linear(heads * head_dim, base.hidden_size, bias=False)
        self._rotary = (rotary,)  # the base's: in a tuple, it is no part of this module

    def cache_shape(self, dtype: torch.dtype, device: torch.device) -> CacheShape:
        """What a cache of this layer must hold."""
        return CacheShape(layers=1, heads=self.kv_heads, head_dim=self.head_dim, dtype=dtype, device=device)

    def rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, T, E] at ``positions`` ([B, T] int64), in the dtype of ``x``."""
        found: tuple[Tensor, Tensor] = self._rotary[0](x, position_ids=positions)
        return found

    def states(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, H, T, E] and keys, and values [B, G, T, E], of inputs [B, T, I]."""
        turns = self.rotation(x, positions)
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.q_proj, self.k_proj, self.v_proj)
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
            cache: one layer, with these T positions reserved; None in training.
        """
        query, key, value = self.states(x, positions)
        if cache is not None:
            key, value = cache.update(key, value, 0)
        return self.output(query, key, value, mask)

    def output(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of given states, projected: [B, T, D]."""
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=self.grouped)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def inference(self, dtype: torch.dtype | None = None) -> Layer:
        """``forward`` with weights packed as ``dtype`` (None: as they are) where that is possible."""
        if dtype is None and not can_prepack(self.q_proj.weight):
            return self.forward
        fused = FusedAttention(self, dtype)
        return lambda x, positions, mask, cache: fused(x, self.rotation(x, positions), mask, cache)[0]


class HeadRMSNorm(nn.Module):
    """Root-mean-square norm with a scale, the statistics in float32."""

    def __init__(self, base: BaseModel, width: int | None = None) -> None:
        """With the base's epsilon, of its width unless ``width`` says otherwise."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width or base.hidden_size, device=base.device))
        self.eps = norm_eps(base)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def inference(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The same in fewer operations; its weight keeps its dtype."""
        return FusedRMSNorm(self)


class HeadMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` without biases."""

    act_fn = staticmethod(F.silu)

    def __init__(self, base: BaseModel, inner: int | None = None) -> None:
        """Of inner width ``inner``, or the base's."""
        super().__init__()
        width, inner, device = base.hidden_size, inner or base.model.config.intermediate_size, base.device
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


def norm_eps(base: BaseModel) -> float:
    """Epsilon of the base's norms."""
    return float(getattr(base.model.config, "rms_norm_eps", 1e-6))
