"""Training targets of a head and the anchors that they are predicted from; shared by all heads.

An anchor is a position t of the text from whose ``h_t`` a head drafts. The target of draft position k at that anchor
is ``x_{t+1+k}``, with k from 1. Heads compute their predictions anchor by anchor. Losses need the predictions in the
order of targets, because the base's distribution at a target is computed once for all draft positions. ``DraftTargets``
translates.

Shape legend: B batch, T time, S anchors of a row, K draft positions, n targets, D width, V target vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.data.batch import NO_DOCUMENT, HiddenStates, TrainBatch
from drafthead.models.base.lm_head import LMHead
from drafthead.models.heads.parts.losses import Labels, chunk_rows


@dataclass(frozen=True, kw_only=True)
class DraftTargets:
    """Targets of a batch, with the anchor from which each draft position predicts them. Indices are flat: row * T + t.

    Example: the row is ``a b c d`` and K = 2. The target ``c`` is predicted by position 1 from ``a`` (t = 0). The
    target ``d`` is predicted by position 1 from ``b`` (t = 1) and by position 2 from ``a``.
    """

    target_idx: Tensor
    """[n] int64 flat index of each target token."""
    valid: Tensor
    """[K, n] bool: entry [k - 1, i] is True if draft position k (from 1) is trained on target i."""
    anchor_idx: Tensor
    """[K, n] int64 flat index of the anchor of each prediction. Where ``valid`` is false, it is an arbitrary index
    within the batch."""
    weights: Tensor | None = None
    """[K, n] float weight of each prediction; None: all 1."""
    host: "DraftTargets | None" = None
    """The same targets in host memory, if this object is a copy on a device. Anchors are listed on the host; listing
    them on the device would make the host wait for it."""

    @classmethod
    def of(cls, batch: TrainBatch, depth: int, one_prediction: bool = False) -> "DraftTargets":
        """Return as targets all tokens of the batch that at least one of ``depth`` draft positions is trained on.

        If the batch has weights, predictions with weight 0 are left out, and so are draft positions that it has no
        weights for. ``one_prediction``: all draft positions predict a token by equal logits, so ``depth`` is 1, and the
        weight of a token is its largest one at any draft position.
        """
        if batch.host is not None:
            return cls.of(batch.host, depth, one_prediction).to(batch.input_ids.device)
        valid = batch.loss_mask.new_zeros((depth, *batch.input_ids.shape))
        for k in range(1, depth + 1):
            _, at_anchor = batch.next_tokens(k)
            valid[k - 1, :, 1 + k :] = at_anchor[:, : -(1 + k)]
        flat_valid = valid.flatten(1)
        weights = None
        if batch.weights is not None:
            weights = batch.weights.flatten(0, 1).t()
            weights = weights.amax(0, keepdim=True) if one_prediction else weights[:depth]
            weights = torch.nn.functional.pad(weights, (0, 0, 0, depth - len(weights)))
            flat_valid = flat_valid & (weights > 0)
        target_idx = flat_valid.any(0).nonzero()[:, 0]
        offsets = torch.arange(2, depth + 2, device=target_idx.device)
        return cls(
            target_idx=target_idx,
            valid=flat_valid[:, target_idx],
            anchor_idx=(target_idx[None] - offsets[:, None]).clamp_(min=0),
            weights=None if weights is None else weights[:, target_idx],
        )

    def subset(self, count: int) -> "DraftTargets":
        """Return the targets of at most ``count`` anchors, drawn at random; predictions from others become invalid."""
        if self.host is not None:
            return self.host.subset(count).to(self.target_idx.device)
        anchors = self.anchors
        if len(anchors) <= count:
            return self
        drawn = anchors[torch.randperm(len(anchors), device=anchors.device)[:count]]
        valid = self.valid & torch.isin(self.anchor_idx, drawn)
        used = valid.any(0)
        return DraftTargets(
            target_idx=self.target_idx[used],
            valid=valid[:, used],
            anchor_idx=self.anchor_idx[:, used],
            weights=None if self.weights is None else self.weights[:, used],
        )

    def to(self, device: torch.device) -> "DraftTargets":
        """Return a copy on ``device``, without waiting for the transfer; return self if already there."""
        if device == self.target_idx.device:
            return self
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return DraftTargets(**moved, host=self)

    @property
    def anchors(self) -> Tensor:
        """Flat indices of the anchors of all valid predictions, ascending, each once."""
        host = self.host or self
        anchors: Tensor = torch.unique(host.anchor_idx[host.valid])
        return anchors.to(self.target_idx.device, non_blocking=True)

    def before_targets(self, values: Tensor) -> Tensor:
        """Return ``values`` [B, T, D] at the position before each target, equal for all K positions: [K, n, D]."""
        return values.flatten(0, 1)[self.target_idx - 1].expand(len(self.valid), -1, -1)

    def to_anchors(self, values: Tensor, k: int, shape: tuple[int, ...]) -> Tensor:
        """Move ``values`` [n, D] of draft position k (0-based) from its targets to their anchors: [B, T, D].

        Other positions get zeros. ``shape`` is (B, T).
        """
        flat = values.new_zeros(shape[0] * shape[1], values.shape[-1])
        return flat.index_add(0, self.anchor_idx[k], torch.where(self.valid[k, :, None], values, 0.0)).view(*shape, -1)

    def labels(self, batch: TrainBatch, base_hidden: HiddenStates, t2d: Tensor, target_lm_head: LMHead) -> Labels:
        """Return the labels for the loss, with the base's final state at the position before each target.

        ``t2d`` [V] maps the base's ids to draft ids, -1 for ids outside the draft vocabulary.
        """
        return Labels(
            ids=t2d[batch.input_ids.flatten()[self.target_idx]],
            valid=self.valid,
            weights=self.weights,
            anchor_idx=self.anchor_idx,
            positions=batch.input_ids.numel(),
            target_hidden=base_hidden.final.flatten(0, 1)[self.target_idx - 1],
            target_lm_head=target_lm_head,
        )


def rank_of(hidden: Tensor, head: LMHead, target_ids: Tensor, top: int) -> Tensor:
    """Return the rank of each target: the number of likelier draft tokens, at most ``top``, [n] int64.

    Args:
        hidden: [n, D] inputs of ``head``.
        head: the projection to the draft vocabulary.
        target_ids: [n] int64 draft ids of the targets; -1 (outside the draft vocabulary) has the rank ``top``.
        top: largest rank; tokens of higher rank get it, too.
    """
    ranks = [target_ids.new_zeros(0)]
    size = chunk_rows(head.weight.shape[0], hidden.device.type)
    for start in range(0, len(target_ids), size):
        rows = slice(start, start + size)
        logits = head.logits(hidden[rows].to(head.weight.dtype)).float()
        true = logits.gather(1, target_ids[rows].clamp(min=0)[:, None])
        ranks.append((logits > true).sum(-1).clamp(max=top))
    return torch.where(target_ids >= 0, torch.cat(ranks), top)


def has_next(documents: Tensor) -> Tensor:
    """Return a mask [B, T] bool: True for tokens that are followed by another token of the same document."""
    followed = torch.zeros_like(documents, dtype=torch.bool)
    followed[:, :-1] = (documents[:, :-1] == documents[:, 1:]) & (documents[:, :-1] != NO_DOCUMENT)
    return followed


def anchors_of(draft_targets: DraftTargets, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the anchors of each row of ``ids`` [B, T], and the index of each batch position among the anchors.

    Rows with fewer than S anchors are padded with other positions, whose results are not used. Example: of two rows of
    four tokens, the first has the anchors 0 and 2, and the second has the anchor 1. The anchors are [[0, 2], [1, 0]],
    flattened 0 2 1 0. Flat position 5 (row 1, t = 1) has the index 2 in the flattened anchors.

    Returns:
        [B, S] int64 positions of the anchors in their rows, and [B * T] int64 indices into the flattened anchors, which
        are arbitrary for positions that are not anchors.
    """
    rows, time = ids.shape
    host = draft_targets.host or draft_targets
    used = torch.zeros(rows * time, dtype=torch.bool, device=host.valid.device)
    used[host.anchor_idx[host.valid]] = True
    used = used.view(rows, time)
    most = int(used.sum(1).max())
    anchors = used.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    slots = torch.zeros_like(used, dtype=torch.int64)
    slots.scatter_(1, anchors, torch.arange(rows * most, device=used.device).view(rows, most))
    return anchors.to(ids.device, non_blocking=True), slots.flatten().to(ids.device, non_blocking=True)
