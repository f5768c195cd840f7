"""The contents of ``eval.json``: metrics of every method, per task and over all, and the breakdown of the speedup.

Plain JSON values, null if nothing was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafthead.data.utils.floats import finite
from drafthead.data.utils.machine import hardware, versions
from drafthead.eval.lossless.equality import Equality, equality_rate
from drafthead.eval.metrics import acceptance, speed
from drafthead.eval.metrics.speedup_breakdown import speedup_breakdown
from drafthead.eval.timing.interleaved import TimedResults
from drafthead.eval.timing.result_log import FailedDecode
from drafthead.eval.trees.cost_model import CostModel
from drafthead.eval.trees.search import TreeOrder
from drafthead.models.decoding.step_log import DecodeResult

AUTOREGRESSIVE = ("transformers_stock", "transformers", "autoregressive")
"""Kinds of autoregressive decoding: transformers' ``generate`` over its stock modules and over ours, and our loop."""
METHOD = "speculative"
"""Name of the headline's method, if it ran."""


@dataclass(frozen=True)
class _Answers:
    """Some turns, answered by all methods."""

    questions: list[tuple[str, int]]
    """Task and number, which the turns of one conversation share."""
    turns: list[dict[str, int]]
    results: dict[str, list[DecodeResult]]
    equalities: dict[str, list[Equality]]

    def choose(self, members: Sequence[int]) -> "_Answers":
        def of(rows: Any) -> Any:
            return {n: of(row) for n, row in rows.items()} if isinstance(rows, dict) else [rows[n] for n in members]

        return _Answers(*map(of, (self.questions, self.turns, self.results, self.equalities)))


def summarise(
    timed: TimedResults,
    equalities: dict[str, list[Equality]],
    retokenised: speed.Retokenised,
    dtype: torch.dtype,
    costs: CostModel | None = None,
    order: TreeOrder | None = None,
) -> dict[str, Any]:
    """Return everything in ``eval.json`` about the answers.

    Args:
        timed: results of at least one of ``AUTOREGRESSIVE`` and one method.
        equalities: comparison per method and turn; some methods may be missing.
        retokenised: token count for the Spec-Bench-compatible numbers.
        dtype: the target's dtype, which determines what counts as a tie.
        costs: for the best draft on this machine.
        order: calibrated nodes, for the best tree.

    Returns:
        "tasks" and "overall": the headline method's numbers, and each method's under "methods".
        "failed": prompts left out of both, with the reason. "headline": name of its method.
        "metrics": every metric per method.
        "by_position", "by_context", "by_entropy": the headline's acceptance in bins.
        "speedup_breakdown": the headline's speedup over each baseline, term by term.
        "equality": rate of equal answers, and the target's dtype.
    """
    prompts, results = timed.prompts, timed.results
    methods, baselines = method_names(results), [name for name in AUTOREGRESSIVE if name in results]
    headline = methods[0]
    pairs = zip(prompts, timed.turns, strict=True)
    turns = [{"prompt": prompt.number} | ({"turn": turn} if prompt.turns > 1 else {}) for prompt, turn in pairs]
    every = _Answers([(prompt.task, prompt.number) for prompt in prompts], turns, results, equalities)
    failed = {n: row for n, row in enumerate(results[headline]) if isinstance(row, FailedDecode)}
    answered = [n for n in range(len(prompts)) if n not in failed]
    measured_on = hardware() | {"other_processes_cores": timed.other_processes_cores}
    answers, machine = every.choose(answered), {"hardware": measured_on, "versions": versions()}
    tasks = {
        task: every.choose([n for n in answered if prompts[n].task == task])
        for task in dict.fromkeys(prompt.task for prompt in prompts)
    }
    overall, runs = _group(answers, retokenised), answers.results
    fastest = runs[fastest_autoregressive(overall)[0]]
    breakdowns = {name: speedup_breakdown(runs[name], runs[headline], costs, order) for name in baselines}
    plain: dict[str, Any] = finite(
        {
            "headline": headline,
            "tasks": {task: _group(group, retokenised) | machine for task, group in tasks.items()},
            "overall": overall | machine,
            "failed": [every.turns[n] | {"task": prompts[n].task, "message": row.error} for n, row in failed.items()],
            "metrics": {name: speed.measure(fastest, runs[name], retokenised, answers.questions) for name in methods},
            "by_position": acceptance.by_position(runs[headline]),
            "by_context": acceptance.by_context(runs[headline], [len(timed.ids[n]) for n in answered]),
            "by_entropy": acceptance.by_entropy(runs[headline]),
            "speedup_breakdown": {name: breakdown and breakdown.to_json() for name, breakdown in breakdowns.items()},
            "equality": equality_rate(answers.equalities.get(headline, []), dtype),
        }
    )
    return plain


