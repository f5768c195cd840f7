"""The measured speedup, term by term, and what this machine's costs make the best draft.

A step commits m tokens and takes d seconds to draft, v to verify and o for the loop around them; a plain step takes
v1 + o1 for one token. So the steps' speedup is m (v1 + o1) / (d + v + o): every term is measured in the same run.
Reading the prompts and whatever else lies outside the steps then pull the speedup of the whole towards 1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from typing import Any, Protocol, Self

from drafthead.eval.metrics import acceptance as metrics
from drafthead.eval.metrics import closed_form
from drafthead.eval.metrics.comparison import speedup
from drafthead.eval.trees.search import TreeOrder
from drafthead.models.decoding.step_log import DecodeResult


class Costs(Protocol):
    """Step costs in seconds, as :class:`~drafthead.eval.trees.cost_model.StepCosts` measures them."""

    @property
    def draft(self) -> float:
        """Drafting, whatever its size."""

    @property
    def overhead(self) -> float:
        """The loop around it."""

    def verify_at(self, nodes: int) -> float:
        """v(n)."""


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
    def of(cls, results: Sequence[DecodeResult]) -> Self:
        """Measured terms; nan without a step."""
        steps = metrics.steps_of(results)
        count = len(steps) or math.nan
        total = sum(step.total_s for step in steps)
        draft, verify = sum(step.draft_s for step in steps), sum(step.verify_s for step in steps)
        return cls(
            tokens=sum(step.committed for step in steps) / count,
            drafts=sum(step.proposed for step in steps) / count,
            depth=sum(step.depth for step in steps) / count,
            draft_s=draft / count,
            verify_s=verify / count,
            loop_s=(total - draft - verify) / count,
            outside_s=(sum(result.total_s for result in results) - total) / count,
        )

    @property
    def step_s(self) -> float:
        """A whole step."""
        return self.draft_s + self.verify_s + self.loop_s


@dataclass(frozen=True)
class Level:
    """The speedup that is left once a cost is counted."""

    name: str
    speedup: float
    change: float
    """Against the level before; 0 for the first."""


@dataclass(frozen=True)
class Option:
    """A draft that could be used, and what the measured terms predict of it."""

    nodes: int
    """Tokens to verify, root included; 1 is plain decoding."""
    tokens: float
    """Mean accepted tokens."""
    step_s: float
    speedup: float


@dataclass(frozen=True)
class ClosedForm:
    """Leviathan's formula beside the measurement."""

    alpha: float
    alpha_is: str
    """"alpha", or what stands in for it."""
    draft_cost: float
    """c: seconds of a drafted position / of a plain step."""
    drafts: int
    """Chain length of the run, rounded from its mean depth."""
    expected_tokens: float
    expected_speedup: float
    optimal_drafts: int
    optimal_speedup: float
    improves: bool
    """alpha > c: some chain beats plain decoding."""


