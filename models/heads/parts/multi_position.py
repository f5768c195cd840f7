"""Heads with a prediction of its own for every draft position: Medusa, Hydra, MLP speculators, EAGLE-3.

``MultiPositionHead`` makes loss and ranks of them; ``CopyingHead`` may have an induction head beside it;
``LastStateHead`` drafts from the base's last hidden state, and ``RecurrentHead`` from a state per node (Hydra and MLP
speculators).

Shape legend: B batch, T time, K draft positions, F frontier nodes, n targets, D width.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from drafthead.data.batch import HiddenStates, LossOutput, TrainBatch
from drafthead.data.utils.errors import check_limits
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lm_head import LMHead
from drafthead.models.decoding.drafter import DraftConfig, DraftState, last_valid
from drafthead.models.decoding.growth import DraftPass
from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig
from drafthead.models.heads.parts.induction import InductionHead, InductionReader, InductionText
from drafthead.models.heads.parts.lm_heads import DraftLMHeads
from drafthead.models.heads.parts.losses import LossConfig, heads_loss, loss_output
from drafthead.models.heads.parts.targets import DraftTargets, rank_of
from drafthead.models.kernels.cuda_graphs import StaticCalls


class MultiPositionHead(DraftHead):
    """A head that says what each position's projection reads; loss and ranks follow."""

    @abstractmethod
    def position_hidden(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        """[K, n, width] what the projection of every position reads for every target.

        Any finite values where ``draft_targets.valid`` is false.
        """

    def confidence_logits(self, hidden: Tensor) -> Tensor | None:
        """[K, n] logits of how likely every draft is accepted, of ``position_hidden``; None where it is not said."""
        return None

    def trained_targets(self, draft_targets: DraftTargets) -> DraftTargets:
        """The targets that a training step reads; by default all."""
        return draft_targets

    def loss(self, batch: TrainBatch, base_hidden: HiddenStates, config: LossConfig) -> LossOutput:
        weights = config.weights_of(self.config.trained_positions)
        depth = len(weights) if torch.is_grad_enabled() else self.depth  # deeper ones are only measured
        decay = config.decay if config.depth_weights is None else 1.0  # given weights stand for themselves
        config = replace(config, depth_weights=weights + [0.0] * (depth - len(weights)), decay=decay)
        draft_targets = self.trained_targets(DraftTargets.of(batch, depth))
        targets = draft_targets.loss_targets(batch, base_hidden, self.t2d, self.target_lm_head)
        hidden = self.position_hidden(batch, base_hidden, draft_targets)
        heads = [self.output_head(k) for k in range(depth)]
        loss_sum, stats = heads_loss(hidden, heads, targets, config, confidence=self.confidence_logits(hidden))
        return loss_output(loss_sum, stats, training=torch.is_grad_enabled())

    @torch.no_grad()
    def candidate_ranks(self, batch: TrainBatch, base_hidden: HiddenStates, top: int) -> Tensor:
        draft_targets = DraftTargets.of(batch, self.depth)
        hidden = self.position_hidden(batch, base_hidden, draft_targets)
        wanted = self.t2d[batch.input_ids.flatten()[draft_targets.target_idx]]
        ranks = torch.full((batch.input_ids.numel(), self.depth), -1, dtype=torch.int64, device=wanted.device)
        for k in range(self.depth):
            there = draft_targets.valid[k].nonzero()[:, 0]
            found = rank_of(hidden[k, there], self.output_head(k), wanted[there], top)
            ranks[draft_targets.source_idx[k, there], k] = found
        return ranks.view(*batch.input_ids.shape, self.depth)


@dataclass(kw_only=True)
class CopyingConfig(DraftHeadConfig):
    """Settings of heads that may have an induction head beside them."""

    own_lm_head: bool = True
    """True: every position trains its own copy of the base's projection (MLP speculators: one of their width). False:
    all share the base's, frozen (of an MLP speculator: over ``h`` and a trained matrix of the state, ours)."""
    induction_rank: int = 0
    """Rank of an induction head that all positions share (ours; no format has it); 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self, "head.", induction_rank="[0, 1024]")
        if self.induction_rank and self.own_lm_head:
            raise ValueError("head.induction_rank adds to the base's projection; set head.own_lm_head=false")


@dataclass
class HeadState(DraftState):
    """What a :class:`CopyingHead` remembers of its rows between steps; subclasses add their own caches."""

    hidden: Tensor
    """[B, D] the base's ``h`` at the last position it has read; NaN before there is one."""
    copied: InductionText | None
    """What an induction head reads."""


class CopyingHead(MultiPositionHead):
    """A head that may have an induction head beside it, whose codes are added to the base's projection."""

    config: CopyingConfig

    def __init__(self, config: CopyingConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self.induction: InductionHead | None = None
        if config.induction_rank:
            self.induction = InductionHead(base, config.induction_rank)
            self.induction_out = nn.Linear(config.induction_rank, len(self.d2t), bias=False, device=base.device)
            with torch.no_grad():
                self.induction_out.weight.copy_(self.induction.start_projection(self.d2t, self.target_lm_head.scale))

    def shared_projection(self) -> DraftLMHeads:
        """The base's projection, frozen, for all positions."""
        config = self.config
        return DraftLMHeads(self.target_lm_head, 0, config.inference_dtype(self.base), scaled=not config.induction_rank)

    @abstractmethod
    def levels(self, state: DraftState, last_token: Tensor, draft_config: DraftConfig) -> DraftPass:
        """Drafting without the induction head."""

    @abstractmethod
    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        """``position_hidden`` without the induction head."""

    @abstractmethod
    def projection(self, k: int) -> LMHead:
        """``output_head`` without the induction head."""

    def output_head(self, k: int) -> LMHead:
        head = self.projection(k)
        return head if self.induction is None else replace(head, low_rank=self.induction_out.weight)

    def position_hidden(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        found = self.hidden_at_positions(batch, base_hidden, draft_targets)
        if self.induction is None:
            return found
        copied = self.induction.at_targets(batch, base_hidden.final, draft_targets)
        return torch.cat([found, copied.to(found.dtype)], -1)

    def init_state(self, batch: int) -> HeadState:
        weight = self.target_lm_head.weight
        hidden = weight.new_full((batch, weight.shape[1]), torch.nan)
        return HeadState(hidden=hidden, copied=InductionText.none(batch) if self.induction else None)

    def update(
        self, state: DraftState, tokens: Tensor, base_hidden: HiddenStates | None, counts: Tensor | None = None
    ) -> HeadState:
        assert isinstance(state, HeadState) and base_hidden is not None
        copied = state.copied
        if copied is not None:
            copied = copied.append(self.inference().induction, tokens, counts)
        return HeadState(hidden=last_valid(base_hidden.final, counts), copied=copied)

    @torch.inference_mode()
    def start(self, state: DraftState, last_token: Tensor, draft_config: DraftConfig) -> DraftPass:
        assert isinstance(state, HeadState)
        drafting = self.levels(state, last_token, draft_config)
        if state.copied is None:
            return drafting
        head = self.inference()
        hidden = state.hidden[:, None].to(head.dtype)
        return InductionPass(drafting, InductionReader(head.induction, state.copied, hidden), head)


class LastStateHead(CopyingHead):
    """A head that drafts from the base's last ``h``, by calls of fixed shapes where the base has graphs."""

    projections: DraftLMHeads

    def __init__(self, config: CopyingConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self._static = StaticCalls(base.device) if base.uses_graphs else None

    def projection(self, k: int) -> LMHead:
        return self.projections.head(k)

    def invalidate(self) -> None:
        super().invalidate()
        if self._static is not None:
            self._static.clear()


class InductionPass:
    """Adds what an induction head copies to every level of a pass that gives products before they are scaled."""

    def __init__(self, drafting: DraftPass, reader: InductionReader, head: CopyingHead) -> None:
        """For an inference copy of a head."""
        self._drafting, self._reader, self._head = drafting, reader, head

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """As ``DraftPass.step``: [B, F, W]."""
        product = self._drafting.step(tokens, parents)
        copied = self._reader.read(tokens, parents)
        return self._head.target_lm_head.scale_and_cap(product + self._head.induction_out(copied))


States = tuple[Tensor, ...]
"""What a node hands on to its children: tensors [..., width], [B, F, width] while drafting."""


class LevelDraftPass:
    """All nodes of a level have the distribution of that level."""

    def __init__(self, logits: Tensor) -> None:
        """``logits`` [B, K, W] of all levels."""
        self._levels: Iterator[Tensor] = iter(logits.split(1, 1))  # type: ignore[no-untyped-call]

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """As ``DraftPass.step``: [B, F] int64 each -> [B, 1, W]."""
        return next(self._levels)


class RecurrentHead(LastStateHead):
    """A head that says how a state begins, and what one more token makes of it."""

    @abstractmethod
    def first_states(self, hidden: Tensor) -> States:
        """The state before any token is read, of the base's ``h``: [..., D]."""

    @abstractmethod
    def read_token(self, k: int, states: States, tokens: Tensor) -> tuple[Tensor, States]:
        """Draft logits [B, F, W] of position k (0-based) and the states after it, for inference.

        ``states``: of the parents, [B, F, ...]; ``tokens``: [B, F] int64 target ids, the root for k = 0, then drafts.
        """

    def levels(self, state: DraftState, last_token: Tensor, draft_config: DraftConfig) -> DraftPass:
        assert isinstance(state, HeadState)
        return RecurrentDraftPass(self.advance, self.first_states(self.read_state(state)[:, None].to(self.dtype)))

    def read_state(self, state: HeadState) -> Tensor:
        """[B, D] what the first states are made of."""
        return state.hidden

    def advance(self, k: int, tokens: Tensor, parents: Tensor, *states: Tensor) -> States:
        """Logits and states of position k, from its parents' ``states`` [B, P, ...]; ``parents`` [B, F] index P."""
        if self._static is None:
            return self._advance(k, tokens, parents, *states)
        return self._static(k, partial(self._advance, k), tokens, parents, *states)

    def _advance(self, k: int, tokens: Tensor, parents: Tensor, *states: Tensor) -> States:
        above = tuple(s.gather(1, parents[..., None].expand(-1, -1, s.shape[-1])) for s in states)
        logits, below = self.read_token(k, above, tokens)
        return (logits, *below)


class RecurrentDraftPass:
    """Drafting in progress: the states of the level that was read last."""

    def __init__(self, advance: Callable[..., States], states: States) -> None:
        """``states`` [B, 1, ...] are those before the root is read."""
        self._advance, self._states = advance, states
        self._position = 0

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """As ``DraftPass.step``: [B, F] int64 each -> [B, F, W]."""
        logits, *states = self._advance(self._position, tokens, parents, *self._states)
        self._states = tuple(states)
        self._position += 1
        return logits
