"""Medusa heads (Cai et al., 2401.10774): K independent heads over the base's last hidden state.

Head k predicts ``x_{t+1+k}`` from ``h_t`` through residual blocks and a projection to the vocabulary. Both published
variants: a projection of its own per head, initialised from the base's (the paper), or the base's own, frozen and
shared (the later recipe). Differences from the reference code: the blocks of a head are separate modules (there, one
module is repeated), their bias starts at zero like their weight, so that an untrained head is exactly the base's
next-token head, and the projections can be cut to a draft vocabulary.

``reads_last_token`` goes beyond the paper: at drafting time ``x_{t+1}`` is already committed, but a Medusa head has to
guess it again from ``h_t``. With the option the first block of every head also reads its embedding, as the first Hydra
head does (2402.05109); the heads stay independent of each other, so drafting still is one pass. ``docs/log.md`` has
what it buys.

Shape legend: B batch, T time, N tree nodes, K heads, n selected positions, D width, W draft vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthead.data.contracts import Features, LossOutput, TrainBatch
from drafthead.models.base import BaseModel, OutputHead
from drafthead.models.draft_head import DraftHead, DraftHeadConfig, HeadSize, HeadState
from drafthead.models.drafter import DraftPlan, DraftState, last_of
from drafthead.models.graphs import StaticCalls
from drafthead.models.linear import PrepackedLinear, can_prepack
from drafthead.models.losses import LossConfig, Targets, chunk_rows, heads_loss, loss_output


@dataclass(kw_only=True)
class MedusaConfig(DraftHeadConfig):
    """Settings of :class:`MedusaHead`."""

    num_heads: int = 5
    """Draft positions K."""
    num_layers: int = 1
    """Residual blocks per head."""
    own_projection: bool = True
    """True: every head trains its own copy of the base's projection. False: all share the base's, frozen."""

    reads_last_token: bool = False
    """True: heads also read the embedding of the last committed token (ours; not in the paper)."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_heads <= 16:
            raise ValueError(f"head.num_heads must be in [1, 16], got {self.num_heads}")
        if not 1 <= self.num_layers <= 8:
            raise ValueError(f"head.num_layers must be in [1, 8], got {self.num_layers}")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 16:
            raise ValueError(f"head.draft_vocab_size must be at least 16 or null, got {self.draft_vocab_size}")

    @property
    def depth(self) -> int:
        return self.num_heads

    def build(self, base: BaseModel, d2t: Tensor | None = None) -> "MedusaHead":
        return MedusaHead(self, base, d2t)

    def size(self, hidden_size: int, vocab_size: int) -> HeadSize:
        vocabulary = min(self.draft_vocab_size or vocab_size, vocab_size)
        per_head = self.num_layers * (hidden_size + 1) * hidden_size + self.reads_last_token * hidden_size**2
        blocks = self.num_heads * per_head
        projections = self.num_heads * vocabulary * hidden_size if self.own_projection else 0
        return HeadSize(
            parameters=blocks + projections,
            trainable=blocks + projections,
            positions=self.num_heads,
            draft_vocab_size=vocabulary,
            projections=projections,
            # Per head: the gathered input, its masked copy, the stacked output and its gradient; per block: the
            # linear's and SiLU's outputs.
            activations_per_token=self.num_heads * hidden_size * (4 + 2 * self.num_layers),
        )


