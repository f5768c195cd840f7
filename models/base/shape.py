"""A base as ``mode=estimate`` knows it: its sizes, and what they make of parameters and activations.

Shape legend: D width, H query heads, KV key/value heads, E head width, I inner width of an MLP, V vocabulary, L layers.
"""

from dataclasses import dataclass
from typing import Any

from drafthead.data.utils.errors import UserError
from drafthead.models.base.layers import attention_sizes
from drafthead.models.base.lora import LM_HEAD, LoraSettings

FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only base (Llama, Mistral, Qwen2/3, Gemma and GPT-BigCode families)."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    """The output head is the embedding."""
    gated: bool = True
    """The MLP has a gate: three matrices instead of two."""
    learned_positions: int = 0
    """Rows of a table of position embeddings."""

    @classmethod
    def from_config(cls, config: Any) -> "ModelShape":
        """The shape of a transformers config of one of those families."""
        kv_heads, head_dim = attention_sizes(config)
        bigcode = config.model_type == "gpt_bigcode"
        return cls(
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=(config.n_inner or 4 * config.hidden_size) if bigcode else config.intermediate_size,
            vocab_size=config.vocab_size,
            tied=bool(getattr(config, "tie_word_embeddings", False)),
            gated=not bigcode,
            learned_positions=config.max_position_embeddings if bigcode else 0,
        )

    def base_parameters(self) -> int:
        """``V D (2 if untied) + L layer_parameters + D``: embedding and output head, layers, the final norm.

        Learned positions come on top. Biases and per-head norms of some families are left out: less than 0.1 % of a
        model.
        """
        tables = self.vocab_size * (1 if self.tied else 2) + self.learned_positions
        return tables * self.hidden_size + self.num_layers * self.layer_parameters() + self.hidden_size

    def layer_parameters(self) -> int:
        """``2 D H E + 2 D KV E + 3 D I + 2 D``, with 2 D I where no MLP has a gate: a decoder layer and its norms."""
        mlp = (2 + self.gated) * self.hidden_size * self.intermediate_size
        return self.attention_parameters() + mlp + 2 * self.hidden_size

    def attention_parameters(self, inputs: int | None = None) -> int:
        """``inputs (H + 2 KV) E + H E D``: q, k and v, which read ``inputs`` values (by default D), and o."""
        projected = (inputs or self.hidden_size) * (self.num_heads + 2 * self.num_kv_heads)
        return (projected + self.num_heads * self.hidden_size) * self.head_dim

    def layer_width(self) -> int:
        """Values per token alive at the peak of one layer without gradients: the wider of attention and MLP.

        Attention: residual, norm, q, k, v, k and v repeated for the query heads, output: ``2D + E(4H + 2KV)``.
        MLP: residual, norm, gate, up, their product: ``2D + 3I``; without a gate ``2D + 2I``.
        """
        attention = self.head_dim * (4 * self.num_heads + 2 * self.num_kv_heads)
        return 2 * self.hidden_size + max(attention, (2 + self.gated) * self.intermediate_size)

    def linears(self) -> list[tuple[str, int, int]]:
        """Name, inputs and outputs of every linear layer of a decoder layer."""
        d, inner, keys = self.hidden_size, self.intermediate_size, self.num_kv_heads * self.head_dim
        queries = self.num_heads * self.head_dim
        if not self.gated:
            return [("c_attn", d, d + 2 * keys), ("c_proj", queries, d), ("c_fc", d, inner), ("c_proj", inner, d)]
        attention = [("q_proj", d, queries), ("k_proj", d, keys), ("v_proj", d, keys), ("o_proj", queries, d)]
        return [*attention, ("gate_proj", d, inner), ("up_proj", d, inner), ("down_proj", inner, d)]

    def adapter_parameters(self, lora: LoraSettings) -> int:
        """``rank (in + out)`` for every layer of the targets' names, L times, and ``rank (D + V)`` for the output head.

        Raises:
            UserError: a target that this base does not have.
        """
        known = {LM_HEAD, *(name for name, _, _ in self.linears())}
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
        queries = self.num_heads * self.head_dim
        values = 4 * queries + (3 if self.gated else 1) * self.intermediate_size
        adapters = sum((FLOAT32 + 1) * inputs + FLOAT32 * lora.rank for _, inputs, _ in self._adapted(lora))
        return 2 * FLOAT32 * self.hidden_size + FLOAT32 * self.num_heads + values * base_bytes + adapters

    def _adapted(self, lora: LoraSettings) -> list[tuple[str, int, int]]:
        return [linear for linear in self.linears() if linear[0] in lora.targets]
