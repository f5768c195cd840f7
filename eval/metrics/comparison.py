"""Metrics of one log against plain decoding's, in both conventions, and the table of all metrics.

Exact: committed tokens, ratios of totals, with the prefill or apart from it. Spec-Bench-compatible: as the evaluation
scripts of Spec-Bench (2401.07851) do it, which is what published tables hold; see :func:`spec_bench`.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from drafthead.data.batch import Ratio
from drafthead.eval.metrics import acceptance as metrics
from drafthead.models.decoding.step_log import DecodeResult

Retokenised = Callable[[list[int]], int]
"""Tokens of an answer after decoding it to text and tokenising that again, without a BOS token."""


def acceleration_rate(method: Sequence[DecodeResult]) -> Ratio:
    """Medusa's acceleration rate: tokens per step, the mean accepted tokens."""
    return metrics.mean_accepted_tokens(method)


def step_overhead(plain: Sequence[DecodeResult], method: Sequence[DecodeResult]) -> Ratio:
    """Medusa's overhead: seconds of a speculative step / seconds of a plain one.

    The acceleration rate divided by it is the speedup of the steps.
    """
    return Ratio(metrics.step_seconds(method).value, metrics.step_seconds(plain).value)


def speedup(plain: Sequence[DecodeResult], method: Sequence[DecodeResult]) -> Ratio:
    """Tokens per second over plain decoding's, totals over totals, prefill included."""
    return Ratio(metrics.tokens_per_second(method).value, metrics.tokens_per_second(plain).value)


def decode_speedup(plain: Sequence[DecodeResult], method: Sequence[DecodeResult]) -> Ratio:
    """The same without the prefill, which no draft makes faster."""
    return Ratio(metrics.decode_tokens_per_second(method).value, metrics.decode_tokens_per_second(plain).value)


@dataclass(frozen=True)
class SpecBench:
    """What Spec-Bench's ``speed.py`` would print."""

    mean_accepted_tokens: float
    """Mean over the pooled steps, before EOS or the limit cut anything off."""
    tokens_per_second: float
    """Mean over questions of their rates."""
    baseline_tokens_per_second: float
    speedup: float

    def to_json(self) -> dict[str, float | None]:
        """Plain values; None where nothing was measured."""
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}


def spec_bench(
    plain: Sequence[DecodeResult],
    method: Sequence[DecodeResult],
    retokenised: Retokenised,
    questions: Sequence[Hashable] | None = None,
) -> SpecBench:
    """Spec-Bench's numbers: the ratio of the means over questions of tokens / seconds, prefill included.

    Its scripts count the method's tokens as they were committed, and the baseline's by tokenising the decoded text
    again, special tokens gone. Not imitated: counting tokens behind EOS, and keeping the last answer's time for one
    that failed.

    Args:
        plain: the baseline's answers.
        method: answers to the same prompts.
        retokenised: how the baseline's tokens are counted.
        questions: per answer its question; turns of one question make one rate. By default each is its own.
    """
    names = list(range(len(plain))) if questions is None else list(questions)
    totals: dict[Hashable, list[float]] = {}
    for name, base, ours in zip(names, plain, method, strict=True):
        if base.tokens and ours.tokens:
            row = totals.setdefault(name, [0.0] * 4)
            for column, value in enumerate((retokenised(base.tokens), base.total_s, len(ours.tokens), ours.total_s)):
                row[column] += value
    rows = list(totals.values())
    base_rate = Ratio(sum(row[0] / row[1] for row in rows), len(rows)).value
    rate = Ratio(sum(row[2] / row[3] for row in rows), len(rows)).value
    return SpecBench(
        mean_accepted_tokens=metrics.mean_verdict_tokens(method).value,
        tokens_per_second=rate,
        baseline_tokens_per_second=base_rate,
        speedup=Ratio(rate, base_rate).value,
    )


@dataclass(frozen=True, kw_only=True)
class Log:
    """What metrics are computed from. What is missing makes the metrics that need it None."""

    method: Sequence[DecodeResult]
    plain: Sequence[DecodeResult] | None = None
    """Plain decoding's answers to the same prompts."""
    retokenised: Retokenised | None = None
    questions: Sequence[Hashable] | None = field(default=None)

    def spec_bench(self) -> SpecBench | None:
        """None without plain decoding or a way to count its tokens."""
        if self.plain is None or self.retokenised is None:
            return None
        return spec_bench(self.plain, self.method, self.retokenised, self.questions)


Measured = Ratio | list[Ratio] | None


@dataclass(frozen=True)
class Metric:
    """A number that somebody reports."""

    name: str
    convention: str
    """Who reports it, under which name, and how it counts."""
    function: Callable[[Log], Measured]
    """None where the log cannot give it."""


def _paired(function: Callable[[Sequence[DecodeResult], Sequence[DecodeResult]], Ratio]) -> Callable[[Log], Measured]:
    return lambda log: None if log.plain is None else function(log.plain, log.method)


