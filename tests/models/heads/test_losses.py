"""The chunked loss is the plain loss, in value and in gradient."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafthead.models.base.lm_head import LMHead
from drafthead.models.heads.parts.losses import (
    FLOOR,
    STATS,
    Labels,
    LossChunk,
    LossConfig,
    TargetDistribution,
    heads_loss,
)
from support import cases

K, N, D, W = 3, 37, 16, 50
EXACT = 1e-11
"""Relative in float64: sums of 37 terms in another order, and logarithms of a softmax."""
TOLERANCE = 2e-6
"""Relative in float32."""


def only(**weights: float | list[float]) -> LossConfig:
    return LossConfig(**{"ce": 0.0, **weights})


CASES = {
    "ce": LossConfig(),
    "kl": only(kl=1.0),
    "reverse_kl": only(reverse_kl=1.0),
    "jsd": only(jsd=1.0),
    "tv": only(tv=1.0),
    "lk": only(lk=1.0),
    "lk_adaptive": only(lk_adaptive=1.0),
    "ce and kl": LossConfig(ce=0.3, kl=0.7, decay=0.5),
    "all": LossConfig(ce=0.3, kl=0.7, reverse_kl=0.5, jsd=0.8, tv=0.4, lk=0.2, lk_adaptive=0.6),
    "depths": only(lk=1.0, depth_weights=[0.5, 0.0, 2.0]),
}


def make(
    shared: bool = False, softcap: float | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, list[LMHead], Labels]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden = (normal(K, N, D) * 2).requires_grad_()
    weights = [normal(W, D).requires_grad_() for _ in range(1 if shared else K)]
    heads = [LMHead(weight=weights[0 if shared else k], scale=0.5, softcap=softcap) for k in range(K)]
    ids = torch.randint(-1, W, (N,), generator=generator)
    ids[::5] = -1
    valid = torch.rand(K, N, generator=generator) < 0.7
    target_lm_head = LMHead(weight=normal(W, D), scale=0.5, softcap=softcap)
    return hidden, heads, Labels(ids=ids, valid=valid, target_hidden=normal(N, D) * 2, target_lm_head=target_lm_head)


def plain(hidden: Tensor, heads: list[LMHead], targets: Labels, config: LossConfig) -> Tensor:
    """Independent few-line reference: whole matrices, torch's own losses, a loop over positions."""
    p = targets.target_lm_head.logits(targets.target_hidden).softmax(-1)
    total = hidden.new_zeros(())
    for k in range(K):
        weight = config.decay ** (k + 1) if config.depth_weights is None else config.depth_weights[k]
        for i in range(N):
            if not targets.valid[k, i]:
                continue
            log_q = heads[k].logits(hidden[k, i]).log_softmax(-1)
            kl = F.kl_div(log_q, p[i], reduction="sum")
            alpha = torch.minimum(p[i], log_q.exp()).sum()
            mix = torch.exp(-3 * alpha.detach())
            mean = (0.5 * (p[i] + log_q.exp())).log()
            to_q = F.kl_div(mean, log_q, reduction="sum", log_target=True)
            jsd = (F.kl_div(mean, p[i], reduction="sum") + to_q) / 2
            reverse = F.kl_div(p[i].log(), log_q, reduction="sum", log_target=True)
            loss = config.kl * kl + config.tv * (1 - alpha) - config.lk * alpha.log()
            loss = loss + config.reverse_kl * reverse + config.jsd * jsd
            loss = loss + config.lk_adaptive * (mix * kl + (1 - mix) * (1 - alpha))
            if targets.ids[i] >= 0:
                loss = loss + config.ce * F.nll_loss(log_q, targets.ids[i])
            target_weights = 1.0 if targets.weights is None else targets.weights[k, i]
            total = total + weight * target_weights * loss
    return total


def values_and_gradients(
    form: Callable[..., Tensor], hidden: Tensor, heads: list[LMHead], *others: object
) -> list[Tensor]:
    value = form(hidden, heads, *others)
    leaves = [hidden, *{id(h.weight): h.weight for h in heads}.values()]
    return [value.detach(), *torch.autograd.grad(2 * value, leaves)]


