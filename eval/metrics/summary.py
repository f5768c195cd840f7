"""What ``eval.json`` holds: the metrics of every method, per task and over all, and the headline's explained."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from drafthead.data.utils.machine import hardware, versions
from drafthead.eval.lossless.equality import Equality, equality_rate
from drafthead.eval.metrics import acceptance as metrics
from drafthead.eval.metrics.breakdown import by_entropy, by_position
from drafthead.eval.metrics.comparison import Log, Retokenised, measure, spec_bench
from drafthead.eval.metrics.speedup_breakdown import Costs, explain
from drafthead.eval.prompts.prompt import EvalPrompt
from drafthead.eval.timing.interleaved import speedup_interval
from drafthead.eval.timing.result_log import FailedDecode
from drafthead.eval.trees.search import TreeOrder
from drafthead.models.decoding.step_log import DecodeResult

BASELINES = ("transformers", "drafthead")
"""Plain decoding: transformers' ``generate``, and our loop."""
METHOD = "speculative"
"""The method that the headline is about, where it ran."""
Row = TypeVar("Row")
Results = Mapping[str, Sequence[DecodeResult]]


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What besides the results makes a summary richer; every part may be missing."""

    turns: Sequence[int] | None = None
    """Of each result its turn in the conversation, from 0; None: all first."""
    retokenised: Retokenised | None = None
    """For the Spec-Bench-compatible numbers."""
    costs: Costs | None = None
    """For the best draft on this machine."""
    order: TreeOrder | None = None
    """Calibrated nodes, for the best tree."""
    draft_s: Callable[[int], float] | None = None
    """Seconds that the headline's drafter takes for a tree d deep; None: as long as ``costs.draft`` for any."""
    dtype: torch.dtype = field(default=torch.float32)
    """That the target computed in: what counts as a tie."""


def summarise(
    prompts: Sequence[EvalPrompt],
    results: Results,
    equalities: Mapping[str, Sequence[Equality]] | Sequence[Equality],
    known: RunInfo | None = None,
) -> dict[str, Any]:
    """Everything ``eval.json`` holds; plain JSON values, None where nothing was measured.

    Args:
        prompts: in the order of the results; every turn of a conversation has the same one.
        results: of ``run_interleaved``, at least one of ``BASELINES`` and one method; any other name is a method.
        equalities: per method one per prompt, ignored for failed prompts; methods may be missing. A bare sequence is
            the headline method's.
        known: what else is known of the run.

    Returns:
        "tasks": per task, and "overall": the headline method's numbers, and under "methods" each method's;
        "failed": prompts left out of both, with the reason; "headline": its method's name; "metrics": per method every
        metric there is; "by_position", "by_entropy": the headline's acceptance in bins; "explained": its speedup over
        each baseline, term by term; "equality": its rate and the target's type.

    Raises:
        ValueError: no baseline or no method among the results.
    """
    known = known or RunInfo()
    methods, plain_names = method_names(results), _plain_names(results)
    headline = methods[0]
    by_method = equalities if isinstance(equalities, Mapping) else {headline: equalities}
    failed = {n: r for n, r in enumerate(results[headline]) if isinstance(r, FailedDecode)}
    kept = [n for n in range(len(prompts)) if n not in failed]
    tasks: dict[str, list[int]] = {}
    for n, prompt in enumerate(prompts):
        tasks.setdefault(prompt.task, []).append(n)
    machine = {"hardware": hardware(), "versions": versions()}

    def group(members: list[int]) -> dict[str, Any]:
        return _group(prompts, _chosen(results, members), _chosen(by_method, members), members, known) | machine

    chosen = _chosen(results, kept)
    return {
        "headline": headline,
        "tasks": {task: group([n for n in members if n not in failed]) for task, members in tasks.items()},
        "overall": group(kept),
        "failed": [_failure(prompts, n, known, row.error) for n, row in failed.items()],
        "metrics": _every_metric(chosen, methods, known, [_question(prompts[n]) for n in kept]),
        "by_position": [found.to_json() for found in by_position(chosen[headline])],
        "by_entropy": [found.to_json() for found in by_entropy(chosen[headline])],
        "explained": {name: _explained(chosen[name], chosen[headline], known) for name in plain_names},
        "equality": equality_rate(_chosen(by_method, kept).get(headline, []), known.dtype),
    }


def method_names(names: Mapping[str, object]) -> list[str]:
    """Which of ``names`` are methods, the headline's first."""
    found = [name for name in names if name not in BASELINES]
    return sorted(found, key=lambda name: name != METHOD)


def _plain_names(results: Results) -> list[str]:
    found = [name for name in BASELINES if name in results]
    if not found or not method_names(results):
        raise ValueError(f"a summary needs one of {BASELINES} and a method, got results of {list(results)}")
    return found


