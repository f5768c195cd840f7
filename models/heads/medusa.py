"""Medusa heads (Cai et al., 2401.10774): K independent heads over the base's last hidden state.

Head k predicts ``x_{t+1+k}`` from ``h_t`` through residual blocks and a projection to the vocabulary. The projection is
one per head that starts as the base's (the paper), or the base's own, frozen and shared (the later recipe).

Differences from the reference code: the blocks of a head are separate modules. Their biases start at zero, so an
untrained head is exactly the base's next-token head. The projections can be restricted to a draft vocabulary.

``reads_last_token`` is our addition: the first block of every head also reads the embedding of ``x_{t+1}``, which is
already committed when drafting starts, as the first Hydra head does (2402.05109). Drafting is still one pass.

Shape legend: B batch, K heads, D width.
"""

from typing import Annotated, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from drafthead.models.base.parts import BaseParts
from drafthead.models.heads.parts.draft_head import Attend, DraftHead, DraftHeadConfig, States
from drafthead.models.heads.parts.head_session import HeadSession
from drafthead.models.kernels.linear import inference_copy, joined_linear
from drafthead.settings.schema import settings


@settings(kw_only=True)
class MedusaConfig(DraftHeadConfig):
    """Settings of :class:`MedusaHead`."""

    own_lm_head: bool = True
    """Train a projection to the vocabulary for each head, which starts as the base's. With false, all heads share the
    base's, frozen."""
    num_layers: Annotated[int, Field(ge=1, le=8)] = 1
    """Residual blocks per head."""
    tie_blocks: bool = False
    """Apply one block ``num_layers`` times, as in the reference code and its released weights."""
    reads_last_token: bool = False
    """Also read the embedding of the last committed token (our addition)."""

    def __post_init__(self) -> None:
        if self.tie_blocks and self.reads_last_token:
            raise ValueError("head.tie_blocks and head.reads_last_token exclude each other; leave one of them out")


class ResBlock(nn.Module):
    """Residual block ``x + SiLU(W x + b)``; with ``conditioned``, ``x + SiLU(W [x; condition] + b)``. W and b start at
    zero."""

    def __init__(self, width: int, conditioned: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width if conditioned else width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        return x + F.silu(self.linear(x if condition is None else torch.cat([x, condition], -1)))


class Blocks(nn.ModuleList):
    """``count`` residual blocks of one head. With ``conditioned``, the first reads a condition too; with ``tied``, one
    block is applied ``count`` times."""

    def __init__(self, width: int, count: int, conditioned: bool = False, tied: bool = False) -> None:
        super().__init__(ResBlock(width, conditioned and i == 0) for i in range(1 if tied else count))
        self._repeats = count if tied else 1

    def in_order(self) -> list[ResBlock]:
        return [cast(ResBlock, block) for block in self] * self._repeats

    def inference(self, dtype: torch.dtype | None = None) -> "Blocks":
        """Return self, because ``MedusaHead`` packs the blocks of all heads together."""
        return self

    def forward(self, x: Tensor, *condition: Tensor) -> Tensor:
        """Map ``x`` [..., D] to [..., D]; only the first block reads ``condition`` [..., D]."""
        first, *deeper = self.in_order()
        x = first(x, *condition)
        for block in deeper:
            x = block(x)
        return x


class MedusaHead(DraftHead):
    """K Medusa heads: for each draft position, residual blocks over the base's last state, and a projection."""

    config: MedusaConfig
    session_class = HeadSession
    reads_drafts = False

    def __init__(self, config: MedusaConfig, base: BaseParts, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        arguments = base.hidden_size, config.num_layers, config.reads_last_token, config.tie_blocks
        blocks = (Blocks(*arguments) for _ in range(config.num_draft_tokens))
        self.blocks = nn.ModuleList(blocks).to(base.device)
        self.projections = self.lm_heads(config.num_draft_tokens if config.own_lm_head else 0)
        self._packed_heads = 0

    def advance(self, k: int, states: States, tokens: Tensor, attend: Attend) -> tuple[Tensor, States]:
        if k == 0 and self.config.reads_last_token:
            states = (*states, self.embed(tokens, unit=True))
        x: Tensor = self.blocks[k](*states)
        return x, states

    def all_inputs(self, hidden: Tensor, last_token: Tensor, depth: int) -> Tensor:
        """Compute ``DraftHead.all_inputs`` with joined and packed layers: fewer and larger matrix products than in
        ``advance``."""
        # The first blocks of several heads are packed together: as many heads as the longest draft so far had. Shorter
        # drafts, at the end of an answer, use a part of the outputs. An inference copy leaves blocks unpacked for this.
        self._packed_heads = heads = max(self._packed_heads, depth)
        first, deeper = self.packed.get(heads, lambda: self._packed_blocks(heads))
        inputs = torch.cat([hidden, self.embed(last_token, unit=True)], -1) if self.config.reads_last_token else hidden
        x = hidden[:, None] + F.silu(first(inputs).unflatten(-1, (heads, -1))[:, :depth])
        for linears in deeper:
            outputs = [linear(hidden) for linear, hidden in zip(linears, x.unbind(1), strict=False)]
            x = x + F.silu(torch.stack(outputs, 1))
        return x

    def _packed_blocks(self, heads: int) -> tuple[nn.Module, list[list[nn.Module]]]:
        """Return packed linear layers of ``heads`` heads: one that joins all first blocks, which read the same input,
        and a list for each later block, with one layer per head."""
        dtype = self.config.inference_dtype(self.base)
        by_head = [[block.linear for block in cast(Blocks, blocks).in_order()] for blocks in self.blocks]
        first, *deeper = zip(*by_head[:heads], strict=True)
        return joined_linear(list(first), dtype), [[inference_copy(x, dtype) for x in block] for block in deeper]
