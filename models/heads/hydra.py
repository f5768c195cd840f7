"""Hydra heads (Ankner et al., 2402.05109): Medusa's heads made sequentially dependent, and Hydra++.

Head k reads the concatenation of ``h_t`` and the base's embeddings of ``x_{t+1} .. x_{t+k}``, the tokens before the
draft. A first block maps it to the base's width; further residual blocks and a projection follow. Hydra++
(``prefix_layer``) adds a decoder layer over the hidden states of the context, whose output replaces ``h_t``. The layer
has its own keys and values, and reads the newly committed tokens once per step.

Differences from the reference code:

- Embeddings are looked up at the tokens themselves; there, a row of embeddings is rolled and wraps around.
- The blocks of a head are separate modules; there, all but the first are one module.
- An untrained head is the base's next-token head, with Hydra++ up to a factor per token; there, the first block is
  random.
- Projections can be the base's, frozen, or restricted to a draft vocabulary. The induction head is our addition.

Shape legend: B batch, T time, K heads, D width.
"""

from dataclasses import replace
from typing import Annotated, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.models.base.parts import BaseParts
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.heads.medusa import ResBlock
from drafthead.models.heads.parts.attention_layer import HeadDecoderLayer, HeadRMSNorm, Layer, Mask, norm_scale
from drafthead.models.heads.parts.draft_head import Attend, DraftHead, DraftHeadConfig, DraftPositions, States
from drafthead.models.heads.parts.head_session import HeadSession, LayerCache
from drafthead.models.heads.parts.targets import DraftTargets
from drafthead.settings.schema import BelowOne, settings


@settings(kw_only=True)
class HydraConfig(DraftHeadConfig):
    """Settings of :class:`HydraHead`."""

    num_draft_tokens: DraftPositions = 4
    own_lm_head: bool = True
    """Train a projection to the vocabulary for each head, which starts as the base's. With false, all heads share the
    base's, frozen."""
    num_layers: Annotated[int, Field(ge=1, le=8)] = 1
    """Blocks per head. Hydra++ has 4."""
    prefix_layer: bool = False
    """Add a decoder layer over the base's hidden states (Hydra++)."""
    dropout: BelowOne = 0.0
    """Dropout before each block and projection in training. Hydra++ uses 0.2."""
    projection_bias: bool = False
    """Give the heads' own projections to the vocabulary a bias, as in the released weights. Needs ``own_lm_head``."""
    tie_blocks: bool = False
    """Use one block for all blocks after a head's first, as in the reference code."""
    unit_embeddings: bool = False
    """Scale embeddings to RMS 1 (our addition). Training is faster with it if the base's embeddings are small."""

    def __post_init__(self) -> None:
        if self.projection_bias and not self.own_lm_head:
            raise ValueError("head.projection_bias needs head.own_lm_head: true; the base's projection has none")


class FirstBlock(nn.Module):
    """First block ``R x + c + SiLU(W x + b)`` of a head, where x concatenates ``inputs`` vectors of ``width`` numbers.
    The untrained block returns the first vector."""

    def __init__(self, width: int, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs * width, width)
        self.residual = nn.Linear(inputs * width, width)
        for linear in (self.linear, self.residual):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
        with torch.no_grad():
            self.residual.weight[:, :width] = torch.eye(width)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.residual(x) + F.silu(self.linear(x)))


class HydraBlocks(nn.ModuleList):
    """``FirstBlock`` and residual blocks of one head, with dropout before each block and after the last."""

    def __init__(self, width: int, inputs: int, config: HydraConfig) -> None:
        further = min(config.num_layers - 1, 1) if config.tie_blocks else config.num_layers - 1
        super().__init__([FirstBlock(width, inputs), *(ResBlock(width) for _ in range(further))])
        self._count, self._dropout = config.num_layers, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        for index in range(self._count):
            block = self[min(index, len(self) - 1)]
            x = block(F.dropout(x, self._dropout, self.training))
        return F.dropout(x, self._dropout, self.training)


class PrefixLayer(HeadDecoderLayer):
    """A decoder layer with a final norm, over the base's hidden states; weights have the names of Llama checkpoints.
    The untrained layer is the identity up to a factor per token, because its norm has the mean scale of the base's
    final norm. The factor is 0.90 to 1.33 on SmolLM2, which raises an untrained head's loss by 0.064 nats."""

    def __init__(self, base: BaseParts) -> None:
        super().__init__(base)
        self.norm = HeadRMSNorm(base)
        with torch.no_grad():
            self.norm.weight.fill_(norm_scale(base).square().mean().sqrt())

    def forward(self, x: Tensor, positions: Tensor, mask: Mask, cache: TreeCache | None = None) -> Tensor:
        return cast(Tensor, self.norm(super().forward(x, positions, mask, cache)))


class HydraHead(DraftHead):
    """K Hydra heads. Each reads the base's (or the prefix layer's) state, joined with the embeddings of its path."""

    config: HydraConfig

    def __init__(self, config: HydraConfig, base: BaseParts, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self.prefix = PrefixLayer(base) if config.prefix_layer else None
        blocks = (HydraBlocks(base.hidden_size, 2 + k, config) for k in range(config.num_draft_tokens))
        self.blocks = nn.ModuleList(blocks).to(base.device)
        first = self.target_lm_head
        if config.projection_bias:
            # The bias is one more column of the weight, whose input is always 1.
            first = replace(first, weight=F.pad(first.weight, (0, 1)))
        self.projections = self.lm_heads(config.num_draft_tokens if config.own_lm_head else 0, first)

    @property
    def projection_width(self) -> int:
        return self.base.hidden_size + self.config.projection_bias

    def open(self, rows: int, cache: TreeCache | None = None) -> HeadSession:
        return HeadSession(self, rows) if self.prefix is None else HydraPlusSession(self, rows)

    def advance(self, k: int, states: States, tokens: Tensor, attend: Attend) -> tuple[Tensor, States]:
        x = torch.cat([states[0], self.embed(tokens, self.config.unit_embeddings)], -1)
        out: Tensor = self.blocks[k](x)
        return F.pad(out, (0, 1), value=1.0) if self.config.projection_bias else out, (x,)

    def anchor_hidden(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        final = base_hidden.final.to(self.dtype)
        if self.prefix is None:
            return final
        # Hidden states that were not stored are NaN, and NaN times a zero weight is still NaN.
        return cast(Tensor, self.prefix(final.nan_to_num(), batch.position_ids, draft_targets.mask))


class HydraPlusSession(HeadSession):
    """A session that runs the prefix layer of Hydra++ over the committed tokens."""

    def __init__(self, head: HydraHead, rows: int) -> None:
        prefix, dtype = cast(PrefixLayer, head.prefix), head.dtype
        shape = prefix.self_attn.cache_shape(dtype, head.base.device)
        layer = cast(Layer, head.inference().prefix)
        self.context = LayerCache([layer], shape, rows, lambda base_hidden: base_hidden.final.to(dtype))
        super().__init__(head, rows, self.context)

    def draft_hidden(self) -> Tensor:
        return self.context.read_all()
