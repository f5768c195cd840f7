"""Acceptance from step logs, under every convention in use; each function says whose it is and how it counts.

Unless a name says otherwise, a metric is a :class:`~drafthead.data.batch.Ratio` of totals over the answers: long
answers weigh more, as in Spec-Bench and EAGLE, and a failed answer without tokens or steps changes nothing.
The prefill's token belongs to no step; autoregressive decoding commits one token per step, so its mean is 1.

``committed`` tokens are what a step added to the answer; ``accepted`` drafts are what the rule accepted, before EOS or
the length limit truncated the answer.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from drafthead.data.batch import Ratio
from drafthead.models.decoding.step_log import DecodeResult, StepRecord

CTAR_WIDTHS = range(1, 7)
Results = Sequence[DecodeResult]


def steps_of(results: Iterable[DecodeResult]) -> list[StepRecord]:
    """The steps of all answers, one list."""
    return [step for result in results for step in result.steps]


def drafting_steps(results: Results) -> list[StepRecord]:
    """Steps that drafted: prompt lookup without a match, or a step at the length limit, drafts nothing."""
    return [step for step in steps_of(results) if step.depth > 0]


def mean_of(steps: Sequence[StepRecord], value: Callable[[StepRecord], float]) -> Ratio:
    """Mean of ``value`` over ``steps``."""
    return Ratio(sum(map(value, steps)), len(steps))


def mean_accepted_length(results: Results) -> Ratio:
    """Tokens committed / steps, bonus token included, after truncation by EOS or the length limit.

    But for the truncation the same as EAGLE's tau, Spec-Bench's "mean accepted tokens", Kangaroo's compression ratio,
    Medusa's acceleration rate, block efficiency, and SGLang's completion_tokens / verify_ct.
    """
    return mean_of(steps_of(results), lambda step: step.committed)


def mean_accepted_length_untruncated(results: Results) -> Ratio:
    """(Accepted drafts + the bonus) / steps, before truncation: Spec-Bench's list of accept lengths.

    Also DSD's TAR as its spec_decoding_demo.py counts it: tokens matched, the bonus added.
    """
    return mean_of(steps_of(results), lambda step: step.accepted + 1)


def mean_accepted_length_if_drafted(results: Results) -> Ratio:
    """vLLM's mean acceptance length: 1 + accepted drafts / steps that drafted.

    Steps without a draft do not count, which favours prompt lookup.
    """
    return mean_of(drafting_steps(results), lambda step: step.accepted + 1)


def mean_accepted_drafts(results: Results) -> Ratio:
    """Accepted drafts / steps, without the bonus: TriForce's avg_tokens, economize's mean_accepted."""
    return mean_of(steps_of(results), lambda step: step.accepted)


def simulated_accepted_drafts(results: Results) -> Ratio:
    """a_1 + a_1 a_2 + ..., of the conditional acceptances: SpecForge's offline simulated_acc_len, without the bonus.

    Equal to :func:`mean_accepted_drafts` where every step drafts equally deep.
    """
    rates = [ratio.value if ratio.den else 0.0 for ratio in acceptance_per_depth(results)]
    return Ratio(float(np.cumprod(rates).sum()), 1 if steps_of(results) else 0)


def compression_ratio_as_released(results: Results) -> Ratio:
    """Kangaroo's CR as its script computes it: the prefill counts as a step of one token, which dilutes the ratio."""
    answered = [result for result in results if result.tokens]
    found = mean_accepted_length(answered)
    return found + Ratio(len(answered), len(answered))


def tar_as_analysed(results: Results) -> Ratio:
    """DSD's TAR as ``analyze_output.py`` averages it: per answer without its first step, then over the answers."""
    means = [mean_of(r.steps[1:], lambda step: step.accepted + 1).value for r in results if len(r.steps) > 1]
    return Ratio(sum(means), len(means))


def acceptance_rate(results: Results) -> Ratio:
    """Accepted drafts / drafted depth: flashspec, vLLM, TriForce. For a chain, the depth is what was drafted.

    Censored by position: a rejection discards the drafts after it untried, yet they count as drafted. It falls with
    the depth at equal quality, and is not alpha.
    """
    steps = steps_of(results)
    return Ratio(sum(step.accepted for step in steps), sum(step.depth for step in steps))


def node_efficiency(results: Results) -> Ratio:
    """Accepted drafts / drafted nodes: what share of the verified tree was of use. vLLM's rate for trees."""
    steps = steps_of(results)
    return Ratio(sum(step.accepted for step in steps), sum(step.proposed for step in steps))


