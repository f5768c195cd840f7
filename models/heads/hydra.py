"""Hydra heads (Ankner et al., 2402.05109): Medusa's heads made sequentially dependent, and Hydra++.

Head k reads ``h_t`` and the base's embeddings of ``x_{t+1} .. x_{t+k}``, the tokens drafted so far, side by side; a
first block brings them to the base's width, further residual blocks and a projection follow. Hydra++
(``prefix_layer``) puts one decoder layer over all of the text's hidden states before them, which is run once per step
over what was committed, with keys and values of its own.

Differences from the reference code: embeddings are looked up at the tokens themselves, where there an embedding row is
rolled and wraps around at its end; the blocks of a head are separate modules (there, all but the first are one); an
untrained head is the base's next-token head, of Hydra++ up to a factor per token (there, its first block is random);
the projections can be the base's own, frozen, or cut to a draft vocabulary; and an induction head is ours.

Shape legend: B batch, T time, F frontier nodes, K heads, n picked targets, D width, W draft vocabulary.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.data.utils.errors import check_limits
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.kv_cache import KVCache, RaggedCache
from drafthead.models.decoding.drafter import DraftState
from drafthead.models.heads.medusa import ResBlock
from drafthead.models.heads.parts.attention_layer import HeadDecoderLayer, HeadRMSNorm
from drafthead.models.heads.parts.layer_cache import LayerKVCache, PendingInputs
from drafthead.models.heads.parts.lm_heads import DraftLMHeads
from drafthead.models.heads.parts.multi_position import CopyingConfig, HeadState, RecurrentHead, States
from drafthead.models.heads.parts.targets import DraftTargets
from drafthead.models.kernels.attention import document_mask


@dataclass(kw_only=True)
class HydraConfig(CopyingConfig):
    """Settings of :class:`HydraHead`."""

    num_draft_tokens: int = 4
    num_layers: int = 1
    """Blocks per head (Hydra++: 4)."""
    prefix_layer: bool = False
    """True: Hydra++, with a decoder layer over the base's hidden states."""
    dropout: float = 0.0
    """Before every block and projection, while training (Hydra++: 0.2)."""
    projection_bias: bool = False
    """True: own projections have a bias, as in the weights that the authors released."""
    tie_blocks: bool = False
    """True: the blocks after a head's first are one, applied repeatedly, as in the reference code."""
    unit_embeddings: bool = False
    """True: embeddings are read at unit RMS (ours): learnt sooner where the base's are small."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self, "head.", num_layers="[1, 8]", dropout="[0, 1)")
        if self.projection_bias and not self.own_lm_head:
            raise ValueError("head.projection_bias needs head.own_lm_head: true; the base's projection has none")

    def build(self, base: BaseModel, d2t: Tensor | None = None) -> "HydraHead":
        return HydraHead(self, base, d2t)


class FirstBlock(nn.Module):
    """``R x + SiLU(W x + b)`` of D ``parts`` side by side; it begins as its first part."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(parts * width, width)
        self.residual = nn.Linear(parts * width, width)
        for linear in (self.linear, self.residual):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
        with torch.no_grad():
            self.residual.weight[:, :width] = torch.eye(width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., parts * D] -> [..., D]."""
        return cast(Tensor, self.residual(x) + F.silu(self.linear(x)))


class HydraBlocks(nn.ModuleList):
    """The blocks of one head."""

    def __init__(self, width: int, parts: int, config: HydraConfig) -> None:
        further = min(config.num_layers - 1, 1) if config.tie_blocks else config.num_layers - 1
        super().__init__([FirstBlock(width, parts), *(ResBlock(width) for _ in range(further))])
        self._count, self._dropout = config.num_layers, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        """[..., parts * D] -> [..., D]."""
        for place in range(self._count):
            block = self[min(place, len(self) - 1)]
            x = block(F.dropout(x, self._dropout, self.training))
        return F.dropout(x, self._dropout, self.training)


class PrefixLayer(HeadDecoderLayer):
    """A decoder layer and a final norm over the base's hidden states; names of its weights as in Llama checkpoints.

    What it adds starts at zero, and its final norm's scale is that of the base's states, so it begins as the identity
    up to a factor per token: what it norms has been normed by the base. The factor is 1 where the base's final norm has
    one scale for all channels; on SmolLM2 it is 0.90 to 1.33, which costs an untrained head 0.064 nats.
    """

    def __init__(self, base: BaseModel) -> None:
        super().__init__(base)
        self.norm = HeadRMSNorm(base)
        with torch.no_grad():
            states = base.model.model.norm(torch.ones_like(base.embedding[:1])).float()
            self.norm.weight.fill_(states.square().mean().sqrt())

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | RaggedCache | None = None
    ) -> Tensor:
        """As ``HeadDecoderLayer``, normed."""
        return cast(Tensor, self.norm(super().forward(x, positions, mask, cache)))


@dataclass
class HydraState(HeadState):
    """The state of Hydra++."""

    text: PendingInputs
    """What the prefix layer has read, and what it has still to read."""


class HydraHead(RecurrentHead):
    """K Hydra heads. A node's state is what the next head reads: ``h`` and the embeddings on the node's path."""

    config: HydraConfig

    def __init__(self, config: HydraConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self.prefix = PrefixLayer(base) if config.prefix_layer else None
        self.blocks = nn.ModuleList(
            HydraBlocks(base.hidden_size, 2 + k, config) for k in range(config.num_draft_tokens)
        ).to(base.device)
        if not config.own_lm_head:
            self.projections = self.shared_projection()
            return
        first = self.target_lm_head
        if config.projection_bias:
            # The bias is one more column, whose input is 1.
            first = replace(first, weight=F.pad(first.weight, (0, 1)))
        self.projections = DraftLMHeads(first, config.num_draft_tokens, config.inference_dtype(base))

    def checkpointable(self) -> list[tuple[nn.Module, str]]:
        return [] if self.prefix is None else [(self.prefix, "forward")]

    def num_calls(self, name: str) -> int:
        return self.config.num_layers - 1 if self.config.tie_blocks and name.endswith(".1.linear") else 1

    def _embed(self, tokens: Tensor) -> Tensor:
        """[...] int64 -> [..., D]: the base's embedding, frozen."""
        embedded = F.embedding(tokens, self.base.embedding).to(self.dtype)
        return F.rms_norm(embedded, embedded.shape[-1:]) if self.config.unit_embeddings else embedded

    def _projected(self, x: Tensor) -> Tensor:
        """What a projection reads of a head's output [..., D]."""
        return F.pad(x, (0, 1), value=1.0) if self.config.projection_bias else x

    # Drafting ------------------------------------------------------------------------------------------------

    def init_state(self, batch: int) -> HeadState:
        state = super().init_state(batch)
        if self.prefix is None:
            return state
        layer, shape = self.inference().prefix, self.prefix.self_attn.cache_shape(self.dtype, self.base.device)
        assert layer is not None
        text = PendingInputs.none(LayerKVCache(layer, shape), batch, self.prefix.norm.weight)
        return HydraState(hidden=state.hidden, copied=state.copied, text=text)

    def update(
        self, state: DraftState, tokens: Tensor, base_hidden: HiddenStates | None, counts: Tensor | None = None
    ) -> HeadState:
        seen = super().update(state, tokens, base_hidden, counts)
        if not isinstance(state, HydraState):
            return seen
        assert base_hidden is not None
        with torch.inference_mode():
            text = state.text.append(base_hidden.final.to(self.dtype), counts)
        return HydraState(hidden=seen.hidden, copied=seen.copied, text=text)

    def read_state(self, state: HeadState) -> Tensor:
        return state.text.cache.prefill(state.text) if isinstance(state, HydraState) else state.hidden

    def first_states(self, hidden: Tensor) -> States:
        return (hidden,)

    def read_token(self, k: int, states: States, tokens: Tensor) -> tuple[Tensor, States]:
        x = torch.cat([states[0], self._embed(tokens)], -1)
        return self.projections.logits(self._projected(self.inference().blocks[k](x)), k), (x,)

    # Training ------------------------------------------------------------------------------------------------

    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        final = base_hidden.final.to(self.dtype)
        if self.prefix is not None:
            # A kept feature is missing (NaN) where nobody read; zero times NaN would reach what does not see it.
            mask = document_mask(batch.document_ids, final.dtype)
            final = self.prefix(final.nan_to_num(), batch.position_ids, mask)
        hidden, found = draft_targets.at_sources(final), []
        for k, blocks in enumerate(self.blocks):
            embedded = [self._embed(draft_targets.tokens(batch.input_ids, j + 1)[k]) for j in range(k + 1)]
            found.append(self._projected(blocks(torch.cat([hidden[k], *embedded], -1))))
        return torch.stack(found)
