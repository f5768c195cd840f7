"""One step log, every metric. What others report under other names is here too, each function saying how it counts.

Counts come from the steps, times from the clock around them. The prefill's token belongs to no step; plain decoding
commits one token a step, so its mean is 1. Unless a name says otherwise, a metric is a
:class:`~drafthead.data.batch.Ratio` of totals over the answers: long answers weigh more, as in Spec-Bench and
EAGLE, and a failed answer without tokens or steps changes nothing. Speeds are of answers that ran one after the other:
the rows of a batch share their steps' times.

``committed`` tokens are what a step added to the answer; ``accepted`` drafts are the rule's verdict, before EOS or the
limit cut anything off.
"""

from collections.abc import Iterable, Sequence

from drafthead.data.batch import Ratio
from drafthead.models.decoding.step_log import DecodeResult, StepRecord

CTAR_WIDTHS = range(1, 7)


def steps_of(results: Iterable[DecodeResult]) -> list[StepRecord]:
    """The steps of all answers, one list."""
    return [step for result in results for step in result.steps]


def _drafting(results: Iterable[DecodeResult]) -> list[StepRecord]:
    """Steps that drafted: prompt lookup without a match, or a step with no room left, offers nothing to accept."""
    return [step for step in steps_of(results) if step.depth > 0]


def _only_chains(steps: Sequence[StepRecord]) -> bool:
    return all(step.proposed == step.depth for step in steps)


def mean_accepted_tokens(results: Sequence[DecodeResult]) -> Ratio:
    """Tokens committed in steps / steps: accepted drafts plus the bonus, less what EOS or the limit cut off.

    Up to the cut the same quantity as EAGLE's tau, Spec-Bench's "mean accepted tokens", Kangaroo's compression ratio,
    Medusa's acceleration rate and SGLang's completion_tokens / verify_ct.
    """
    steps = steps_of(results)
    return Ratio(sum(step.committed for step in steps), len(steps))


def mean_verdict_tokens(results: Sequence[DecodeResult]) -> Ratio:
    """(Accepted drafts + the bonus) / steps, with what EOS or the limit cut off still counted.

    How Spec-Bench's pooled list of accept lengths and DSD's TAR count, as released (TAR is described as the tokens
    matched; the released script adds the bonus).
    """
    steps = steps_of(results)
    return Ratio(sum(step.accepted + 1 for step in steps), len(steps))


def mean_length_of_drafting_steps(results: Sequence[DecodeResult]) -> Ratio:
    """vLLM's mean acceptance length: 1 + accepted drafts / steps that drafted.

    Steps without a draft do not count, so that prompt lookup looks better than its tokens per step.
    """
    steps = _drafting(results)
    return Ratio(sum(step.accepted + 1 for step in steps), len(steps))


def accepted_length(results: Sequence[DecodeResult]) -> Ratio:
    """Accepted drafts / steps, without the bonus: TriForce's avg_tokens, economize's mean_accepted."""
    steps = steps_of(results)
    return Ratio(sum(step.accepted for step in steps), len(steps))


def simulated_length(results: Sequence[DecodeResult]) -> Ratio:
    """a_1 + a_1 a_2 + ..., of the conditional acceptances: SpecForge's offline simulated_acc_len, without the bonus.

    Equal to :func:`accepted_length` where every step offers the same depth.
    """
    total, product = 0.0, 1.0
    for ratio in acceptance_per_depth(results):
        product *= ratio.value if ratio.den else 0.0
        total += product
    return Ratio(total, 1 if steps_of(results) else 0)


def compression_ratio_as_released(results: Sequence[DecodeResult]) -> Ratio:
    """Kangaroo's CR as its script computes it: the prefill counts as a step of one token, which dilutes the ratio."""
    ran = [result for result in results if result.tokens]
    steps = steps_of(ran)
    return Ratio(sum(step.committed for step in steps) + len(ran), len(steps) + len(ran))


def tar_as_analysed(results: Sequence[DecodeResult]) -> Ratio:
    """DSD's TAR as ``analyze_output.py`` averages it: per answer without its first step, then over the answers."""
    kept = [result.steps[1:] for result in results if len(result.steps) > 1]
    means = [sum(step.accepted + 1 for step in steps) / len(steps) for steps in kept]
    return Ratio(sum(means), len(means))


def acceptance_rate(results: Sequence[DecodeResult]) -> Ratio:
    """Accepted drafts / depth offered: flashspec, vLLM, TriForce. For a chain, the depth is what was proposed.

    Censored by position: a rejection discards the drafts behind it untried, yet they count as proposed. It falls with
    the depth at equal quality, and is not alpha.
    """
    steps = steps_of(results)
    return Ratio(sum(step.accepted for step in steps), sum(step.depth for step in steps))


