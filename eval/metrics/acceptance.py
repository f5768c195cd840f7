"""Acceptance from step logs, under every published convention.

Unless noted otherwise, a metric is a :class:`~drafthead.data.batch.Ratio` of totals over the answers. Long answers
therefore weigh more, as in Spec-Bench and EAGLE. A failed answer has no tokens or steps and changes nothing. The
prefill's token belongs to no step. Autoregressive decoding commits one token per step, so its mean accepted length is
1.

``committed`` tokens are those that a step added to the answer. ``accepted`` drafts are those that the rule accepted,
before EOS or the length limit truncated the answer.
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
    """Return the steps of all answers in one list."""
    return [step for result in results for step in result.steps]


def drafting_steps(results: Results) -> list[StepRecord]:
    """Return the steps that drafted: prompt lookup without a match, or a step at the length limit, drafts nothing."""
    return [step for step in steps_of(results) if step.depth > 0]


def mean_of(steps: Sequence[StepRecord], value: Callable[[StepRecord], float]) -> Ratio:
    """Return the mean of ``value`` over ``steps``."""
    return Ratio(sum(map(value, steps)), len(steps))


def mean_accepted_length(results: Results) -> Ratio:
    """Return tokens committed / steps, with the bonus token, after truncation by EOS or the length limit.

    Apart from the truncation it equals EAGLE's tau, Spec-Bench's "mean accepted tokens", Kangaroo's compression ratio,
    Medusa's acceleration rate, block efficiency, and SGLang's completion_tokens / verify_ct.
    """
    return mean_of(steps_of(results), lambda step: step.committed)


def mean_accepted_length_untruncated(results: Results) -> Ratio:
    """Return (accepted drafts + the bonus token) / steps, before truncation: Spec-Bench's list of accept lengths."""
    return mean_of(steps_of(results), lambda step: step.accepted + 1)


def acceptance_per_depth(results: Results) -> list[Ratio]:
    """Return P(draft i accepted | draft i-1 accepted, and the tree is i deep) for i = 1, 2, ..., as NeMo Automodel.

    In a sparse tree, a branch that ends before the deepest one counts as a rejection.
    """
    steps = steps_of(results)
    ratios = []
    for depth in range(1, max((step.depth for step in steps), default=0) + 1):
        reached = [step for step in steps if step.depth >= depth and step.accepted >= depth - 1]
        ratios.append(Ratio(sum(step.accepted >= depth for step in reached), len(reached)))
    return ratios


def alpha(results: Results) -> Ratio | None:
    """Return Leviathan's alpha = E[sum_x min(p, q)] from chains: accepted drafts / drafts tried; None for trees.

    A draft is tried when the one before it was accepted, so nothing is censored. The log of a tree does not record
    which sibling was accepted.
    """
    steps = drafting_steps(results)
    if any(step.proposed != step.depth for step in steps):
        return None
    return Ratio(sum(step.accepted for step in steps), sum(min(step.accepted + 1, step.depth) for step in steps))


def ctar(results: Results, width: int) -> Ratio:
    """Return Kangaroo's consistent token acceptance rate: P(a step commits more than ``width`` tokens), with the bonus.

    Summed over all widths from 0 it is the mean accepted length.
    """
    return mean_of(steps_of(results), lambda step: step.committed > width)