def fastest_baseline(group: dict[str, Any]) -> tuple[str, float | None]:
    """Name and tokens per second of the faster plain decoding in a group of ``summarise``."""
    speeds: dict[str, float | None] = group["baseline_tokens_per_second"]
    name = max(speeds, key=lambda baseline: speeds[baseline] or 0.0)
    return name, speeds[name]


def speedup_of(group: dict[str, Any], method: str | None = None) -> float | None:
    """Speedup over the faster plain decoding in a group of ``summarise``: the one to quote.

    Args:
        group: of ``summarise``.
        method: which; None is the headline's.
    """
    numbers = group if method is None else group["methods"][method]
    value: float | None = numbers["speedup"][f"vs_{fastest_baseline(group)[0]}"]
    return value


def _group(
    prompts: Sequence[EvalPrompt],
    results: dict[str, list[DecodeResult]],
    equalities: dict[str, list[Equality]],
    members: list[int],
    known: RunInfo,
) -> dict[str, Any]:
    """The numbers of the answers ``members``; results and equalities are already those."""
    speeds = {name: _number(metrics.tokens_per_second(results[name]).value) for name in BASELINES if name in results}
    shared: dict[str, Any] = {"baseline_tokens_per_second": speeds}
    fastest, _ = fastest_baseline(shared)
    methods = {}
    for name in method_names(results):
        numbers = _numbers(results, name, fastest, known, [_question(prompts[n]) for n in members])
        if name in equalities:
            places = [_place(prompts, n, known) for n in members]
            numbers["identical_outputs"] = _identical(places, equalities[name])
        methods[name] = numbers
    return shared | next(iter(methods.values())) | {"methods": methods}


def _numbers(
    results: dict[str, list[DecodeResult]], name: str, fastest: str, known: RunInfo, questions: list[tuple[str, int]]
) -> dict[str, Any]:
    method = results[name]
    intervals = {base: speedup_interval(results[base], method, questions) for base in BASELINES if base in results}
    ratios: dict[str, Any] = {f"vs_{base}": _number(found[0]) for base, found in intervals.items()}
    # The faster baseline is the honest denominator.
    ratios["interval_95"] = [_number(bound) for bound in intervals[fastest][1:]]
    compatible = None
    if known.retokenised is not None:
        compatible = spec_bench(results[fastest], method, known.retokenised, questions).to_json()
    return {
        "mean_accepted_tokens": _number(metrics.mean_accepted_tokens(method).value),
        "acceptance_per_depth": [_number(ratio.value) for ratio in metrics.acceptance_per_depth(method)],
        "ctar": {str(width): _number(metrics.ctar(method, width).value) for width in metrics.CTAR_WIDTHS},
        "tokens_per_second": _number(metrics.tokens_per_second(method).value),
        "decode_tokens_per_second": _number(metrics.decode_tokens_per_second(method).value),
        "speedup": ratios,
        "spec_bench": compatible,
    }


def _every_metric(
    results: dict[str, list[DecodeResult]], methods: list[str], known: RunInfo, questions: list[tuple[str, int]]
) -> dict[str, Any]:
    speeds = {name: metrics.tokens_per_second(results[name]).value for name in BASELINES if name in results}
    plain = results[max(speeds, key=lambda name: speeds[name] if math.isfinite(speeds[name]) else 0.0)]
    return {
        name: measure(Log(method=results[name], plain=plain, retokenised=known.retokenised, questions=questions))
        for name in methods
    }


def _explained(plain: list[DecodeResult], method: list[DecodeResult], known: RunInfo) -> dict[str, Any] | None:
    found = explain(plain, method, known.costs, order=known.order, draft_s=known.draft_s)
    return None if found is None else found.to_json()


def _chosen(rows: Mapping[str, Sequence[Row]], members: list[int]) -> dict[str, list[Row]]:
    return {name: [row[n] for n in members] for name, row in rows.items()}


def _identical(places: Sequence[dict[str, int]], equalities: Sequence[Equality]) -> dict[str, Any]:
    differing = [
        (equality, place | {name: value for name, value in equality.to_json().items() if name != "same"})
        for place, equality in zip(places, equalities, strict=True)
        if not equality.same
    ]
    return {
        "same": sum(equality.same for equality in equalities),
        "of": len(equalities),
        "near_ties": [entry for equality, entry in differing if equality.near_tie],
        "different": [entry for equality, entry in differing if not equality.near_tie],
    }


def _question(prompt: EvalPrompt) -> tuple[str, int]:
    """What the turns of one conversation share."""
    return prompt.task, prompt.number


def _failure(prompts: Sequence[EvalPrompt], at: int, known: RunInfo, message: str) -> dict[str, Any]:
    return _place(prompts, at, known) | {"task": prompts[at].task, "message": message}


def _place(prompts: Sequence[EvalPrompt], at: int, known: RunInfo) -> dict[str, int]:
    """Which prompt the result ``at`` is of, and which turn, where there are several."""
    turn = known.turns[at] if known.turns is not None else 0
    return {"prompt": prompts[at].number} | ({"turn": turn} if prompts[at].turns > 1 else {})


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
