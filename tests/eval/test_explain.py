"""The closed form against the paper's numbers, the explanation against what it explains."""

import json
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthead.eval.metrics import closed_form
from drafthead.eval.metrics.comparison import speedup
from drafthead.eval.metrics.speedup_breakdown import StepTerms, best, chain_values, explain, options
from drafthead.eval.trees.search import TreeOrder
from drafthead.models.decoding.step_log import DecodeResult, StepRecord


@pytest.mark.parametrize(("draft_cost", "drafts"), [(0.01, 7), (0.02, 6), (0.05, 4), (0.1, 3)])
def test_optimal_lookahead_of_the_paper(draft_cost: float, drafts: int) -> None:
    assert closed_form.optimal_lookahead(0.6, draft_cost) == drafts


def test_closed_form() -> None:
    assert closed_form.expected_tokens(0.5, 2) == pytest.approx(1.75)
    assert closed_form.expected_tokens(1.0, 5) == 6
    assert closed_form.expected_tokens(1 - 1e-9, 5) == pytest.approx(6)
    assert closed_form.expected_tokens(0.0, 5) == 1
    assert closed_form.expected_speedup(0.5, 0.1, 2) == pytest.approx(1.75 / 1.2)
    assert closed_form.optimal_lookahead(1.0, 0.1) == 64
    assert closed_form.optimal_lookahead(0.05, 0.2) == 1
    for rate, drafts in ((-0.1, 3), (1.1, 3), (math.nan, 3), (0.5, -1)):
        with pytest.raises(ValueError, match=r"an acceptance rate|a chain has"):
            closed_form.expected_tokens(rate, drafts)
    with pytest.raises(ValueError, match="cost in plain steps must be >= 0, got -1"):
        closed_form.expected_speedup(0.5, -1, 2)


@given(st.floats(0.01, 0.99), st.floats(0.0, 1.5))
def test_some_chain_pays_where_alpha_is_above_c(alpha: float, draft_cost: float) -> None:
    best_speedup = closed_form.expected_speedup(alpha, draft_cost, closed_form.optimal_lookahead(alpha, draft_cost))
    if abs(alpha - draft_cost) > 1e-9:
        assert (best_speedup > 1) == closed_form.improves(alpha, draft_cost)


@dataclass(frozen=True)
class Costs:
    """A machine whose verification costs grow by a tenth a token."""

    draft: float = 0.2
    overhead: float = 0.1
    growth: float = 0.1
    measured: list[int] = field(default_factory=list)

    def verify_at(self, nodes: int) -> float:
        return 0.9 + self.growth * (nodes - 1)


def answer(
    accepted: list[int], depth: int, proposed: int, costs: Costs, prefill_s: float = 1.0, rest_s: float = 0.0
) -> DecodeResult:
    """Steps that cost exactly what ``costs`` says."""
    steps = []
    position = 1
    for count in accepted:
        draft, verify = (costs.draft if proposed else 0.0), costs.verify_at(proposed + 1)
        steps.append(
            StepRecord(
                position=position,
                proposed=proposed,
                depth=depth,
                accepted=count,
                committed=count + 1,
                draft_s=draft,
                verify_s=verify,
                total_s=draft + verify + costs.overhead,
            )
        )
        position += count + 1
    total = prefill_s + rest_s + sum(step.total_s for step in steps)
    return DecodeResult(tokens=[5] * position, steps=steps, prefill_s=prefill_s, total_s=total)


def plain_of(method: list[DecodeResult], costs: Costs) -> list[DecodeResult]:
    return [answer([0] * (len(m.tokens) - 1), 0, 0, costs, prefill_s=m.prefill_s) for m in method]


accepted = st.lists(st.integers(0, 3), min_size=1, max_size=8)


@given(st.lists(accepted, min_size=1, max_size=3), st.floats(0, 3), st.floats(0, 2))
def test_the_waterfall_ends_at_the_measurement(log: list[list[int]], prefill_s: float, rest_s: float) -> None:
    costs = Costs()
    method = [answer(counts, 3, 3, costs, prefill_s, rest_s) for counts in log]
    plain = plain_of(method, costs)
    found = explain(plain, method, costs)
    assert found is not None
    assert found.measured == pytest.approx(speedup(plain, method).value)
    assert found.residual == pytest.approx(0, abs=1e-9)
    assert found.waterfall[0].speedup == pytest.approx(found.method.tokens)
    assert sum(level.change for level in found.waterfall) + found.waterfall[0].speedup == pytest.approx(found.measured)
    assert found.predicted == pytest.approx(found.waterfall[-2].speedup)
    assert found.predicted_from_costs == pytest.approx(found.predicted), "the run cost what the table says"


