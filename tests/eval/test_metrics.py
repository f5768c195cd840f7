"""Metrics against hand-counted logs, and the identities between them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthead.data.contracts import DecodeResult, Ratio, StepRecord
from drafthead.eval import metrics


def step(accepted: int, committed: int, depth: int = 3, total_s: float = 1.0) -> StepRecord:
    return StepRecord(
        position=0,
        proposed=depth,
        depth=depth,
        accepted=accepted,
        committed=committed,
        draft_s=0.1 * total_s,
        verify_s=0.8 * total_s,
        total_s=total_s,
    )


def answer(steps: list[StepRecord], prefill_s: float = 1.0) -> DecodeResult:
    tokens = [7] * (1 + sum(s.committed for s in steps))
    return DecodeResult(
        tokens=tokens, steps=steps, prefill_s=prefill_s, total_s=prefill_s + sum(s.total_s for s in steps)
    )


# Accepted 2, 0, 3, 1; EOS cut the last step's two tokens to one.
LOG = [answer([step(2, 3), step(0, 1)]), answer([step(3, 4, total_s=3.0), step(1, 1, depth=2)])]


def test_counted_by_hand() -> None:
    assert metrics.mean_accepted_tokens(LOG) == Ratio(9, 4)
    assert metrics.acceptance_per_depth(LOG) == [Ratio(3, 4), Ratio(2, 3), Ratio(1, 2)]
    assert [metrics.ctar(LOG, w) for w in (1, 2, 3, 4)] == [Ratio(2, 4), Ratio(2, 4), Ratio(1, 4), Ratio(0, 4)]
    assert metrics.tokens_per_second(LOG) == Ratio(11, 8.0)
    assert metrics.overhead(LOG).value == pytest.approx(0.1)


def test_a_depth_that_was_not_offered_is_no_rejection() -> None:
    """Depth 2 was offered once and accepted: certain, although another step stopped at its own end."""
    log = [answer([step(1, 2, depth=1), step(2, 3, depth=2)])]
    assert metrics.acceptance_per_depth(log) == [Ratio(2, 2), Ratio(1, 1)]


def test_plain_decoding_commits_one_token_a_step() -> None:
    plain = [answer([step(0, 1, depth=0)] * 5)]
    assert metrics.mean_accepted_tokens(plain).value == 1
    assert metrics.acceptance_per_depth(plain) == []
    assert metrics.ctar(plain, 1).value == 0


def test_nothing_counted_is_nan() -> None:
    nothing = [DecodeResult(tokens=[], steps=[], prefill_s=0.0, total_s=0.0)]
    for ratio in (metrics.mean_accepted_tokens(nothing), metrics.tokens_per_second(nothing), metrics.overhead(nothing)):
        assert math.isnan(ratio.value)


DEPTH = 4
steps = st.integers(0, DEPTH).flatmap(
    lambda accepted: st.integers(1, accepted + 1).map(lambda committed: step(accepted, committed, depth=DEPTH))
)
logs = st.lists(st.lists(steps, min_size=1, max_size=6).map(answer), min_size=1, max_size=4)


@given(logs)
def test_ctar_sums_to_the_mean(log: list[DecodeResult]) -> None:
    total = sum(metrics.ctar(log, width).value for width in range(DEPTH + 2))
    assert total == pytest.approx(metrics.mean_accepted_tokens(log).value)


@given(st.lists(st.integers(0, DEPTH), min_size=1, max_size=20))
def test_running_products_sum_to_the_mean(accepted: list[int]) -> None:
    """At full depth, with nothing cut off: mean = 1 + sum_i prod_{j<=i} a_j."""
    log = [answer([step(a, a + 1, depth=DEPTH) for a in accepted])]
    mean, product = 1.0, 1.0
    for ratio in metrics.acceptance_per_depth(log):
        product *= ratio.value if ratio.den else 0.0
        mean += product
    assert mean == pytest.approx(metrics.mean_accepted_tokens(log).value)
