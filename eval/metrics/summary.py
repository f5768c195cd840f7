"""The contents of ``eval.json``: every method's metrics, per task and over all tasks, and the speedup's breakdown. All
values are JSON values; null if nothing was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drafthead.data.answers.loops import is_degenerate
from drafthead.eval.config import METHOD
from drafthead.eval.lossless.equality import Equality, equality_rate
from drafthead.eval.metrics import steps
from drafthead.eval.metrics.speedup_breakdown import speedup_breakdown
from drafthead.eval.timing.interleaved import TimedResults
from drafthead.eval.timing.result_log import FailedDecode
from drafthead.eval.trees.search import TreeOrder
from drafthead.files.local import finite
from drafthead.models.decoding.cost_model import CostModel
from drafthead.system.machine import hardware, versions

AUTOREGRESSIVE = ("transformers_stock", "transformers", "autoregressive")  # generate (stock, our modules), our loop
CTAR_WIDTHS = range(1, 7)
HEADLINE = ("mean_accepted_length", "acceptance_per_depth", "tokens_per_second", "decode_tokens_per_second")
"""Metrics reported per task and method. All other metrics are reported per method, over all tasks."""


def summarise(
    timed: TimedResults,
    equalities: dict[str, list[Equality]],
    retokenised: steps.Retokenised,
    dtype: torch.dtype,
    costs: CostModel | None = None,
    order: TreeOrder | None = None,
    **columns: Any,
) -> dict[str, Any]:
    """Return everything in ``eval.json`` about the answers. ``timed`` has results of at least one of ``AUTOREGRESSIVE``
    and one method. ``equalities`` compares every turn's answer, by method; some methods may be missing. ``costs`` and
    ``order`` (calibrated nodes) are used to find the fastest draft size on this machine. ``columns`` are more arguments
    of ``step_table``, such as ``spans``.
    "tasks" and "overall" have the headline method's numbers, and each method's under "methods". "failed" lists the
    prompts left out of both. "metrics" has every metric per method. "by_position", "by_context", "by_entropy" and
    "by_span" are the headline's acceptance in bins, "by_context_of" each method's by context. "degenerate" counts each
    method's answers that repeat themselves. "speedup_breakdown" is the headline's speedup over each baseline, and
    "equality" its ``equality_rate``."""
    table = steps.step_table(timed.results, timed.prompts, timed.turns, timed.ids, retokenised, **columns)
    runs = {name: table[table.method == name] for name in timed.results}
    methods, baselines = method_names(runs), [name for name in AUTOREGRESSIVE if name in runs]
    headline = methods[0]
    turns = [
        {"prompt": prompt.number} | ({"turn": turn} if prompt.turns > 1 else {})
        for prompt, turn in zip(timed.prompts, timed.turns, strict=True)
    ]
    tasks = [prompt.task for prompt in timed.prompts]
    errors = {n: row.error for n, row in enumerate(timed.results[headline]) if isinstance(row, FailedDecode)}
    answered = [n for n in range(len(turns)) if n not in errors]
    measured_on = hardware() | {"other_processes_cores": timed.other_processes_cores}
    machine = {"hardware": measured_on, "versions": versions()}

    def group(rows: steps.Rows, members: list[int]) -> dict[str, Any]:
        """Return the metrics of the answers with the indices ``members``; ``rows`` are their steps with all methods."""
        outputs = {name: [(turns[n], equality[n]) for n in members] for name, equality in equalities.items()}
        return _group({name: rows[rows.method == name] for name in (*baselines, *methods)}, outputs) | machine

    overall = group(table, answered)
    by_task = {t: group(table[table.task == t], [n for n in answered if tasks[n] == t]) for t in dict.fromkeys(tasks)}
    fastest = runs[fastest_autoregressive(overall)[0]]
    summary = {
        "headline": headline,
        "tasks": by_task,
        "overall": overall,
        "failed": [turns[n] | {"task": tasks[n], "message": error} for n, error in errors.items()],
        "metrics": {name: {m: metric(runs[name], fastest) for m, metric in steps.METRICS.items()} for name in methods},
        "by_position": steps.by_position(runs[headline]),
        "by_context": steps.by_context(runs[headline]),
        "by_entropy": steps.by_entropy(runs[headline]),
        "by_context_of": {name: steps.by_context(runs[name]) for name in methods},
        "by_span": steps.by_span(runs[headline]),
        "degenerate": {name: _degenerate(timed, name, runs[name]) for name in methods},
        "speedup_breakdown": {name: speedup_breakdown(runs[name], runs[headline], costs, order) for name in baselines},
        "equality": equality_rate([equalities[headline][n] for n in answered if headline in equalities], dtype),
    }
    plain: dict[str, Any] = finite(summary)
    return plain


def _degenerate(timed: TimedResults, method: str, rows: steps.Rows) -> dict[str, Any]:
    """Return the number of a method's answers that repeat themselves, their prompts, and tau without them."""
    answers = zip(timed.prompts, timed.turns, timed.results[method], strict=True)
    looping = {(prompt.task, prompt.number, turn) for prompt, turn, row in answers if is_degenerate(row.tokens)}
    keys = zip(rows.task, rows.prompt, rows.turn, strict=True)
    others = rows[[key not in looping for key in keys]]
    return {
        "answers": len(looping),
        "of": len(rows[rows.step == 0]),
        "prompts": sorted({number for _, number, _ in looping}),
        "mean_accepted_length_without": steps.mean_accepted_length(others),
    }