@dataclass(frozen=True)
class Explanation:
    """A speedup explained."""

    plain: StepTerms
    method: StepTerms
    predicted: float
    """m (v1 + o1) / (d + v + o)."""
    predicted_from_costs: float | None
    """The same with the step costs measured beforehand, at the run's mean tree size; None without them."""
    measured: float
    """Tokens per second over plain decoding's, totals over totals."""
    residual: float
    """Measured minus the last level: answers of other lengths, which share out the prefill otherwise."""
    waterfall: list[Level]
    closed_form: ClosedForm | None
    """None without a draft."""
    best_chain: Option | None = None
    best_tree: Option | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; None for what is not finite."""
        found: dict[str, Any] = _finite(asdict(self))
        return found


def explain(
    plain: Sequence[DecodeResult],
    method: Sequence[DecodeResult],
    costs: Costs | None = None,
    *,
    order: TreeOrder | None = None,
    draft_s: Callable[[int], float] | None = None,
) -> Explanation | None:
    """Explain the speedup of ``method`` over ``plain`` on the same prompts.

    Args:
        plain: answers of plain decoding, one token a step.
        method: answers of speculative decoding.
        costs: of steps on this machine; without them no best draft is named.
        order: calibrated nodes with their acceptances, for the best tree and chain. Without it the best chain comes
            from the run's conditional acceptances, where the run drafted chains.
        draft_s: seconds to draft a tree d deep; by default ``costs.draft`` whatever d, as of heads that draft all
            positions at once.

    Returns:
        None when one of them made no step.
    """
    before, after = StepTerms.of(plain), StepTerms.of(method)
    if not (before.step_s > 0 and after.step_s > 0):
        return None
    levels = waterfall(before, after)
    measured = speedup(plain, method).value
    predicted_from_costs = best_chain = best_tree = None
    if costs is not None:
        draft_s = draft_s or _constant(costs.draft)
        seconds = _step_seconds(costs, 1 + after.drafts, draft_s(round(after.depth)))
        predicted_from_costs = after.tokens * (costs.verify_at(1) + costs.overhead) / seconds
        chain = chain_values(method, order)
        best_chain = best(chain, range(1, len(chain) + 1), costs, draft_s)
        best_tree = best(order.values, [len(path) for path in order.paths], costs, draft_s) if order else None
    return Explanation(
        plain=before,
        method=after,
        predicted=after.tokens * before.step_s / after.step_s,
        predicted_from_costs=predicted_from_costs,
        measured=measured,
        residual=measured - levels[-1].speedup,
        waterfall=levels,
        closed_form=_closed_form(method, before, after),
        best_chain=best_chain,
        best_tree=best_tree,
    )


def waterfall(plain: StepTerms, method: StepTerms) -> list[Level]:
    """From the mean accepted tokens, the speedup if a step cost what a plain one does, down to what was measured.

    Each level counts one cost more: drafting, the growth of v(n) over v(1), the loop's, and what lies outside steps.
    """
    m, one = method.tokens, plain.step_s
    growth = method.verify_s - plain.verify_s
    # Outside the steps both take their own time; plain decoding makes m steps where this one makes one.
    whole = (m * (one + plain.outside_s)) / (method.step_s + method.outside_s)
    speeds = [
        ("ideal: tokens per step", m),
        ("drafting", m * one / (one + method.draft_s)),
        ("verifying n tokens, not 1", m * one / (one + method.draft_s + growth)),
        ("the loop", m * one / method.step_s),
        ("prefill and the rest", whole),
    ]
    befores = [m, *(speed for _, speed in speeds)]
    return [Level(name, speed, speed - before) for (name, speed), before in zip(speeds, befores, strict=False)]


def options(
    values: Sequence[float], depths: Sequence[int], costs: Costs, draft_s: Callable[[int], float]
) -> list[Option]:
    """What the first 0, 1, 2, ... nodes of a growing draft would buy.

    Args:
        values: probability that each node is accepted, in the order of growth. Of a chain these are the running
            products of its conditional acceptances.
        depths: how deep each node stands.
        costs: of steps on this machine; a plain step takes v(1) + o, one with k drafts v(k + 1) + o + ``draft_s(d)``.
        draft_s: seconds to draft a tree d deep.
    """
    plain = costs.verify_at(1) + costs.overhead
    found = []
    for drafts, tokens in enumerate(accumulate(values, initial=1.0)):
        deepest = max(depths[:drafts], default=0)
        seconds = _step_seconds(costs, drafts + 1, draft_s(deepest) if drafts else 0.0)
        found.append(Option(drafts + 1, tokens, seconds, tokens * plain / seconds))
    return found


def best(
    values: Sequence[float], depths: Sequence[int], costs: Costs, draft_s: Callable[[int], float]
) -> Option | None:
    """The fastest of ``options``, plain decoding among them; None without values."""
    return max(options(values, depths, costs, draft_s), key=lambda option: option.speedup) if values else None


def chain_values(results: Sequence[DecodeResult], order: TreeOrder | None = None) -> list[float]:
    """Probability that each draft of a chain is accepted: by ``order``, else measured; empty when only trees ran."""
    if order is not None:
        return [value for path, value in zip(order.paths, order.values, strict=True) if not any(path)]
    if metrics.n_alpha(results) is None:
        return []  # by depth, a tree's acceptance is that of all siblings together
    conditional = [ratio.value if ratio.den else 0.0 for ratio in metrics.acceptance_per_depth(results)]
    return list(accumulate(conditional, mul))


def _constant(seconds: float) -> Callable[[int], float]:
    return lambda depth: seconds if depth else 0.0


def _step_seconds(costs: Costs, nodes: float, draft_s: float) -> float:
    """A step with a tree of ``nodes``, which may be a mean."""
    lower, part = math.floor(nodes), nodes % 1
    verify = costs.verify_at(lower) * (1 - part) + (costs.verify_at(lower + 1) * part if part else 0.0)
    return verify + costs.overhead + draft_s


def _closed_form(results: Sequence[DecodeResult], plain: StepTerms, method: StepTerms) -> ClosedForm | None:
    if not method.depth > 0:
        return None
    ratio, name = metrics.alpha_or_first_depth(results)
    rate, drafts = ratio.value, max(1, round(method.depth))
    cost = method.draft_s / method.depth / plain.step_s
    best = closed_form.optimal_lookahead(rate, cost)
    return ClosedForm(
        alpha=rate,
        alpha_is=name,
        draft_cost=cost,
        drafts=drafts,
        expected_tokens=closed_form.expected_tokens(rate, drafts),
        expected_speedup=closed_form.expected_speedup(rate, cost, drafts),
        optimal_drafts=best,
        optimal_speedup=closed_form.expected_speedup(rate, cost, best),
        improves=closed_form.improves(rate, cost),
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
