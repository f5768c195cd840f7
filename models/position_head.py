"""Heads with a prediction of its own for every draft position: Medusa, Hydra, MLP speculators, EAGLE-3.

Shape legend: B batch, T time, K draft positions, n picked targets, D width.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafthead.data.contracts import Features, LossOutput, TrainBatch
from drafthead.models.base import BaseModel
from drafthead.models.draft_head import DraftHead, DraftHeadConfig
from drafthead.models.drafter import DraftState, last_of
from drafthead.models.graphs import StaticCalls
from drafthead.models.losses import LossConfig, heads_loss, loss_output
from drafthead.models.output_head import OutputHead
from drafthead.models.reading import Reading


class PositionHead(DraftHead):
    """A head that says what each position's projection reads; loss and ranks follow."""

    @abstractmethod
    def position_hidden(self, batch: TrainBatch, features: Features, reading: Reading) -> Tensor:
        """[K, n, width] what the projection of every position reads for every target of ``reading``.

        Where ``reading.valid`` is false, any finite values.
        """

    @abstractmethod
    def output_head(self, k: int) -> OutputHead:
        """The projection of draft position k (0-based)."""

    def loss(self, batch: TrainBatch, features: Features, config: LossConfig) -> LossOutput:
        weights = config.weights_of(self.config.trained_positions)
        depth = len(weights) if torch.is_grad_enabled() else self.depth  # deeper ones are only measured
        config = replace(config, depth_weights=weights + [0.0] * (depth - len(weights)))
        reading = Reading.of(batch, depth)
        targets = reading.targets(batch, features, self.t2d, self.teacher)
        hidden = self.position_hidden(batch, features, reading)
        loss_sum, stats = heads_loss(hidden, [self.output_head(k) for k in range(depth)], targets, config)
        return loss_output(loss_sum, stats, training=torch.is_grad_enabled())

    @torch.no_grad()
    def candidate_ranks(self, batch: TrainBatch, features: Features, top: int) -> Tensor:
        reading = Reading.of(batch, self.depth)
        hidden = self.position_hidden(batch, features, reading)
        heads = [self.output_head(k) for k in range(self.depth)]
        wanted = self.t2d[batch.input_ids.flatten()[reading.picked]]
        return reading.ranks(wanted, hidden, heads, batch.input_ids.shape, top)


@dataclass
class HeadState(DraftState):
    """What a :class:`LastStateHead` remembers of its rows between steps; subclasses add their own caches."""

    hidden: Tensor
    """[B, D] the base's ``h`` at the last position it has read; NaN before there is one."""


class LastStateHead(PositionHead):
    """A head that drafts from the base's last ``h``, by calls of fixed shapes where the base has graphs."""

    def __init__(self, config: DraftHeadConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self._static = StaticCalls(base.device) if base.uses_graphs else None

    @property
    def dtype(self) -> torch.dtype:
        """Of the head's weights."""
        return next(self.parameters()).dtype

    def forget_copies(self) -> None:
        if self._static is not None:
            self._static.clear()

    def init_state(self, batch: int) -> HeadState:
        return HeadState(hidden=self.teacher.weight.new_full((batch, self.teacher.weight.shape[1]), torch.nan))

    def observe(
        self, state: DraftState, tokens: Tensor, features: Features | None, counts: Tensor | None = None
    ) -> HeadState:
        assert features is not None
        return HeadState(hidden=last_of(features.final, counts))