def published_metrics(results: Results) -> dict[str, Ratio | list[Ratio] | None]:
    """Return acceptance by the name and in the convention of every paper and engine that reports it."""
    steps, drafting, per_depth = steps_of(results), drafting_steps(results), acceptance_per_depth(results)
    answered = [result for result in results if result.tokens]
    length, untruncated = mean_accepted_length(results), mean_accepted_length_untruncated(results)
    accepted = sum(step.accepted for step in steps)
    first_steps_left_out = [
        mean_of(result.steps[1:], lambda step: step.accepted + 1).value for result in results if len(result.steps) > 1
    ]
    conditional = [ratio.value if ratio.den else 0.0 for ratio in per_depth]
    deepest = max((step.depth for step in drafting), default=0)
    longest = max((step.committed for step in steps), default=0)
    return {
        "mean_accepted_length": length,
        "compression_ratio": length,  # Kangaroo's paper
        "acceleration_rate": length,  # Medusa
        "mean_accepted_length_untruncated": untruncated,
        "tar": untruncated,  # DSD, as its spec_decoding_demo.py counts
        # vLLM: steps without a draft do not count, which favours prompt lookup.
        "mean_accepted_length_if_drafted": mean_of(drafting, lambda step: step.accepted + 1),
        # Without the bonus token: TriForce's avg_tokens, economize's mean_accepted.
        "mean_accepted_drafts": Ratio(accepted, len(steps)),
        # SpecForge's offline simulated_acc_len, a_1 + a_1 a_2 + ...; the line above if all steps draft equally deep.
        "simulated_accepted_drafts": Ratio(float(np.cumprod(conditional).sum()), 1 if steps else 0),
        # flashspec, vLLM, TriForce: accepted drafts / drafted depth. A rejection leaves later drafts untried, yet they
        # count as drafted, so the rate falls with the depth at equal quality. It is not alpha.
        "acceptance_rate": Ratio(accepted, sum(step.depth for step in steps)),
        # vLLM's rate for trees: the useful share of the verified nodes.
        "node_efficiency": Ratio(accepted, sum(step.proposed for step in steps)),
        "alpha": alpha(results),
        # EAGLE: acceptance when n features of the draft's input are predicted ones, which is depth n + 1 of a chain.
        "n_alpha": None if alpha(results) is None else per_depth,
        "acceptance_per_depth": per_depth,
        # vLLM's unconditional rate, whose sum is the number of accepted drafts per drafting step.
        "acceptance_per_depth_of_all": [
            Ratio(sum(step.accepted >= depth for step in drafting), len(drafting)) for depth in range(1, deepest + 1)
        ],
        # Kangaroo's script counts the prefill as a step of one token, which dilutes the ratio.
        "compression_ratio_as_released": mean_accepted_length(answered) + Ratio(len(answered), len(answered)),
        # DSD's analyze_output.py averages per answer, without its first step, and then over the answers.
        "tar_as_analysed": Ratio(sum(first_steps_left_out), len(first_steps_left_out)),
        "ctar": [ctar(results, width) for width in range(longest)],
    }


Bin = dict[str, Any]
"""Plain values of the steps whose key is in ["low", "high"); the last bin includes its "high". NaN: nothing counted."""


def by_position(results: Results, width: int = 32) -> list[Bin]:
    """Return acceptance by the answer tokens before the step, in bins of ``width`` and without empty bins."""
    steps = steps_of(results)
    last = max((step.position for step in steps), default=-1)
    edges = [float(edge) for edge in range(0, last + 1 + width, width)]
    return _binned(steps, [float(step.position) for step in steps], edges)


CONTEXTS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Edges of the bins of ``by_context``."""


def by_context(results: Results, prompt_tokens: Sequence[int]) -> list[Bin]:
    """Return acceptance by all tokens before the step, including its prompt's."""
    pairs = zip(results, prompt_tokens, strict=True)
    keys = [float(prompt + step.position) for result, prompt in pairs for step in result.steps]
    return _binned(steps_of(results), keys, [float(edge) for edge in CONTEXTS])


def by_entropy(results: Results, bins: int = 5) -> list[Bin]:
    """Return acceptance by the target's entropy in nats, in bins of equally many steps.

    Steps without an entropy (NaN) are left out. Equal quantiles give fewer bins.
    """
    steps = [step for step in steps_of(results) if math.isfinite(step.entropy)]
    if not steps:
        return []
    keys = [step.entropy for step in steps]
    edges = np.unique(np.quantile(keys, np.linspace(0, 1, bins + 1))).tolist()
    return _binned(steps, keys, edges if len(edges) > 1 else edges * 2)


def _binned(steps: Sequence[StepRecord], keys: list[float], edges: list[float]) -> list[Bin]:
    indices = np.minimum(np.searchsorted(edges, keys, side="right") - 1, len(edges) - 2)
    bins = []
    for index in np.unique(indices).tolist():
        group = [step for step, its_index in zip(steps, indices, strict=True) if its_index == index]
        drafting = [step for step in group if step.depth > 0]
        numbers = {
            "mean_accepted_length": mean_of(group, lambda step: step.committed).value,
            "first_accepted": mean_of(drafting, lambda step: step.accepted > 0).value,
        }
        bins.append({"low": edges[index], "high": edges[index + 1], "steps": len(group)} | numbers)
    return bins
