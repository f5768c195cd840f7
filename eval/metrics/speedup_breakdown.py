"""The measured speedup term by term, Leviathan's closed form, and the best draft for this machine.

A step commits m tokens. It takes d seconds to draft, v to verify and o for the loop around them. An autoregressive step
takes v1 + o1 for one token. So the speedup of the steps is m (v1 + o1) / (d + v + o), and every term is measured in the
same run. The prefill and other time outside the steps then pull the whole speedup towards 1.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from typing import Any, Self

import numpy as np

from drafthead.data.utils.floats import finite
from drafthead.eval.metrics.steps import Rows, acceptance_per_depth, alpha, ratio, speedup, steps
from drafthead.eval.trees.cost_model import CostModel
from drafthead.eval.trees.search import TreeOrder

LONGEST_CHAIN = 64


def expected_tokens(rate: float, drafts: int) -> float:
    """Return Leviathan's (2211.17192) tokens per step with a chain of k drafts, (1 - alpha^(k+1)) / (1 - alpha)."""
    return drafts + 1.0 if rate == 1 else (1 - rate ** (drafts + 1)) / (1 - rate)


def expected_speedup(rate: float, draft_cost: float, drafts: int) -> float:
    """Return the walltime improvement (1 - alpha^(k+1)) / ((1 - alpha) (c k + 1)) of chains of k drafts.

    Verifying k + 1 tokens costs one step here. ``draft_cost`` is c, a draft position's time in autoregressive
    steps; ``drafts`` is k, the paper's gamma.
    """
    return expected_tokens(rate, drafts) / (draft_cost * drafts + 1)


def optimal_lookahead(rate: float, draft_cost: float) -> int:
    """Return the shortest chain length with the highest expected speedup. Drafting pays if alpha > c."""
    return max(range(1, LONGEST_CHAIN + 1), key=lambda drafts: expected_speedup(rate, draft_cost, drafts))


@dataclass(frozen=True)
class StepTerms:
    """Means over steps, in seconds but for the counts."""

    tokens: float
    """Committed by a step: m."""
    drafts: float
    """Nodes drafted, root excluded."""
    depth: float
    draft_s: float
    verify_s: float
    loop_s: float
    outside_s: float
    """Prefill and everything else outside the steps, per step."""

    @classmethod
    def of(cls, rows: Rows) -> Self:
        """Return the measured terms; NaN without a step."""
        names = ["committed", "proposed", "depth", "draft_s", "verify_s", "total_s"]
        tokens, drafts, depth, draft, verify, total = map(float, steps(rows)[names].mean())
        outside = ratio(rows.total_s[rows.step == 0].sum(), len(steps(rows)))
        return cls(tokens, drafts, depth, draft, verify, total - draft - verify, outside)

    @property
    def step_s(self) -> float:
        """A whole step."""
        return self.draft_s + self.verify_s + self.loop_s


@dataclass(frozen=True)
class WaterfallStep:
    """The speedup that is left once a cost is counted."""

    name: str
    speedup: float
    change: float
    """Against the one before; 0 for the first."""


@dataclass(frozen=True)
class Option:
    """A possible draft, and its performance predicted from the measured terms."""

    nodes: int
    """Tokens to verify, root included; 1 is autoregressive decoding."""
    tokens: float
    """Mean accepted length."""
    step_s: float
    speedup: float


@dataclass(frozen=True)
class ClosedForm:
    """Leviathan's formula compared with the measurement."""

    alpha: float
    alpha_is: str
    """"alpha", or the name of its substitute."""
    draft_cost: float
    drafts: int
    """Chain length of the run, rounded from its mean depth."""
    expected_tokens: float
    expected_speedup: float
    optimal_drafts: int
    optimal_speedup: float
    improves: bool
    """alpha > c: some chain is faster than autoregressive decoding."""

    @classmethod
    def of(cls, rows: Rows, baseline: StepTerms, method: StepTerms) -> Self:
        """Return the closed form of a run that drafted."""
        known = alpha(rows)
        # A tree's log does not tell alpha.
        rate = acceptance_per_depth(rows)[0] if known is None else known
        drafts = max(1, round(method.depth))
        cost = method.draft_s / method.depth / baseline.step_s
        best = optimal_lookahead(rate, cost)
        return cls(
            alpha=rate,
            alpha_is="acceptance at depth 1" if known is None else "alpha",
            draft_cost=cost,
            drafts=drafts,
            expected_tokens=expected_tokens(rate, drafts),
            expected_speedup=expected_speedup(rate, cost, drafts),
            optimal_drafts=best,
            optimal_speedup=expected_speedup(rate, cost, best),
            improves=rate > cost,
        )


