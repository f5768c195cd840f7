"""Training targets of a head and the anchors that they are predicted from; shared by all heads.

An anchor is a position t of the context from whose ``h_t`` a head drafts. The target of draft position k (from 1) at
that anchor is ``x_{t+1+k}``. Heads compute anchor by anchor; the loss goes through the targets, because the base's
distribution at a target is computed once for all draft positions.

Shape legend: B batch, T time, N = B * T tokens, A anchors, K draft positions, n targets, D width, V target vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafthead.data.batch import NO_DOCUMENT, HiddenStates, TrainBatch
from drafthead.models.base.lm_head import LMHead
from drafthead.models.heads.parts.context_ids import BatchIds
from drafthead.models.heads.parts.losses import Labels, chunk_rows
from drafthead.models.kernels.packed import PackedMask


@dataclass(frozen=True, kw_only=True)
class DraftTargets:
    """The anchors and targets of a batch. Tokens have flat indices: row * T + t.

    Example: the row is ``a b c d`` and K = 2. The target ``c`` is predicted by position 1 from ``a`` (t = 0). The
    target ``d`` is predicted by position 1 from ``b`` (t = 1) and by position 2 from ``a``. The anchors are 0 and 1.
    """

    anchors: Tensor  # [A] int64 flat index of each anchor, ascending
    target_idx: Tensor  # [n] int64 flat index of each target, ascending
    valid: Tensor  # [K, n] bool: [k - 1, i] is True if draft position k (from 1) is trained on target i
    anchor_idx: Tensor  # [K, n] int64 index in ``anchors`` for each prediction; arbitrary where ``valid`` is false
    mask: PackedMask  # keys that each of the N tokens attends to
    seen: PackedMask  # keys that each anchor attends to
    weights: Tensor | None = None  # [K, n] float weight of each prediction; None: all 1

    @classmethod
    def of(
        cls, batch: TrainBatch, depth: int, device: torch.device | str | None = None, most: int | None = None
    ) -> "DraftTargets":
        """Return as targets all tokens of the batch that at least one of ``depth`` draft positions is trained on. The
        batch is in host memory, and the result on ``device`` (None: there, too). ``most`` limits the anchors, which are
        drawn at random."""
        device = batch.input_ids.device if device is None else torch.device(device)
        by_anchor = torch.stack([batch.next_tokens(k)[1] for k in range(1, depth + 1)]).flatten(1)
        used = by_anchor.any(0)
        anchors = used.nonzero()[:, 0]
        if most is not None and most < len(anchors):
            anchors = anchors[torch.randperm(len(anchors), device=anchors.device)[:most]].sort().values
            used = torch.zeros_like(used).index_fill_(0, anchors, True)
        valid = torch.stack([(valid_k & used).roll(2 + k) for k, valid_k in enumerate(by_anchor)])
        target_idx = valid.any(0).nonzero()[:, 0]
        number = (used.cumsum(0) - 1).clamp_(min=0)  # of each anchor
        offsets = torch.arange(2, depth + 2, device=target_idx.device)
        mask = PackedMask.of(batch.document_ids, device)
        indices = {
            "anchors": anchors,
            "target_idx": target_idx,
            "valid": valid[:, target_idx],
            "anchor_idx": number[(target_idx - offsets[:, None]).clamp_(min=0)],
        }
        moved = {name: index.to(device, non_blocking=True) for name, index in indices.items()}
        return cls(**moved, mask=mask, seen=mask.at(anchors.cpu()))

    def weighted(self, weights: Tensor, one_prediction: bool) -> "DraftTargets":
        """Return these targets with the ``weights`` [B, T, K] of a batch; predictions without a weight above 0 become
        invalid. ``one_prediction``: a token has equal logits at all draft positions, so its largest weight counts."""
        depth, weights = len(self.valid), weights.flatten(0, 1)[self.target_idx].t()
        weights = weights.amax(0, keepdim=True) if one_prediction else weights[:depth]
        weights = torch.nn.functional.pad(weights, (0, 0, 0, depth - len(weights)))
        return replace(self, weights=weights, valid=self.valid & (weights > 0))

    @property
    def last_read(self) -> Tensor:
        """[K, A] int64 flat index of the token before each draft: ``t + k`` for position k (from 1) of anchor t."""
        offsets = torch.arange(1, len(self.valid) + 1, device=self.anchors.device)
        return (self.anchors + offsets[:, None]).clamp_(max=self.mask.tokens - 1)

    def labels(
        self,
        batch: TrainBatch,
        base_hidden: HiddenStates,
        t2d: Tensor,
        target_lm_head: LMHead,
        seen: BatchIds | None = None,
    ) -> Labels:
        """Return the labels for the loss. ``t2d`` [V] maps the base's ids to draft ids, -1 for ids outside the draft
        vocabulary. ``seen`` gives these ids labels, too, where they occurred before the last position's anchor."""
        ids, document = t2d[batch.input_ids.flatten()[self.target_idx]], None
        if seen is not None:
            size, document = len(target_lm_head.weight) - len(seen.ids), seen.document[self.target_idx]
            ids = seen.draft_ids(t2d, size, self.target_idx, self.target_idx - 1 - len(self.valid))
        return Labels(
            ids=ids,
            document=document,
            absent=None if seen is None else seen.absent,
            valid=self.valid,
            weights=self.weights,
            anchor_idx=self.anchor_idx,
            target_hidden=base_hidden.final.flatten(0, 1)[self.target_idx - 1],
            target_lm_head=target_lm_head,
        )


def rank_of(hidden: Tensor, head: LMHead, target_ids: Tensor, top: int, unseen: Tensor | None = None) -> Tensor:
    """Return the rank of each target [n] int64: the number of likelier draft tokens, at most ``top``. ``hidden`` [n, D]
    are the inputs of ``head``. ``target_ids`` [n] int64 are draft ids; -1 (outside the vocabulary) gets ``top``. The
    last C draft tokens are left out where ``unseen`` [n, C] is true."""
    ranks = [target_ids.new_zeros(0)]
    size = chunk_rows(head.weight.shape[0], hidden.device.type)
    for start in range(0, len(target_ids), size):
        rows = slice(start, start + size)
        logits = head.logits(hidden[rows].to(head.weight.dtype)).float()
        if unseen is not None:
            logits[:, logits.shape[1] - unseen.shape[1] :].masked_fill_(unseen[rows], -torch.inf)
        true = logits.gather(1, target_ids[rows].clamp(min=0)[:, None])
        ranks.append((logits > true).sum(-1).clamp(max=top))
    return torch.where(target_ids >= 0, torch.cat(ranks), top)


def has_next(documents: Tensor) -> Tensor:
    """Return a mask [B, T] bool of the tokens that another token of the same document follows."""
    followed = torch.zeros_like(documents, dtype=torch.bool)
    followed[:, :-1] = (documents[:, :-1] == documents[:, 1:]) & (documents[:, :-1] != NO_DOCUMENT)
    return followed
