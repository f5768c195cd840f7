"""Sizes, parameter counts and activations of a base for ``mode=estimate``, counted on the meta device.

Shape legend: D width, H query heads, KV key/value heads, E head width, I inner width of an MLP, V vocabulary, L layers.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from drafthead.data.utils.errors import UserError
from drafthead.models.base.lora import LM_HEAD, LoraSettings
from drafthead.models.base.structure import attention_sizes, llama_like, sizes
from drafthead.models.base.text_model import build, text_config

FLOAT32 = 4


EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk", "num_experts_per_token", "top_k")
"""Config keys for the number of experts per token."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only base, or of the language model of a composite checkpoint."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of queries and keys; the largest if layers differ."""
    vocab_size: int
    base_parameters: int
    """Parameters of the whole model with all experts; a tied output head counts once."""
    all_layers_parameters: int
    """Parameters of all decoder layers with their norms."""
    layer_parameters: int
    """Parameters of the largest decoder layer."""
    mlp_values: int
    """Values per token inside the widest MLP: the outputs of its first linear layers and the input of its last one.
    In a mixture, each expert of a token adds a copy of the token and the expert's result."""
    linears: tuple[tuple[str, int, int], ...]
    """Name, inputs and outputs of every linear layer of all decoder layers."""

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "ModelShape":
        """Return the shape of a model with this transformers config, built without weights."""
        config = text_config(config)
        with torch.device("meta"):
            model: Any = llama_like(build(config))
        layers, (kv_heads, head_dim) = list(model.model.layers), attention_sizes(config)
        latent = [getattr(config, key, None) or 0 for key in ("qk_nope_head_dim", "qk_rope_head_dim")]
        named = [(n.rpartition(".")[2], linear) for layer in layers for n, linear in _linears(layer)]
        counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
        return cls(
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=kv_heads,
            head_dim=max(head_dim, sum(latent), *sizes(config, "head_dim")),
            vocab_size=config.vocab_size,
            base_parameters=model.num_parameters(),
            all_layers_parameters=sum(counts),
            layer_parameters=max(counts),
            mlp_values=max(_mlp_values(layer, config) for layer in layers),
            linears=tuple((name, linear.in_features, linear.out_features) for name, linear in named),
        )

    def layer_width(self) -> int:
        """Return the values per token that one layer without gradients holds at its peak.

        Attention: residual, norm, q, k, v, k and v repeated for the query heads, output: ``2D + E(4H + 2KV)``.
        MLP: residual, norm, gate, up, their product: ``2D + 3I``; without a gate ``2D + 2I``. With k experts per
        token: ``2D + k (2D + 3I)``, plus the shared expert's.
        """
        attention = self.head_dim * (4 * self.num_heads + 2 * self.num_kv_heads)
        return 2 * self.hidden_size + max(attention, self.mlp_values)

    def adapter_parameters(self, lora: LoraSettings) -> int:
        """Count adapter parameters: ``rank (in + out)`` per target layer, ``rank (D + V)`` for the output head."""
        known = {LM_HEAD, *(name for name, _, _ in self.linears)}
        if unknown := sorted(set(lora.targets) - known):
            raise UserError(f"the base has no linear layer {unknown[0]!r} for an adapter; choose from {sorted(known)}")
        widths = sum(inputs + outputs for _, inputs, outputs in self._adapted(lora))
        head = self.hidden_size + self.vocab_size if LM_HEAD in lora.targets else 0
        return lora.rank * (widths + head)

    def kept_bytes(self, lora: LoraSettings, base_bytes: int) -> int:
        """Return the bytes per token that one layer stores for its backward pass.

        - Norms: the float32 copies of their inputs, ``2 x 4 D``.
        - Attention: ``4 H E`` values for queries, output, and keys and values repeated for the query heads. Each head
          adds a float32 sum.
        - MLP: gate, its activation and up, ``3 I`` values; without a gate ``2 I``.
        - Each adapter: its input in float32 and a dropout mask in bytes, ``5 in``. Its inner values add ``4 rank``.

        Frozen weights need no gradient, so their layers do not store their inputs.
        """
        values = 4 * self.num_heads * self.head_dim + self.mlp_values
        adapters = sum((FLOAT32 + 1) * inputs + FLOAT32 * lora.rank for _, inputs, _ in self._adapted(lora))
        norms = 2 * FLOAT32 * self.hidden_size + FLOAT32 * self.num_heads
        return norms + values * base_bytes + adapters // self.num_layers

    def _adapted(self, lora: LoraSettings) -> list[tuple[str, int, int]]:
        return [linear for linear in self.linears if linear[0] in lora.targets]


def _linears(layer: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, m) for name, m in layer.named_modules() if isinstance(m, nn.Linear)]


def _mlp_values(layer: nn.Module, config: PreTrainedConfig) -> int:
    """Count ``ModelShape.mlp_values`` of one layer."""
    width: int = config.hidden_size
    linears = [(n, linear) for n, linear in _linears(layer) if "attn" not in n and "attention" not in n]
    # Experts are separate linear layers in some families and stacked weights in others.
    one_expert = [linear for n, linear in linears if re.search(r"experts\.0\.", n)]
    dense = [linear for n, linear in linears if not re.search(r"experts\.\d+\.", n)]
    values = sum(linear.out_features for linear in dense if linear.in_features == width)
    values += max((linear.in_features for linear in dense if linear.out_features == width), default=0)
    stacked = [weight[0] for weight in layer.parameters() if weight.ndim == 3]  # [out, in] or [in, out] of an expert
    inner = sum(one.numel() // width if width in one.shape else min(one.shape) for one in stacked)
    inner += sum(linear.out_features if linear.in_features == width else linear.in_features for linear in one_expert)
    if not inner:
        return values
    given = (getattr(config, key, None) for key in EXPERTS_PER_TOKEN)
    count: int = next((value for value in given if isinstance(value, int) and value), 1)
    return values + count * (2 * width + inner)
