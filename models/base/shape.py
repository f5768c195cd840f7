"""A base as ``mode=estimate`` knows it: its sizes and parameters, counted on the meta device, and its activations.

Shape legend: D width, H query heads, KV key/value heads, E head width, I inner width of an MLP, V vocabulary, L layers.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from drafthead.data.utils.errors import UserError
from drafthead.models.base.layers import attention_sizes, llama_like, sizes
from drafthead.models.base.lora import LM_HEAD, LoraSettings
from drafthead.models.base.text_model import build, text_config

FLOAT32 = 4


EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk", "num_experts_per_token", "top_k")
"""Keys under which configs say how many experts a token is sent to."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only base; of a composite checkpoint, of its text model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys, the widest where layers differ."""
    vocab_size: int
    base_parameters: int
    """Of the whole model, all experts included; a tied output head counts once."""
    all_layers_parameters: int
    """Of the decoder layers with their norms."""
    layer_parameters: int
    """Of the largest of them."""
    mlp_values: int
    """Values per token inside the widest MLP: what its linear layers put out, and what enters the last of them. Of a
    mixture also, for every expert that a token is sent to, a copy of the token and the expert's result."""
    linears: tuple[tuple[str, int, int], ...]
    """Name, inputs and outputs of every linear layer of all decoder layers."""

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "ModelShape":
        """The shape of a model of this transformers config, built without weights."""
        config = text_config(config)
        with torch.device("meta"):
            model: Any = llama_like(build(config))
        layers, (kv_heads, head_dim) = list(model.model.layers), attention_sizes(config)
        latent = [getattr(config, key, None) or 0 for key in ("qk_nope_head_dim", "qk_rope_head_dim")]
        named = [(n.rpartition(".")[2], part) for layer in layers for n, part in _linears(layer)]
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
            linears=tuple((name, part.in_features, part.out_features) for name, part in named),
        )

    def layer_width(self) -> int:
        """Values per token alive at the peak of one layer without gradients: the wider of attention and MLP.

        Attention: residual, norm, q, k, v, k and v repeated for the query heads, output: ``2D + E(4H + 2KV)``.
        MLP: residual, norm, gate, up, their product: ``2D + 3I``; without a gate ``2D + 2I``. With experts, of which a
        token is sent to k: ``2D + k (2D + 3I)`` and what a shared one adds.
        """
        attention = self.head_dim * (4 * self.num_heads + 2 * self.num_kv_heads)
        return 2 * self.hidden_size + max(attention, self.mlp_values)

    def adapter_parameters(self, lora: LoraSettings) -> int:
        """``rank (in + out)`` for every layer of the targets' names; ``rank (D + V)`` for the output head."""
        known = {LM_HEAD, *(name for name, _, _ in self.linears)}
        if unknown := sorted(set(lora.targets) - known):
            raise UserError(f"the base has no linear layer {unknown[0]!r} to put an adapter on; it has {sorted(known)}")
        widths = sum(inputs + outputs for _, inputs, outputs in self._adapted(lora))
        head = self.hidden_size + self.vocab_size if LM_HEAD in lora.targets else 0
        return lora.rank * (widths + head)

    def kept_bytes(self, lora: LoraSettings, base_bytes: int) -> int:
        """Bytes per token that one layer keeps for the backward pass through it.

        - norms: the float32 copies of their inputs, ``2 x 4 D``;
        - attention: queries, keys and values repeated for the query heads, output, ``4 H E`` values, and a float32
          sum a head;
        - MLP: gate, its activation and up, ``3 I`` values; without a gate ``2 I``;
        - each adapter: its input in float32 and as many bytes of a dropout mask, ``5 in``, and ``4 rank`` between its
          two matrices.

        Frozen weights need no gradient, so their layers do not keep their inputs.
        """
        values = 4 * self.num_heads * self.head_dim + self.mlp_values
        adapters = sum((FLOAT32 + 1) * inputs + FLOAT32 * lora.rank for _, inputs, _ in self._adapted(lora))
        norms = 2 * FLOAT32 * self.hidden_size + FLOAT32 * self.num_heads
        return norms + values * base_bytes + adapters // self.num_layers

    def _adapted(self, lora: LoraSettings) -> list[tuple[str, int, int]]:
        return [linear for linear in self.linears if linear[0] in lora.targets]


def _linears(layer: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, part) for name, part in layer.named_modules() if isinstance(part, nn.Linear)]


def _mlp_values(layer: nn.Module, config: PreTrainedConfig) -> int:
    """``ModelShape.mlp_values`` of one layer."""
    width: int = config.hidden_size
    dense = [(n, part) for n, part in _linears(layer) if "attn" not in n and "attention" not in n]
    one_expert = [part for n, part in dense if re.search(r"experts\.0\.", n)]
    dense = [(n, part) for n, part in dense if not re.search(r"experts\.\d+\.", n)]
    values = sum(part.out_features for _, part in dense if part.in_features == width)
    values += max((part.in_features for _, part in dense if part.out_features == width), default=0)
    stacked = [weight[0] for weight in layer.parameters() if weight.ndim == 3]  # [out, in] or [in, out] of an expert
    inner = sum(one.numel() // width if width in one.shape else min(one.shape) for one in stacked)
    inner += sum(part.out_features if part.in_features == width else part.in_features for part in one_expert)
    if not inner:
        return values
    found = (getattr(config, key, None) for key in EXPERTS_PER_TOKEN)
    count: int = next((value for value in found if isinstance(value, int) and value), 1)
    return values + count * (2 * width + inner)
