"""Metrics of one log against hand-counted logs, and the identities between them."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthead.data.batch import Ratio
from drafthead.eval.metrics import acceptance as metrics
from drafthead.eval.metrics import speed
from drafthead.eval.metrics.acceptance import by_context, by_entropy, by_position
from drafthead.models.decoding.step_log import DecodeResult, StepRecord
from support import step_record as step


def answer(steps: list[StepRecord], prefill_s: float = 1.0) -> DecodeResult:
    tokens = [7] * (1 + sum(s.committed for s in steps))
    return DecodeResult(
        tokens=tokens, steps=steps, prefill_s=prefill_s, total_s=prefill_s + sum(s.total_s for s in steps)
    )


def published(log: list[DecodeResult]) -> dict[str, Any]:
    return metrics.published_metrics(log)


# Accepted 2, 0, 3, 1; EOS cut the last step's two tokens to one.
LOG = [answer([step(2, 3), step(0, 1)]), answer([step(3, 4, total_s=3.0), step(1, 1, depth=2)])]


def test_counted_by_hand() -> None:
    assert metrics.mean_accepted_length(LOG) == Ratio(9, 4)
    assert metrics.acceptance_per_depth(LOG) == [Ratio(3, 4), Ratio(2, 3), Ratio(1, 2)]
    assert [metrics.ctar(LOG, w) for w in (1, 2, 3, 4)] == [Ratio(2, 4), Ratio(2, 4), Ratio(1, 4), Ratio(0, 4)]
    assert speed.tokens_per_second(LOG) == Ratio(11, 8.0)
    assert speed.measure(LOG, LOG, len)["loop_overhead"] == pytest.approx(0.1)
    assert speed.decode_tokens_per_second(LOG) == Ratio(9, 6.0)
    # EOS cut a token off the last step, which only the counts of committed tokens see.
    assert metrics.mean_accepted_length_untruncated(LOG) == Ratio(10, 4)
    assert published(LOG)["mean_accepted_drafts"] == Ratio(6, 4)
    assert published(LOG)["acceptance_rate"] == published(LOG)["node_efficiency"] == Ratio(6, 11)
    assert published(LOG)["acceptance_per_depth_of_all"] == [Ratio(3, 4), Ratio(2, 4), Ratio(1, 4)]
    assert metrics.alpha(LOG) == Ratio(6, 3 + 1 + 3 + 2)
    assert published(LOG)["compression_ratio_as_released"] == Ratio(11, 6)
    assert published(LOG)["tar_as_analysed"] == Ratio(1 + 2, 2)


def test_a_depth_that_was_not_offered_is_no_rejection() -> None:
    """Depth 2 was offered once and accepted: certain, although another step stopped at its own end."""
    log = [answer([step(1, 2, depth=1), step(2, 3, depth=2)])]
    assert metrics.acceptance_per_depth(log) == [Ratio(2, 2), Ratio(1, 1)]


def test_a_step_without_a_draft_counts_for_the_target_and_not_for_the_draft() -> None:
    """Prompt lookup that finds a match in one of two steps."""
    log = [answer([step(0, 1, depth=0), step(2, 3, depth=2)])]
    assert metrics.mean_accepted_length_untruncated(log) == Ratio(4, 2)
    assert published(log)["mean_accepted_length_if_drafted"] == Ratio(3, 1)
    assert published(log)["acceptance_per_depth_of_all"] == [Ratio(1, 1), Ratio(1, 1)]


def test_a_tree_does_not_tell_alpha() -> None:
    tree = [answer([replace(step(1, 2, depth=2), proposed=5), replace(step(0, 1, depth=2), proposed=5)])]
    assert metrics.alpha(tree) is None and published(tree)["n_alpha"] is None
    assert published(LOG)["n_alpha"] == metrics.acceptance_per_depth(LOG)
    assert published(tree)["node_efficiency"] == Ratio(1, 10) and published(tree)["acceptance_rate"] == Ratio(1, 4)


DEPTH = 4
steps = st.integers(0, DEPTH).flatmap(
    lambda depth: st.integers(0, depth).flatmap(
        lambda accepted: st.integers(1, accepted + 1).map(lambda committed: step(accepted, committed, depth=depth))
    )
)
logs = st.lists(st.lists(steps, min_size=1, max_size=6).map(answer), min_size=1, max_size=4)
full_depth = st.lists(st.integers(0, DEPTH), min_size=1, max_size=20).map(
    lambda accepted: [answer([step(a, a + 1, depth=DEPTH) for a in accepted])]
)


@given(logs)
def test_ctar_sums_to_the_mean(log: list[DecodeResult]) -> None:
    mean = metrics.mean_accepted_length(log).value
    assert sum(metrics.ctar(log, width).value for width in range(DEPTH + 2)) == pytest.approx(mean)
    curve = published(log)["ctar"]
    assert sum(ratio.value for ratio in curve) == pytest.approx(mean)
    assert curve[0].value == 1 and [r.value for r in curve] == sorted((r.value for r in curve), reverse=True)


@given(logs)
def test_the_conventions_differ_by_the_bonus_and_by_what_was_cut_off(log: list[DecodeResult]) -> None:
    untruncated = metrics.mean_accepted_length_untruncated(log).value
    assert untruncated == pytest.approx(1 + published(log)["mean_accepted_drafts"].value)
    assert metrics.mean_accepted_length(log).value <= untruncated
    drafting = published(log)["mean_accepted_length_if_drafted"]
    if drafting.den:
        assert untruncated <= drafting.value
        total = sum(ratio.value for ratio in published(log)["acceptance_per_depth_of_all"])
        assert 1 + total == pytest.approx(drafting.value)


@given(full_depth)
def test_running_products_sum_to_the_mean(log: list[DecodeResult]) -> None:
    """At full depth, with nothing cut off: mean = 1 + sum_i prod_{j<=i} a_j."""
    mean = metrics.mean_accepted_length(log).value
    assert 1 + published(log)["simulated_accepted_drafts"].value == pytest.approx(mean)
    assert published(log)["acceptance_rate"].value == pytest.approx((mean - 1) / DEPTH)
    # alpha is the mean acceptance of the drafts that were tried
    per_depth, alpha = metrics.acceptance_per_depth(log), metrics.alpha(log)
    assert alpha == Ratio(sum(r.num for r in per_depth), sum(r.den for r in per_depth))
    assert alpha.value >= published(log)["acceptance_rate"].value


# Bins by position and entropy --------------------------------------------------------------------------------


def by_rows(rows: list[tuple[int, float]]) -> DecodeResult:
    """One step per (drafts accepted of 3, entropy)."""
    positions = [1 + sum(accepted + 1 for accepted, _ in rows[:n]) for n in range(len(rows))]
    return answer([step(a, position=p, entropy=e) for (a, e), p in zip(rows, positions, strict=True)])


def test_by_position_counted_by_hand() -> None:
    log = [by_rows([(3, 0.1), (3, 0.1), (0, 0.1)]), by_rows([(1, 0.1)])]  # positions 1, 5, 9 and 1
    bins = by_position(log, width=4)
    assert [tuple(b.values()) for b in bins] == [(0, 4, 2, 3, 1), (4, 8, 1, 4, 1), (8, 12, 1, 1, 0)]


def test_by_context_counts_the_prompt() -> None:
    log = [by_rows([(3, 0.1), (3, 0.1), (0, 0.1)]), by_rows([(1, 0.1)])]
    bins = by_context(log, [250, 600])  # 251, 255 and 259 tokens, and 601
    assert [(b["low"], b["high"], b["steps"], b["mean_accepted_length"]) for b in bins] == [
        (0, 256, 2, 4),
        (256, 512, 1, 1),
        (512, 1024, 1, 2),
    ]


def test_by_entropy_bins_are_equally_full_and_nan_is_nowhere() -> None:
    log = [by_rows([(3, 0.1), (2, 0.2), (0, 3.0), (0, 4.0), (3, math.nan)])]
    low, high = by_entropy(log, bins=2)
    assert (low["mean_accepted_length"], high["mean_accepted_length"]) == (7 / 2, 2 / 2)
    assert (low["low"], high["high"]) == (0.1, 4.0)
    assert by_entropy([by_rows([(1, math.nan)])]) == []
    only = by_entropy([by_rows([(1, 0.5), (0, 0.5)])])
    assert [(b["low"], b["high"], b["mean_accepted_length"]) for b in only] == [(0.5, 0.5, 3 / 2)]


entropies = st.one_of(st.floats(0, 8), st.just(0.0), st.just(math.nan))
binned_logs = st.lists(st.lists(st.tuples(st.integers(0, 3), entropies), max_size=8).map(by_rows), max_size=4)


@given(binned_logs, st.integers(1, 6), st.integers(1, 40))
def test_every_step_is_in_one_bin(log: list[DecodeResult], bins: int, width: int) -> None:
    steps = metrics.steps_of(log)
    known = [s for s in steps if math.isfinite(s.entropy)]
    by_nats = by_entropy(log, bins)
    assert len(by_nats) <= bins
    for binned, rows in ((steps, by_position(log, width)), (known, by_nats)):
        assert sum(row["steps"] for row in rows) == len(binned)
        total = sum(row["steps"] * row["mean_accepted_length"] for row in rows)
        assert total == pytest.approx(sum(s.committed for s in binned))
    json.dumps(by_nats, allow_nan=False)


def test_a_bin_without_drafts_has_no_first_acceptance() -> None:
    (only_bin,) = by_position([answer([step(0, depth=0)])])
    assert math.isnan(only_bin["first_accepted"])
    assert only_bin["mean_accepted_length"] == pytest.approx(1)