def method_names(names: Mapping[str, object]) -> list[str]:
    """Return the methods among ``names``, the headline's first."""
    methods = [name for name in names if name not in AUTOREGRESSIVE]
    return sorted(methods, key=lambda name: name != METHOD)


def fastest_autoregressive(group: dict[str, Any]) -> tuple[str, float | None]:
    """Return name and tokens per second of the fastest baseline in a group of ``summarise``."""
    speeds: dict[str, float | None] = group["autoregressive_tokens_per_second"]
    name = max(speeds, key=lambda baseline: speeds[baseline] or 0.0)
    return name, speeds[name]


def speedup_of(group: dict[str, Any], method: str | None = None) -> float | None:
    """Return the speedup over the fastest baseline in a group of ``summarise``; ``method`` None is the headline's."""
    numbers = group if method is None else group["methods"][method]
    value: float | None = numbers["speedup"][f"vs_{fastest_autoregressive(group)[0]}"]
    return value


def _group(answers: _Answers, retokenised: speed.Retokenised) -> dict[str, Any]:
    """Return the numbers of these answers: the headline's, and each method's."""
    runs = {name: answers.results[name] for name in AUTOREGRESSIVE if name in answers.results}
    speeds = {name: finite(speed.tokens_per_second(run).value) for name, run in runs.items()}
    shared: dict[str, Any] = {"autoregressive_tokens_per_second": speeds}
    fastest, _ = fastest_autoregressive(shared)
    methods = {name: _numbers(answers, name, fastest, retokenised) for name in method_names(answers.results)}
    return shared | next(iter(methods.values())) | {"methods": methods}


def _numbers(answers: _Answers, name: str, fastest: str, retokenised: speed.Retokenised) -> dict[str, Any]:
    method, results, questions = answers.results[name], answers.results, answers.questions
    speedups = {n: speed.speedup_interval(results[n], method, questions) for n in AUTOREGRESSIVE if n in results}
    numbers = {
        "mean_accepted_length": acceptance.mean_accepted_length(method).value,
        "acceptance_per_depth": [ratio.value for ratio in acceptance.acceptance_per_depth(method)],
        "ctar": {str(width): acceptance.ctar(method, width).value for width in acceptance.CTAR_WIDTHS},
        "tokens_per_second": speed.tokens_per_second(method).value,
        "decode_tokens_per_second": speed.decode_tokens_per_second(method).value,
        # The fastest baseline is the honest denominator.
        "speedup": {f"vs_{n}": interval[0] for n, interval in speedups.items()}
        | {"interval_95": speedups[fastest][1:]},
        "spec_bench": vars(speed.spec_bench(results[fastest], method, retokenised, questions)),
    }
    if name in answers.equalities:
        numbers["identical_outputs"] = _identical(answers.turns, answers.equalities[name])
    return numbers


def _identical(turns: Sequence[dict[str, int]], equalities: Sequence[Equality]) -> dict[str, Any]:
    near_ties: list[dict[str, Any]] = []
    different: list[dict[str, Any]] = []
    for turn, equality in zip(turns, equalities, strict=True):
        if not equality.same:
            (near_ties if equality.near_tie else different).append(turn | equality.to_json())
    same = sum(equality.same for equality in equalities)
    return {"same": same, "of": len(equalities), "near_ties": near_ties, "different": different}
