"""Simulated acceptance: the number of steps that decoding a finished answer would take, with any tree.

Under a lossless rule the distribution of the answer does not depend on the drafts. Given the answer, only the ends of
steps are random, and they depend on each position alone. ``accept_probs[t, k, s]`` is the probability that a step
starting at position t, with k drafts accepted, accepts the answer's next token as candidate s of its node. Products of
these along the answer's path through a tree tell how far a step gets. A recursion along the answer then gives the
expected number of steps, exactly. With greedy decoding all probabilities are 0 or 1.

A position is an answer token at which a step may start: any but the first, which the prefill yields. Positions are
counted from 0, the answer's second token. A step from t commits the token at t, and one more per accepted draft.
Example: if a step from t = 0 accepts two drafts, it commits the tokens at 0, 1 and 2. The next step starts at t = 3.

Shape legend: T positions of one answer, n positions of any answers, K draft positions, S candidates at a node, D depth
of a tree, W draft vocabulary, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from drafthead.data.intervals import Floats, bootstrap_interval
from drafthead.models.decoding.drafter import DraftSampling
from drafthead.models.simulation.ranks import Ranks
from drafthead.models.token_tree import TokenTree
from drafthead.system.devices import wide

# [T, K, S]: probability that a step from t, after k accepted drafts, accepts the next token as candidate s; NaN after
# the answer's end
AcceptProbs = Floats
LengthProbs = Floats  # [T, D+1]: probability that a step from t accepts exactly 0, 1, ..., D drafts


def accept_probs_of_ranks(ranks: Ranks, width: int) -> AcceptProbs:
    """Return the acceptance probabilities of ``width`` top-k candidates: 1 at each token's rank, else 0."""
    accept_probs: AcceptProbs = (ranks[..., None] == np.arange(width)).astype(np.float64)
    accept_probs[ranks < 0] = np.nan
    return accept_probs


def top_k_accept_probs(logits: Tensor, tokens: Tensor, d2t: Tensor, width: int) -> Tensor:
    """Return [n, width] float64 for n nodes with ``width`` top-k candidates: 1 for the answer's token, else 0.
    ``logits`` [n, W] are over the draft vocabulary with target ids ``d2t`` [W]; ``tokens`` [n] are target ids."""
    match = d2t[None, :] == tokens[:, None]
    true = torch.where(match, logits, -torch.inf).amax(-1, keepdim=True)
    rank = torch.where(match.any(-1), (logits > true).sum(-1), width)
    return wide(rank[:, None] == torch.arange(width, device=logits.device))


def candidate_accept_probs(
    target: Tensor, draft: Tensor, tokens: Tensor, draft_sampling: DraftSampling, width: int, generator: torch.Generator
) -> Tensor:
    """For n sampled nodes, return the probabilities [n, width] that the committed token was accepted as candidate s.

    ``tokens`` [n] are the committed tokens. ``target`` and ``draft`` are the probabilities [n, V] of both models after
    temperature, top-k and so on; below they are called P and q. ``generator`` draws rejected candidates.

    A candidate drawn from q against a residual P accepts x with mass ``min(q(x), P(x))``. It leaves the residual
    ``P' = norm(max(P - q, 0))``. The node commits x with total mass P(x). Given x, the candidate therefore accepts with
    probability ``min(1, q(x) / P(x))``, and the next one with the same formula for P'.

    Without replacement the next q depends on the rejected token. This function draws that token from its distribution
    ``norm(max(q - P, 0))``. Averaged over these draws the result is exact, and so are products over positions with
    independent draws.
    """
    p, q = wide(target), wide(draft)
    # P(all candidates so far were rejected | the token is committed).
    left = torch.ones(len(tokens), dtype=p.dtype, device=tokens.device)
    by_candidate = []
    for s in range(width):
        accepted = _ratio(q.gather(1, tokens[:, None]), p.gather(1, tokens[:, None]))[:, 0].clamp(max=1.0)
        by_candidate.append(left * accepted)
        left = left * (1.0 - accepted)
        if s + 1 < width:
            excess = (q - p).clamp(min=0)
            p = _normalised((p - q).clamp(min=0), otherwise=p)
            if draft_sampling is DraftSampling.WITHOUT_REPLACEMENT:
                possible = excess.sum(-1, keepdim=True) > 0
                rejected = torch.where(possible, excess, 1.0).multinomial(1, generator=generator)
                q = q.scatter(1, rejected, 0.0)
                q = _normalised(q, otherwise=torch.zeros_like(q))  # no token is left: nothing is accepted
    return torch.stack(by_candidate, -1)


