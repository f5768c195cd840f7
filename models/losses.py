"""Losses of draft heads, chunked so that a [tokens, vocabulary] matrix never exists whole.

Shape legend: K draft positions, n target positions, D width, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafthead.data.contracts import LossOutput
from drafthead.models.base import OutputHead

CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
"""Size of one chunk's float32 logits: within a CPU's last-level cache; large enough to fill a GPU. About three
matrices of that size are alive at the peak."""

STATS = ("accept", "ce", "count", "overlap", "known")
"""Sums per draft position: top-1 hits, cross-entropies of in-vocabulary targets, targets, min(p, q) (nan in training,
where it would cost two passes over the logits for a metric), and in-vocabulary targets."""


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


def chunk_rows(vocabulary: int, device: str) -> int:
    """Target positions per chunk for a draft vocabulary of that size."""
    return max(64, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // (4 * vocabulary))


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
        Scalar float32 loss sum, and the ``STATS`` of each position, [K, len(STATS)] float32.
    """
    rows = rows or chunk_rows(heads[0].weight.shape[0], hidden.device.type)
    weights = [h.weight if torch.is_grad_enabled() else h.weight.detach() for h in heads]
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
        training = grad_hidden is not None or any(g is not None for g in grad_weights)
        total = hidden.new_zeros((), dtype=torch.float32)
        stats = hidden.new_zeros((depth, len(STATS)), dtype=torch.float32)
        for start in range(0, n, rows):
            part = slice(start, min(n, start + rows))
            teacher = _Teacher.of(targets, part, needed=config.kl > 0 or not training)
            for k in range(depth):
                h = hidden[k, part].to(weights[k].dtype)
                chunk = _Chunk(heads[k], h @ weights[k].t(), targets.ids[part], targets.valid[k, part])
                stats[k] += chunk.stats(None if training else teacher)
                weight = config.decay ** (k + 1)
                loss, gradient = chunk.loss_and_gradient(teacher, config)
                total += weight * loss
                if training:
                    gradient = (weight * gradient).to(h.dtype)
                    if grad_hidden is not None:
                        grad_hidden[k, part] = (gradient @ weights[k]).to(grad_hidden.dtype)
                    if (grad_weight := grad_weights[k]) is not None:
                        grad_weight.addmm_(gradient.t(), h)
        ctx.grads = grad_hidden, grad_weights
        ctx.mark_non_differentiable(stats)
        return total, stats

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> Any:
        grad_hidden, grad_weights = ctx.grads
        scaled = [None if g is None else g.mul_(grad_total) for g in (grad_hidden, *grad_weights)]
        return scaled[0], None, None, None, None, *scaled[1:]


@dataclass(frozen=True)
class _Teacher:
    """The base's distribution at a chunk of targets, on the draft vocabulary. Shared by all heads."""

    probs: Tensor
    """[c, W] float32, rows sum to 1."""
    negative_entropy: Tensor
    """[c] sum of p log p."""

    @staticmethod
    def of(targets: Targets, part: slice, needed: bool) -> "_Teacher | None":
        if not needed or targets.teacher is None or targets.teacher_hidden is None:
            return None
        hidden = targets.teacher_hidden[part].to(targets.teacher.weight.dtype)
        log_probs = targets.teacher.logits(hidden).float().log_softmax(-1)
        probs = log_probs.exp()
        return _Teacher(probs, _row_dot(probs, log_probs))


class _Chunk:
    """One head's logits on a chunk: loss and analytic gradient in few passes, the logits overwritten by the last.

    With q = softmax(logits), CE = lse - logit[target] and KL = sum p log p - sum p logit + lse, so the gradient by the
    logits is (ce + kl) q - ce onehot - kl p. autograd would make about twice as many [c, W] matrices.
    """

    def __init__(self, head: OutputHead, product: Tensor, ids: Tensor, valid: Tensor) -> None:
        self.head, self.valid = head, valid.float()
        self.logits = head.finish(product).float()
        self.ids = ids.clamp(min=0)[:, None]
        self.known = (valid & (ids >= 0)).float()
        self.true = self.logits.gather(1, self.ids)[:, 0]
        self.largest = self.logits.amax(-1)
        self.exponentials = (self.logits - self.largest[:, None]).exp_()
        self.sums = self.exponentials.sum(-1)
        self.lse = self.largest + self.sums.log()

    def stats(self, teacher: "_Teacher | None") -> Tensor:
        """The ``STATS`` of the chunk, [len(STATS)] float32."""
        hits = (self.true >= self.largest) * self.known
        overlap = self.logits.new_full((), torch.nan)
        if teacher is not None:
            q = self.exponentials / self.sums[:, None]
            overlap = (torch.minimum(q, teacher.probs).sum(-1) * self.valid).sum()
        ce = (self.lse - self.true) * self.known
        return torch.stack([hits.sum(), ce.sum(), self.valid.sum(), overlap, self.known.sum()])

    def loss_and_gradient(self, teacher: "_Teacher | None", config: LossConfig) -> tuple[Tensor, Tensor]:
        """Summed loss without the position's decay, and its gradient by the product ([c, W] float32)."""
        loss = config.ce * ((self.lse - self.true) * self.known).sum()
        mass = config.ce * self.known
        if config.kl and teacher is not None:
            kl = teacher.negative_entropy - _row_dot(teacher.probs, self.logits) + self.lse
            loss = loss + config.kl * (kl * self.valid).sum()
            mass = mass + config.kl * self.valid
        gradient = self.exponentials.mul_((mass / self.sums)[:, None])
        if config.kl and teacher is not None:
            gradient.addcmul_(teacher.probs, self.valid[:, None], value=-config.kl)
        gradient.scatter_add_(1, self.ids, (-config.ce * self.known)[:, None])
        return loss, self._through_finish(gradient)

    def _through_finish(self, gradient: Tensor) -> Tensor:
        """Chain rule through scale and soft-cap."""
        if self.head.softcap is not None:
            gradient = gradient * (1 - (self.logits / self.head.softcap) ** 2)
        return gradient * self.head.scale if self.head.scale != 1.0 else gradient


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """[c] row-wise dot products, without a [c, W] product matrix."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


_METRICS = (("loss", "ce", "known"), ("accept", "accept", "count"), ("overlap", "overlap", "count"))
"""Name, what is summed, what it is divided by. A target outside the draft vocabulary has no cross-entropy."""


def loss_output(loss_sum: Tensor, stats: Tensor, training: bool) -> LossOutput:
    """Metrics per draft position from the ``STATS``: loss_k, accept_k (top-1 hits) and, outside training, overlap_k."""
    column = dict(zip(STATS, stats.double().unbind(1), strict=True))
    names, pairs = [], []
    for k in range(stats.shape[0]):
        for name, source, of in _METRICS:
            if source == "overlap" and training:
                continue
            names.append(f"{name}_{k + 1}")
            pairs.append(torch.stack([column[source][k], column[of][k]]))
    return LossOutput(
        loss_sum=loss_sum, tokens=stats[0, STATS.index("count")].long(), sums=torch.stack(pairs), names=tuple(names)
    )
