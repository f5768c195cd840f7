"""Which tokens a head is trained to predict, and from where: shared by all heads.

Losses want predictions aligned with what they predict, so that the base's distribution at a token is computed once for
all draft positions that predict it. Heads compute at the place they draft from. ``DraftTargets`` translates.

Shape legend: B batch, T time, K draft positions, n targets, D width, W draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.data.batch import NO_DOCUMENT, HiddenStates, TrainBatch
from drafthead.models.base.lm_head import LMHead
from drafthead.models.heads.parts.losses import Targets, chunk_rows


@dataclass(frozen=True, kw_only=True)
class DraftTargets:
    """The targets of a batch, and the flat (row * T + t) places that every draft position predicts them from."""

    target_idx: Tensor
    """[n] int64 flat place of each target ``x_{t+1+k}``."""
    valid: Tensor
    """[K, n] bool: position k is trained on this target."""
    source_idx: Tensor
    """[K, n] int64 flat place of ``t``, whose ``h_t`` position k starts from; anything in range where not valid."""
    weights: Tensor | None = None
    """[K, n] float: weight of each prediction; None: all 1."""

    @classmethod
    def of(cls, batch: TrainBatch, depth: int) -> "DraftTargets":
        """Every token of the batch that some of ``depth`` draft positions is trained to predict.

        With ``batch.weights`` only what has a weight. A head whose one prediction serves all positions (``depth`` 1)
        takes the largest of a token's weights; positions deeper than the weights have none.
        """
        valid = batch.loss_mask.new_zeros((depth, *batch.input_ids.shape))
        for k in range(1, depth + 1):
            _, at_source = batch.draft_targets(k)
            valid[k - 1, :, 1 + k :] = at_source[:, : -(1 + k)]
        flat_valid = valid.flatten(1)
        weights = None
        if batch.weights is not None:
            weights = batch.weights.flatten(0, 1).t()
            weights = weights.amax(0, keepdim=True) if depth == 1 else weights[:depth]
            weights = torch.nn.functional.pad(weights, (0, 0, 0, depth - len(weights)))
            flat_valid = flat_valid & (weights > 0)
        target_idx = flat_valid.any(0).nonzero()[:, 0]
        offsets = torch.arange(2, depth + 2, device=target_idx.device)
        source_idx = (target_idx[None] - offsets[:, None]).clamp_(min=0)
        return cls(
            target_idx=target_idx,
            valid=flat_valid[:, target_idx],
            source_idx=source_idx,
            weights=None if weights is None else weights[:, target_idx],
        )

    def subset(self, places: int) -> "DraftTargets":
        """What is predicted from at most ``places`` places, drawn at random."""
        used = torch.unique(self.source_idx[self.valid])
        if len(used) <= places:
            return self
        kept = used[torch.randperm(len(used), device=used.device)[:places]]
        valid = self.valid & torch.isin(self.source_idx, kept)
        some = valid.any(0)
        return DraftTargets(
            target_idx=self.target_idx[some],
            valid=valid[:, some],
            source_idx=self.source_idx[:, some],
            weights=None if self.weights is None else self.weights[:, some],
        )

    def at_sources(self, values: Tensor) -> Tensor:
        """Values [B, T, D] where each position starts: [K, n, D].

        Zero where a position has no valid source: a hidden state there may be another document's, or NaN where none
        was kept, and zero carries neither value nor gradient.
        """
        return torch.where(self.valid[..., None], values.flatten(0, 1)[self.source_idx], 0.0)

    def tokens(self, input_ids: Tensor, ahead: int) -> Tensor:
        """[K, n] int64: ``x_{t+ahead}`` as seen from each position's source t. Any token where not valid."""
        flat = input_ids.flatten()
        return flat[(self.source_idx + ahead).clamp(max=len(flat) - 1)]

    def loss_targets(
        self, batch: TrainBatch, base_hidden: HiddenStates, t2d: Tensor, target_lm_head: LMHead
    ) -> Targets:
        """What to predict, with the base's hidden states before it."""
        return Targets(
            ids=t2d[batch.input_ids.flatten()[self.target_idx]],
            valid=self.valid,
            weights=self.weights,
            source_idx=self.source_idx,
            target_hidden=base_hidden.final.flatten(0, 1)[self.target_idx - 1],
            target_lm_head=target_lm_head,
        )


def rank_of(hidden: Tensor, head: LMHead, wanted: Tensor, top: int) -> Tensor:
    """[n] int64: how many candidates are likelier than the wanted draft id, at most ``top``; ``top`` where it is -1."""
    found = [wanted.new_zeros(0)]
    size = chunk_rows(head.weight.shape[0], hidden.device.type)
    for start in range(0, len(wanted), size):
        part = slice(start, start + size)
        logits = head.logits(hidden[part].to(head.weight.dtype)).float()
        true = logits.gather(1, wanted[part].clamp(min=0)[:, None])
        found.append((logits > true).sum(-1).clamp(max=top))
    return torch.where(wanted >= 0, torch.cat(found), top)


def has_next(documents: Tensor) -> Tensor:
    """[B, T] bool: another token of the same document follows."""
    found = torch.zeros_like(documents, dtype=torch.bool)
    found[:, :-1] = (documents[:, :-1] == documents[:, 1:]) & (documents[:, :-1] != NO_DOCUMENT)
    return found


def drafting_places(draft_targets: DraftTargets, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where any position drafts from: [B, S] places in the rows, and for every flat place its flat place in there."""
    rows, time = ids.shape
    used = torch.zeros(rows * time, dtype=torch.bool, device=ids.device)
    used[draft_targets.source_idx[draft_targets.valid]] = True
    used = used.view(rows, time)
    most = int(used.sum(1).max())
    places = used.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    slots = torch.zeros_like(used, dtype=torch.int64)
    slots.scatter_(1, places, torch.arange(rows * most, device=ids.device).view(rows, most))
    return places, slots.flatten()
