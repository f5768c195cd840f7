"""Sampled draft candidates against their joint distribution."""

from itertools import product

import pytest
import torch

from drafthead.models.decoding.drafter import DraftSampling
from drafthead.models.decoding.growth import MISSING, draw_candidates
from drafthead.models.decoding.random_source import DRAFT, PerRowRng
from support import p_value

CPU = torch.device("cpu")
PROBS = torch.tensor([0.4, 0.0, 0.35, 0.25])
ROWS = 4000


def drawn(probs: torch.Tensor, count: int, kind: DraftSampling) -> torch.Tensor:
    rows = probs.shape[0]
    return draw_candidates(probs, count, kind, PerRowRng(list(range(rows)), [0] * rows, DRAFT, CPU))


def joint(kind: DraftSampling) -> dict[tuple[int, ...], float]:
    """Probabilities of two candidates of one node."""
    exact: dict[tuple[int, ...], float] = {}
    for first, second in product(range(4), repeat=2):
        left = 1.0 - PROBS[first].item() * (kind is DraftSampling.WITHOUT_REPLACEMENT)
        allowed = kind is DraftSampling.WITH_REPLACEMENT or first != second
        exact[first, second] = allowed * PROBS[first].item() * PROBS[second].item() / left
    return exact


@pytest.mark.parametrize("kind", [DraftSampling.WITH_REPLACEMENT, DraftSampling.WITHOUT_REPLACEMENT])
def test_two_candidates_have_their_joint_distribution(kind: DraftSampling) -> None:
    samples = drawn(PROBS.expand(ROWS, 1, 4), 2, kind)[:, 0]
    expected = joint(kind)
    assert sum(expected.values()) == pytest.approx(1)
    possible = [pair for pair, chance in expected.items() if chance > 0]
    counts = torch.tensor([int((samples == torch.tensor(pair)).all(-1).sum()) for pair in possible])
    assert counts.sum() == ROWS
    assert p_value(counts, torch.tensor([expected[pair] * ROWS for pair in possible])) > 1e-3


def test_every_parent_has_its_own_samples() -> None:
    probs = torch.eye(5)[None, [3, 1]].expand(2, -1, -1)
    assert drawn(probs, 2, DraftSampling.WITH_REPLACEMENT).tolist() == [[[3, 3], [1, 1]]] * 2


def test_candidates_beyond_the_support_are_missing() -> None:
    probs = torch.stack([PROBS, torch.eye(4)[2], torch.full((4,), 0.25)])[None]
    samples = drawn(probs, 5, DraftSampling.WITHOUT_REPLACEMENT)[0]
    assert sorted(samples[0].tolist()) == [MISSING, MISSING, 0, 2, 3] and samples[0, 3:].tolist() == [MISSING] * 2
    assert samples[1].tolist() == [2, *[MISSING] * 4]
    assert sorted(samples[2].tolist()) == [MISSING, 0, 1, 2, 3]
