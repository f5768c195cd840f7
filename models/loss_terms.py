"""The terms of a draft head's loss on one chunk of targets: their weights, values and analytic gradients.

Shape legend: c target positions of a chunk, D width, W draft vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.models.output_head import OutputHead

SHARPNESS = 3.0
"""eta of the adaptive mixture, the best of the LK paper."""
FLOOR = 1e-30
"""Smallest alpha that is divided by; in float32 a sure teacher and a sure head that disagree have an alpha of 0."""

STATS = ("accept", "ce", "count", "overlap", "known")
"""Sums per draft position: top-1 hits, cross-entropies of in-vocabulary targets, targets, min(p, q) (nan in training,
where it would cost two passes over the logits for a metric), and in-vocabulary targets."""

TERMS = ("ce", "kl", "tv", "lk", "lk_adaptive")


@dataclass(kw_only=True)
class TermWeights:
    """Weights of the terms of a loss.

    q is the head's law and p the base's, both on the draft vocabulary, and ``alpha = sum_v min(p_v, q_v)`` at each
    target. p is renormalised on that vocabulary, because the base's mass outside it would cost its whole projection.
    So alpha is the acceptance rate of speculative sampling given that the base's token can be drafted. The true rate,
    with p as it is, is at most that; q = p maximises both.
    """

    ce: float = 1.0
    """Weight of the hard cross-entropy against the corpus token. Targets outside the draft vocabulary add nothing."""
    kl: float = 0.0
    """Weight of KL(p || q). This and the terms below train on all targets, also those outside the draft vocabulary."""
    tv: float = 0.0
    """Weight of the total variation 1 - alpha. Its gradient vanishes where alpha is small: not for a fresh head."""
    lk: float = 0.0
    """Weight of -log(alpha) (LK, 2602.23881): the gradient of ``tv`` divided by alpha, which does not vanish."""
    lk_adaptive: float = 0.0
    """Weight of s KL + (1 - s) TV with s = exp(-3 alpha) held constant (2602.23881). s is that of each target; the
    authors' code takes the batch's mean alpha."""

    def __post_init__(self) -> None:
        for key in TERMS:
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"loss.{key} must be >= 0, got {getattr(self, key)}")
        if not any(getattr(self, key) for key in TERMS):
            raise ValueError(f"loss.{', loss.'.join(TERMS)} are all 0: nothing would be trained; set one of them")

    @property
    def reads_alpha(self) -> bool:
        """Whether a term needs ``alpha``."""
        return self.tv > 0 or self.lk > 0 or self.lk_adaptive > 0

    @property
    def needs_teacher(self) -> bool:
        """Whether a term compares with the base's distribution."""
        return self.kl > 0 or self.reads_alpha


@dataclass(frozen=True)
class TeacherLaw:
    """The base's distribution at a chunk of targets, on the draft vocabulary. Shared by all heads."""

    probs: Tensor
    """[c, W] float32 or wider, rows sum to 1."""
    negative_entropy: Tensor
    """[c] sum of p log p."""

    @staticmethod
    def of(head: OutputHead, hidden: Tensor) -> "TeacherLaw":
        """The law of ``head`` (rows of the draft vocabulary) after ``hidden``, [c, D]."""
        log_probs = _wide(head.logits(hidden.to(head.weight.dtype))).log_softmax(-1)
        probs = log_probs.exp()
        return TeacherLaw(probs, _row_dot(probs, log_probs))


