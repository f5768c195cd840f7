"""The measured speedup term by term, Leviathan's closed form, and the fastest draft size for this machine. A step
commits m tokens. It takes d seconds to draft, v to verify and o for the rest of the loop. An autoregressive step takes
v1 + o1 seconds for one token. The speedup of the steps is therefore m (v1 + o1) / (d + v + o), and every term is
measured in the same run. The prefill and other time outside the steps then pull the total speedup towards 1."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from drafthead.eval.metrics.steps import Rows, acceptance_per_depth, alpha, ratio, speedup, steps
from drafthead.eval.trees.search import TreeOrder
from drafthead.models.decoding.cost_model import CostModel

LONGEST_CHAIN = 64


def expected_tokens(rate: float, drafts: int) -> float:
    """Return the expected tokens per step of a chain of k drafts, (1 - alpha^(k+1)) / (1 - alpha) (2211.17192)."""
    return drafts + 1.0 if rate == 1 else (1 - rate ** (drafts + 1)) / (1 - rate)


def expected_speedup(rate: float, draft_cost: float, drafts: int) -> float:
    """Return the walltime improvement (1 - alpha^(k+1)) / ((1 - alpha) (c k + 1)) of chains of k drafts (2211.17192).
    It assumes that verifying k + 1 tokens takes as long as one autoregressive step. ``draft_cost`` is c, the time to
    draft one token divided by the time of an autoregressive step."""
    return expected_tokens(rate, drafts) / (draft_cost * drafts + 1)


def optimal_lookahead(rate: float, draft_cost: float) -> int:
    """Return the chain length, 1 to ``LONGEST_CHAIN``, with the highest ``expected_speedup``; the shortest if equal."""
    return max(range(1, LONGEST_CHAIN + 1), key=lambda drafts: expected_speedup(rate, draft_cost, drafts))


def step_terms(rows: Rows) -> dict[str, float]:
    """Return means over the steps of one method, in seconds (keys that end in "_s") or counts; NaN without a step.
    "drafts" are drafted nodes, without the root. "outside_s" is all time outside the steps, such as the prefill,
    divided by the number of steps."""
    columns = {"tokens": "committed", "drafts": "proposed"} | {name: name for name in ("depth", "draft_s", "verify_s")}
    terms = {name: float(steps(rows)[column].mean()) for name, column in columns.items()}
    terms["loop_s"] = float(steps(rows).total_s.mean()) - terms["draft_s"] - terms["verify_s"]
    return terms | {"outside_s": ratio(rows.total_s[rows.step == 0].sum(), len(steps(rows)))}


def step_s(terms: dict[str, float]) -> float:
    return terms["draft_s"] + terms["verify_s"] + terms["loop_s"]


def closed_form(rows: Rows, baseline: dict[str, float], method: dict[str, float]) -> dict[str, Any]:
    """Return the terms and the speedup of Leviathan's formula for a run that drafted, to compare with the measurement.
    "alpha_is" says what "alpha" is: for trees, the acceptance at depth 1. "drafts" is the run's mean depth, rounded.
    "improves" is true if some chain is faster than autoregressive decoding (alpha > c)."""
    known = alpha(rows)
    rate = acceptance_per_depth(rows)[0] if known is None else known  # a tree's log does not tell alpha
    drafts = max(1, round(method["depth"]))
    cost = method["draft_s"] / method["depth"] / step_s(baseline)
    best = optimal_lookahead(rate, cost)
    return {
        "alpha": rate,
        "alpha_is": "acceptance at depth 1" if known is None else "alpha",
        "draft_cost": cost,
        "drafts": drafts,
        "expected_tokens": expected_tokens(rate, drafts),
        "expected_speedup": expected_speedup(rate, cost, drafts),
        "optimal_drafts": best,
        "optimal_speedup": expected_speedup(rate, cost, best),
        "improves": rate > cost,
    }


def speedup_breakdown(
    baseline: Rows, method: Rows, costs: CostModel | None = None, order: TreeOrder | None = None
) -> dict[str, Any] | None:
    """Break down the speedup of ``method`` over ``baseline`` on the same prompts; None if either made no step.
    ``costs`` were measured beforehand. Without ``order`` (calibrated nodes with their acceptances), the best chain
    comes from the run's acceptances.
    "autoregressive" and "method" are the ``step_terms``. "predicted" is the number of committed tokens per step, times
    the seconds of an autoregressive step, divided by the seconds of the method's step. "predicted_from_costs" is the
    same formula with ``costs``. "measured" is tokens per second divided by the baseline's. "residual" is the measured
    speedup minus the last level of the "waterfall"; it is not 0 if the answers differ in length. "best_chain" and
    "best_tree" are the fastest of ``options``."""
    before, after = step_terms(baseline), step_terms(method)
    if not (step_s(before) > 0 and step_s(after) > 0):
        return None
    levels = _waterfall(before, after)
    measured = speedup(method, baseline)
    predicted_from_costs = best_chain = best_tree = None
    if costs is not None:
        predicted_from_costs = costs.speedup(after["tokens"], 1 + after["drafts"], round(after["depth"]))
        chain = chain_values(method, order)
        best_chain = best_option(chain, range(1, len(chain) + 1), costs)
        best_tree = best_option(order.values, [len(path) for path in order.paths], costs) if order else None
    return {
        "autoregressive": before,
        "method": after,
        "predicted": after["tokens"] * step_s(before) / step_s(after),
        "predicted_from_costs": predicted_from_costs,
        "measured": measured,
        "residual": measured - levels[-1]["speedup"],
        "waterfall": levels,
        "closed_form": closed_form(method, before, after) if after["depth"] > 0 else None,
        "best_chain": best_chain,
        "best_tree": best_tree,
    }


def _waterfall(baseline: dict[str, float], method: dict[str, float]) -> list[dict[str, Any]]:
    """Return the speedups predicted if more and more of the measured costs count, as levels of a figure. At the first
    level no cost counts: the speedup is the mean number of committed tokens per step. At the last all do."""
    m, one = method["tokens"], step_s(baseline)
    growth = method["verify_s"] - baseline["verify_s"]
    # Autoregressive decoding makes m steps for one of this method, and each has time outside the steps.
    whole = (m * (one + baseline["outside_s"])) / (step_s(method) + method["outside_s"])
    speeds = {
        "ideal: mean accepted length": m,
        "drafting": m * one / (one + method["draft_s"]),
        "verifying n tokens, not 1": m * one / (one + method["draft_s"] + growth),
        "the loop": m * one / step_s(method),
        "prefill and the rest": whole,
    }
    befores = [m, *speeds.values()]
    return [
        {"name": name, "speedup": speed, "change": speed - before}
        for (name, speed), before in zip(speeds.items(), befores, strict=False)
    ]


def options(values: Sequence[float], depths: Sequence[int], costs: CostModel) -> list[dict[str, Any]]:
    """Return the predicted performance of drafting the first 0, 1, 2, ... of an ordered list of nodes. ``values`` are
    the nodes' probabilities of being accepted. In the result, "nodes" counts the root, so 1 means autoregressive
    decoding; "tokens" is the mean accepted length."""
    deepest = accumulate(depths, max, initial=0)
    return [
        {
            "nodes": nodes,
            "tokens": tokens,
            "step_s": costs.step(nodes, depth),
            "speedup": costs.speedup(tokens, nodes, depth),
        }
        for nodes, (tokens, depth) in enumerate(zip(accumulate(values, initial=1.0), deepest, strict=False), start=1)
    ]


def best_option(values: Sequence[float], depths: Sequence[int], costs: CostModel) -> dict[str, Any] | None:
    """Return the fastest of ``options``, which include autoregressive decoding; None if ``values`` is empty."""
    return max(options(values, depths, costs), key=lambda option: float(option["speedup"])) if values else None


def chain_values(rows: Rows, order: TreeOrder | None = None) -> list[float]:
    """Return P(draft k is accepted) for k = 1, 2, ... of a chain, from calibrated nodes or else a run of chains."""
    if order is not None:
        return [value for path, value in zip(order.paths, order.values, strict=True) if not any(path)]
    if alpha(rows) is None:
        return []  # by depth, a tree's acceptance is that of all siblings together
    return list(accumulate(np.nan_to_num(acceptance_per_depth(rows)).tolist(), mul))
