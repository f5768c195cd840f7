"""Losses of draft heads, chunked so that a [tokens, vocabulary] matrix never exists whole.

Shape legend: K draft positions, n target positions, D width, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafthead.models.base import OutputHead

CHUNK_BYTES = 64 * 2**20
"""Size of one chunk's float32 logits. A chunk holds about four matrices of that size at its peak."""

STATS = ("accept", "overlap", "ce", "count")
"""Per draft position: top-1 hits, sum of min(p, q), sum of cross-entropies (in-vocabulary targets), targets."""


@dataclass(kw_only=True)
class LossConfig:
    """What a phase minimises: ``sum_k decay^k (ce * CE_k + kl * KL_k)``, over trained tokens."""

    ce: float = 1.0
    """Weight of the hard cross-entropy against the corpus token. Targets outside the draft vocabulary add nothing."""
    kl: float = 0.0
    """Weight of KL(p || q) to the base's distribution, renormalised on the draft vocabulary."""
    decay: float = 0.8
    """Weight of draft position k is ``decay ** k`` (Medusa, 2401.10774)."""

    def __post_init__(self) -> None:
        for key in ("ce", "kl"):
            if getattr(self, key) < 0:
                raise ValueError(f"loss.{key} must be >= 0, got {getattr(self, key)}")
        if self.ce == self.kl == 0:
            raise ValueError("loss.ce and loss.kl are both 0: nothing would be trained; set one of them")
        if not 0 < self.decay <= 1:
            raise ValueError(f"loss.decay must be in (0, 1], got {self.decay}")


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What the K heads should predict at n target positions."""

    ids: Tensor
    """[n] int64 index in the draft vocabulary, -1 when the token is outside it."""
    valid: Tensor
    """[K, n] bool: head k is trained on (and measured at) this target."""
    teacher_hidden: Tensor | None
    """[n, D] the base's ``h`` one position before each target; None when only ``ce`` is wanted."""
    teacher: OutputHead | None
    """The base's head over the draft vocabulary."""


def position_loss(
    logits: Tensor, ids: Tensor, valid: Tensor, teacher_probs: Tensor | None, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Loss of one draft position, the plain form.

    Args:
        logits: [n, W] float32.
        ids: [n] target indices, -1 outside the draft vocabulary.
        valid: [n] bool.
        teacher_probs: [n, W] float32, rows sum to 1; needed when ``config.kl`` > 0.

    Returns:
        The summed loss (scalar, without the position's ``decay``) and the ``STATS`` ([4] float32).
    """
    known = valid & (ids >= 0)
    log_q = F.log_softmax(logits, -1)
    ce = -log_q.gather(1, ids.clamp(min=0)[:, None])[:, 0] * known
    loss = config.ce * ce.sum()
    overlap = logits.new_full((), torch.nan)
    if teacher_probs is not None:
        if config.kl:
            kl = torch.xlogy(teacher_probs, teacher_probs).sum(-1) - (teacher_probs * log_q).sum(-1)
            loss = loss + config.kl * (kl * valid).sum()
        overlap = (torch.minimum(log_q.detach().exp(), teacher_probs).sum(-1) * valid).sum()
    hits = ((logits.argmax(-1) == ids) & known).sum()
    return loss, torch.stack([hits.float(), overlap, ce.detach().sum(), valid.sum().float()])


def chunk_rows(vocabulary: int) -> int:
    """Target positions per chunk for a draft vocabulary of that size."""
    return max(16, CHUNK_BYTES // (4 * vocabulary))


def heads_loss(
    hidden: Tensor, heads: Sequence[OutputHead], targets: Targets, config: LossConfig, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """``sum_k decay^k loss_k`` over n target positions, in chunks, with gradients for ``hidden`` and the weights.

    The gradients are computed in the forward pass, chunk by chunk, so nothing of size [n, W] is kept: memory is
    flat in n * W. The value and the gradients equal the plain form's (``tests/models/test_losses.py``).

    Args:
        hidden: [K, n, D] what each head's projection reads, aligned with the targets.
        heads: K projections (the same object K times when shared).
        targets: what to predict.
        config: loss weights.
        rows: positions per chunk; by default such that a chunk's logits take ``CHUNK_BYTES``.

    Returns:
        Scalar float32 loss sum, and the ``STATS`` of each position, [K, 4] float32.
    """
    rows = rows or chunk_rows(heads[0].weight.shape[0])
    weights = [h.weight for h in heads]
    result: tuple[Tensor, Tensor] = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, heads, targets, config, rows, *weights
    )
    return result


class _ChunkedLoss(torch.autograd.Function):
    """Forward computes value and gradients; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        heads: Sequence[OutputHead],
        targets: Targets,
        config: LossConfig,
        rows: int,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        depth, n, _ = hidden.shape
        grad_hidden = torch.zeros_like(hidden) if hidden.requires_grad else None
        grad_weights = [torch.zeros_like(w) if w.requires_grad else None for w in weights]
        total = hidden.new_zeros((), dtype=torch.float32)
        stats = hidden.new_zeros((depth, len(STATS)), dtype=torch.float32)
        for start in range(0, n, rows):
            part = slice(start, min(n, start + rows))
            teacher_probs = _teacher_probs(targets, part)
            for k in range(depth):
                h = hidden[k, part].detach().requires_grad_(grad_hidden is not None)
                w = weights[k].detach().requires_grad_(grad_weights[k] is not None)
                with torch.enable_grad():
                    logits = heads[k].finish(h.to(w.dtype) @ w.t()).float()
                    loss, counted = position_loss(
                        logits, targets.ids[part], targets.valid[k, part], teacher_probs, config
                    )
                    loss = loss * config.decay ** (k + 1)
                wanted = [t for t in (h, w) if t.requires_grad]
                if wanted:
                    grads = list(torch.autograd.grad(loss, wanted))
                    if grad_hidden is not None:
                        grad_hidden[k, part] = grads.pop(0)
                    if (grad_weight := grad_weights[k]) is not None:
                        grad_weight += grads.pop(0)
                total += loss.detach()
                stats[k] += counted
        ctx.grads = grad_hidden, grad_weights
        ctx.mark_non_differentiable(stats)
        return total, stats

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> Any:
        grad_hidden, grad_weights = ctx.grads
        scaled = [None if g is None else g * grad_total for g in (grad_hidden, *grad_weights)]
        return scaled[0], None, None, None, None, *scaled[1:]


def _teacher_probs(targets: Targets, part: slice) -> Tensor | None:
    if targets.teacher is None or targets.teacher_hidden is None:
        return None
    hidden = targets.teacher_hidden[part].to(targets.teacher.weight.dtype)
    return targets.teacher.logits(hidden).float().softmax(-1)
