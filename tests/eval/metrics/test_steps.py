"""Metrics of the table of steps against hand-counted logs, and the breakdown of a speedup."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.eval.metrics import steps as metrics
from drafthead.eval.metrics.spans import answer_spans
from drafthead.eval.metrics.speedup_breakdown import (
    best_option,
    chain_values,
    expected_speedup,
    expected_tokens,
    optimal_lookahead,
    options,
    speedup_breakdown,
)
from drafthead.eval.metrics.steps import METRICS, by_context, by_entropy, by_position, by_span, speedup, step_table
from drafthead.eval.trees.search import TreeOrder
from drafthead.files.local import finite
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.step import DecodeResult, StepRecord
from support import cases, steady_answer, step_record
from support import step_record as step


def answer(steps: list[StepRecord], prefill_s: float = 1.0) -> DecodeResult:
    tokens = [7] * (1 + sum(s.committed for s in steps))
    total_s = prefill_s + sum(s.total_s for s in steps)
    return DecodeResult(tokens=tokens, steps=steps, prefill_s=prefill_s, total_s=total_s)


def timed(committed: list[int], step_s: float = 1.0) -> DecodeResult:
    return answer([step(count - 1, total_s=step_s) for count in committed], prefill_s=0.5)


def rows_of(log: list[DecodeResult], **options: Any) -> metrics.Rows:
    return step_table({"m": log}, **options)


def measured(log: list[DecodeResult], baseline: list[DecodeResult] | None = None) -> dict[str, Any]:
    """Return all metrics of ``log``, as ``eval.json`` has them."""
    rows, base = rows_of(log), rows_of(log if baseline is None else baseline)
    return {name: metric(rows, base) for name, metric in METRICS.items()}


# Accepted 2, 0, 3, 1; EOS cut the last step's two tokens to one.
LOG = [answer([step(2, 3), step(0, 1)]), answer([step(3, 4, total_s=3.0), step(1, 1, depth=2)])]
TREE = [answer([replace(step(1, 2, depth=2), proposed=5), replace(step(0, 1, depth=2), proposed=5)])]
LOOKUP = [answer([step(0, 1, depth=0), step(2, 3, depth=2)])]
"""Prompt lookup that finds a match in one of two steps."""
SHORT = [answer([step(1, 2, depth=1), step(2, 3, depth=2)])]
"""Depth 2 was offered once and accepted: certain, although another step stopped at its own end."""


@cases(
    "log, values",
    (
        LOG,
        {
            "mean_accepted_length": 9 / 4,
            "acceptance_per_depth": [3 / 4, 2 / 3, 1 / 2],
            "ctar": [1, 1 / 2, 1 / 2, 1 / 4],
            "tokens_per_second": 11 / 8,
            "decode_tokens_per_second": 9 / 6,
            "loop_overhead": 0.1,
            "mean_accepted_length_untruncated": 10 / 4,
            "mean_accepted_drafts": 6 / 4,
            "acceptance_rate": 6 / 11,
            "node_efficiency": 6 / 11,
            "acceptance_per_depth_of_all": [3 / 4, 2 / 4, 1 / 4],
            "alpha": 6 / (3 + 1 + 3 + 2),
            "n_alpha": [3 / 4, 2 / 3, 1 / 2],
            "compression_ratio_as_released": 11 / 6,
            "tar_as_analysed": (1 + 2) / 2,
        },
    ),
    (SHORT, {"acceptance_per_depth": [1, 1]}),
    (LOOKUP, {"mean_accepted_length_untruncated": 2, "acceptance_per_depth_of_all": [1, 1]}),
    (LOOKUP, {"mean_accepted_length_if_drafted": 3}),
    (TREE, {"node_efficiency": 1 / 10, "acceptance_rate": 1 / 4, "alpha": None, "n_alpha": None}),
)
def test_counted_by_hand(log: list[DecodeResult], values: dict[str, Any]) -> None:
    assert {name: measured(log)[name] for name in values} == {k: pytest.approx(v) for k, v in values.items()}


# Speeds against a baseline -----------------------------------------------------------------------------------

BASELINE = [timed([1] * 4), timed([1] * 9)]
METHOD = [timed([4], step_s=2.0), timed([4, 4, 1], step_s=2.0)]


def test_both_conventions_counted_by_hand() -> None:
    values = measured(METHOD, BASELINE)
    assert values["speedup"] == pytest.approx((15 / 9.0) / (15 / 14.0))
    assert values["decode_speedup"] == pytest.approx((13 / 8.0) / (13 / 13.0))
    # Of every 5 baseline tokens one vanishes when the text is tokenised again.
    base = rows_of(BASELINE, retokenised=lambda tokens: len(tokens) - len(tokens) // 5)
    compatible = metrics.spec_bench(rows_of(METHOD), base)
    assert compatible["autoregressive_tokens_per_second"] == pytest.approx((4 / 4.5 + 8 / 9.5) / 2)
    assert compatible["tokens_per_second"] == pytest.approx((5 / 2.5 + 10 / 6.5) / 2)
    assert compatible["speedup"] == pytest.approx((5 / 2.5 + 10 / 6.5) / (4 / 4.5 + 8 / 9.5))
    assert compatible["mean_accepted_length"] == pytest.approx(13 / 4)


def test_every_metric_is_plain_json() -> None:
    values = finite(measured(METHOD, BASELINE))
    assert all(value is not None for value in values.values()) and len(values) == 25
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    nothing = finite(measured([]))
    json.dumps(nothing, allow_nan=False)
    assert nothing["mean_accepted_length"] is None and nothing["ctar"] == []


def interval(baseline: list[DecodeResult], method: list[DecodeResult], numbers: list[int] | None = None) -> Any:
    prompts = [EvalPrompt("t", n, []) for n in numbers or range(len(method))]
    rows, base = (rows_of(log, prompts=prompts, turns=list(range(len(log)))) for log in (method, baseline))
    return metrics.speedup(rows, base), *metrics.speedup_interval(rows, base)


def test_speedup_is_a_ratio_of_totals_with_a_paired_interval() -> None:
    """Prompts of very different length, each exactly twice as fast: pairing leaves no doubt at all."""
    baseline, method = ([steady_answer(n, n / speed) for n in (4, 40, 400)] for speed in (10, 20))
    assert interval(baseline, method) == pytest.approx((2.0, 2.0, 2.0))
    uneven = [steady_answer(10, 1.0), steady_answer(100, 5.0)]
    speedup, low, high = interval([steady_answer(10, 1.0), steady_answer(100, 10.0)], uneven)
    assert speedup == pytest.approx((110 / 6) / (110 / 11)) and (low, high) == pytest.approx((1.0, 2.0))
    speedup, *bounds = interval([steady_answer(8, 2.0)], [steady_answer(8, 1.0)])
    assert speedup == 2 and all(math.isnan(x) for x in (*bounds, *interval([], [])))


def test_the_turns_of_a_conversation_are_drawn_together() -> None:
    """Two conversations of two turns, one twice as fast and one as fast: the bounds are those of single prompts."""
    method = [steady_answer(10, seconds) for seconds in (0.4, 0.6, 0.9, 1.1)]
    assert interval([steady_answer(10, 1.0)] * 4, method, [0, 0, 1, 1])[1:] == pytest.approx((1.0, 2.0))


# Bins by position, context and entropy -----------------------------------------------------------------------


def by_rows(rows: list[tuple[int, float]]) -> DecodeResult:
    """One step per (drafts accepted of 3, entropy)."""
    positions = [1 + sum(accepted + 1 for accepted, _ in rows[:n]) for n in range(len(rows))]
    return answer([step(a, position=p, entropy=e) for (a, e), p in zip(rows, positions, strict=True)])


def test_by_position_and_context_counted_by_hand() -> None:
    log = [by_rows([(3, 0.1), (3, 0.1), (0, 0.1)]), by_rows([(1, 0.1)])]  # positions 1, 5, 9 and 1
    bins = by_position(rows_of(log), width=4)
    assert [tuple(b.values()) for b in bins] == [(0, 4, 2, 3, 1), (4, 8, 1, 4, 1), (8, 12, 1, 1, 0)]
    bins = by_context(rows_of(log, ids=[[0] * 250, [0] * 600]))  # 251, 255 and 259 tokens, and 601
    assert [tuple(b.values())[:4] for b in bins] == [(0, 256, 2, 4), (256, 512, 1, 1), (512, 1024, 1, 2)]
    (only_bin,) = by_position(rows_of([answer([step(0, depth=0)])]))
    assert math.isnan(only_bin["first_accepted"]) and only_bin["mean_accepted_length"] == pytest.approx(1)


@cases(
    "prompt, text, spans",
    ("hi", "plain", {"answer": "plain"}),
    ("hi", "<think>a b</think>yes", {"thinking": "<think>a b</think>", "answer": "yes"}),
    ("hi<think>\n", "because</think>yes", {"thinking": "because</think>", "answer": "yes"}),
    ("<think></think>", "no", {"answer": "no"}),
    (
        "hi",
        "so <tool_call>{1}</tool_call><tool_call>{2}</tool_call> ok",
        {"answer": "so  ok", "tool call": "<tool_call>{1}</tool_call><tool_call>{2}</tool_call>"},
    ),
    ("hi", "[THINK]x[/THINK][TOOL_CALLS]f", {"thinking": "[THINK]x[/THINK]", "tool call": "[TOOL_CALLS]f"}),
    ("hi", "<think>\u00e9", {"thinking": "<think>\u00e9"}),
)
def test_the_spans_of_an_answer(prompt: str, text: str, spans: dict[str, str]) -> None:
    tokenizer = tiny_tokenizer()
    before, tokens = (tokenizer(part, add_special_tokens=False).input_ids for part in (prompt, text))
    names = answer_spans(tokenizer, before, tokens)
    shown = {
        name: tokenizer.decode([token for token, span in zip(tokens, names, strict=True) if span == name])
        for name in dict.fromkeys(names)
    }
    assert shown == spans


def test_acceptance_by_span_is_of_the_step_that_begins_there() -> None:
    records = [step(3, 4), replace(step(1, 2), position=5), replace(step(0, 1), position=7)]
    log = [answer(records)]
    names = ["thinking"] * 6 + ["answer"] * 2
    thinking, rest = by_span(rows_of(log, spans=lambda ids, tokens: names, ids=[[1, 2]]))
    assert thinking == {"span": "thinking", "steps": 2, "tokens": 6, "mean_accepted_length": 3.0, "first_accepted": 1.0}
    assert (rest["span"], rest["steps"], rest["mean_accepted_length"]) == ("answer", 1, 1.0)


def test_by_entropy_bins_are_equally_full_and_nan_is_nowhere() -> None:
    low, high = by_entropy(rows_of([by_rows([(3, 0.1), (2, 0.2), (0, 3.0), (0, 4.0), (3, math.nan)])]), bins=2)
    assert (low["mean_accepted_length"], high["mean_accepted_length"]) == (7 / 2, 2 / 2)
    assert (low["low"], high["high"]) == (0.1, 4.0)
    assert by_entropy(rows_of([by_rows([(1, math.nan)])])) == []
    only = by_entropy(rows_of([by_rows([(1, 0.5), (0, 0.5)])]))
    assert [(b["low"], b["high"], b["mean_accepted_length"]) for b in only] == [(0.5, 0.5, 3 / 2)]


entropies = st.one_of(st.floats(0, 8), st.just(0.0), st.just(math.nan))
binned_logs = st.lists(st.lists(st.tuples(st.integers(0, 3), entropies), max_size=8).map(by_rows), max_size=4)


@settings(max_examples=30)
@given(binned_logs, st.integers(1, 6), st.integers(1, 40))
def test_every_step_is_in_one_bin(log: list[DecodeResult], bins: int, width: int) -> None:
    steps = [step for result in log for step in result.steps]
    known = [s for s in steps if math.isfinite(s.entropy)]
    by_nats = by_entropy(rows_of(log), bins)
    assert len(by_nats) <= bins
    for binned, rows in ((steps, by_position(rows_of(log), width)), (known, by_nats)):
        assert sum(row["steps"] for row in rows) == len(binned)
        total = sum(row["steps"] * row["mean_accepted_length"] for row in rows)
        assert total == pytest.approx(sum(s.committed for s in binned))
    json.dumps(by_nats, allow_nan=False)


# Breakdown of a speedup -----------------------------------------------------------------------------------------------


COSTS = CostModel(verify={1: 0.9, 64: 7.2}, draft=0.2, overhead=0.1, context=200)
"""A machine whose verification costs grow by a tenth a token."""


@pytest.mark.parametrize(("draft_cost", "drafts"), [(0.01, 7), (0.02, 6), (0.05, 4), (0.1, 3)])
def test_optimal_lookahead_of_the_paper(draft_cost: float, drafts: int) -> None:
    assert optimal_lookahead(0.6, draft_cost) == drafts


def test_closed_form() -> None:
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(1 - 1e-9, 5) == pytest.approx(6)
    assert expected_tokens(0.0, 5) == 1
    assert expected_speedup(0.5, 0.1, 2) == pytest.approx(1.75 / 1.2)
    assert (optimal_lookahead(1.0, 0.1), optimal_lookahead(0.05, 0.2)) == (64, 1)


def costed(accepted: list[int], depth: int, proposed: int, prefill_s: float = 1.0, rest_s: float = 0.0) -> DecodeResult:
    """Steps that cost exactly what ``COSTS`` says."""
    draft, verify = (COSTS.draft if proposed else 0.0), COSTS.verify_at(proposed + 1)
    times = {"draft_s": draft, "verify_s": verify, "total_s": draft + verify + COSTS.overhead}
    steps = [step_record(count, depth=depth, proposed=proposed, **times) for count in accepted]
    total, tokens = prefill_s + rest_s + sum(step.total_s for step in steps), 1 + sum(s.committed for s in steps)
    return DecodeResult(tokens=[5] * tokens, steps=steps, prefill_s=prefill_s, total_s=total)


def autoregressive(method: list[DecodeResult]) -> list[DecodeResult]:
    return [costed([0] * (len(m.tokens) - 1), 0, 0, prefill_s=m.prefill_s) for m in method]


accepted = st.lists(st.integers(0, 3), min_size=1, max_size=8)


@settings(max_examples=30)
@given(st.lists(accepted, min_size=1, max_size=3), st.floats(0, 3), st.floats(0, 2))
def test_the_waterfall_ends_at_the_measurement(log: list[list[int]], prefill_s: float, rest_s: float) -> None:
    method = [costed(counts, 3, 3, prefill_s, rest_s) for counts in log]
    baseline = autoregressive(method)
    breakdown = speedup_breakdown(rows_of(baseline), rows_of(method), COSTS)
    assert breakdown["measured"] == pytest.approx(speedup(rows_of(method), rows_of(baseline)))
    assert breakdown["residual"] == pytest.approx(0, abs=1e-9)
    assert breakdown["waterfall"][0]["speedup"] == pytest.approx(breakdown["method"]["tokens"])
    changes = sum(level["change"] for level in breakdown["waterfall"])
    assert breakdown["waterfall"][0]["speedup"] + changes == pytest.approx(breakdown["measured"])
    assert breakdown["predicted"] == pytest.approx(breakdown["waterfall"][-2]["speedup"])
    assert breakdown["predicted_from_costs"] == pytest.approx(breakdown["predicted"]), "the costs are the table's"


def test_terms_counted_by_hand() -> None:
    """4 drafts in a tree of 2 levels; a step takes 0.2 + 1.3 + 0.1 for 2 tokens, an autoregressive one 1."""
    method = [costed([2, 0], 2, 4, prefill_s=2.0)]
    breakdown = speedup_breakdown(rows_of(autoregressive(method)), rows_of(method), COSTS)
    terms = {"draft_s": 0.2, "verify_s": 1.3, "loop_s": 0.1, "outside_s": 1.0}
    assert breakdown["method"] == pytest.approx({"tokens": 2.0, "drafts": 4.0, "depth": 2.0} | terms)
    levels = [level["speedup"] for level in breakdown["waterfall"]]
    assert levels == pytest.approx([2, 2 / 1.2, 2 / 1.6, 2 / 1.6, 6 / 5.2])
    form = breakdown["closed_form"]
    assert (form["alpha"], form["alpha_is"], form["drafts"]) == (0.5, "acceptance at depth 1", 2)
    assert (form["draft_cost"], form["expected_speedup"]) == pytest.approx((0.1, 1.75 / 1.2))
    assert breakdown["best_chain"] is None, "the acceptance of a tree is not a chain's"


def test_other_answers_are_the_residual_and_no_steps_are_nothing() -> None:
    breakdown = speedup_breakdown(rows_of([costed([0] * 9, 0, 0)]), rows_of([costed([1, 1], 2, 2)]))
    assert breakdown is not None and breakdown["predicted_from_costs"] is None
    assert breakdown["residual"] == pytest.approx(breakdown["measured"] - breakdown["waterfall"][-1]["speedup"])
    assert abs(breakdown["residual"]) > 0.01
    nothing = rows_of([DecodeResult(tokens=[1], steps=[], prefill_s=1.0, total_s=1.0)])
    assert speedup_breakdown(nothing, nothing) is None
    baseline = rows_of([costed([0, 0], 0, 0)])
    breakdown = speedup_breakdown(baseline, baseline)
    assert breakdown is not None and breakdown["closed_form"] is None and breakdown["measured"] == 1


def test_the_best_draft_on_a_machine() -> None:
    """Tokens 1, 1.8, 2.3, 2.5; a step costs 1, 1.3, 1.4, 1.5: two drafts give 1.643, three 1.667."""
    values, depths = [0.8, 0.5, 0.2], [1, 2, 3]
    drafts = options(values, depths, COSTS)
    assert [o["tokens"] for o in drafts] == pytest.approx([1, 1.8, 2.3, 2.5])
    assert [o["step_s"] for o in drafts] == pytest.approx([1, 1.3, 1.4, 1.5])
    chosen = best_option(values, depths, COSTS)
    assert chosen is not None and chosen["nodes"] == 4 and chosen["speedup"] == pytest.approx(2.5 / 1.5)
    by_depth = CostModel(COSTS.verify, 0.2, 0.1, 200, draft_by_depth=[0.0, 0.4, 0.8, 1.2])
    dear = best_option(values, depths, by_depth)
    assert dear is not None and dear["nodes"] == 2, "every level costs: 1.8 / 1.5 beats 2.3 / 2.0 and 1"
    hopeless = best_option([0.1], [1], COSTS)
    assert hopeless is not None and (hopeless["nodes"], hopeless["speedup"]) == (1, 1)
    assert best_option([], [], COSTS) is None
    wide = options([0.05] * 15, [1] * 15, by_depth)[-1]
    assert wide["step_s"] == pytest.approx(COSTS.verify_at(16) + 0.1 + 0.4), "15 nodes are one level to draft"


def test_chain_values_are_running_products() -> None:
    log = [costed([2, 0, 1, 2], 2, 2)]
    assert chain_values(rows_of(log)) == pytest.approx([3 / 4, 3 / 4 * 2 / 3])
    order = TreeOrder([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)], [0.6, 0.2, 0.4, 0.1, 0.3])
    assert chain_values(rows_of(log), order) == [0.6, 0.4, 0.3]
    breakdown = speedup_breakdown(rows_of(autoregressive(log)), rows_of(log), COSTS, order)
    assert breakdown is not None and breakdown["best_chain"] is not None and breakdown["best_tree"] is not None
    assert breakdown["best_tree"]["tokens"] >= breakdown["best_chain"]["tokens"]
    assert json.loads(json.dumps(breakdown, allow_nan=False)) == breakdown