def _ratio(q: Tensor, p: Tensor) -> Tensor:
    """Return q / p, or q where p is 0: rounding can remove a committed token from the target's top-k or top-p."""
    return torch.where(p > 0, q / p.clamp(min=torch.finfo(p.dtype).tiny), q)


def _normalised(masses: Tensor, otherwise: Tensor) -> Tensor:
    total = masses.sum(-1, keepdim=True)  # rows of zeros become those of `otherwise`
    return torch.where(total > 0, masses / total.clamp(min=torch.finfo(masses.dtype).tiny), otherwise)


def block_accept_probs(target: Tensor, draft: Tensor) -> Tensor:
    """Return block verification's acceptance probabilities [n, K] (Sun et al., 2403.10444) in n chains of K drafts.

    ``target`` and ``draft`` [n, K] are the probabilities p(x) and q(x) of the answer's tokens.

    At least k drafts of a drafted prefix are accepted with probability ``a_k = min(1, a_{k-1} p(x_k) / q(x_k))``. Given
    the answer, its prefix was drafted with relative probability ``R_k = prod(q / p)``, and ``a_k R_k = min(a_{k-1}
    R_{k-1}, R_k)``. This is the running minimum of R; token-by-token verification gives the product of ``min(1, q /
    p)`` instead. The result holds each position's factor: their products along a chain are these minima.
    """
    # R_1, R_2, ...; the running minimum of R starts at R_0 = 1.
    products = _ratio(wide(draft), wide(target)).cumprod(1)
    reached = torch.cat([torch.ones_like(products[:, :1]), products], 1).cummin(1).values
    above = reached[:, :-1]
    return torch.where(above > 0, reached[:, 1:] / above.clamp(min=torch.finfo(above.dtype).tiny), 0.0)


def trials_in_order(tree: TokenTree) -> TokenTree:
    """Number each node's children 0, 1, ..., the order of trials that indexes sampled siblings."""
    renamed: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    children: dict[tuple[int, ...], int] = {}
    for path in sorted(tree.paths[1:], key=lambda p: (len(p), p)):
        above = renamed[path[:-1]]
        renamed[path] = (*above, children.get(above, 0))
        children[above] = children.get(above, 0) + 1
    return TokenTree.from_paths(list(renamed.values()))


def accepted_length_probs(accept_probs: AcceptProbs, tree: TokenTree) -> LengthProbs:
    """Return the probability [T, D+1] that a step with ``tree`` from each position accepts exactly d drafts."""
    positions, depth, width = accept_probs.shape
    known = np.nan_to_num(accept_probs)
    reached = np.zeros((positions, tree.depth + 2))
    reached[:, 0] = 1.0
    nodes = [reached[:, 0].copy()]
    for parent, path in zip(tree.parents[1:], tree.paths[1:], strict=True):
        k, s = len(path) - 1, path[-1]
        node = nodes[parent] * known[:, k, s] if k < depth and s < width else np.zeros(positions)
        nodes.append(node)
        reached[:, k + 1] += node
    # P(at least d drafts) - P(at least d + 1) = P(exactly d); rounding can leave differences of about -1e-17.
    return np.maximum(reached[:, :-1] - reached[:, 1:], 0.0)


