"""Heads that predict every draft position from one ``h_t``: Medusa, Hydra, MLP speculators.

Shape legend: B batch, T time, K draft positions, n picked targets, D width.
"""

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from drafthead.data.contracts import Features, LossOutput, TrainBatch
from drafthead.models.draft_head import DraftHead
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