def node_efficiency(results: Sequence[DecodeResult]) -> Ratio:
    """Accepted drafts / drafted nodes: what share of the verified tree was of use. vLLM's rate for trees."""
    steps = steps_of(results)
    return Ratio(sum(step.accepted for step in steps), sum(step.proposed for step in steps))


def acceptance_per_depth(results: Sequence[DecodeResult]) -> list[Ratio]:
    """P(draft i accepted | draft i-1 accepted, and the tree offered depth i), for i = 1, 2, ...

    Conditional, as NeMo Automodel reports it: where every step offers the same depth and nothing is cut off, the mean
    accepted tokens are 1 plus the sum of the running products. In a sparse tree, a branch that ends before the deepest
    one counts as a rejection. Counts the rule's verdict, before EOS or the limit cuts the answer.
    """
    steps = steps_of(results)
    deepest = max((step.depth for step in steps), default=0)
    ratios = []
    for depth in range(1, deepest + 1):
        reached = [step for step in steps if step.depth >= depth and step.accepted >= depth - 1]
        ratios.append(Ratio(sum(step.accepted >= depth for step in reached), len(reached)))
    return ratios


def acceptance_per_depth_of_all(results: Sequence[DecodeResult]) -> list[Ratio]:
    """P(draft i accepted), over all steps that drafted: vLLM's per-position acceptance rate, for i = 1, 2, ...

    Unconditional: it sums to the accepted drafts per drafting step.
    """
    steps = _drafting(results)
    deepest = max((step.depth for step in steps), default=0)
    return [Ratio(sum(s.accepted >= depth for s in steps), len(steps)) for depth in range(1, deepest + 1)]


def alpha(results: Sequence[DecodeResult]) -> Ratio | None:
    """Leviathan's alpha = E[beta] = E[sum_x min(p, q)], from chains: accepted drafts / drafts tried.

    A draft is tried when the one before it was accepted, and then it is accepted with probability beta: the mean over
    tried drafts is alpha over the prefixes that the chain reached, with no censoring. With siblings a node's first
    trial is not in the log, so trees give None: use the first of :func:`acceptance_per_depth` and say so.
    """
    steps = _drafting(results)
    if not _only_chains(steps):
        return None
    return Ratio(sum(step.accepted for step in steps), sum(min(step.accepted + 1, step.depth) for step in steps))


def alpha_or_first_depth(results: Sequence[DecodeResult]) -> tuple[Ratio, str]:
    """:func:`alpha`, or the conditional acceptance at depth 1 where the log cannot give it; and which of them it is."""
    found = alpha(results)
    if found is not None:
        return found, "alpha"
    return acceptance_per_depth(results)[0], "acceptance at depth 1"


def n_alpha(results: Sequence[DecodeResult]) -> list[Ratio] | None:
    """EAGLE's n-alpha, n = 0, 1, ...: acceptance where the draft's input has n features that the draft predicted.

    In a chain that is the conditional acceptance at depth n + 1; trees give None.
    """
    return acceptance_per_depth(results) if _only_chains(_drafting(results)) else None


def ctar(results: Sequence[DecodeResult], width: int) -> Ratio:
    """Consistent token acceptance rate of Kangaroo (2404.18911): P(a step commits more than ``width`` tokens).

    The bonus counts, so CTAR(1) is the share of steps with an accepted draft. Summed over all widths from 0 it is
    the mean accepted tokens.
    """
    steps = steps_of(results)
    return Ratio(sum(step.committed > width for step in steps), len(steps))


def ctar_curve(results: Sequence[DecodeResult]) -> list[Ratio]:
    """CTAR(0), CTAR(1), ... up to the longest step; it sums to the mean accepted tokens."""
    longest = max((step.committed for step in steps_of(results)), default=0)
    return [ctar(results, width) for width in range(longest)]


def step_seconds(results: Sequence[DecodeResult]) -> Ratio:
    """Seconds of a step."""
    steps = steps_of(results)
    return Ratio(sum(step.total_s for step in steps), len(steps))


def tokens_per_second(results: Sequence[DecodeResult]) -> Ratio:
    """Answer tokens, the prefill's included, per second of the whole decoding, prefill included."""
    return Ratio(sum(len(r.tokens) for r in results), sum(r.total_s for r in results))


def decode_tokens_per_second(results: Sequence[DecodeResult]) -> Ratio:
    """Tokens committed in steps per second behind the prefill."""
    seconds = sum(r.total_s - r.prefill_s for r in results)
    return Ratio(sum(step.committed for step in steps_of(results)), seconds)


def overhead(results: Sequence[DecodeResult]) -> Ratio:
    """Share of the steps' wall time spent neither drafting nor in the base: 1 - (draft + verify) / total."""
    steps = steps_of(results)
    total = sum(step.total_s for step in steps)
    return Ratio(total - sum(step.draft_s + step.verify_s for step in steps), total)