def test_terms_counted_by_hand() -> None:
    """4 drafts in a tree of 2 levels; a plain step takes 1, a speculative one 0.2 + 1.3 + 0.1, and commits 2."""
    costs = Costs()
    method = [answer([2, 0], 2, 4, costs, prefill_s=2.0)]
    found = explain(plain_of(method, costs), method, costs)
    assert found is not None
    assert found.method == StepTerms(
        tokens=2.0,
        drafts=4.0,
        depth=2.0,
        draft_s=pytest.approx(0.2),
        verify_s=pytest.approx(1.3),
        loop_s=pytest.approx(0.1),
        outside_s=pytest.approx(1.0),
    )
    assert [level.speedup for level in found.waterfall] == pytest.approx([2, 2 / 1.2, 2 / 1.6, 2 / 1.6, 6 / 5.2])
    assert found.predicted == pytest.approx(2 / 1.6)
    form = found.closed_form
    assert form is not None
    assert (form.alpha, form.alpha_is, form.drafts) == (0.5, "acceptance at depth 1", 2)
    assert form.draft_cost == pytest.approx(0.1)
    assert form.expected_speedup == pytest.approx(1.75 / 1.2)
    assert found.best_chain is None, "the acceptance of a tree is not a chain's"


def test_other_answers_are_the_residual() -> None:
    costs = Costs()
    method = [answer([1, 1], 2, 2, costs)]
    longer = [answer([0] * 9, 0, 0, costs)]
    found = explain(longer, method)
    assert found is not None and found.predicted_from_costs is None
    assert found.residual == pytest.approx(found.measured - found.waterfall[-1].speedup)
    assert abs(found.residual) > 0.01


DEPTHS = range(1, 100)


def test_the_best_draft_on_a_machine() -> None:
    """Tokens 1, 1.8, 2.3, 2.5; a step costs 1, 1.3, 1.4, 1.5: two drafts give 1.643, three 1.667."""
    values = [0.8, 0.5, 0.2]
    found = options(values, DEPTHS, Costs(), lambda depth: 0.2)
    assert [o.tokens for o in found] == pytest.approx([1, 1.8, 2.3, 2.5])
    assert [o.step_s for o in found] == pytest.approx([1, 1.3, 1.4, 1.5])
    chosen = best(values, DEPTHS, Costs(), lambda depth: 0.2)
    assert chosen is not None and chosen.nodes == 4 and chosen.speedup == pytest.approx(2.5 / 1.5)
    dear = best(values, DEPTHS, Costs(), lambda depth: 0.4 * depth)
    assert dear is not None and dear.nodes == 2, "every draft costs: 1.8 / 1.5 beats 2.3 / 2.0 and 1"
    hopeless = best([0.1], [1], Costs(), lambda depth: 0.2)
    assert hopeless is not None and hopeless.nodes == 1 and hopeless.speedup == 1
    assert best([], [], Costs(), lambda depth: 0.2) is None


def test_chain_values_are_running_products() -> None:
    log = [answer([2, 0, 1, 2], 2, 2, Costs())]
    assert chain_values(log) == pytest.approx([3 / 4, 3 / 4 * 2 / 3])
    order = TreeOrder([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)], [0.6, 0.2, 0.4, 0.1, 0.3])
    assert chain_values(log, order) == [0.6, 0.4, 0.3]
    found = explain(plain_of(log, Costs()), log, Costs(), order=order)
    assert found is not None and found.best_chain is not None and found.best_tree is not None
    assert found.best_tree.tokens >= found.best_chain.tokens
    assert json.loads(json.dumps(found.to_json(), allow_nan=False)) == found.to_json()


def test_nothing_to_explain() -> None:
    nothing = [DecodeResult(tokens=[1], steps=[], prefill_s=1.0, total_s=1.0)]
    assert explain(nothing, nothing) is None
    plain = [answer([0, 0], 0, 0, Costs())]
    found = explain(plain, plain)
    assert found is not None and found.closed_form is None and found.measured == 1


def test_a_wide_tree_is_drafted_as_fast_as_it_is_deep() -> None:
    """Sixteen nodes on one level cost one level of drafting."""
    wide = options([0.05] * 15, [1] * 15, Costs(), lambda depth: 0.2 * depth)[-1]
    assert wide.step_s == pytest.approx(Costs().verify_at(16) + Costs().overhead + 0.2)
