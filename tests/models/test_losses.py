"""The chunked loss is the plain loss, in value and in gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafthead.models.base import OutputHead
from drafthead.models.losses import STATS, LossConfig, Targets, heads_loss

K, N, D, W = 3, 37, 16, 50
TOLERANCE = 2e-6
"""Relative: sums of 37 float32 terms in another order."""

CASES = [
    ("ce", LossConfig(ce=1.0, kl=0.0)),
    ("kl", LossConfig(ce=0.0, kl=1.0)),
    ("mixed", LossConfig(ce=0.3, kl=0.7, decay=0.5)),
]


def make(shared: bool, softcap: float | None) -> tuple[Tensor, list[OutputHead], Targets]:
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(K, N, D, generator=generator) * 3).requires_grad_()
    weights = [(torch.randn(W, D, generator=generator)).requires_grad_() for _ in range(1 if shared else K)]
    heads = [OutputHead(weight=weights[0 if shared else k], scale=0.5, softcap=softcap) for k in range(K)]
    ids = torch.randint(-1, W, (N,), generator=generator)
    valid = torch.rand(K, N, generator=generator) < 0.7
    teacher_hidden = torch.randn(N, D, generator=generator) * 3
    teacher = OutputHead(weight=torch.randn(W, D, generator=generator))
    return hidden, heads, Targets(ids=ids, valid=valid, teacher_hidden=teacher_hidden, teacher=teacher)


def plain(hidden: Tensor, heads: list[OutputHead], targets: Targets, config: LossConfig) -> Tensor:
    """Independent few-line reference: whole matrices, torch's own losses, a loop over positions."""
    assert targets.teacher is not None and targets.teacher_hidden is not None
    p = targets.teacher.logits(targets.teacher_hidden).softmax(-1)
    total = hidden.new_zeros(())
    for k in range(K):
        logits = heads[k].logits(hidden[k])
        for i in range(N):
            if not targets.valid[k, i]:
                continue
            loss = config.kl * F.kl_div(logits[i].log_softmax(-1), p[i], reduction="sum")
            if targets.ids[i] >= 0:
                loss = loss + config.ce * F.cross_entropy(logits[i], targets.ids[i])
            total = total + config.decay ** (k + 1) * loss
    return total


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["linear", "softcap"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("rows", [1, 8, 1000])
@pytest.mark.parametrize(("name", "config"), CASES, ids=[c[0] for c in CASES])
def test_chunked_equals_plain(name: str, config: LossConfig, rows: int, shared: bool, softcap: float | None) -> None:
    hidden, heads, targets = make(shared, softcap)
    wanted = plain(hidden, heads, targets, config)
    leaves = [hidden, *{id(h.weight): h.weight for h in heads}.values()]
    wanted_grads = torch.autograd.grad(2 * wanted, leaves)
    value, stats = heads_loss(hidden, heads, targets, config, rows)
    (2 * value).backward()
    torch.testing.assert_close(value, wanted, rtol=TOLERANCE, atol=0)
    for leaf, grad in zip(leaves, wanted_grads, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-5, atol=1e-5)
    assert stats[:, STATS.index("count")].tolist() == targets.valid.sum(1).tolist()
    assert stats[:, STATS.index("known")].tolist() == (targets.valid & (targets.ids >= 0)).sum(1).tolist()


def test_overlap_is_the_sampled_acceptance() -> None:
    hidden, heads, targets = make(shared=True, softcap=None)
    with torch.no_grad():
        fixed = [OutputHead(weight=h.weight.detach(), scale=h.scale) for h in heads]
        _, stats = heads_loss(hidden.detach(), fixed, targets, LossConfig(), 8)
    assert targets.teacher is not None and targets.teacher_hidden is not None
    p = targets.teacher.logits(targets.teacher_hidden).softmax(-1)
    q = heads[1].logits(hidden[1]).softmax(-1)
    wanted = (torch.minimum(p, q).sum(-1) * targets.valid[1]).sum()
    torch.testing.assert_close(stats[1, STATS.index("overlap")], wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [("ce", -1.0, "loss.ce must be >= 0"), ("decay", 0.0, r"loss.decay must be in \(0, 1\]"), ("ce", 0.0, "both 0")],
)
def test_bad_settings(key: str, value: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LossConfig(**{key: value})
