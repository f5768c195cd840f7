"""Speeds against a baseline in both conventions, the bootstrap, and the table that names every metric."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthead.eval.metrics import speed
from drafthead.eval.metrics.speed import measure
from drafthead.models.decoding.step_log import DecodeResult
from support import steady_answer, step_record


def answer(committed: list[int], step_s: float = 1.0, prefill_s: float = 0.5) -> DecodeResult:
    steps = [step_record(count - 1, total_s=step_s) for count in committed]
    total = prefill_s + step_s * len(steps)
    return DecodeResult(tokens=[5] * (1 + sum(committed)), steps=steps, prefill_s=prefill_s, total_s=total)


BASELINE = [answer([1] * 4), answer([1] * 9)]
METHOD = [answer([4], step_s=2.0), answer([4, 4, 1], step_s=2.0)]


def test_both_conventions_counted_by_hand() -> None:
    assert speed.speedup(BASELINE, METHOD).value == pytest.approx((15 / 9.0) / (15 / 14.0))
    assert measure(BASELINE, METHOD, len)["decode_speedup"] == pytest.approx((13 / 8.0) / (13 / 13.0))
    # Of every 5 baseline tokens one vanishes when the text is tokenised again.
    compatible = speed.spec_bench(BASELINE, METHOD, lambda tokens: len(tokens) - len(tokens) // 5)
    assert compatible.autoregressive_tokens_per_second == pytest.approx((4 / 4.5 + 8 / 9.5) / 2)
    assert compatible.tokens_per_second == pytest.approx((5 / 2.5 + 10 / 6.5) / 2)
    assert compatible.speedup == pytest.approx(
        compatible.tokens_per_second / compatible.autoregressive_tokens_per_second
    )
    assert compatible.mean_accepted_length == pytest.approx(13 / 4)


def test_answers_without_tokens_are_no_rate() -> None:
    failed = DecodeResult(tokens=[], steps=[], prefill_s=0.0, total_s=0.0)
    with_failed = speed.spec_bench([*BASELINE, failed], [*METHOD, failed], len)
    assert with_failed == speed.spec_bench(BASELINE, METHOD, len)
    assert math.isnan(speed.spec_bench([failed], [failed], len).speedup)


def test_every_metric_is_plain_json() -> None:
    values = measure(BASELINE, METHOD, len)
    assert all(value is not None for value in values.values()) and len(values) == 25
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    nothing = measure([], [], len)
    json.dumps(nothing, allow_nan=False)
    assert nothing["mean_accepted_length"] is None and nothing["ctar"] == []


committed = st.lists(st.integers(1, 4), min_size=1, max_size=6)
seconds = st.floats(0.5, 2.0)


@given(st.lists(committed, min_size=1, max_size=4), seconds, seconds)
def test_speedup_of_steps_is_rate_over_overhead(log: list[list[int]], baseline_s: float, step_s: float) -> None:
    """Medusa's speedup = acceleration rate / overhead is the exact decode speedup without the prefill."""
    method = [answer(counts, step_s) for counts in log]
    baseline = [answer([1] * sum(counts), baseline_s) for counts in log]
    values = measure(baseline, method, len)
    rate, overhead, decode_speedup = (
        float(str(values[name])) for name in ("acceleration_rate", "step_overhead", "decode_speedup")
    )
    assert rate / overhead == pytest.approx(decode_speedup)
    assert measure(baseline, baseline, len)["decode_speedup"] == 1


def test_speedup_is_a_ratio_of_totals_with_a_paired_interval() -> None:
    """Prompts of very different length, each exactly twice as fast: pairing leaves no doubt at all."""
    baseline = [steady_answer(n, n / 10) for n in (4, 40, 400)]
    method = [steady_answer(n, n / 20) for n in (4, 40, 400)]
    assert speed.speedup_interval(baseline, method) == pytest.approx((2.0, 2.0, 2.0))

    uneven = [steady_answer(10, 1.0), steady_answer(100, 5.0)]
    ratio, low, high = speed.speedup_interval([steady_answer(10, 1.0), steady_answer(100, 10.0)], uneven)
    assert ratio == pytest.approx((110 / 6) / (110 / 11))
    assert (low, high) == pytest.approx((1.0, 2.0))
    assert speed.speedup_interval(baseline, method, seed=1) == speed.speedup_interval(baseline, method, seed=1)


def test_the_turns_of_a_conversation_are_drawn_together() -> None:
    """Two conversations of two turns, one twice as fast and one as fast: the bounds are those of single prompts."""
    baseline = [steady_answer(10, 1.0)] * 4
    method = [steady_answer(10, 0.4), steady_answer(10, 0.6), steady_answer(10, 0.9), steady_answer(10, 1.1)]
    _, low, high = speed.speedup_interval(baseline, method, [0, 0, 1, 1])
    assert (low, high) == pytest.approx((1.0, 2.0))


def test_interval_needs_two_prompts() -> None:
    ratio, low, high = speed.speedup_interval([steady_answer(8, 2.0)], [steady_answer(8, 1.0)])
    assert ratio == 2
    assert math.isnan(low) and math.isnan(high)
    assert all(math.isnan(x) for x in speed.speedup_interval([], []))
