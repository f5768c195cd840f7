"""Heads with one prediction for every draft position: they read their own drafts like any other token.

Position 1 predicts ``x_{t+2}`` after reading ``x_{t+1}``, and position k does the same k - 1 tokens later. Given the
true tokens before a target, its prediction is the same at every position, so a token is a single training target.

Shape legend: B batch, T time, K draft positions, D width.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from drafthead.data.batch import HiddenStates, LossOutput, TrainBatch
from drafthead.data.utils.settings import settings
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lm_head import LMHead
from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig
from drafthead.models.heads.parts.lm_heads import DraftLMHeads
from drafthead.models.heads.parts.losses import LossConfig, heads_loss, loss_output
from drafthead.models.heads.parts.targets import DraftTargets, rank_of


@settings(kw_only=True)
class AutoregressiveConfig(DraftHeadConfig):
    """Settings of an :class:`AutoregressiveHead`."""

    @property
    def trained_positions(self) -> int:
        return 1  # all positions share one prediction


class AutoregressiveHead(DraftHead):
    """A head that is a causal LM, with the base's frozen output head."""

    @abstractmethod
    def hidden_states(self, batch: TrainBatch, base_hidden: HiddenStates) -> Tensor:
        """Return the projection's input after every token, [B, T, D]; a token sees its own document only."""

    def __init__(self, config: AutoregressiveConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self.projection = DraftLMHeads(self.target_lm_head, 0, config.inference_dtype(base))

    def output_head(self, k: int) -> LMHead:
        return self.target_lm_head

    def loss(self, batch: TrainBatch, base_hidden: HiddenStates, config: LossConfig) -> LossOutput:
        draft_targets = DraftTargets.of(batch, 1)
        targets = draft_targets.loss_targets(batch, base_hidden, self.t2d, self.target_lm_head)
        hidden = self.hidden_states(batch, base_hidden).flatten(0, 1)[draft_targets.target_idx - 1]
        loss_sum, stats = heads_loss(hidden[None], [self.output_head(0)], targets, config)
        return loss_output(loss_sum, stats.expand(self.depth, -1), training=torch.is_grad_enabled())

    @torch.no_grad()
    def candidate_ranks(self, batch: TrainBatch, base_hidden: HiddenStates, top: int) -> Tensor:
        """Return the ranks of ``DraftHead.candidate_ranks``, given the true tokens before ``x_{t+1+k}``.

        This is exact: a node at depth k can only be accepted below a path of true tokens.
        """
        hidden = self.hidden_states(batch, base_hidden)
        next_ids, _ = batch.draft_targets(0)
        rank = rank_of(hidden.flatten(0, 1), self.output_head(0), self.t2d[next_ids].flatten(), top).view_as(next_ids)
        ranks = torch.full((*next_ids.shape, self.depth), -1, dtype=torch.int64, device=rank.device)
        for k in range(1, self.depth + 1):
            _, valid = batch.draft_targets(k)
            shifted = torch.full_like(rank, -1)
            shifted[:, :-k] = rank[:, k:]  # the token after t + k is x_{t+1+k}
            ranks[..., k - 1] = torch.where(valid, shifted, -1)
        return ranks