def retokenised(tokenizer: Any, tokens: list[int]) -> int:
    """Return the number of tokens after decoding and tokenising an answer again, which Spec-Bench counts."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return len(tokenizer(text, add_special_tokens=False).input_ids)


def method_names(names: Mapping[str, object]) -> list[str]:
    """Return the names of the speculative methods (all but ``AUTOREGRESSIVE``), the headline method first."""
    methods = [name for name in names if name not in AUTOREGRESSIVE]
    return sorted(methods, key=lambda name: name != METHOD)


def fastest_autoregressive(group: dict[str, Any]) -> tuple[str, float | None]:
    """Return name and tokens per second of the fastest baseline in ``group`` ("overall" or a task of ``summarise``)."""
    speeds: dict[str, float | None] = group["autoregressive_tokens_per_second"]
    name = max(speeds, key=lambda baseline: speeds[baseline] or 0.0)
    return name, speeds[name]


def speedup_of(group: dict[str, Any], method: str | None = None) -> float | None:
    """Return the speedup of ``method`` (None: the headline's) over the fastest baseline in ``group``; None: unknown."""
    numbers = group if method is None else group["methods"][method]
    value: float | None = numbers["speedup"][f"vs_{fastest_autoregressive(group)[0]}"]
    return value


def nodes_per_step(evaluation: dict[str, Any]) -> float | None:
    """Return the mean size of the headline's trees, root included; None if no step was measured."""
    explained = evaluation["speedup_breakdown"][fastest_autoregressive(evaluation["overall"])[0]]
    return explained and 1 + float(explained["method"]["drafts"])


Outputs = Sequence[tuple[dict[str, int], Equality]]  # prompt and turn of each answer, and its comparison


def _group(runs: dict[str, steps.Rows], outputs: Mapping[str, Outputs]) -> dict[str, Any]:
    """Return the headline method's numbers and, under "methods", every method's, from their rows on some prompts."""
    baselines = {name: rows for name, rows in runs.items() if name in AUTOREGRESSIVE}
    speeds = {name: finite(steps.tokens_per_second(rows)) for name, rows in baselines.items()}
    shared: dict[str, Any] = {"autoregressive_tokens_per_second": speeds}
    fastest, _ = fastest_autoregressive(shared)
    methods = {
        name: _numbers(runs[name], baselines, fastest)
        | ({"identical_outputs": _identical(outputs[name])} if name in outputs else {})
        for name in method_names(runs)
    }
    return shared | next(iter(methods.values())) | {"methods": methods}


def _numbers(rows: steps.Rows, baselines: dict[str, steps.Rows], fastest: str) -> dict[str, Any]:
    """Return a method's numbers. Its intervals and Spec-Bench numbers refer to the fastest baseline."""
    base = baselines[fastest]
    speedups = {f"vs_{name}": steps.speedup(rows, baseline) for name, baseline in baselines.items()}
    return {name: steps.METRICS[name](rows, base) for name in HEADLINE} | {
        "ctar": {str(width): share for width, share in zip(CTAR_WIDTHS, steps.ctar(rows, CTAR_WIDTHS), strict=True)},
        "speedup": speedups | {"interval_95": steps.speedup_interval(rows, base)},
        "spec_bench": steps.spec_bench(rows, base),
    }


def _identical(outputs: Outputs) -> dict[str, Any]:
    """Return the numbers of equal and of all answers, and the differing ones: near-ties, and others."""
    keys = ("position", "tokens", "margin", "diagnosis")
    differing = [(e.near_tie, turn | {key: getattr(e, key) for key in keys}) for turn, e in outputs if not e.same]
    return {
        "same": len(outputs) - len(differing),
        "of": len(outputs),
        "near_ties": [entry for near_tie, entry in differing if near_tie],
        "different": [entry for near_tie, entry in differing if not near_tie],
    }
