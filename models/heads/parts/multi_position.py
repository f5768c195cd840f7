"""Heads with a separate prediction for every draft position: Medusa, Hydra, MLP speculators, EAGLE-3, DSpark.

``MultiPositionHead`` derives the loss and the ranks from them. ``CopyingHead`` drafts from the base's last hidden state
and can have an induction head. ``RecurrentHead`` drafts from a state per node.

Shape legend: B batch, T time, K draft positions, F frontier nodes, P nodes of the level above, n targets, D base width,
W draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from drafthead.data.batch import HiddenStates, LossOutput, TrainBatch
from drafthead.data.utils.settings import settings
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lm_head import LMHead
from drafthead.models.decoding.drafter import DraftConfig, DraftState, last_valid
from drafthead.models.decoding.growth import DraftPass
from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig
from drafthead.models.heads.parts.induction import InductionContext, InductionHead, InductionReader
from drafthead.models.heads.parts.layer_cache import PendingInputs
from drafthead.models.heads.parts.lm_heads import DraftLMHeads
from drafthead.models.heads.parts.losses import LossConfig, heads_loss, loss_output
from drafthead.models.heads.parts.targets import DraftTargets, rank_of
from drafthead.models.kernels.cuda_graphs import StaticCalls


@dataclass
class HeadState(DraftState):
    """State of a :class:`MultiPositionHead` between steps."""

    hidden: Tensor
    """[B, D] the base's ``h`` at the last position it has read; NaN before the prompt."""
    copied: InductionContext | None
    """Context of the induction head."""
    context: PendingInputs | None = None
    """Context of the head's own attention layers, if it has any."""


