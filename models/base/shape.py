"""A base as ``mode=estimate`` knows it: its sizes and parameters, counted on the meta device, and its activations.

Shape legend: D width, H query heads, KV key/value heads, E head width, I inner width of an MLP, V vocabulary, L layers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from drafthead.data.utils.errors import UserError
from drafthead.models.base.layers import attention_sizes, llama_like
from drafthead.models.base.lora import LM_HEAD, LoraSettings

FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only base."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    base_parameters: int
    """Of the whole model; a tied output head counts once."""
    layer_parameters: int
    """Of one decoder layer with its norms."""
    linears: tuple[tuple[str, int, int], ...]
    """Name, inputs and outputs of every linear layer of a decoder layer."""

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "ModelShape":
        """The shape of a model of this transformers config, built without weights."""
        with torch.device("meta"):
            model: Any = llama_like(AutoModelForCausalLM.from_config(config))
        layer, (kv_heads, head_dim) = model.model.layers[0], attention_sizes(config)
        named = [(name.rpartition(".")[2], part) for name, part in layer.named_modules() if isinstance(part, nn.Linear)]
        return cls(
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            base_parameters=model.num_parameters(),
            layer_parameters=sum(parameter.numel() for parameter in layer.parameters()),
            linears=tuple((name, part.in_features, part.out_features) for name, part in named),
        )

    @property
    def mlp_widths(self) -> list[int]:
        """Outputs of the MLP's linear layers that read the residual stream: gate and up, or one without a gate."""
        return [outputs for name, _, outputs in self.linears if name in ("gate_proj", "up_proj", "c_fc")]

    def layer_width(self) -> int:
        """Values per token alive at the peak of one layer without gradients: the wider of attention and MLP.

        Attention: residual, norm, q, k, v, k and v repeated for the query heads, output: ``2D + E(4H + 2KV)``.
        MLP: residual, norm, gate, up, their product: ``2D + 3I``; without a gate ``2D + 2I``.
        """
        attention = self.head_dim * (4 * self.num_heads + 2 * self.num_kv_heads)
        return 2 * self.hidden_size + max(attention, sum(self.mlp_widths) + self.mlp_widths[-1])

    def adapter_parameters(self, lora: LoraSettings) -> int:
        """``rank (in + out)`` for every layer of the targets' names, L times; ``rank (D + V)`` for the output head."""
        known = {LM_HEAD, *(name for name, _, _ in self.linears)}
        if unknown := sorted(set(lora.targets) - known):
            raise UserError(f"the base has no linear layer {unknown[0]!r} to put an adapter on; it has {sorted(known)}")
        sizes = sum(inputs + outputs for _, inputs, outputs in self._adapted(lora))
        head = self.hidden_size + self.vocab_size if LM_HEAD in lora.targets else 0
        return lora.rank * (self.num_layers * sizes + head)

    def kept_bytes(self, lora: LoraSettings, base_bytes: int) -> int:
        """Bytes per token that one layer keeps for the backward pass through it.

        - norms: the float32 copies of their inputs, ``2 x 4 D``;
        - attention: queries, keys and values repeated for the query heads, output, ``4 H E`` values, and a float32
          sum a head;
        - MLP: gate, its activation and up, ``3 I`` values; without a gate ``I``;
        - each adapter: its input in float32 and as many bytes of a dropout mask, ``5 in``, and ``4 rank`` between its
          two matrices.

        Frozen weights need no gradient, so their layers do not keep their inputs.
        """
        widths = self.mlp_widths
        values = 4 * self.num_heads * self.head_dim + (3 * widths[0] if len(widths) > 1 else widths[0])
        adapters = sum((FLOAT32 + 1) * inputs + FLOAT32 * lora.rank for _, inputs, _ in self._adapted(lora))
        return 2 * FLOAT32 * self.hidden_size + FLOAT32 * self.num_heads + values * base_bytes + adapters

    def _adapted(self, lora: LoraSettings) -> list[tuple[str, int, int]]:
        return [linear for linear in self.linears if linear[0] in lora.targets]