def start_probs(answers: Sequence[LengthProbs]) -> list[Floats]:
    """Return the probability [T] that a step starts at each position, per answer, from ``LengthProbs`` of each."""
    longest, width = max(map(len, answers), default=0), max((a.shape[1] for a in answers), default=1)
    table = np.zeros((len(answers), longest, width))  # zeros after an answer's end
    for row, answer in zip(table, answers, strict=True):
        row[: len(answer), : answer.shape[1]] = answer
    started = np.zeros((len(answers), longest + width))
    started[:, 0] = 1.0
    for t in range(longest):
        # A step from t that accepts d drafts commits d + 1 tokens, so the next one starts at t + 1 + d.
        started[:, t + 1 : t + 1 + width] += started[:, t : t + 1] * table[:, t]
    return [row[: len(answer)] for row, answer in zip(started, answers, strict=True)]


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Expected number of steps, and of tokens per step, if finished answers were decoded."""

    mean_accepted_length: float  # committed tokens by steps, over all answers
    interval: tuple[float, float] | None  # 95 %, by a bootstrap over answers; None for fewer than two
    steps: float  # expected number
    tokens: int  # that the steps commit, none of them after an answer's end
    nodes: dict[int, float] | None = None  # tree size with the root -> share of steps; not all trees are full
    cost: float | None = None  # mean time of a step in tokens of plain decoding; only of trees by cost
    by_depth: tuple[float, ...] = field(default=(), compare=False)
    """Share of accepted drafts at each draft position, of the steps that accepted the one before; NaN if there are
    none."""
    by_position: tuple[tuple[Floats, Floats], ...] = field(default=(), compare=False, repr=False)
    """For each answer, by the position that a step may start from, [T] each: the probability that a step does, and the
    tokens that it then commits."""


def _committed(lengths: LengthProbs) -> Floats:
    """Return the expected tokens of a step from each position, [T]; the answer's end cuts the last step."""
    left = np.arange(len(lengths), 0, -1)[:, None]
    expected: Floats = (lengths * np.minimum(1 + np.arange(lengths.shape[1]), left)).sum(1)
    return expected


def simulate_acceptance(answers: Sequence[AcceptProbs], tree: TokenTree, seed: int = 0) -> SimulatedAcceptance:
    return simulate_steps([accepted_length_probs(a, tree) for a in answers], seed)


def simulate_steps(
    answers: Sequence[LengthProbs],
    seed: int = 0,
    sizes: Sequence[Floats] | None = None,
    costs: Sequence[Floats] | None = None,
) -> SimulatedAcceptance:
    """Simulate decoding answers from the probabilities of accepted lengths. Trees have ``sizes`` [T] nodes, and steps
    take as long as ``costs`` [T] tokens of plain decoding."""
    started = start_probs(answers)
    # The expected number of steps is the sum over positions of the probability that a step starts there.
    rows = np.array([[len(a), start.sum()] for a, start in zip(answers, started, strict=True) if len(a)])
    tokens, steps = rows.reshape(-1, 2).sum(0).tolist()
    low, high = bootstrap_interval(rows, lambda totals: totals[:, 0] / totals[:, 1], seed)
    nodes = None
    if sizes and steps:
        counts, weights = np.concatenate(sizes), np.concatenate(started)
        nodes = {int(n): float(weights[counts == n].sum() / weights.sum()) for n in np.unique(counts)}
    time = sum(float(start @ cost) for start, cost in zip(started, costs, strict=True)) if costs else None
    deepest = max((lengths.shape[1] for lengths in answers), default=1)
    ended = np.zeros(deepest)  # steps by accepted length
    for start, lengths in zip(started, answers, strict=True):
        ended[: lengths.shape[1]] += start @ lengths
    reached = ended[::-1].cumsum()[::-1]
    with np.errstate(invalid="ignore"):
        by_depth = tuple((reached[1:] / reached[:-1]).tolist())
    return SimulatedAcceptance(
        mean_accepted_length=tokens / steps if steps else float("nan"),
        interval=None if np.isnan(low) else (low, high),
        steps=steps,
        tokens=int(tokens),
        nodes=nodes,
        cost=time / steps if time is not None and steps else None,
        by_depth=by_depth,
        by_position=tuple((start, _committed(lengths)) for start, lengths in zip(started, answers, strict=True)),
    )
