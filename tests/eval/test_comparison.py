"""Metrics against plain decoding in both conventions, and the table that names them all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthead.data.batch import Ratio
from drafthead.eval.metrics import acceptance as metrics
from drafthead.eval.metrics import comparison
from drafthead.eval.metrics.comparison import METRICS, Log, measure
from drafthead.models.decoding.step_log import DecodeResult, StepRecord


def answer(committed: list[int], step_s: float = 1.0, prefill_s: float = 0.5) -> DecodeResult:
    steps = [
        StepRecord(
            position=1 + sum(committed[:n]),
            proposed=3,
            depth=3,
            accepted=count - 1,
            committed=count,
            draft_s=0.1 * step_s,
            verify_s=0.8 * step_s,
            total_s=step_s,
        )
        for n, count in enumerate(committed)
    ]
    total = prefill_s + step_s * len(steps)
    return DecodeResult(tokens=[5] * (1 + sum(committed)), steps=steps, prefill_s=prefill_s, total_s=total)


PLAIN = [answer([1] * 4), answer([1] * 9)]
METHOD = [answer([4], step_s=2.0), answer([4, 4, 1], step_s=2.0)]


def test_both_conventions_counted_by_hand() -> None:
    assert comparison.speedup(PLAIN, METHOD).value == pytest.approx((15 / 9.0) / (15 / 14.0))
    assert comparison.decode_speedup(PLAIN, METHOD).value == pytest.approx((13 / 8.0) / (13 / 13.0))
    # Of every 5 plain tokens one vanishes when the text is tokenised again.
    found = comparison.spec_bench(PLAIN, METHOD, lambda tokens: len(tokens) - len(tokens) // 5)
    assert found.baseline_tokens_per_second == pytest.approx((4 / 4.5 + 8 / 9.5) / 2)
    assert found.tokens_per_second == pytest.approx((5 / 2.5 + 10 / 6.5) / 2)
    assert found.speedup == pytest.approx(found.tokens_per_second / found.baseline_tokens_per_second)
    assert found.mean_accepted_tokens == pytest.approx(13 / 4)


def test_turns_of_a_question_make_one_rate() -> None:
    found = comparison.spec_bench(PLAIN, METHOD, len, questions=["a", "a"])
    assert found.tokens_per_second == pytest.approx(15 / 9.0)
    assert found.speedup == pytest.approx(comparison.speedup(PLAIN, METHOD).value)


def test_answers_without_tokens_are_no_rate() -> None:
    failed = DecodeResult(tokens=[], steps=[], prefill_s=0.0, total_s=0.0)
    with_failed = comparison.spec_bench([*PLAIN, failed], [*METHOD, failed], len)
    assert with_failed == comparison.spec_bench(PLAIN, METHOD, len)
    assert comparison.spec_bench([failed], [failed], len).to_json()["speedup"] is None


def test_every_metric_has_a_convention_and_is_plain_json() -> None:
    found = measure(Log(method=METHOD, plain=PLAIN, retokenised=len))
    assert set(found) == set(METRICS)
    assert all(value is not None for value in found.values())
    assert all(metric.name == name and metric.convention for name, metric in METRICS.items())
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_what_the_log_cannot_give_is_none() -> None:
    found = measure(Log(method=METHOD))
    paired = {"step_overhead", "speedup", "decode_speedup", "spec_bench_speedup", "spec_bench_tokens_per_second"}
    assert {name for name, value in found.items() if value is None} == paired
    nothing = measure(Log(method=[], plain=[], retokenised=len))
    json.dumps(nothing, allow_nan=False)
    assert nothing["mean_accepted_tokens"] is None and nothing["ctar"] == []


committed = st.lists(st.integers(1, 4), min_size=1, max_size=6)
seconds = st.floats(0.5, 2.0)


@given(st.lists(committed, min_size=1, max_size=4), seconds, seconds)
def test_speedup_of_steps_is_rate_over_overhead(log: list[list[int]], plain_s: float, step_s: float) -> None:
    """Medusa's speedup = acceleration rate / overhead is the exact decode speedup, prefill apart."""
    method = [answer(counts, step_s) for counts in log]
    plain = [answer([1] * sum(counts), plain_s) for counts in log]
    rate, overhead = comparison.acceleration_rate(method), comparison.step_overhead(plain, method)
    assert rate.value / overhead.value == pytest.approx(comparison.decode_speedup(plain, method).value)
    assert rate == metrics.mean_accepted_tokens(method)
    assert comparison.decode_speedup(plain, plain) == Ratio(pytest.approx(1 / plain_s), pytest.approx(1 / plain_s))