def acceptance_per_depth(results: Results) -> list[Ratio]:
    """P(draft i accepted | draft i-1 accepted, and the tree is i deep), for i = 1, 2, ...: NeMo Automodel.

    In a sparse tree, a branch that ends before the deepest one counts as a rejection.
    """
    steps = steps_of(results)
    ratios = []
    for depth in range(1, max((step.depth for step in steps), default=0) + 1):
        reached = [step for step in steps if step.depth >= depth and step.accepted >= depth - 1]
        ratios.append(Ratio(sum(step.accepted >= depth for step in reached), len(reached)))
    return ratios


def acceptance_per_depth_of_all(results: Results) -> list[Ratio]:
    """P(draft i accepted), over all steps that drafted: vLLM's per-position acceptance rate, for i = 1, 2, ...

    Unconditional: it sums to the accepted drafts per drafting step.
    """
    steps = drafting_steps(results)
    deepest = max((step.depth for step in steps), default=0)
    return [Ratio(sum(s.accepted >= depth for s in steps), len(steps)) for depth in range(1, deepest + 1)]


def alpha(results: Results) -> Ratio | None:
    """Leviathan's alpha = E[sum_x min(p, q)], from chains: accepted drafts / drafts tried; None for trees.

    A draft is tried when the one before it was accepted, so nothing is censored. With siblings a node's first
    candidate is not in the log.
    """
    steps = drafting_steps(results)
    if any(step.proposed != step.depth for step in steps):
        return None
    return Ratio(sum(step.accepted for step in steps), sum(min(step.accepted + 1, step.depth) for step in steps))


def n_alpha(results: Results) -> list[Ratio] | None:
    """EAGLE's n-alpha, n = 0, 1, ...: acceptance where the draft's input has n features that the draft predicted.

    In a chain that is the conditional acceptance at depth n + 1; None for trees.
    """
    return None if alpha(results) is None else acceptance_per_depth(results)


def ctar(results: Results, width: int) -> Ratio:
    """Kangaroo's consistent token acceptance rate: P(a step commits more than ``width`` tokens), bonus included.

    Summed over all widths from 0 it is the mean accepted length.
    """
    return mean_of(steps_of(results), lambda step: step.committed > width)


def ctar_curve(results: Results) -> list[Ratio]:
    """CTAR(0), CTAR(1), ... up to the longest step."""
    longest = max((step.committed for step in steps_of(results)), default=0)
    return [ctar(results, width) for width in range(longest)]


Bin = dict[str, Any]
"""Plain values of the steps whose key lies in ["low", "high"), the last bin's high included; NaN: nothing counted."""


def by_position(results: Results, width: int = 32) -> list[Bin]:
    """Acceptance by the answer tokens before the step, in bins of ``width``; empty bins are left out."""
    steps = steps_of(results)
    last = max((step.position for step in steps), default=-1)
    edges = [float(edge) for edge in range(0, last + 1 + width, width)]
    return _binned(steps, [float(step.position) for step in steps], edges)


CONTEXTS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Edges of the bins of ``by_context``."""


def by_context(results: Results, prompt_tokens: Sequence[int]) -> list[Bin]:
    """Acceptance by all tokens before the step, those of its prompt included."""
    pairs = zip(results, prompt_tokens, strict=True)
    keys = [float(prompt + step.position) for result, prompt in pairs for step in result.steps]
    return _binned(steps_of(results), keys, [float(edge) for edge in CONTEXTS])


def by_entropy(results: Results, bins: int = 5) -> list[Bin]:
    """Acceptance by the target's entropy in nats, in bins of equally many steps.

    Steps without an entropy (NaN) are left out; equal quantiles make fewer bins.
    """
    steps = [step for step in steps_of(results) if math.isfinite(step.entropy)]
    if not steps:
        return []
    keys = [step.entropy for step in steps]
    edges = np.unique(np.quantile(keys, np.linspace(0, 1, bins + 1))).tolist()
    return _binned(steps, keys, edges if len(edges) > 1 else edges * 2)


def _binned(steps: Sequence[StepRecord], keys: list[float], edges: list[float]) -> list[Bin]:
    places = np.minimum(np.searchsorted(edges, keys, side="right") - 1, len(edges) - 2)
    found = []
    for place in np.unique(places).tolist():
        group = [step for step, at in zip(steps, places, strict=True) if at == place]
        drafting = [step for step in group if step.depth > 0]
        numbers = {
            "mean_accepted_length": mean_of(group, lambda step: step.committed).value,
            "first_accepted": mean_of(drafting, lambda step: step.accepted > 0).value,
        }
        found.append({"low": edges[place], "high": edges[place + 1], "steps": len(group)} | numbers)
    return found