def chunked(hidden: Tensor, heads: list[LMHead], targets: Labels, config: LossConfig, rows: int) -> Tensor:
    return heads_loss(hidden, heads, targets, config, rows)[0]


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["linear", "softcap"])
@pytest.mark.parametrize("rows", [8, 1000])
@pytest.mark.parametrize("name", CASES)
def test_chunked_equals_plain(name: str, rows: int, softcap: float | None) -> None:
    weights = torch.rand(K, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for shared, target_weights in ((True, None), (False, None), (False, weights)):
        hidden, lm_heads, targets = make(shared, softcap)
        setting = hidden, lm_heads, replace(targets, weights=target_weights)
        actual = values_and_gradients(chunked, *setting, CASES[name], rows)
        expected = values_and_gradients(plain, *setting, CASES[name])
        for value, other in zip(actual, expected, strict=True):
            assert value.dtype == torch.float64
            torch.testing.assert_close(value, other, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", CASES)
def test_float32_is_float64_rounded(name: str) -> None:
    actual = values_and_gradients(chunked, *make(dtype=torch.float32), CASES[name], 8)
    expected = values_and_gradients(plain, *make(), CASES[name])
    assert actual[0].dtype == torch.float32
    for value, other in zip(actual, expected, strict=True):
        # The reverse KL has log(q / p) as a factor, up to 60 here.
        rtol, atol = (1e-5, 5e-5) if CASES[name].reverse_kl else (TOLERANCE, 1e-5)
        torch.testing.assert_close(value.double(), other, rtol=rtol, atol=atol)


@torch.no_grad()
@pytest.mark.parametrize("name", ["ce", "lk"])
def test_stats_by_hand(name: str) -> None:
    hidden, heads, targets = make(shared=True)
    hidden = hidden.detach()
    right = heads[0].logits(hidden[1]).argmax(-1)
    targets = replace(targets, ids=torch.where(targets.ids < 25, targets.ids, right))
    value, stats = heads_loss(hidden, heads, targets, CASES[name], 8)
    torch.testing.assert_close(value, plain(hidden, heads, targets, CASES[name]), rtol=EXACT, atol=0)
    logits, valid, known = heads[0].logits(hidden), targets.valid, targets.valid & (targets.ids >= 0)
    overlap = torch.minimum(targets.target_lm_head.logits(targets.target_hidden).softmax(-1), logits.softmax(-1))
    expected = {
        "accept": (logits.argmax(-1) == targets.ids) & known,
        "ce": -logits.log_softmax(-1).gather(-1, targets.ids.clamp(min=0).expand(K, N)[..., None])[..., 0] * known,
        "count": valid,
        "overlap": overlap.sum(-1) * valid,
        "known": known,
    }
    assert list(expected) == list(STATS) and int(expected["accept"].sum()) > 5
    torch.testing.assert_close(stats, torch.stack([values.sum(1).float() for values in expected.values()], 1))


def term(q_logits: Tensor, p_logits: Tensor, config: LossConfig) -> tuple[float, Tensor, float]:
    """Value, gradient and alpha of one target."""
    dist = TargetDistribution.of(LMHead(weight=torch.eye(5)), p_logits)
    chunk = LossChunk(LMHead(weight=torch.eye(5)), q_logits, torch.tensor([-1]), torch.tensor([True]))
    loss, gradient, _ = chunk.loss_and_gradient(dist, config)
    alpha = torch.minimum(q_logits.softmax(-1), p_logits.softmax(-1)).sum()
    return float(loss), gradient, float(alpha)


def test_lk_trains_where_total_variation_does_not() -> None:
    """A sure head that disagrees with a sure base: the gradient of tv is gone, that of lk is not."""
    q, p = torch.tensor([[20.0, 0.0, 0.0, 0.0, 0.0]]), torch.tensor([[0.0, 20.0, 0.0, 0.0, 0.0]])
    assert float(term(q.clone(), p, only(tv=1.0))[1].abs().max()) < 1e-7
    assert float(term(q.clone(), p, only(lk=1.0))[1].abs().max()) > 0.1
    apart = torch.tensor([[400.0, 0.0, 0.0, 0.0, 0.0]]), torch.tensor([[0.0, 400.0, 0.0, 0.0, 0.0]])
    value, gradient, alpha = term(apart[0].clone(), apart[1], only(lk=1.0))
    assert alpha == 0 and value == pytest.approx(-torch.tensor(FLOOR).log().item()) and torch.isfinite(gradient).all()


@cases(
    "weights, says",
    ({"ce": 0.0}, "loss.ce, .* loss.lk_adaptive"),
    *(({"depth_weights": weights}, "loss.depth_weights") for weights in ([1.0, -1.0], [0.0], [])),
    *(({"decay": decay}, "loss.decay .*dpace") for decay in (0.0, 1.5, "fast")),
)
def test_bad_settings(weights: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LossConfig(**weights)


def test_bfloat16_sums_over_chunks_in_float32() -> None:
    """512 chunks of one target each: a sum kept in bfloat16 stops growing at 256 of its terms."""
    count = 512
    hidden = torch.ones(1, count, 4, dtype=torch.bfloat16)
    weight = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    targets = Labels(
        ids=torch.zeros(count, dtype=torch.int64),
        valid=torch.ones(1, count, dtype=torch.bool),
        target_hidden=None,
        target_lm_head=None,
    )
    loss, _ = heads_loss(hidden, [LMHead(weight=weight)], targets, LossConfig(decay=1.0), rows=1)
    loss.backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad.float(), torch.tensor([[-0.5], [0.5]]).expand(2, 4) * count)