@dataclass(frozen=True)
class SpeedupBreakdown:
    """A speedup and its terms."""

    autoregressive: StepTerms
    method: StepTerms
    predicted: float
    """m (v1 + o1) / (d + v + o)."""
    predicted_from_costs: float | None
    """The same formula with step costs measured beforehand, at the run's mean tree size; None without them."""
    measured: float
    """Tokens per second over the baseline's, totals over totals."""
    residual: float
    """Measured speedup minus the waterfall's last level: answers of other lengths share the prefill differently."""
    waterfall: list[WaterfallStep]
    closed_form: ClosedForm | None
    """None if nothing was drafted."""
    best_chain: Option | None = None
    best_tree: Option | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values; None for values that are not finite."""
        values: dict[str, Any] = finite(asdict(self))
        return values


def speedup_breakdown(
    baseline: Rows, method: Rows, costs: CostModel | None = None, order: TreeOrder | None = None
) -> SpeedupBreakdown | None:
    """Break down the speedup of ``method`` over ``baseline`` on the same prompts; None if one of them made no step.

    Without ``costs`` no best draft is named. ``order`` (calibrated nodes with their acceptances) gives the best tree
    and chain. Without it the best chain comes from the run's conditional acceptances, if the run drafted chains.
    """
    before, after = StepTerms.of(baseline), StepTerms.of(method)
    if not (before.step_s > 0 and after.step_s > 0):
        return None
    levels = _waterfall(before, after)
    measured = speedup(method, baseline)
    predicted_from_costs = best_chain = best_tree = None
    if costs is not None:
        predicted_from_costs = costs.speedup(after.tokens, 1 + after.drafts, round(after.depth))
        chain = chain_values(method, order)
        best_chain = best_option(chain, range(1, len(chain) + 1), costs)
        best_tree = best_option(order.values, [len(path) for path in order.paths], costs) if order else None
    return SpeedupBreakdown(
        autoregressive=before,
        method=after,
        predicted=after.tokens * before.step_s / after.step_s,
        predicted_from_costs=predicted_from_costs,
        measured=measured,
        residual=measured - levels[-1].speedup,
        waterfall=levels,
        closed_form=ClosedForm.of(method, before, after) if after.depth > 0 else None,
        best_chain=best_chain,
        best_tree=best_tree,
    )


def _waterfall(baseline: StepTerms, method: StepTerms) -> list[WaterfallStep]:
    """Return the levels from the speedup at free drafts down to the measured one, adding one cost at a time."""
    m, one = method.tokens, baseline.step_s
    growth = method.verify_s - baseline.verify_s
    # Autoregressive decoding makes m steps for one of this method, and each has time outside the steps.
    whole = (m * (one + baseline.outside_s)) / (method.step_s + method.outside_s)
    speeds = [
        ("ideal: mean accepted length", m),
        ("drafting", m * one / (one + method.draft_s)),
        ("verifying n tokens, not 1", m * one / (one + method.draft_s + growth)),
        ("the loop", m * one / method.step_s),
        ("prefill and the rest", whole),
    ]
    befores = [m, *(speed for _, speed in speeds)]
    return [WaterfallStep(name, speed, speed - before) for (name, speed), before in zip(speeds, befores, strict=False)]


def options(values: Sequence[float], depths: Sequence[int], costs: CostModel) -> list[Option]:
    """Return the predicted performance of the first 0, 1, 2, ... nodes of a growing draft.

    ``values``: probability that each node is accepted, in the order of growth; for a chain the running products of its
    conditional acceptances. ``depths``: depth of each node.
    """
    deepest = accumulate(depths, max, initial=0)
    return [
        Option(nodes, tokens, costs.step(nodes, depth), costs.speedup(tokens, nodes, depth))
        for nodes, (tokens, depth) in enumerate(zip(accumulate(values, initial=1.0), deepest, strict=False), start=1)
    ]


def best_option(values: Sequence[float], depths: Sequence[int], costs: CostModel) -> Option | None:
    """Return the fastest of ``options``, which include autoregressive decoding; None without values."""
    return max(options(values, depths, costs), key=lambda option: option.speedup) if values else None


def chain_values(rows: Rows, order: TreeOrder | None = None) -> list[float]:
    """Return the probability that each draft of a chain is accepted: by ``order``, else measured; empty if only trees
    ran.
    """
    if order is not None:
        return [value for path, value in zip(order.paths, order.values, strict=True) if not any(path)]
    if alpha(rows) is None:
        return []  # by depth, a tree's acceptance is that of all siblings together
    return list(accumulate(np.nan_to_num(acceptance_per_depth(rows)).tolist(), mul))
