"""Equality with autoregressive decoding, and the diagnosis of a difference."""

import json
import math
from collections.abc import Callable

import pytest
import torch

from drafthead.eval.lossless.equality import TOLERANCE, Diagnosis, Equality, compare_outputs, diagnose, equality_rate

EXPECTED, SPECULATIVE, OTHER = 2, 5, 9


def margin_of(value: float) -> Callable[[int], float]:
    return lambda position: value


def never(position: int) -> float:
    raise AssertionError("the margin is costly: not needed without two tokens to compare")


CASES = [
    # margin, fresh, cached -> diagnosis
    (5e-5, EXPECTED, EXPECTED, Diagnosis.TIE),
    (5e-5, OTHER, None, Diagnosis.TIE),
    (-5e-5, SPECULATIVE, None, Diagnosis.TIE),
    (3.0, EXPECTED, EXPECTED, Diagnosis.CACHE),
    (3.0, EXPECTED, SPECULATIVE, Diagnosis.MASK),
    (3.0, EXPECTED, OTHER, Diagnosis.MASK),
    (3.0, SPECULATIVE, SPECULATIVE, Diagnosis.AUTOREGRESSIVE),
    (3.0, SPECULATIVE, None, Diagnosis.AUTOREGRESSIVE),
    (3.0, OTHER, EXPECTED, Diagnosis.UNKNOWN),
    (3.0, EXPECTED, None, Diagnosis.UNKNOWN),
    (3.0, None, None, Diagnosis.UNKNOWN),
    (math.nan, EXPECTED, EXPECTED, Diagnosis.CACHE),
]


@pytest.mark.parametrize(("margin", "fresh", "cached", "expected"), CASES)
def test_diagnosis(margin: float, fresh: int | None, cached: int | None, expected: Diagnosis) -> None:
    found = diagnose(
        margin=margin,
        fresh_token=fresh,
        cached_token=cached,
        expected_token=EXPECTED,
        speculative_token=SPECULATIVE,
        position=7,
    )
    assert found.diagnosis is expected
    assert (found.same, found.position, found.tokens) == (False, 7, (EXPECTED, SPECULATIVE))
    assert found.near_tie == (expected is Diagnosis.TIE)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_tolerance_is_the_types(dtype: torch.dtype) -> None:
    def found(margin: float) -> Diagnosis | None:
        return diagnose(
            margin=margin,
            fresh_token=EXPECTED,
            cached_token=EXPECTED,
            expected_token=EXPECTED,
            speculative_token=SPECULATIVE,
            dtype=dtype,
        ).diagnosis

    assert found(0.99 * TOLERANCE[dtype]) is Diagnosis.TIE
    assert found(TOLERANCE[dtype]) is Diagnosis.CACHE


def test_compare_outputs() -> None:
    assert compare_outputs([1, 2], [1, 2], never) == Equality(same=True)
    assert compare_outputs([1, 2, 3], [1, 5, 3], margin_of(-5e-5)) == Equality(
        same=False, position=1, tokens=(2, 5), margin=5e-5, near_tie=True, diagnosis=Diagnosis.TIE
    )
    assert not compare_outputs([1], [2], margin_of(1e-4)).near_tie
    assert not compare_outputs([1], [2], margin_of(math.nan)).near_tie
    assert compare_outputs([1], [2], margin_of(0.2), dtype=torch.bfloat16).near_tie
    ended = compare_outputs([1, 2, 3], [1, 2], never)
    assert ended == Equality(same=False, position=2, diagnosis=Diagnosis.STOP)


def test_it_recomputes_only_where_rounding_explains_nothing() -> None:
    positions: list[int] = []

    def recompute(position: int) -> tuple[int | None, int | None]:
        positions.append(position)
        return 2, 5

    assert compare_outputs([1, 2], [1, 5], margin_of(1e-6), recompute).diagnosis is Diagnosis.TIE
    assert positions == []
    assert compare_outputs([1, 2], [1, 5], margin_of(1.5), recompute).diagnosis is Diagnosis.MASK
    assert positions == [1]
    assert compare_outputs([1, 2], [1, 5], margin_of(1.5)).diagnosis is Diagnosis.UNKNOWN


def test_the_rate_counts_diagnoses() -> None:
    tie = Equality(False, 3, (1, 2), 0.1, True, Diagnosis.TIE)
    rate = equality_rate([Equality(True), tie, tie, Equality(False, 9, diagnosis=Diagnosis.STOP)], torch.bfloat16)
    assert rate == {"dtype": "bfloat16", "same": 1, "of": 4, "found": {"tie": 2, "one answer ends early": 1}}
    assert json.loads(json.dumps(tie.to_json()))["diagnosis"] == "tie"
