"""Equality with autoregressive decoding, and the diagnosis of a difference."""

import math

import pytest
import torch

from drafthead.eval.lossless.equality import TOLERANCE, Diagnosis, Equality, compare_outputs, draw_margin, fresh_logits
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.random_source import sampling_point
from drafthead.models.decoding.sampling import Sampler
from support import cases, small_base

EXPECTED, SPECULATIVE, OTHER = 2, 5, 9


def found(
    margin: float, fresh: int | None = None, cached: int | None = None, dtype: torch.dtype = torch.float32
) -> Equality:
    expected, tokens = [1, EXPECTED, 3], [1, SPECULATIVE, 3]
    return compare_outputs(expected, tokens, {1: margin}.__getitem__, {1: (fresh, cached)}.__getitem__, dtype)


@cases(
    "margin, fresh, cached, expected",
    (5e-5, EXPECTED, EXPECTED, Diagnosis.TIE),
    (-5e-5, SPECULATIVE, None, Diagnosis.TIE),
    (3.0, EXPECTED, EXPECTED, Diagnosis.CACHE),
    (3.0, EXPECTED, SPECULATIVE, Diagnosis.MASK),
    (3.0, SPECULATIVE, SPECULATIVE, Diagnosis.AUTOREGRESSIVE),
    (3.0, OTHER, EXPECTED, Diagnosis.UNKNOWN),
    (3.0, EXPECTED, None, Diagnosis.UNKNOWN),
    (math.nan, EXPECTED, EXPECTED, Diagnosis.CACHE),
)
def test_diagnosis(margin: float, fresh: int | None, cached: int | None, expected: Diagnosis) -> None:
    equality = found(margin, fresh, cached)
    assert equality.diagnosis is expected
    assert (equality.same, equality.position, equality.tokens) == (False, 1, (EXPECTED, SPECULATIVE))
    assert equality.near_tie == (expected is Diagnosis.TIE)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_tolerance_is_the_types(dtype: torch.dtype) -> None:
    assert found(0.99 * TOLERANCE[dtype], dtype=dtype).diagnosis is Diagnosis.TIE
    assert found(TOLERANCE[dtype], EXPECTED, EXPECTED, dtype).diagnosis is Diagnosis.CACHE


def test_nothing_costly_is_computed_without_need() -> None:
    def never(position: int) -> float:
        raise AssertionError("costly, and not needed")

    assert compare_outputs([1, 2], [1, 2], never) == Equality(same=True)
    ended = compare_outputs([1, 2, 3], [1, 2], never)
    assert ended == Equality(same=False, position=2, diagnosis=Diagnosis.STOP)
    assert compare_outputs([1], [2], lambda _: 1e-6, never).near_tie  # type: ignore[arg-type]
    assert compare_outputs([1], [2], lambda _: 1.5).diagnosis is Diagnosis.UNKNOWN


def test_two_sampled_tokens_tie_where_the_drawn_number_lies_between_them() -> None:
    base, sampler, ids, seed = small_base(), Sampler(temperature=1.0), [5, 6, 7], 3
    ends = sampler.probs(fresh_logits(base, ids)[None])[0].double().cumsum(0)
    drawn = int((ends <= sampling_point(seed, 0) * ends[-1]).sum())
    assert draw_margin(base, sampler, seed, ids, [drawn], [drawn], 0) == 0
    apart = [draw_margin(base, sampler, seed, ids, [drawn], [drawn + step], 0) for step in (1, 2, 3)]
    assert apart == sorted(apart) and apart[0] == pytest.approx(float(ends[drawn]) - sampling_point(seed, 0), abs=1e-6)


def test_two_coupled_tokens_tie_where_they_arrive_together() -> None:
    base, sampler, ids, seed = small_base(), Sampler(temperature=1.0, coupled=True), [5, 6, 7], 3
    (drawn,) = decode(base, None, ids, seed=seed, max_new_tokens=1, sampler=sampler).tokens
    apart = [draw_margin(base, sampler, seed, ids, [drawn], [token], 0) for token in range(base.vocab_size)]
    assert apart[drawn] == 0 < min(margin for token, margin in enumerate(apart) if token != drawn)
