"""The closed form against the paper's numbers, the breakdown of a speedup against what it is made of."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthead.eval.metrics.speedup_breakdown import (
    best_option,
    chain_values,
    expected_speedup,
    expected_tokens,
    optimal_lookahead,
    options,
    speedup_breakdown,
)
from drafthead.eval.metrics.steps import Rows, speedup, step_table
from drafthead.eval.trees.cost_model import CostModel
from drafthead.eval.trees.search import TreeOrder
from drafthead.models.decoding.step import DecodeResult
from support import step_record

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


def answer(accepted: list[int], depth: int, proposed: int, prefill_s: float = 1.0, rest_s: float = 0.0) -> DecodeResult:
    """Steps that cost exactly what ``COSTS`` says."""
    draft, verify = (COSTS.draft if proposed else 0.0), COSTS.verify_at(proposed + 1)
    times = {"draft_s": draft, "verify_s": verify, "total_s": draft + verify + COSTS.overhead}
    steps = [step_record(count, depth=depth, proposed=proposed, **times) for count in accepted]
    total, tokens = prefill_s + rest_s + sum(step.total_s for step in steps), 1 + sum(s.committed for s in steps)
    return DecodeResult(tokens=[5] * tokens, steps=steps, prefill_s=prefill_s, total_s=total)


def rows_of(log: list[DecodeResult]) -> Rows:
    return step_table({"": log})


def autoregressive(method: list[DecodeResult]) -> list[DecodeResult]:
    return [answer([0] * (len(m.tokens) - 1), 0, 0, prefill_s=m.prefill_s) for m in method]


accepted = st.lists(st.integers(0, 3), min_size=1, max_size=8)


@settings(max_examples=30)
@given(st.lists(accepted, min_size=1, max_size=3), st.floats(0, 3), st.floats(0, 2))
def test_the_waterfall_ends_at_the_measurement(log: list[list[int]], prefill_s: float, rest_s: float) -> None:
    method = [answer(counts, 3, 3, prefill_s, rest_s) for counts in log]
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
    method = [answer([2, 0], 2, 4, prefill_s=2.0)]
    breakdown = speedup_breakdown(rows_of(autoregressive(method)), rows_of(method), COSTS)
    terms = {"draft_s": 0.2, "verify_s": 1.3, "loop_s": 0.1, "outside_s": 1.0}
    assert breakdown["method"] == pytest.approx({"tokens": 2.0, "drafts": 4.0, "depth": 2.0} | terms)
    levels = [level["speedup"] for level in breakdown["waterfall"]]
    assert levels == pytest.approx([2, 2 / 1.2, 2 / 1.6, 2 / 1.6, 6 / 5.2])
    form = breakdown["closed_form"]
    assert (form["alpha"], form["alpha_is"], form["drafts"]) == (0.5, "acceptance at depth 1", 2)
    assert (form["draft_cost"], form["expected_speedup"]) == pytest.approx((0.1, 1.75 / 1.2))
    assert breakdown["best_chain"] is None, "the acceptance of a tree is not a chain's"


def test_other_answers_are_the_residual() -> None:
    breakdown = speedup_breakdown(rows_of([answer([0] * 9, 0, 0)]), rows_of([answer([1, 1], 2, 2)]))
    assert breakdown is not None and breakdown["predicted_from_costs"] is None
    assert breakdown["residual"] == pytest.approx(breakdown["measured"] - breakdown["waterfall"][-1]["speedup"])
    assert abs(breakdown["residual"]) > 0.01


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
    log = [answer([2, 0, 1, 2], 2, 2)]
    assert chain_values(rows_of(log)) == pytest.approx([3 / 4, 3 / 4 * 2 / 3])
    order = TreeOrder([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)], [0.6, 0.2, 0.4, 0.1, 0.3])
    assert chain_values(rows_of(log), order) == [0.6, 0.4, 0.3]
    breakdown = speedup_breakdown(rows_of(autoregressive(log)), rows_of(log), COSTS, order)
    assert breakdown is not None and breakdown["best_chain"] is not None and breakdown["best_tree"] is not None
    assert breakdown["best_tree"]["tokens"] >= breakdown["best_chain"]["tokens"]
    assert json.loads(json.dumps(breakdown, allow_nan=False)) == breakdown


def test_nothing_to_take_apart() -> None:
    nothing = rows_of([DecodeResult(tokens=[1], steps=[], prefill_s=1.0, total_s=1.0)])
    assert speedup_breakdown(nothing, nothing) is None
    baseline = rows_of([answer([0, 0], 0, 0)])
    breakdown = speedup_breakdown(baseline, baseline)
    assert breakdown is not None and breakdown["closed_form"] is None and breakdown["measured"] == 1