class ResBlock(nn.Module):
    """``x + SiLU(W [x; condition] + b)`` with W and b starting at zero; the condition is optional."""

    def __init__(self, width: int, conditioned: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width if conditioned else width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        return x + F.silu(self.linear(x if condition is None else torch.cat([x, condition], -1)))


class Blocks(nn.ModuleList):
    """The residual blocks of one head, each a module of its own; the first may be conditioned."""

    def __init__(self, width: int, count: int, conditioned: bool) -> None:
        super().__init__(ResBlock(width, conditioned and i == 0) for i in range(count))

    def forward(self, x: Tensor, condition: Tensor | None) -> Tensor:
        for i, block in enumerate(self):
            x = block(x, condition if i == 0 else None)
        return x


class MedusaHead(DraftHead):
    """K Medusa heads."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self.blocks = nn.ModuleList(
            Blocks(base.hidden_size, config.num_layers, config.reads_last_token) for _ in range(config.num_heads)
        ).to(base.device)
        copies = config.num_heads if config.own_projection else 0
        self.projections = nn.ParameterList(
            nn.Parameter(self.teacher.weight.detach().float().clone()) for _ in range(copies)
        )
        self._products: list[nn.Module] | None = None
        self._stacks: list[tuple[Tensor, Tensor]] | None = None
        self._static = StaticCalls(base.device) if base.uses_graphs else None

    def train(self, mode: bool = True) -> "MedusaHead":
        self._forget_copies()
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._forget_copies()
        moved: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return moved

    def _forget_copies(self) -> None:
        """Copies of weights that may change, and graphs that read them where they are."""
        self._products = self._stacks = None
        if self._static is not None:
            self._static.clear()

    def output_head(self, k: int) -> OutputHead:
        """The projection of head k (0-based)."""
        if not self.config.own_projection:
            return self.teacher
        return OutputHead(weight=self.projections[k], scale=self.teacher.scale, softcap=self.teacher.softcap)

    def _condition(self, last: Tensor) -> Tensor | None:
        """What the heads know of the last committed token: its embedding at unit RMS, [...] -> [..., D]."""
        if not self.config.reads_last_token:
            return None
        embedded = F.embedding(last, self.base.embedding).to(self._dtype)
        return F.rms_norm(embedded, embedded.shape[-1:])

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def init_state(self, batch: int) -> HeadState:
        return HeadState(hidden=self.teacher.weight.new_full((batch, self.teacher.weight.shape[1]), torch.nan))

    def observe(
        self, state: DraftState, tokens: Tensor, features: Features | None, counts: Tensor | None = None
    ) -> HeadState:
        assert features is not None
        return HeadState(hidden=last_of(features.final, counts))

    def begin(self, state: DraftState, last: Tensor, plan: DraftPlan) -> "_MedusaExpansion":
        assert isinstance(state, HeadState)
        if self._static is None:
            return _MedusaExpansion(self.draft_logits(state.hidden, last, plan.depth))
        depth = plan.depth
        (logits,) = self._static(depth, lambda h, x: (self.draft_logits(h, x, depth),), state.hidden, last)
        return _MedusaExpansion(logits)

    @torch.inference_mode()
    def draft_logits(self, hidden: Tensor, last: Tensor, depth: int) -> Tensor:
        """Logits of the first ``depth`` heads: [B, D], [B] -> [B, depth, W]."""
        x, condition = hidden.to(self._dtype), self._condition(last)
        for layer, (weights, biases) in enumerate(self._stacked_blocks()):
            read = x if layer or condition is None else torch.cat([x, condition], -1)
            read = read.expand(depth, -1, -1) if layer == 0 else read
            x = x + F.silu(torch.baddbmm(biases[:depth], read, weights[:depth]))
        stacked = x.transpose(0, 1).to(self.output_head(0).weight.dtype)
        products = self._inference_products()
        if len(products) == 1:
            product = products[0](stacked)
        else:
            product = torch.stack([products[k](stacked[:, k]) for k in range(depth)], 1)
        return self.teacher.finish(product)

    def _stacked_blocks(self) -> list[tuple[Tensor, Tensor]]:
        """Per block the weights [K, in, D] and biases [K, 1, D] of all heads: drafting is then one product a block."""
        if self._stacks is None:
            layers = zip(*self.blocks, strict=True)
            self._stacks = [
                (
                    torch.stack([block.linear.weight.detach().t() for block in blocks]),
                    torch.stack([block.linear.bias.detach()[None] for block in blocks]),
                )
                for blocks in layers
            ]
        return self._stacks

    def _inference_products(self) -> list[nn.Module]:
        """The projections as layers fit for few rows, made once."""
        if self._products is None:
            count = self.depth if self.config.own_projection else 1
            self._products = [_inference_linear(self.output_head(k).weight.detach()) for k in range(count)]
        return self._products

    def loss(self, batch: TrainBatch, features: Features, config: LossConfig) -> LossOutput:
        targets, sources = self._targets(batch, features, with_teacher=True)
        flat = features.final.flatten(0, 1)
        # Where a head has no valid source the feature may be another document's or NaN (never read): zero carries
        # neither value nor gradient.
        read = torch.where(targets.valid[..., None], flat[sources], 0.0).to(self._dtype)
        condition = self._condition(batch.input_ids.flatten()[sources + 1])
        hidden = torch.stack(
            [blocks(read[k], None if condition is None else condition[k]) for k, blocks in enumerate(self.blocks)]
        )
        heads = [self.output_head(k) for k in range(self.depth)]
        loss_sum, stats = heads_loss(hidden, heads, targets, config)
        return loss_output(loss_sum, stats, training=loss_sum.requires_grad)

    def _targets(self, batch: TrainBatch, features: Features, with_teacher: bool) -> tuple[Targets, Tensor]:
        """Every position that some head is trained to predict, and per head the flat index of the ``h`` it reads."""
        rows, time = batch.input_ids.shape
        valid = batch.loss_mask.new_zeros((self.depth, rows, time))
        for k in range(1, self.depth + 1):
            _, at_source = batch.draft_targets(k)
            valid[k - 1, :, 1 + k :] = at_source[:, : -(1 + k)]
        flat_valid = valid.flatten(1)
        picked = flat_valid.any(0).nonzero()[:, 0]
        offsets = torch.arange(2, self.depth + 2, device=picked.device)
        sources = (picked[None] - offsets[:, None]).clamp_(min=0)  # [K, n]; a clamped one is never valid
        targets = Targets(
            ids=self.t2d[batch.input_ids.flatten()[picked]],
            valid=flat_valid[:, picked],
            teacher_hidden=features.final.flatten(0, 1)[picked - 1] if with_teacher else None,
            teacher=self.teacher if with_teacher else None,
        )
        return targets, sources

    @torch.no_grad()
    def candidate_ranks(self, batch: TrainBatch, features: Features, top: int) -> Tensor:
        ranks = torch.full((*batch.input_ids.shape, self.depth), -1, dtype=torch.int64, device=batch.input_ids.device)
        last, _ = batch.draft_targets(0)
        for k, blocks in enumerate(self.blocks):
            ids, valid = batch.draft_targets(k + 1)
            hidden = blocks(features.final[valid].to(self._dtype), self._condition(last[valid]))
            wanted = self.t2d[ids[valid]]
            found = []
            for part in torch.arange(len(wanted), device=wanted.device).split(  # type: ignore[no-untyped-call]
                chunk_rows(len(self.d2t), wanted.device.type)
            ):
                head = self.output_head(k)
                logits = head.logits(hidden[part].to(head.weight.dtype)).float()
                true = logits.gather(1, wanted[part].clamp(min=0)[:, None])
                found.append((logits > true).sum(-1).clamp(max=top))
            rank = torch.cat(found) if found else wanted
            ranks[..., k][valid] = torch.where(wanted >= 0, rank, top)
        return ranks


class _MedusaExpansion:
    """Independent heads: all nodes of a level have the law of that level's head."""

    def __init__(self, logits: Tensor) -> None:
        self._levels: Iterator[Tensor] = iter(logits.split(1, 1))  # type: ignore[no-untyped-call]

    def root(self) -> Tensor:
        return next(self._levels)

    def grow(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return next(self._levels)


def _inference_linear(weight: Tensor) -> nn.Module:
    if can_prepack(weight):
        return PrepackedLinear(weight, None)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
