"""Speeds of answers against a baseline, in two conventions, and every metric by name.

Exact: committed tokens, and ratios of totals. Spec-Bench-compatible: counted like its evaluation scripts (2401.07851),
on which published tables are based.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafthead.data.batch import Ratio
from drafthead.data.utils.floats import bootstrap_interval, finite
from drafthead.eval.metrics import acceptance
from drafthead.eval.metrics.acceptance import Results, mean_of, steps_of

Retokenised = Callable[[list[int]], int]
"""Number of tokens of an answer after decoding it and tokenising the result again, without a BOS token."""


def tokens_per_second(results: Results) -> Ratio:
    """Return answer tokens per second of whole decodings: the prefill's token and time are included."""
    return Ratio(sum(len(r.tokens) for r in results), sum(r.total_s for r in results))


def decode_tokens_per_second(results: Results) -> Ratio:
    """Return tokens committed in steps per second after the prefill."""
    seconds = sum(r.total_s - r.prefill_s for r in results)
    return Ratio(sum(step.committed for step in steps_of(results)), seconds)


def speedup(baseline: Results, method: Results) -> Ratio:
    """Return tokens per second over the baseline's, totals over totals, prefill included."""
    return Ratio(tokens_per_second(method).value, tokens_per_second(baseline).value)


def speedup_interval(
    baseline: Results, method: Results, groups: list[Any] | None = None, seed: int = 0
) -> tuple[float, float, float]:
    """Return :func:`speedup` and its 95 % bootstrap interval over prompts as (ratio, low, high).

    Both methods' answers to a prompt are drawn as a pair, because a slow prompt is slow for both. ``groups`` names each
    answer's prompt, so that the turns of a conversation are drawn together. Too few prompts give NaN bounds.
    """
    timed = [b.total_s > 0 and m.total_s > 0 for b, m in zip(baseline, method, strict=True)]
    columns = [[len(m.tokens), m.total_s, len(b.tokens), b.total_s] for b, m in zip(baseline, method, strict=True)]
    rows = _by_group(columns, groups, timed)
    return float(_ratio(rows.sum(0))), *bootstrap_interval(rows, _ratio, seed)


def _ratio(totals: np.ndarray) -> np.ndarray:
    tokens, seconds, base_tokens, base_s = np.moveaxis(totals, -1, 0)
    with np.errstate(invalid="ignore"):
        return np.asarray((tokens / seconds) / (base_tokens / base_s))


def _by_group(columns: list[list[float]], groups: list[Any] | None, included: list[bool]) -> np.ndarray:
    """Return totals [groups, C] of the rows marked in ``included``, in the order of each group's first row."""
    names: list[Hashable] = list(range(len(columns))) if groups is None else groups
    totals: dict[Hashable, np.ndarray] = {}
    for name, row, is_included in zip(names, columns, included, strict=True):
        if is_included:
            totals[name] = totals.get(name, 0) + np.array(row)
    return np.array(list(totals.values())).reshape(-1, 4)


@dataclass(frozen=True)
class SpecBench:
    """The numbers that Spec-Bench's ``speed.py`` prints."""

    mean_accepted_length: float
    """Mean over the pooled steps, before truncation."""
    tokens_per_second: float
    """Mean over questions of their rates."""
    autoregressive_tokens_per_second: float
    speedup: float


def spec_bench(
    baseline: Results, method: Results, retokenised: Retokenised, groups: list[Any] | None = None
) -> SpecBench:
    """Return Spec-Bench's numbers: the ratio of the means over questions of tokens / seconds, prefill included.

    Its scripts count the method's committed tokens, but the baseline's by tokenising the decoded text again, without
    special tokens. Two of its faults are not imitated. It counts tokens after EOS, and gives a failed answer the time
    of the previous one. ``groups`` names each answer's question; all turns of a question give one rate.
    """
    answered = [bool(b.tokens and m.tokens) for b, m in zip(baseline, method, strict=True)]
    columns = [
        [len(m.tokens), m.total_s, retokenised(b.tokens) if b.tokens else 0, b.total_s]
        for b, m in zip(baseline, method, strict=True)
    ]
    rows = _by_group(columns, groups, answered)
    rate, base_rate = (Ratio(float((rows[:, n] / rows[:, n + 1]).sum()), len(rows)).value for n in (0, 2))
    length = acceptance.mean_accepted_length_untruncated(method).value
    return SpecBench(length, rate, base_rate, Ratio(rate, base_rate).value)


def measure(
    baseline: Results, method: Results, retokenised: Retokenised, groups: list[Any] | None = None
) -> dict[str, float | None | list[float | None]]:
    """Return every metric of ``method`` by name as plain values; None if the log cannot tell it."""
    steps = steps_of(method)
    step_s, baseline_step_s = (mean_of(steps_of(r), lambda step: step.total_s).value for r in (method, baseline))
    total_s = sum(step.total_s for step in steps)
    decode_speeds = [decode_tokens_per_second(results).value for results in (method, baseline)]
    metrics: dict[str, Ratio | list[Ratio] | None] = acceptance.published_metrics(method) | {
        "tokens_per_second": tokens_per_second(method),
        "decode_tokens_per_second": decode_tokens_per_second(method),
        # Share of the steps' wall time spent neither drafting nor in the base.
        "loop_overhead": Ratio(total_s - sum(step.draft_s + step.verify_s for step in steps), total_s),
        # Medusa's overhead: the mean accepted length divided by it is the speedup of the steps.
        "step_overhead": Ratio(step_s, baseline_step_s),
        "speedup": speedup(baseline, method),
        # Without the prefill, which drafts cannot speed up.
        "decode_speedup": Ratio(*decode_speeds),
    }
    compatible = spec_bench(baseline, method, retokenised, groups)
    values: dict[str, Any] = {
        name: [ratio.value for ratio in metric] if isinstance(metric, list) else metric and metric.value
        for name, metric in metrics.items()
    }
    values |= {"spec_bench_tokens_per_second": compatible.tokens_per_second, "spec_bench_speedup": compatible.speedup}
    plain: dict[str, float | None | list[float | None]] = finite(values)
    return plain