class MultiPositionHead(DraftHead):
    """A head that gives the projection's input at every position; loss and ranks follow."""

    def __init__(self, config: DraftHeadConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self.induction: InductionHead | None = None

    @abstractmethod
    def position_hidden(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        """Return the input of every position's projection for every target, [K, n, width].

        It may be any finite value where ``draft_targets.valid`` is false.
        """

    def confidence_logits(self, hidden: Tensor) -> Tensor | None:
        """Return logits [K, n] of the drafts' acceptance from ``position_hidden``; None without a confidence head."""
        return None

    def trained_targets(self, draft_targets: DraftTargets) -> DraftTargets:
        """Return the targets of a training step; all by default."""
        return draft_targets

    def loss(self, batch: TrainBatch, base_hidden: HiddenStates, config: LossConfig) -> LossOutput:
        weights = config.weights_of(self.config.trained_positions)
        depth = len(weights) if torch.is_grad_enabled() else self.depth  # untrained positions are only measured
        decay = config.decay if config.depth_weights is None else 1.0  # explicit weights do not decay
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
        target_ids = self.t2d[batch.input_ids.flatten()[draft_targets.target_idx]]
        ranks = torch.full((batch.input_ids.numel(), self.depth), -1, dtype=torch.int64, device=target_ids.device)
        for k in range(self.depth):
            valid = draft_targets.valid[k].nonzero()[:, 0]
            position_ranks = rank_of(hidden[k, valid], self.output_head(k), target_ids[valid], top)
            ranks[draft_targets.source_idx[k, valid], k] = position_ranks
        return ranks.view(*batch.input_ids.shape, self.depth)

    def init_state(self, batch: int) -> HeadState:
        weight = self.target_lm_head.weight
        hidden = weight.new_full((batch, weight.shape[1]), torch.nan)
        return HeadState(hidden=hidden, copied=InductionContext.none(batch) if self.induction else None)

    def update(
        self, state: HeadState, tokens: Tensor, base_hidden: HiddenStates | None, counts: Tensor | None = None
    ) -> HeadState:
        assert base_hidden is not None
        copied = state.copied
        if copied is not None:
            copied = copied.append(self.inference().induction, tokens, counts)
        return HeadState(hidden=last_valid(base_hidden.final, counts), copied=copied)


@settings(kw_only=True)
class CopyingConfig(DraftHeadConfig):
    """Settings of heads that can have an induction head."""

    own_lm_head: bool = True
    """Train a projection to the vocabulary at each position. It starts as a copy of the base's (MLP speculators: one of
    their width). With false, all positions share the base's, frozen (MLP speculators: over ``h`` and a trained matrix
    of the state, our addition)."""
    induction_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rank of an induction head that all positions share (our addition; no format has it). 0 turns it off. Needs
    ``own_lm_head=false``."""

    def __post_init__(self) -> None:
        if self.induction_rank and self.own_lm_head:
            raise ValueError("head.induction_rank adds to the base's projection; set head.own_lm_head=false")


class CopyingHead(MultiPositionHead):
    """A head that drafts from the base's last state, and can have an induction head.

    Codes of the induction head are added to the base's projection. ``levels``, ``hidden_at_positions`` and
    ``projection`` leave them out.
    """

    config: CopyingConfig
    projections: DraftLMHeads

    def __init__(self, config: CopyingConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self._static = StaticCalls(base.device) if base.uses_graphs else None
        if config.induction_rank:
            self.induction = InductionHead(base, config.induction_rank)
            self.induction_out = nn.Linear(config.induction_rank, len(self.d2t), bias=False, device=base.device)
            with torch.no_grad():
                self.induction_out.weight.copy_(self.induction.start_projection(self.d2t, self.target_lm_head.scale))

    def shared_projection(self) -> DraftLMHeads:
        """Return the base's projection, frozen, for all positions."""
        config = self.config
        return DraftLMHeads(self.target_lm_head, 0, config.inference_dtype(self.base), scaled=not config.induction_rank)

    @abstractmethod
    def levels(self, state: HeadState, last_token: Tensor, draft_config: DraftConfig) -> DraftPass:
        """Start drafting without the induction head; arguments as in ``StepwiseDrafter.start``."""

    @abstractmethod
    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        """Return ``position_hidden`` without the induction head, [K, n, width]."""

    def projection(self, k: int) -> LMHead:
        """Return the projection of position k (0-based) without the induction head."""
        return self.projections.head(k)

    def invalidate(self) -> None:
        super().invalidate()
        if self._static is not None:
            self._static.clear()

    def output_head(self, k: int) -> LMHead:
        head = self.projection(k)
        return head if self.induction is None else replace(head, low_rank=self.induction_out.weight)

    def position_hidden(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        hidden = self.hidden_at_positions(batch, base_hidden, draft_targets)
        if self.induction is None:
            return hidden
        copied = self.induction.at_targets(batch, base_hidden.final, draft_targets)
        return torch.cat([hidden, copied.to(hidden.dtype)], -1)

    @torch.inference_mode()
    def start(self, state: HeadState, last_token: Tensor, draft_config: DraftConfig) -> DraftPass:
        draft_pass = self.levels(state, last_token, draft_config)
        if state.copied is None:
            return draft_pass
        head = self.inference()
        hidden = state.hidden[:, None].to(head.dtype)
        return InductionPass(draft_pass, InductionReader(head.induction, state.copied, hidden), head)


class InductionPass:
    """Adds the induction head's logits to every level of a pass that returns unscaled products."""

    def __init__(self, draft_pass: DraftPass, reader: InductionReader, head: CopyingHead) -> None:
        """Wrap ``draft_pass`` of the inference copy ``head``."""
        self._draft_pass, self._reader, self._head = draft_pass, reader, head

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return draft logits [B, F, W]; see ``DraftPass.step``."""
        product = self._draft_pass.step(tokens, parents)
        copied = self._reader.read(tokens, parents)
        return self._head.target_lm_head.scale_and_cap(product + self._head.induction_out(copied))


States = tuple[Tensor, ...]
"""State that a node passes on to its children: tensors [..., width], [B, F, width] while drafting."""


class LevelDraftPass:
    """A draft pass in which all nodes of a level share one distribution."""

    def __init__(self, logits: Tensor) -> None:
        """Take the logits of all levels, [B, K, W]."""
        self._levels: Iterator[Tensor] = iter(logits.split(1, 1))  # type: ignore[no-untyped-call]

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return the level's draft logits, [B, 1, W]; see ``DraftPass.step``."""
        return next(self._levels)


class RecurrentHead(CopyingHead):
    """A head defined by its first state and by how one more token changes a state."""

    @abstractmethod
    def first_states(self, hidden: Tensor) -> States:
        """Return the state before any token is read, from the base's ``h`` [..., D]."""

    @abstractmethod
    def read_token(self, k: int, states: States, tokens: Tensor) -> tuple[Tensor, States]:
        """Return draft logits [B, F, W] of position k (0-based) and the states after it, for inference.

        Args:
            k: draft position, from 0.
            states: states of the nodes' parents, [B, F, ...].
            tokens: [B, F] int64 target ids; the root for k = 0, then drafts.
        """

    def levels(self, state: HeadState, last_token: Tensor, draft_config: DraftConfig) -> DraftPass:
        return RecurrentDraftPass(self, self.first_states(self.read_state(state)[:, None].to(self.dtype)))

    def read_state(self, state: HeadState) -> Tensor:
        """Return the input [B, D] of ``first_states``."""
        return state.hidden

    def advance(self, k: int, tokens: Tensor, parents: Tensor, *states: Tensor) -> States:
        """Return the logits and states of position k (0-based), in one CUDA graph if the base uses graphs.

        Args:
            k: draft position.
            tokens: [B, F] int64 target ids.
            parents: [B, F] int64 index of each node's parent on the level above.
            *states: states of the level above, [B, P, ...].
        """

        def call(tokens: Tensor, parents: Tensor, *states: Tensor) -> States:
            of_parents = tuple(s.gather(1, parents[..., None].expand(-1, -1, s.shape[-1])) for s in states)
            logits, below = self.read_token(k, of_parents, tokens)
            return (logits, *below)

        return (call if self._static is None else partial(self._static, k, call))(tokens, parents, *states)


class RecurrentDraftPass:
    """A draft pass that stores the states of the level read last."""

    def __init__(self, head: RecurrentHead, states: States) -> None:
        """Start from ``states`` [B, 1, ...] before the root is read."""
        self._head, self._states = head, states
        self._position = 0

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return draft logits [B, F, W]; see ``DraftPass.step``."""
        logits, *states = self._head.advance(self._position, tokens, parents, *self._states)
        self._states = tuple(states)
        self._position += 1
        return logits