def _compatible(name: str) -> Callable[[Log], Measured]:
    def measure_one(log: Log) -> Measured:
        found = log.spec_bench()
        return None if found is None else Ratio(getattr(found, name), 1)

    return measure_one


_ROWS: list[tuple[str, str, Callable[[Log], Measured]]] = [
    ("mean_accepted_tokens", "with the bonus, after EOS and limit: EAGLE tau, Kangaroo CR, block efficiency, SGLang",
     lambda log: metrics.mean_accepted_tokens(log.method)),
    ("mean_verdict_tokens", "with the bonus, before EOS and limit: Spec-Bench's list of accept lengths",
     lambda log: metrics.mean_verdict_tokens(log.method)),
    ("mean_length_of_drafting_steps", "with the bonus, steps without a draft left out: vLLM 1 + accepted / drafts",
     lambda log: metrics.mean_length_of_drafting_steps(log.method)),
    ("accepted_length", "without the bonus: TriForce avg_tokens, economize mean_accepted",
     lambda log: metrics.accepted_length(log.method)),
    ("simulated_length", "without the bonus, from conditional acceptances: SpecForge offline simulated_acc_len",
     lambda log: metrics.simulated_length(log.method)),
    ("acceptance_rate", "accepted / depth offered, position-censored: flashspec, vLLM, TriForce",
     lambda log: metrics.acceptance_rate(log.method)),
    ("node_efficiency", "accepted / drafted nodes: vLLM's rate over a tree",
     lambda log: metrics.node_efficiency(log.method)),
    ("alpha", "Leviathan E[sum min(p, q)] over tried drafts; none for trees",
     lambda log: metrics.alpha(log.method)),
    ("n_alpha", "EAGLE, n = 0, 1, ... self-predicted features in the draft's input; none for trees",
     lambda log: metrics.n_alpha(log.method)),
    ("acceptance_per_depth", "conditional on the draft before: NeMo Automodel",
     lambda log: metrics.acceptance_per_depth(log.method)),
    ("acceptance_per_depth_of_all", "unconditional, over drafting steps: vLLM per-position acceptance rate",
     lambda log: metrics.acceptance_per_depth_of_all(log.method)),
    ("ctar", "Kangaroo P(a step commits more than w tokens), w = 0, 1, ...; sums to mean_accepted_tokens",
     lambda log: metrics.ctar_curve(log.method)),
    ("compression_ratio", "Kangaroo's paper: the mean accepted tokens",
     lambda log: metrics.mean_accepted_tokens(log.method)),
    ("compression_ratio_as_released", "Kangaroo's script: the prefill counts as a step of one token",
     lambda log: metrics.compression_ratio_as_released(log.method)),
    ("tar", "DSD spec_decoding_demo.py: tokens matched per iteration, the bonus added",
     lambda log: metrics.mean_verdict_tokens(log.method)),
    ("tar_as_analysed", "DSD analyze_output.py: mean of per-answer means without each answer's first step",
     lambda log: metrics.tar_as_analysed(log.method)),
    ("acceleration_rate", "Medusa: tokens per step", lambda log: acceleration_rate(log.method)),
    ("step_overhead", "Medusa's overhead: seconds of a step / of a plain step", _paired(step_overhead)),
    ("tokens_per_second", "exact: committed tokens, prefill included",
     lambda log: metrics.tokens_per_second(log.method)),
    ("decode_tokens_per_second", "exact: committed in steps, prefill apart",
     lambda log: metrics.decode_tokens_per_second(log.method)),
    ("speedup", "exact: ratio of totals, prefill included", _paired(speedup)),
    ("decode_speedup", "exact: ratio of totals, prefill apart", _paired(decode_speedup)),
    ("spec_bench_tokens_per_second", "Spec-Bench: mean over questions of rates", _compatible("tokens_per_second")),
    ("spec_bench_speedup", "Spec-Bench: ratio of means of rates, the baseline's text tokenised again",
     _compatible("speedup")),
    ("loop_overhead", "share of the steps' time outside draft and base", lambda log: metrics.overhead(log.method)),
]  # fmt: skip
METRICS: dict[str, Metric] = {name: Metric(name, convention, function) for name, convention, function in _ROWS}
"""Every metric by name. Speeds against plain decoding are for answers that ran one after the other."""


def measure(log: Log) -> dict[str, float | None | list[float | None]]:
    """All of ``METRICS`` as plain values; None where the log cannot give one."""
    return {name: _plain(metric.function(log)) for name, metric in METRICS.items()}


def _plain(found: Measured) -> float | None | list[float | None]:
    if found is None:
        return None
    if isinstance(found, Ratio):
        return found.value if math.isfinite(found.value) else None
    return [ratio.value if math.isfinite(ratio.value) else None for ratio in found]