class LossChunk:
    """One head's logits on a chunk: loss and analytic gradient in few passes, the last ones in place.

    With q = softmax(logits), ``CE = lse - logit[target]`` and ``KL = sum p log p - sum p logit + lse`` have the
    gradients ``q - onehot`` and ``q - p``. alpha grows with the logits of the ids that q gives less than p: with
    ``short = q [q < p]``, alpha has the gradient ``short - q sum(short)``. All are linear in q, p, short and onehot,
    so a row needs one factor for each. autograd would make about twice as many [c, W] matrices.
    """

    def __init__(self, head: OutputHead, product: Tensor, ids: Tensor, valid: Tensor) -> None:
        self.head = head
        self.logits = _wide(head.finish(product))
        self.valid = valid.to(self.logits.dtype)
        self.ids = ids.clamp(min=0)[:, None]
        self.known = (valid & (ids >= 0)).to(self.logits.dtype)
        self.true = self.logits.gather(1, self.ids)[:, 0]
        self.largest = self.logits.amax(-1)
        self.exponentials = (self.logits - self.largest[:, None]).exp_()
        self.sums = self.exponentials.sum(-1)
        self.lse = self.largest + self.sums.log()

    def stats(self, teacher: "TeacherLaw | None") -> Tensor:
        """The ``STATS`` of the chunk, [len(STATS)] float32."""
        hits = (self.true >= self.largest) * self.known
        overlap = self.logits.new_full((), torch.nan)
        if teacher is not None:
            q = self.exponentials / self.sums[:, None]
            overlap = (torch.minimum(q, teacher.probs).sum(-1) * self.valid).sum()
        ce = (self.lse - self.true) * self.known
        return torch.stack([hits.sum(), ce.sum(), self.valid.sum(), overlap, self.known.sum()])

    def loss_and_gradient(self, teacher: "TeacherLaw | None", config: TermWeights) -> tuple[Tensor, Tensor]:
        """Summed loss without the position's weight, and its gradient by the product ([c, W], the logits' dtype)."""
        on_target = config.ce * self.known
        loss = (on_target * (self.lse - self.true)).sum()
        on_q, on_p = on_target, config.kl * self.valid
        short: Tensor | None = None
        if config.reads_alpha and teacher is not None:
            short, alpha = self._short_and_alpha(teacher)
            share = torch.exp(-SHARPNESS * alpha)
            variation = self.valid * (config.tv + config.lk_adaptive * (1 - share))
            log_alpha = alpha.clamp(min=FLOOR).log()
            loss = loss + (variation * (1 - alpha) - config.lk * self.valid * log_alpha).sum()
            on_p = on_p + config.lk_adaptive * self.valid * share
            on_short = variation + config.lk * self.valid / alpha.clamp(min=FLOOR)
            on_q = on_q + on_short * short.sum(-1)
            short.mul_(on_short[:, None])
        law = teacher if config.kl > 0 or config.lk_adaptive > 0 else None
        if law is not None:
            kl = law.negative_entropy - _row_dot(law.probs, self.logits) + self.lse
            loss = loss + (on_p * kl).sum()
            on_q = on_q + on_p
        gradient = self.exponentials.mul_((on_q / self.sums)[:, None])
        if law is not None:
            gradient.addcmul_(law.probs, on_p[:, None], value=-1)
        if short is not None:
            gradient.sub_(short)
        gradient.scatter_add_(1, self.ids, -on_target[:, None])
        return loss, self._through_finish(gradient)

    def _short_and_alpha(self, teacher: "TeacherLaw") -> tuple[Tensor, Tensor]:
        """``q [q < p]`` ([c, W]) and alpha ([c]). Leaves q in place of the exponentials, to keep one matrix fewer."""
        q = self.exponentials.div_(self.sums[:, None])
        self.sums = torch.ones_like(self.sums)
        smaller = torch.minimum(q, teacher.probs)
        alpha = smaller.sum(-1)
        return smaller.mul_(q < teacher.probs), alpha

    def _through_finish(self, gradient: Tensor) -> Tensor:
        """Chain rule through scale and soft-cap."""
        if self.head.softcap is not None:
            gradient = gradient * (1 - (self.logits / self.head.softcap) ** 2)
        return gradient * self.head.scale if self.head.scale != 1.0 else gradient


def _wide(values: Tensor) -> Tensor:
    """The values in float32, or in float64 when they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """[c] row-wise dot products, without a [c, W] product matrix."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]
