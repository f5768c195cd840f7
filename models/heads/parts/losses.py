"""Losses of draft heads, computed in chunks so that a [tokens, vocabulary] matrix never exists as a whole.

At each target, q is the head's distribution and p the base's, renormalised over the draft vocabulary, because the
base's mass outside it would cost the whole projection. ``alpha = sum_v min(p_v, q_v)`` is the probability that
speculative sampling would accept the draft if the base, too, were limited to the draft vocabulary. alpha is therefore
an upper bound of the true acceptance rate.

Shape legend: K draft positions, A anchors, n targets, c targets of a chunk, D width, W draft vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafthead.data.batch import LossOutput
from drafthead.errors import UserError
from drafthead.models.base.lm_head import LMHead
from drafthead.settings.schema import NonNegativeFloat, settings
from drafthead.system.devices import wide

SHARPNESS = 3.0
"""Factor eta in the share exp(-eta alpha) of the loss ``lk_adaptive``; the best value in the LK paper (2602.23881)."""
FLOOR = 1e-30
"""Lower bound of the acceptance alpha = sum_v min(p_v, q_v), and of probabilities in logarithms. If base and head are
sure of different tokens, alpha is 0 in float32."""
STATS = ("accept", "ce", "count", "overlap", "known")
"""Sums over the targets of a draft position: ``accept``, targets that are the head's likeliest token; ``ce``,
cross-entropies of the targets in the draft vocabulary; ``count``, targets; ``overlap``, alpha = sum_v min(p_v, q_v);
``known``, targets in the draft vocabulary. ``overlap`` is nan in training, because it would cost two more passes over
the logits."""
TERMS = ("ce", "kl", "reverse_kl", "jsd", "tv", "lk", "lk_adaptive")
DPACE, AUF = "dpace", "auf"
DPACE_FLOOR = 0.5
"""D-PACE maps a true token's probability p to (1 - floor) p + floor, with this floor. Otherwise later draft positions
would have almost no weight early in training."""


ABSENT = -1e9
"""Logit of an id that a document does not have: finite, since 0 * inf would be nan."""
CHUNK_BYTES = {"cpu": 4 * 2**20, "accelerator": 64 * 2**20}
"""Size of one chunk's float32 logits: within a CPU's last-level cache, or large enough to keep a GPU busy. The peak
memory is about three such matrices."""


@settings(kw_only=True)
class LossConfig:
    """Loss of a phase: ``sum_k w_k (ce CE_k + kl KL_k + tv TV_k + ...)``, over trained tokens. k counts the draft
    positions, and ``decay`` or ``depth_weights`` gives their weights w_k."""

    ce: NonNegativeFloat = 1.0
    """Weight of the cross-entropy against the corpus token. Targets outside the draft vocabulary add nothing."""
    kl: NonNegativeFloat = 0.0
    """Weight of KL(p || q), from the base's p to the head's q. This and the terms below train on all targets, including
    those outside the draft vocabulary."""
    reverse_kl: NonNegativeFloat = 0.0
    """Weight of KL(q || p), which avoids mass that the base does not have. With 0.9 ``kl`` and 0.1 ``reverse_kl``, the
    loss is what the code of Online Speculative Decoding (2310.07177) calls JSD."""
    jsd: NonNegativeFloat = 0.0
    """Weight of the Jensen-Shannon divergence, (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2."""
    tv: NonNegativeFloat = 0.0
    """Weight of the total variation, 1 - alpha. The acceptance alpha = sum_v min(p_v, q_v) is the probability that a
    draft sampled from q is accepted. The gradient vanishes if alpha is small, so this loss does not suit an untrained
    head."""
    lk: NonNegativeFloat = 0.0
    """Weight of -log(alpha) (LK, 2602.23881), with the alpha of ``tv``. Its gradient is that of ``tv`` divided by alpha
    and does not vanish."""
    lk_adaptive: NonNegativeFloat = 0.0
    """Weight of s KL(p || q) + (1 - s) (1 - alpha), with the alpha of ``tv`` and s = exp(-3 alpha), not differentiated.
    The share s is computed for each target; the authors' code (2602.23881) uses the mean alpha of the batch."""
    confidence: NonNegativeFloat = 1.0
    """Weight of a confidence head's cross-entropy (DSpark). Its label is alpha, the probability that the draft is
    accepted. Heads without a confidence head ignore it."""
    decay: float | int | str = 0.8
    """Weight of draft position k is ``decay ** k``, with ``decay`` in (0, 1], or ``dpace`` or ``auf``. Positions count
    from 1 (Medusa, 2401.10774). ``dpace`` (D-PACE) weighs each position by what it adds to the accepted length,
    according to the head's own probabilities of the true tokens. ``auf`` (accept until fail, 2607.01893) trains only
    what decoding reaches: positions up to the first whose likeliest token is wrong."""
    depth_weights: list[float] | None = None
    """Weights of the draft positions, one per trained position. With null, ``decay`` gives them."""

    def __post_init__(self) -> None:
        if not any(getattr(self, key) for key in TERMS):
            raise ValueError(f"loss.{', loss.'.join(TERMS)} are all 0: nothing would be trained; set one of them")
        if self.decay not in (DPACE, AUF) and (isinstance(self.decay, str) or not 0 < self.decay <= 1):
            raise ValueError(f"loss.decay must be in (0, 1], {DPACE} or {AUF}, got {self.decay!r}")
        weights = self.depth_weights
        if weights is not None and not (any(weights) and all(0 <= w < math.inf for w in weights)):
            raise ValueError(f"loss.depth_weights must be >= 0 and not all 0, or null, got {list(weights)}")

    @property
    def paced(self) -> bool:
        return isinstance(self.decay, str) and self.depth_weights is None

    @property
    def reads_alpha(self) -> bool:
        """True if a term other than ``confidence`` needs alpha, the probability of acceptance."""
        return self.tv > 0 or self.lk > 0 or self.lk_adaptive > 0

    @property
    def needs_target_probs(self) -> bool:
        """True if a term other than ``confidence`` needs the base's distribution p."""
        return self.kl > 0 or self.reverse_kl > 0 or self.jsd > 0 or self.reads_alpha

    def weights_of(self, depth: int) -> list[float]:
        """Return the weight of each of ``depth`` draft positions, 1.0 with D-PACE or AUF, which weigh every target.
        Reject another number of ``depth_weights``."""
        if self.depth_weights is None:
            # Their own weights, which differ between targets, are applied instead.
            return [1.0 if isinstance(self.decay, str) else self.decay**k for k in range(1, depth + 1)]
        if len(self.depth_weights) != depth:
            what = f"loss.depth_weights has {len(self.depth_weights)} weights, but {depth} draft positions are trained"
            raise UserError(f"{what}; give {depth}, or null for decay ** k")
        return list(self.depth_weights)


@dataclass(frozen=True)
class TargetDistribution:
    """The base's probabilities of the draft vocabulary, renormalised, at c targets; equal for all draft positions."""

    probs: Tensor  # [c, W] probabilities p of the draft tokens, float32 or wider; rows sum to 1
    negative_entropy: Tensor  # [c] sum of p log p over the draft vocabulary

    @staticmethod
    def of(head: LMHead, hidden: Tensor, absent: Tensor | None = None) -> "TargetDistribution":
        """Return the distribution after the base's states [c, D]; ``head`` has only the draft vocabulary's rows.
        ``absent`` [c, C] marks those of the last C ids that are left out."""
        logits = _without(_wide(head.logits(hidden.to(head.weight.dtype))), absent)
        log_probs = logits.log_softmax(-1)
        probs = log_probs.exp()
        return TargetDistribution(probs, _row_dot(probs, log_probs))


class LossChunk:
    """The logits z of one draft position at a chunk of targets, with the loss and its analytic gradient.

    Except for the reverse KL and the Jensen-Shannon divergence, the gradient of every term by z is a sum of four rows:
    q, p, the one-hot target and s. Each target needs only one factor for each row::

        term                              d term / d z            factors of q, p, onehot, s
        CE   = lse - z[target]            q - onehot              +1,           -1
        KL   = sum p log p - p z + lse    q - p                   +1,       -1
        alpha = sum min(p, q)             s - q sum(s)            -sum(s),               +1

    with ``s = q [q < p]``: raising z_v raises alpha only where q is below p. ``tv = 1 - alpha`` and
    ``lk = -log alpha`` use the last line, scaled by -1 and by -1 / alpha. The gradient is built in place in the
    matrix of exponentials; autograd would allocate about twice as many [c, W] matrices.
    """

    def __init__(self, head: LMHead, product: Tensor, ids: Tensor, valid: Tensor, absent: Tensor | None = None) -> None:
        """Compute the softmax of one draft position at c targets.

        Args:
            head: the projection that gave ``product``.
            product: [c, W] logits before scale and soft-cap.
            ids: [c] int64 draft ids of the targets, -1 for targets outside the draft vocabulary.
            valid: [c] bool: False excludes the target.
            absent: [c, C] bool: those of the last C draft ids that are left out.
        """
        self.head = head
        self.logits = _without(_wide(head.scale_and_cap(product)), absent)
        self.weights = valid.to(self.logits.dtype)
        self.target_ids = ids.clamp(min=0)[:, None]
        self.ce_weights = (valid & (ids >= 0)).to(self.logits.dtype)
        self.target_logits = self.logits.gather(1, self.target_ids)[:, 0]
        self.max_logits = self.logits.amax(-1)
        self.exps = (self.logits - self.max_logits[:, None]).exp_()
        self.exp_sums = self.exps.sum(-1)  # q is exponentials / sums
        self.lse = self.max_logits + self.exp_sums.log()

    def weigh(self, factors: Tensor) -> None:
        """Multiply the loss of target i by ``factors[i]``. Call it after ``stats``: metrics are not weighted."""
        self.weights, self.ce_weights = self.weights * factors, self.ce_weights * factors

    def stats(self, target: TargetDistribution | None) -> Tensor:
        """Return the sums of ``STATS``; without ``target``, ``overlap`` is nan."""
        hits = (self.target_logits >= self.max_logits) * self.ce_weights
        overlap = self.logits.new_full((), torch.nan)
        if target is not None:
            q = self.exps / self.exp_sums[:, None]
            overlap = (torch.minimum(q, target.probs).sum(-1) * self.weights).sum()
        ce = (self.lse - self.target_logits) * self.ce_weights
        return torch.stack([hits.sum(), ce.sum(), self.weights.sum(), overlap, self.ce_weights.sum()])

    def loss_and_gradient(
        self, target: TargetDistribution | None, config: LossConfig, confidence: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the summed loss without the position's weight, its gradient by ``product`` ([c, W], in the logits'
        dtype), and its gradient by the logits ``confidence`` [c] of a confidence head, whose label is alpha.

        Call this method once, after ``stats``, because it overwrites values that ``stats`` reads. ``target`` may be
        None if no term needs it.
        """
        on_onehot = config.ce * self.ce_weights
        loss = (on_onehot * (self.lse - self.target_logits)).sum()
        on_q, on_p = on_onehot, config.kl * self.weights  # factors [c] of the rows q and (subtracted) p
        mode_seeking: Tensor | None = None
        if (config.reverse_kl > 0 or config.jsd > 0) and target is not None:
            term, mode_seeking = self._mode_seeking(target, config)
            loss = loss + term
        s_rows: Tensor | None = None
        by_confidence: Tensor | None = None
        if (config.reads_alpha or confidence is not None) and target is not None:
            # s = q [q < p]. The exponentials are overwritten by q, to save a matrix.
            q = self.exps.div_(self.exp_sums[:, None])
            self.exp_sums = torch.ones_like(self.exp_sums)
            smaller = torch.minimum(q, target.probs)
            alpha = smaller.sum(-1)
            s_rows = smaller.mul_(q < target.probs)
            if confidence is not None:
                wide, factor = _wide(confidence), config.confidence * self.weights
                loss = loss + (factor * (torch.nn.functional.softplus(wide) - wide * alpha)).sum()
                by_confidence = factor * (wide.sigmoid() - alpha)
            share = torch.exp(-SHARPNESS * alpha)
            on_tv = self.weights * (config.tv + config.lk_adaptive * (1 - share))
            log_alpha = alpha.clamp(min=FLOOR).log()
            loss = loss + (on_tv * (1 - alpha) - config.lk * self.weights * log_alpha).sum()
            on_p = on_p + config.lk_adaptive * self.weights * share
            # d(1 - alpha) = -d alpha and d(-log alpha) = -d alpha / alpha: one factor for both, subtracted below.
            on_s = on_tv + config.lk * self.weights / alpha.clamp(min=FLOOR)
            on_q = on_q + on_s * s_rows.sum(-1)
            s_rows.mul_(on_s[:, None])
        dist = target if config.kl > 0 or config.lk_adaptive > 0 else None
        if dist is not None:
            kl = dist.negative_entropy - _row_dot(dist.probs, self.logits) + self.lse
            loss = loss + (on_p * kl).sum()
            on_q = on_q + on_p
        # From here on the exponentials are overwritten by the gradient.
        gradient = self.exps.mul_((on_q / self.exp_sums)[:, None])
        if dist is not None:
            gradient.addcmul_(dist.probs, on_p[:, None], value=-1)
        if s_rows is not None:
            gradient.sub_(s_rows)
        if mode_seeking is not None:
            gradient.add_(mode_seeking)
        gradient.scatter_add_(1, self.target_ids, -on_onehot[:, None])
        if self.head.softcap is not None:  # the derivative of cap tanh(x / cap) is 1 - (logit / cap)^2
            gradient = gradient * (1 - (self.logits / self.head.softcap) ** 2)
        return loss, gradient * self.head.scale if self.head.scale != 1.0 else gradient, by_confidence

    def _mode_seeking(self, target: TargetDistribution, config: LossConfig) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of reverse KL and Jensen-Shannon divergence, and its gradient [c, W] by the logits.

        If s_v is the derivative of a divergence by q_v, its gradient by the logits is ``q (s - sum q s)``. A constant
        added to s cancels. The derivative of the reverse KL, ``log(q / p) + 1``, is therefore used without the 1.
        """
        log_q = self.logits - self.lse[:, None]
        q = log_q.exp()
        log_ratio = log_q - target.probs.clamp(min=FLOOR).log()
        value, slope = config.reverse_kl * _row_dot(q, log_ratio), config.reverse_kl * log_ratio
        if config.jsd > 0:
            log_mean = ((q + target.probs) / 2).clamp(min=FLOOR).log()
            half = config.jsd / 2
            value = value + half * (target.negative_entropy - _row_dot(target.probs, log_mean))
            value = value + half * _row_dot(q, log_q - log_mean)
            slope = slope + half * (log_q - log_mean)
        gradient = q * (slope - _row_dot(q, slope)[:, None])
        return (self.weights * value).sum(), gradient * self.weights[:, None]


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _without(logits: Tensor, absent: Tensor | None) -> Tensor:
    if absent is not None:
        logits[:, logits.shape[1] - absent.shape[1] :].masked_fill_(absent, ABSENT)
    return logits


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot product of each row of ``a`` with the same row of ``b``: [c, W], [c, W] -> [c]."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Labels of the K draft positions at n targets."""

    ids: Tensor  # [n] int64 draft id of each target, -1 for a token outside the draft vocabulary
    valid: Tensor  # [K, n] bool: position k is trained and measured on this target
    weights: Tensor | None = None  # [K, n] float weight of each prediction in the loss; None: all 1
    anchor_idx: Tensor | None = None
    """[K, n] int64 index, in the projections' inputs, of the anchor that predicts each target; None: anchor i predicts
    target i."""
    target_hidden: Tensor | None  # [n, D] the base's final state one token before each target; None if not needed
    target_lm_head: LMHead | None  # the base's output head over the draft vocabulary; None if not needed
    document: Tensor | None = None  # [n] int64 document of each target; only with ``absent``
    absent: Tensor | None = None  # [documents, C] bool: which of the last C draft ids a document does not have

    def absent_at(self, rows: slice) -> Tensor | None:
        return None if self.absent is None or self.document is None else self.absent[self.document[rows]]

    def distribution(self, rows: slice) -> TargetDistribution | None:
        """Return the base's distribution at some targets; None if these labels cannot give it."""
        if self.target_lm_head is None or self.target_hidden is None:
            return None
        return TargetDistribution.of(self.target_lm_head, self.target_hidden[rows], self.absent_at(rows))

    def anchors(self) -> Tensor:
        if self.anchor_idx is not None:
            return self.anchor_idx
        return torch.arange(self.valid.shape[1], device=self.valid.device).expand_as(self.valid)


def chunk_rows(vocabulary: int, device: str) -> int:
    """Return the number of targets per chunk, at least 64, for ``vocabulary`` logits each and a device type."""
    return max(64, CHUNK_BYTES.get(device, CHUNK_BYTES["accelerator"]) // (4 * vocabulary))


def heads_loss(
    hidden: Tensor,
    heads: Sequence[LMHead],
    labels: Labels,
    config: LossConfig,
    rows: int | None = None,
    confidence: Tensor | None = None,
    position_weights: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss ``sum_k w_k loss_k`` of K draft positions, summed over n targets, and the sums for metrics.

    The gradients are computed in the forward pass, chunk by chunk. Nothing of size [n, W] is stored, so memory does
    not grow with n * W.

    Args:
        hidden: [K, A, D] inputs of the projections at the anchors.
        heads: the projection of each of the K draft positions; an object may occur several times.
        labels: the labels of the n targets.
        config: weights of the terms.
        rows: targets per chunk; by default as many as ``CHUNK_BYTES`` of logits hold.
        confidence: [K, A] logits of each draft's predicted acceptance; None without a confidence head. Not used if
            ``config.confidence`` is 0.
        position_weights: the weights w_k of the K draft positions; None: those of ``config``.

    Returns:
        The scalar loss sum (float32, or float64 for a float64 head), and the ``STATS`` of each position,
        [K, len(STATS)] float32.

    Raises:
        ValueError: the loss needs the base's distribution, but ``labels`` have no ``target_hidden``.
    """
    confidence = confidence if config.confidence else None
    known = labels.target_lm_head is not None and labels.target_hidden is not None
    if (config.needs_target_probs or confidence is not None) and not known:
        raise ValueError("the loss needs the base's distribution: give Labels target_hidden and target_lm_head")
    heads = [head.cast_frozen(hidden.dtype) for head in heads]
    rows = rows or chunk_rows(heads[0].weight.shape[0], hidden.device.type)
    weights = [w if torch.is_grad_enabled() else w.detach() for head in heads for w in head.trained]
    position_weights = config.weights_of(len(hidden)) if position_weights is None else position_weights
    result: tuple[Tensor, Tensor] = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, confidence, heads, labels, config, position_weights, rows, *weights
    )
    return result


@torch.no_grad()
def _paced_weights(
    hidden: Tensor, heads: Sequence[LMHead], labels: Labels, rows: int, pace: float | int | str
) -> Tensor:
    """Return the weights [K, n] of D-PACE or AUF, from a pass over the logits before the loss."""
    probs, anchors = torch.zeros(labels.valid.shape, device=hidden.device), labels.anchors()
    right = torch.zeros_like(labels.valid)
    for start in range(0, probs.shape[1], rows):
        span = slice(start, start + rows)
        absent = labels.absent_at(span)
        for k, head in enumerate(heads):
            product = head.product(hidden[k].index_select(0, anchors[k, span]).to(head.trained[0].dtype))
            chunk = LossChunk(head, product, labels.ids[span], labels.valid[k, span], absent)
            probs[k, span] = (chunk.target_logits - chunk.lse).exp() * chunk.ce_weights
            right[k, span] = (chunk.target_logits >= chunk.max_logits) & (chunk.ce_weights > 0)
    weigh = auf_weights if pace == AUF else dpace_weights
    return weigh(right.float() if pace == AUF else probs, labels, hidden.shape[1])


def _by_anchor(values: Tensor, labels: Labels, count: int) -> Tensor:
    """Order ``values`` [K, n] by their ``count`` anchors, [K, count + 1]: the positions of one anchor have different
    targets. Positions without a valid target are 0; the last column collects invalid predictions."""
    by_anchor = values.new_zeros(len(values), count + 1)
    return by_anchor.scatter_(1, torch.where(labels.valid, labels.anchors(), count), values)


def auf_weights(right: Tensor, labels: Labels, count: int) -> Tensor:
    """Return AUF's weights [K, n]: 1 if the head's likeliest token is right (``right`` [K, n], 1 or 0) at all earlier
    positions of the anchor, else 0. Example: right at positions 1 and 3 has the weights 1, 1, 0, 0."""
    by_anchor = _by_anchor(right, labels, count)
    reached = torch.cat([torch.ones_like(by_anchor[:1]), by_anchor[:-1].cumprod(0)])
    return reached.gather(1, labels.anchors())


def dpace_weights(probs: Tensor, labels: Labels, count: int) -> Tensor:
    """Return D-PACE's weights [K, n] from the probabilities ``probs`` [K, n] of the true tokens from ``count`` anchors.

    Probabilities are first mapped linearly from [0, 1] to [``DPACE_FLOOR``, 1]; q has the results. The expected number
    of accepted drafts is then ``q_1 + q_1 q_2 + ...``. The weight of position j is the sum of the products that contain
    q_j, divided by K. Example: q = (0.8, 0.5, 0.5) has the products 0.8, 0.4, 0.2 and the weights 1.4/3, 0.6/3, 0.2/3.
    """
    reached = _by_anchor((1 - DPACE_FLOOR) * probs + DPACE_FLOOR, labels, count).cumprod(0)
    weights = reached.flip(0).cumsum(0).flip(0) / len(probs)
    return weights.gather(1, labels.anchors())


class _ChunkedLoss(torch.autograd.Function):
    """A loss whose forward pass also computes the gradients; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        confidence: Tensor | None,
        heads: Sequence[LMHead],
        labels: Labels,
        config: LossConfig,
        position_weights: Sequence[float],
        rows: int,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        (depth, n), anchors = labels.valid.shape, labels.anchors()
        grad_hidden = torch.zeros_like(hidden) if hidden.requires_grad else None
        # A bfloat16 sum over many chunks would lose the later ones: 256 + 1 rounds to 256.
        wide = torch.promote_types(weights[0].dtype, torch.float32)
        grad_weights = [torch.zeros_like(w, dtype=wide) if w.requires_grad else None for w in weights]
        grad_confidence = torch.zeros_like(confidence) if confidence is not None and confidence.requires_grad else None
        training = grad_hidden is not None or any(g is not None for g in grad_weights)
        gradients = iter(grad_weights)
        trained = [[(next(gradients), columns) for columns in head.trained_columns] for head in heads]
        paced = None
        if config.paced and training:
            paced = _paced_weights(hidden, heads, labels, rows, config.decay)
        total = hidden.new_zeros((), dtype=wide)
        stats = hidden.new_zeros((depth, len(STATS)), dtype=torch.float32)
        for start in range(0, n, rows):
            span = slice(start, min(n, start + rows))
            compared = config.needs_target_probs or confidence is not None or not training
            target, absent = labels.distribution(span) if compared else None, labels.absent_at(span)
            for k in range(depth):
                predicted_from, valid = anchors[k, span], labels.valid[k, span]
                h = hidden[k].index_select(0, predicted_from).to(heads[k].trained[0].dtype)
                chunk = LossChunk(heads[k], heads[k].product(h), labels.ids[span], valid, absent)
                stats[k] += chunk.stats(None if training else target)
                if labels.weights is not None:
                    chunk.weigh(labels.weights[k, span])
                if paced is not None:
                    chunk.weigh(paced[k, span])
                chunk_confidence = None if confidence is None else confidence[k].index_select(0, predicted_from)
                loss, gradient, by_confidence = chunk.loss_and_gradient(target, config, chunk_confidence)
                total += position_weights[k] * loss
                if training:
                    gradient = (position_weights[k] * gradient).to(h.dtype)
                    if grad_hidden is not None:
                        by_h = heads[k].input_gradient(gradient).to(grad_hidden.dtype)
                        grad_hidden[k].index_add_(0, predicted_from, by_h)  # invalid predictions add 0
                    if grad_confidence is not None and by_confidence is not None:
                        by_c = (position_weights[k] * by_confidence).to(grad_confidence.dtype)
                        grad_confidence[k].index_add_(0, predicted_from, by_c)
                    for grad_weight, columns in trained[k]:
                        if grad_weight is None:
                            continue
                        if h.dtype == wide:
                            grad_weight.addmm_(gradient.t(), h[:, columns])
                        else:
                            grad_weight += gradient.t() @ h[:, columns]
        ctx.grads = grad_hidden, grad_confidence, grad_weights
        ctx.mark_non_differentiable(stats)
        return total, stats

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> Any:
        grad_hidden, grad_confidence, grad_weights = ctx.grads
        scaled = [None if g is None else g.mul_(grad_total) for g in (grad_hidden, grad_confidence, *grad_weights)]
        return scaled[0], scaled[1], None, None, None, None, None, *scaled[2:]


_METRICS = (("loss", "ce", "known"), ("accept", "accept", "count"), ("overlap", "overlap", "count"))
"""Each metric's name and the ``STATS`` that are its numerator and denominator. A target outside the draft vocabulary
has no cross-entropy."""


def loss_output(loss_sum: Tensor, stats: Tensor, training: bool) -> LossOutput:
    """Return the loss with metrics per draft position k (from 1): ``loss_k``, the mean cross-entropy; ``accept_k``, the
    share of targets that are the head's likeliest token; and, except in training, ``overlap_k``, the mean alpha."""
    column = dict(zip(STATS, wide(stats).unbind(1), strict=True))
    metrics = {
        f"{name}_{k + 1}": torch.stack([column[total][k], column[count][k]])
        for k in range(len(stats))
        for name, total, count in _METRICS
        if total != "overlap" or not training
    }
    tokens = stats[:, STATS.index("count")].max().long()
    return LossOutput(loss_sum=loss_sum, tokens=tokens, sums=torch.stack([*metrics.values()]), names=tuple(metrics))
