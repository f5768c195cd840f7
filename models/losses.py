"""Losses of draft heads, chunked so that a [tokens, vocabulary] matrix never exists whole.

Shape legend: K draft positions, n target positions, D width, W draft vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafthead.data.contracts import LossOutput
from drafthead.data.errors import UserError
from drafthead.models.loss_terms import STATS, LossChunk, TeacherLaw, TermWeights
from drafthead.models.output_head import OutputHead

CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
"""Size of one chunk's float32 logits: within a CPU's last-level cache; large enough to fill a GPU. About three
matrices of that size are alive at the peak."""


@dataclass(kw_only=True)
class LossConfig(TermWeights):
    """What a phase minimises: ``sum_k w_k (ce CE_k + kl KL_k + tv TV_k + ...)``, over trained tokens."""

    decay: float = 0.8
    """Weight w_k of draft position k is ``decay ** k``, k from 1 (Medusa, 2401.10774)."""
    depth_weights: list[float] | None = None
    """The weights w_k themselves, one per draft position; null takes ``decay``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay <= 1:
            raise ValueError(f"loss.decay must be in (0, 1], got {self.decay}")
        weights = self.depth_weights
        if weights is not None and not (any(weights) and all(0 <= w < math.inf for w in weights)):
            raise ValueError(f"loss.depth_weights must be >= 0 and not all 0, or null, got {list(weights)}")

    def weights_of(self, depth: int) -> list[float]:
        """The weight of each of ``depth`` draft positions.

        Raises:
            UserError: ``depth_weights`` has another number of them.
        """
        if self.depth_weights is None:
            return [self.decay**k for k in range(1, depth + 1)]
        if len(self.depth_weights) != depth:
            raise UserError(
                f"loss.depth_weights has {len(self.depth_weights)} weights, but the head is trained at {depth} draft "
                f"positions; give {depth}, or null for decay ** k"
            )
        return list(self.depth_weights)


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What the K heads should predict at n target positions."""

    ids: Tensor
    """[n] int64 index in the draft vocabulary, -1 when the token is outside it."""
    valid: Tensor
    """[K, n] bool: head k is trained on (and measured at) this target."""
    teacher_hidden: Tensor | None
    """[n, D] the base's ``h`` one position before each target; None when nothing but ``ce`` is wanted."""
    teacher: OutputHead | None
    """The base's head over the draft vocabulary."""


def chunk_rows(vocabulary: int, device: str) -> int:
    """Target positions per chunk for a draft vocabulary of that size."""
    return max(64, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // (4 * vocabulary))


def heads_loss(
    hidden: Tensor, heads: Sequence[OutputHead], targets: Targets, config: LossConfig, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """``sum_k w_k loss_k`` over n target positions, in chunks, with gradients for ``hidden`` and the weights.

    The gradients are computed in the forward pass, chunk by chunk, so nothing of size [n, W] is kept: memory is
    flat in n * W. The value and the gradients equal the plain form's (``tests/models/test_losses.py``).

    Args:
        hidden: [K, n, D] what each head's projection reads, aligned with the targets.
        heads: K projections (the same object K times when shared).
        targets: what to predict.
        config: loss weights.
        rows: positions per chunk; by default such that a chunk's logits take ``CHUNK_BYTES``.

    Returns:
        Scalar loss sum (float32, or float64 for a float64 head), and the ``STATS`` of each position,
        [K, len(STATS)] float32.

    Raises:
        UserError: ``depth_weights`` of another length than K.
        ValueError: a term needs the teacher, and ``targets`` has none.
    """
    if config.needs_teacher and (targets.teacher is None or targets.teacher_hidden is None):
        raise ValueError("the loss compares with the base's distribution, but the targets have no teacher")
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
        # Sums over many chunks: in bfloat16 the later ones would be lost beside the earlier ones.
        wide = torch.promote_types(weights[0].dtype, torch.float32)
        grad_weights = [torch.zeros_like(w, dtype=wide) if w.requires_grad else None for w in weights]
        training = grad_hidden is not None or any(g is not None for g in grad_weights)
        factors = config.weights_of(depth)
        total = hidden.new_zeros((), dtype=wide)
        stats = hidden.new_zeros((depth, len(STATS)), dtype=torch.float32)
        for start in range(0, n, rows):
            part = slice(start, min(n, start + rows))
            teacher = _teacher_law(targets, part) if config.needs_teacher or not training else None
            for k in range(depth):
                h = hidden[k, part].to(weights[k].dtype)
                chunk = LossChunk(heads[k], h @ weights[k].t(), targets.ids[part], targets.valid[k, part])
                stats[k] += chunk.stats(None if training else teacher)
                loss, gradient = chunk.loss_and_gradient(teacher, config)
                total += factors[k] * loss
                if training:
                    gradient = (factors[k] * gradient).to(h.dtype)
                    if grad_hidden is not None:
                        grad_hidden[k, part] = (gradient @ weights[k]).to(grad_hidden.dtype)
                    if (grad_weight := grad_weights[k]) is not None:
                        if h.dtype == wide:
                            grad_weight.addmm_(gradient.t(), h)
                        else:
                            grad_weight += gradient.t() @ h
        ctx.grads = grad_hidden, grad_weights
        ctx.mark_non_differentiable(stats)
        return total, stats

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> Any:
        grad_hidden, grad_weights = ctx.grads
        scaled = [None if g is None else g.mul_(grad_total) for g in (grad_hidden, *grad_weights)]
        return scaled[0], None, None, None, None, *scaled[1:]


def _teacher_law(targets: Targets, part: slice) -> TeacherLaw | None:
    """The base's law at a chunk of targets, shared by all heads; None where the targets name no teacher."""
    if targets.teacher is None or targets.teacher_hidden is None:
        return None
    return TeacherLaw.of(targets.teacher, targets.teacher_hidden[part])


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
