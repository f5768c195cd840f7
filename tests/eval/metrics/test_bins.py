"""Acceptance by position, entropy and task: bins hold each step once, and what has no key is left out."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthead.data.batch import Ratio
from drafthead.eval.metrics import acceptance as metrics
from drafthead.eval.metrics.acceptance import by_entropy, by_position
from drafthead.models.decoding.step_log import DecodeResult, StepRecord


def answer(rows: list[tuple[int, float]]) -> DecodeResult:
    """One step per (drafts accepted of 3, entropy)."""
    steps = []
    position = 1
    for accepted, entropy in rows:
        steps.append(
            StepRecord(
                position=position,
                proposed=3,
                depth=3,
                accepted=accepted,
                committed=accepted + 1,
                entropy=entropy,
                draft_s=0.1,
                verify_s=0.8,
                total_s=1.0,
            )
        )
        position += accepted + 1
    return DecodeResult(tokens=[5] * position, steps=steps, prefill_s=1.0, total_s=1.0 + len(steps))


def test_by_position_counted_by_hand() -> None:
    log = [answer([(3, 0.1), (3, 0.1), (0, 0.1)]), answer([(1, 0.1)])]  # positions 1, 5, 9 and 1
    found = by_position(log, width=4)
    assert [(b.low, b.high, b.mean_accepted_length) for b in found] == [
        (0, 4, Ratio(6, 2)),
        (4, 8, Ratio(4, 1)),
        (8, 12, Ratio(1, 1)),
    ]
    assert [b.first_accepted for b in found] == [Ratio(2, 2), Ratio(1, 1), Ratio(0, 1)]


def test_by_entropy_bins_are_equally_full_and_nan_is_nowhere() -> None:
    log = [answer([(3, 0.1), (2, 0.2), (0, 3.0), (0, 4.0), (3, math.nan)])]
    low, high = by_entropy(log, bins=2)
    assert (low.mean_accepted_length, high.mean_accepted_length) == (Ratio(7, 2), Ratio(2, 2))
    assert (low.low, high.high) == (0.1, 4.0)
    assert by_entropy([answer([(1, math.nan)])]) == []
    only = by_entropy([answer([(1, 0.5), (0, 0.5)])])
    assert [(b.low, b.high, b.mean_accepted_length) for b in only] == [(0.5, 0.5, Ratio(3, 2))]


entropies = st.one_of(st.floats(0, 8), st.just(0.0), st.just(math.nan))
logs = st.lists(st.lists(st.tuples(st.integers(0, 3), entropies), max_size=8).map(answer), max_size=4)


@given(logs, st.integers(1, 6), st.integers(1, 40))
def test_every_step_is_in_one_bin(log: list[DecodeResult], bins: int, width: int) -> None:
    steps = metrics.steps_of(log)
    total = sum((b.mean_accepted_length for b in by_position(log, width)), Ratio(0, 0))
    assert total == metrics.mean_accepted_length(log)
    known = [s for s in steps if math.isfinite(s.entropy)]
    found = by_entropy(log, bins)
    total = sum((b.mean_accepted_length for b in found), Ratio(0, 0))
    assert total == Ratio(sum(s.committed for s in known), len(known))
    assert len(found) <= bins
    json.dumps([b.to_json() for b in (*found, *by_position(log))], allow_nan=False)


def test_a_bin_without_drafts_has_no_first_acceptance() -> None:
    plain = StepRecord(position=1, proposed=0, depth=0, accepted=0, committed=1, draft_s=0.0, verify_s=1.0, total_s=1.0)
    (found,) = by_position([DecodeResult(tokens=[1, 2], steps=[plain], prefill_s=1.0, total_s=2.0)])
    assert math.isnan(found.to_json()["first_accepted"])
    assert found.to_json()["mean_accepted_length"] == pytest.approx(1)
