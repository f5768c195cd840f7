"""One step log, every metric.

All counts come from what was committed. The prefill's token belongs to no step; plain decoding commits one token a
step, so its mean is 1. Every metric is a :class:`~drafthead.data.contracts.Ratio` of totals over the answers: long
answers weigh more, as in Spec-Bench and EAGLE, and a failed answer without tokens or steps changes nothing.
"""

from collections.abc import Iterable, Sequence

from drafthead.data.contracts import DecodeResult, Ratio, StepRecord

CTAR_WIDTHS = range(1, 7)


def _steps(results: Iterable[DecodeResult]) -> list[StepRecord]:
    return [step for result in results for step in result.steps]


def mean_accepted_tokens(results: Sequence[DecodeResult]) -> Ratio:
    """Tokens committed in steps / steps: accepted drafts plus the bonus, less what EOS or the limit cut off.

    The same quantity as EAGLE's tau, Spec-Bench's "mean accepted tokens", Kangaroo's compression ratio and Medusa's
    acceleration rate. TriForce and economize report it without the bonus: ours minus 1.
    """
    steps = _steps(results)
    return Ratio(sum(step.committed for step in steps), len(steps))


def acceptance_per_depth(results: Sequence[DecodeResult]) -> list[Ratio]:
    """P(draft i accepted | draft i-1 accepted, and the tree offered depth i), for i = 1, 2, ...

    Conditional, as vLLM reports it: where every step offers the same depth and nothing is cut off, the mean accepted
    tokens are 1 plus the sum of the running products. In a sparse tree, a branch that ends before the deepest one
    counts as a rejection. Counts the rule's verdict, before EOS or the limit cuts the answer.
    """
    steps = _steps(results)
    deepest = max((step.depth for step in steps), default=0)
    ratios = []
    for depth in range(1, deepest + 1):
        reached = [step for step in steps if step.depth >= depth and step.accepted >= depth - 1]
        ratios.append(Ratio(sum(step.accepted >= depth for step in reached), len(reached)))
    return ratios


def ctar(results: Sequence[DecodeResult], width: int) -> Ratio:
    """Consistent token acceptance rate of Kangaroo (2404.18911): P(a step commits more than ``width`` tokens).

    The bonus counts, so CTAR(1) is the share of steps with an accepted draft. Summed over all widths from 0 it is
    the mean accepted tokens.
    """
    steps = _steps(results)
    return Ratio(sum(step.committed > width for step in steps), len(steps))


def tokens_per_second(results: Sequence[DecodeResult]) -> Ratio:
    """Answer tokens, the prefill's included, per second of the whole decoding, prefill included."""
    return Ratio(sum(len(r.tokens) for r in results), sum(r.total_s for r in results))


def overhead(results: Sequence[DecodeResult]) -> Ratio:
    """Share of the steps' wall time spent neither drafting nor in the base: 1 - (draft + verify) / total."""
    steps = _steps(results)
    total = sum(step.total_s for step in steps)
    return Ratio(total - sum(step.draft_s + step.verify_s for step in steps), total)
