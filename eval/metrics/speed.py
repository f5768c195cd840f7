"""Speeds of answers that ran one after the other, against a baseline in both conventions; and every metric by name.

Exact: committed tokens, ratios of totals. Spec-Bench-compatible: as its evaluation scripts (2401.07851) count, which is
what published tables hold.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafthead.data.batch import Ratio
from drafthead.data.utils.floats import bootstrap_interval, finite
from drafthead.eval.metrics import acceptance
from drafthead.eval.metrics.acceptance import Results, mean_of, steps_of

Retokenised = Callable[[list[int]], int]
"""Tokens of an answer after decoding it to text and tokenising that again, without a BOS token."""
Measured = Ratio | list[Ratio] | None


def step_seconds(results: Results) -> Ratio:
    """Seconds per step."""
    return mean_of(steps_of(results), lambda step: step.total_s)


def tokens_per_second(results: Results) -> Ratio:
    """Answer tokens, the prefill's included, per second of the whole decoding, prefill included."""
    return Ratio(sum(len(r.tokens) for r in results), sum(r.total_s for r in results))


def decode_tokens_per_second(results: Results) -> Ratio:
    """Tokens committed in steps per second after the prefill."""
    seconds = sum(r.total_s - r.prefill_s for r in results)
    return Ratio(sum(step.committed for step in steps_of(results)), seconds)


def loop_overhead(results: Results) -> Ratio:
    """Share of the steps' wall time spent neither drafting nor in the base: 1 - (draft + verify) / total."""
    steps = steps_of(results)
    total = sum(step.total_s for step in steps)
    return Ratio(total - sum(step.draft_s + step.verify_s for step in steps), total)


def step_overhead(baseline: Results, method: Results) -> Ratio:
    """Medusa's overhead: seconds of a speculative step / of an autoregressive one.

    The mean accepted length divided by it is the speedup of the steps.
    """
    return Ratio(step_seconds(method).value, step_seconds(baseline).value)


def speedup(baseline: Results, method: Results) -> Ratio:
    """Tokens per second over the baseline's, totals over totals, prefill included."""
    return Ratio(tokens_per_second(method).value, tokens_per_second(baseline).value)


def decode_speedup(baseline: Results, method: Results) -> Ratio:
    """The same without the prefill, which no draft makes faster."""
    return Ratio(decode_tokens_per_second(method).value, decode_tokens_per_second(baseline).value)


def speedup_interval(
    baseline: Results, method: Results, groups: list[Any] | None = None, seed: int = 0
) -> tuple[float, float, float]:
    """:func:`speedup` with a 95 % bootstrap interval over prompts, drawn in pairs: a slow prompt is slow for both.

    ``groups``: per answer its prompt, so that the turns of one conversation are drawn together. Returns ratio, low,
    high; NaN where there are too few prompts.
    """
    timed = [b.total_s > 0 and m.total_s > 0 for b, m in zip(baseline, method, strict=True)]
    columns = [[len(m.tokens), m.total_s, len(b.tokens), b.total_s] for b, m in zip(baseline, method, strict=True)]
    rows = _by_group(columns, groups, timed)
    return float(_ratio(rows.sum(0))), *bootstrap_interval(rows, _ratio, seed)


def _ratio(totals: np.ndarray) -> np.ndarray:
    tokens, seconds, base_tokens, base_s = np.moveaxis(totals, -1, 0)
    with np.errstate(invalid="ignore"):
        return np.asarray((tokens / seconds) / (base_tokens / base_s))


def _by_group(columns: list[list[float]], groups: list[Any] | None, kept: list[bool]) -> np.ndarray:
    """Totals [groups, C] of the rows that are kept, the groups in the order in which they come."""
    names: list[Hashable] = list(range(len(columns))) if groups is None else groups
    totals: dict[Hashable, np.ndarray] = {}
    for name, row, keep in zip(names, columns, kept, strict=True):
        if keep:
            totals[name] = totals.get(name, 0) + np.array(row)
    return np.array(list(totals.values())).reshape(-1, 4)


@dataclass(frozen=True)
class SpecBench:
    """What Spec-Bench's ``speed.py`` would print."""

    mean_accepted_length: float
    """Mean over the pooled steps, before truncation."""
    tokens_per_second: float
    """Mean over questions of their rates."""
    autoregressive_tokens_per_second: float
    speedup: float


def spec_bench(
    baseline: Results, method: Results, retokenised: Retokenised, groups: list[Any] | None = None
) -> SpecBench:
    """Spec-Bench's numbers: the ratio of the means over questions of tokens / seconds, prefill included.

    Its scripts count the method's tokens as they were committed, and the baseline's by tokenising the decoded text
    again, special tokens gone. Not imitated: counting tokens after EOS, and keeping the last answer's time for one
    that failed. ``groups``: per answer its question; turns of one question make one rate.
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


METRICS: Mapping[str, Callable[[Results], Measured]] = {
    metric.__name__: metric
    for metric in (
        acceptance.mean_accepted_length,
        acceptance.mean_accepted_length_untruncated,
        acceptance.mean_accepted_length_if_drafted,
        acceptance.mean_accepted_drafts,
        acceptance.simulated_accepted_drafts,
        acceptance.acceptance_rate,
        acceptance.node_efficiency,
        acceptance.alpha,
        acceptance.n_alpha,
        acceptance.acceptance_per_depth,
        acceptance.acceptance_per_depth_of_all,
        acceptance.compression_ratio_as_released,
        acceptance.tar_as_analysed,
        tokens_per_second,
        decode_tokens_per_second,
        loop_overhead,
    )
} | {
    "ctar": acceptance.ctar_curve,
    "compression_ratio": acceptance.mean_accepted_length,  # Kangaroo's paper
    "tar": acceptance.mean_accepted_length_untruncated,  # DSD's spec_decoding_demo.py
    "acceleration_rate": acceptance.mean_accepted_length,  # Medusa
}
"""Metrics of one step log; the functions' docstrings name whose convention each one follows."""
AGAINST_BASELINE = {metric.__name__: metric for metric in (step_overhead, speedup, decode_speedup)}


def measure(
    baseline: Results, method: Results, retokenised: Retokenised, groups: list[Any] | None = None
) -> dict[str, float | None | list[float | None]]:
    """Every metric of ``method`` by name, as plain values; None where the log cannot give one."""
    found: dict[str, Measured] = {name: metric(method) for name, metric in METRICS.items()}
    found |= {name: metric(baseline, method) for name, metric in AGAINST_BASELINE.items()}
    values: dict[str, Any] = {
        name: [ratio.value for ratio in value] if isinstance(value, list) else value and value.value
        for name, value in found.items()
    }
    compatible = spec_bench(baseline, method, retokenised, groups)
    values |= {"spec_bench_tokens_per_second": compatible.tokens_per_second, "spec_bench_speedup": compatible.speedup}
    plain: dict[str, float | None | list[float | None]] = finite(values)
    return plain
