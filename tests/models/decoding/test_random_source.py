"""Random numbers of a row: their distributions, what they depend on, and the candidates drawn with them."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafthead.models.decoding.drafter import DraftSampling
from drafthead.models.decoding.growth import MISSING, draw_candidates
from drafthead.models.decoding.random_source import _BLOCK, DRAFT, VERIFY, PerRowRng
from support import p_value

CPU = torch.device("cpu")


def rng(seeds: list[int], positions: list[int] | None = None, stream: int = VERIFY) -> PerRowRng:
    return PerRowRng(seeds, positions or [0] * len(seeds), stream, CPU)


def ask(source: PerRowRng, rows: int, times: int, active: torch.Tensor | None = None) -> torch.Tensor:
    """[times, rows] decisions at one half."""
    half = torch.full((rows,), 0.5)
    active = torch.ones(rows, dtype=torch.bool) if active is None else active
    return torch.stack([source.bernoulli(half, half * 2, active) for _ in range(times)])


def test_decisions_and_samples_follow_their_probs() -> None:
    rows = 4000
    p, q, active = torch.full((rows,), 0.3), torch.full((rows,), 0.4), torch.ones(rows).bool()
    accepted = rng(list(range(rows))).bernoulli(p, q, active)
    assert abs(float(accepted.float().mean()) - 0.75) < 0.03
    probs = torch.tensor([0.5, 0.0, 2.0, 1.5])  # not normalised
    drawn = rng(list(range(rows))).categorical(probs.expand(rows, 2, 4))
    for column in drawn.T:
        counts = torch.bincount(column, minlength=4)
        assert counts[1] == 0
        assert p_value(counts[[0, 2, 3]], probs[[0, 2, 3]] / 4 * rows) > 1e-3
    assert (drawn[:, 0] != drawn[:, 1]).any()


PROBABILITIES = st.floats(0, 1, width=32, allow_subnormal=False)


class Fixed(PerRowRng):
    """A source whose uniform numbers are all ``value``."""

    def __init__(self, value: float, rows: int) -> None:
        super().__init__([0] * rows, [0] * rows, VERIFY, CPU)
        self.value, self.rows = value, rows

    def uniform(self, part: int, count: int, offset: int) -> torch.Tensor:
        return torch.full((self.rows, count), self.value, dtype=torch.float64)


@given(p=PROBABILITIES, q=PROBABILITIES, seed=st.integers(0, 2**40))
def test_nothing_accepts_the_impossible_or_rejects_the_certain(p: float, q: float, seed: int) -> None:
    accepted = rng([seed]).bernoulli(torch.tensor([p]), torch.tensor([q]), torch.tensor([True]))
    if p == 0:
        assert not accepted
    elif p >= q:
        assert accepted


def test_a_number_of_zero_does_not_accept_probability_zero() -> None:
    """The generator may return 0 exactly: ``u * q <= p`` would then accept a token that the target never emits."""
    source, everywhere = Fixed(0.0, rows=2), torch.tensor([True, True])
    assert source.bernoulli(torch.tensor([0.0, 1e-30]), torch.tensor([0.5, 0.5]), everywhere).tolist() == [False, True]
    assert source.categorical(torch.tensor([[[0.0, 0.3, 0.7]], [[0.0, 0.0, 1.0]]]))[:, 0].tolist() == [1, 2]


def test_the_largest_number_draws_the_last_possible_token() -> None:
    probs = torch.tensor([[[0.1, 0.2, 0.3, 0.0]]]) / 3
    assert Fixed(math.nextafter(1.0, 0.0), rows=1).categorical(probs).item() == 2


def test_a_distribution_of_zeros_names_some_token() -> None:
    assert 0 <= rng([0]).categorical(torch.zeros(1, 1, 5)).item() < 5


def test_more_numbers_than_one_block() -> None:
    times = 3 * _BLOCK + 5
    decisions = ask(rng([1, 2]), 2, times)
    assert decisions[:, 0].tolist() == ask(rng([1]), 1, times)[:, 0].tolist()
    for block in decisions[:, 0].split(_BLOCK):  # type: ignore[no-untyped-call]
        assert 0 < block.float().mean() < 1, "a block of equal decisions"
    assert decisions[:_BLOCK, 0].tolist() != decisions[_BLOCK : 2 * _BLOCK, 0].tolist()


def test_seed_position_and_stream_each_matter() -> None:
    def numbers(seed: int, position: int, stream: int) -> tuple[bool, ...]:
        return tuple(ask(rng([seed], [position], stream), 1, 60)[:, 0].tolist())

    streams = {numbers(s, p, stream) for s in (0, 1, -1) for p in (0, 1, 2) for stream in (DRAFT, VERIFY)}
    assert len(streams) == 18
    assert numbers(3, 4, DRAFT) == numbers(3, 4, DRAFT)


# Candidates ----------------------------------------------------------------------------------------------------

PROBS = torch.tensor([0.4, 0.0, 0.35, 0.25])
ROWS = 4000


def drawn(probs: torch.Tensor, count: int, kind: DraftSampling) -> torch.Tensor:
    rows = probs.shape[0]
    return draw_candidates(probs, count, kind, rng(list(range(rows)), stream=DRAFT))


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
