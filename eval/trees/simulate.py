"""Replay: how many steps decoding would have needed for a finished answer, with any tree, without decoding.

Under an exact rule the answer's law does not depend on the drafts. Given the answer, all that is left to chance is
where steps end, and that is a property of each position alone: ``chances[t, k, s]`` is the probability that a step
starting at position t, with k drafts accepted, accepts the answer's next token as trial s of its node. The product
along the answer's path through a tree gives how far a step gets, and a recursion along the answer gives the expected
number of steps, exactly. With greedy decoding the chances are 0 and 1: one-hot ranks of the true tokens among the
drafter's candidates. ``eval/replay_laws.py`` computes the chances for sampling.

A position is a place where a step may start, one per answer token that steps commit: all but the first, which the
prefill yields. A step from t commits token t, and one more for every accepted draft.

Shape legend: A answers, T positions of one answer, K draft positions, S trials at a node, D depth of a tree.
"""
# Chances of acceptance along finished texts, from one pass over them: what ``eval/replay.py`` works on.

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafthead.models.decoding.contract import DraftSampling
from drafthead.models.token_tree import TokenTree


def candidate_accept_probs(
    target: Tensor, draft: Tensor, tokens: Tensor, draft_sampling: DraftSampling, width: int, generator: torch.Generator
) -> Tensor:
    """P(the committed ``tokens`` were accepted as trial s | they were committed): [n, V], [n, V], [n] -> [n, width].

    A trial of law q against a residual P accepts x with mass ``min(q(x), P(x))`` and leaves
    ``P' = norm(max(P - q, 0))``. What is committed at the node is x with mass P(x) all told, so given x the trial
    accepts with probability ``min(1, q(x) / P(x))``, and the next one against P' likewise: the masses telescope.
    For one trial it is ``min(1, q(x) / p(x))``, whose mean over x ~ p is ``sum(min(p, q))``.

    Without replacement the next law depends on the rejected token, which is drawn here from its own law
    ``norm(max(q - P, 0))``: the estimate is unbiased, and products over independently drawn positions stay so.

    Args:
        target: the target's laws after warping.
        draft: laws that the siblings are drawn from; the committed path's.
        tokens: the text's token at each node.
        draft_sampling: how the siblings are drawn, not deterministic.
        width: trials.
        generator: for rejected tokens without replacement.
    """
    dist, trial = target.double(), draft.double()
    at = tokens[:, None]
    left = torch.ones(len(tokens), dtype=torch.float64, device=tokens.device)
    chances = []
    for s in range(width):
        p, q = dist.gather(1, at)[:, 0], trial.gather(1, at)[:, 0]
        # A token of probability 0 (rounding moved it across a warper's cut) counts as the law's only one.
        hazard = torch.where(p > 0, (q / p.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0), q)
        chances.append(left * hazard)
        left = left * (1.0 - hazard)
        if s + 1 < width:
            excess = (trial - dist).clamp(min=0)
            dist = _normalised((dist - trial).clamp(min=0), dist)
            if draft_sampling is DraftSampling.WITHOUT_REPLACEMENT:
                possible = excess.sum(-1, keepdim=True) > 0
                rejected = torch.where(possible, excess, 1.0).multinomial(1, generator=generator)
                trial = trial.scatter(1, rejected, 0.0)
                trial = _normalised(trial, torch.zeros_like(trial))  # no token is left: a trial that accepts nothing
    return torch.stack(chances, -1)


def _normalised(masses: Tensor, otherwise: Tensor) -> Tensor:
    total = masses.sum(-1, keepdim=True)
    return torch.where(total > 0, masses / total.clamp(min=torch.finfo(masses.dtype).tiny), otherwise)


def block_chances(target: Tensor, draft: Tensor) -> Tensor:
    """Block verification (Sun et al., 2403.10444) of a chain: [n, K] p(x), [n, K] q(x) on the text -> [n, K].

    It accepts at least k drafts of a drafted prefix with probability ``a_k = min(1, a_{k-1} p(x_k) / q(x_k))``. Seen
    from the committed text the prefix was drafted with probability ``R_k = prod(q / p)`` of its own, and
    ``a_k R_k = min(a_{k-1} R_{k-1}, R_k)``: the running minimum of R, where token by token it is the product of
    ``min(1, q / p)``. Returned is each position's factor, so that a chain's products are these minima.
    """
    p, q = target.double(), draft.double()
    ratio = torch.where(p > 0, q / p.clamp(min=torch.finfo(p.dtype).tiny), q)
    reached = torch.cat([torch.ones_like(ratio[:, :1]), ratio.cumprod(1)], 1).cummin(1).values
    above = reached[:, :-1]
    return torch.where(above > 0, reached[:, 1:] / above.clamp(min=torch.finfo(p.dtype).tiny), 0.0)


def rank_chances(logits: Tensor, tokens: Tensor, d2t: Tensor, width: int) -> Tensor:
    """Deterministic siblings: 1 where the draft's candidate s is the text's token; [n, W] logits -> [n, width]."""
    found = logits.new_zeros(len(tokens), width, dtype=torch.float64)
    match = d2t[None, :] == tokens[:, None]
    true = torch.where(match, logits, -torch.inf).amax(-1, keepdim=True)
    rank = (logits > true).sum(-1)
    safe_join = match.any(-1) & (rank < width)
    found[safe_join, rank[safe_join]] = 1.0
    return found


Ranks = npt.NDArray[np.int64]
"""[T, K]: which of the drafter's candidates for draft position k+1 is right; large: none; -1: the answer ends before.
"""
Chances = npt.NDArray[np.float64]
"""[T, K, S] probabilities; NaN where the answer ends before."""
Ends = npt.NDArray[np.float64]
"""[T, D+1]: probability that a step from t accepts exactly so many drafts."""
RESAMPLES = 1000


@dataclass(frozen=True)
class Replay:
    """What decoding is expected to do on the replayed answers."""

    mean_accepted_tokens: float
    """Tokens committed per step, bonus included: total over total, as ``metrics.mean_accepted_tokens``."""
    interval: tuple[float, float] | None
    """95 % bootstrap over answers; None for fewer than two. It holds no noise of acceptance, which is averaged out."""
    steps: float
    """Expected number of steps over all answers."""
    tokens: int
    """Tokens that these steps commit: what cuts an answer short cuts its last step."""


def chances_of(ranks: Ranks, width: int | None = None) -> Chances:
    """The chances of deterministic siblings: one-hot ranks below ``width`` (by default all that occur)."""
    width = width or int(ranks.max(initial=0)) + 1
    chances: Chances = (ranks[..., None] == np.arange(width)).astype(np.float64)
    chances[ranks < 0] = np.nan
    return chances


def by_trial(tree: TokenTree) -> TokenTree:
    """``tree`` with ranks counting a node's children: sampled siblings are trials in order, whatever their rank."""
    renamed: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    children: dict[tuple[int, ...], int] = {}
    for path in sorted(tree.paths[1:], key=lambda p: (len(p), p)):
        above = renamed[path[:-1]]
        renamed[path] = (*above, children.get(above, 0))
        children[above] = children.get(above, 0) + 1
    return TokenTree.from_paths(list(renamed.values()))


def ends(chances: Chances, tree: TokenTree) -> Ends:
    """How many drafts a step with ``tree`` accepts at each position: [T, K, S] -> [T, D+1]."""
    positions, depth, width = chances.shape
    known = np.nan_to_num(chances)
    reached = np.zeros((positions, tree.depth + 2))
    reached[:, 0] = 1.0
    nodes = [reached[:, 0].copy()]
    for parent, path in zip(tree.parents[1:], tree.paths[1:], strict=True):
        k, s = len(path) - 1, path[-1]
        node = nodes[parent] * known[:, k, s] if k < depth and s < width else np.zeros(positions)
        nodes.append(node)
        reached[:, k + 1] += node
    # Rounding of the products can leave a negative difference of about 1e-17.
    return np.maximum(reached[:, :-1] - reached[:, 1:], 0.0)


def ends_of(accepted: npt.NDArray[np.int64]) -> Ends:
    """The same for drafts whose acceptance is known: [T] -> [T, D+1]."""
    table: Ends = np.eye(int(accepted.max(initial=0)) + 1)[accepted]
    return table


def expected_steps(answers: Sequence[Ends]) -> npt.NDArray[np.float64]:
    """[A] expected steps of each answer: a step from t, and what is left behind the tokens that it commits."""
    table, lengths = _pad(answers)
    count, longest, width = table.shape
    ahead = np.zeros((count, longest + width))  # column t: expected steps from t on; 0 behind the answer's end
    for t in range(longest - 1, -1, -1):
        rest = np.einsum("ad,ad->a", table[:, t], ahead[:, t + 1 : t + 1 + width])
        ahead[:, t] = np.where(t < lengths, 1.0 + rest, 0.0)
    return ahead[:, 0]


def visits(answers: Sequence[Ends]) -> list[npt.NDArray[np.float64]]:
    """Per answer [T]: probability that a step starts at each position."""
    table, lengths = _pad(answers)
    count, longest, width = table.shape
    started = np.zeros((count, longest + width))
    started[:, 0] = 1.0
    for t in range(longest):
        started[:, t + 1 : t + 1 + width] += started[:, t : t + 1] * table[:, t]
    return [row[:length] for row, length in zip(started, lengths.tolist(), strict=True)]


def replay(answers: Sequence[Chances], tree: TokenTree, seed: int = 0) -> Replay:
    """What decoding with ``tree`` would have needed for these answers; ``seed`` is the bootstrap's."""
    return replay_ends([ends(a, tree) for a in answers], seed)


def replay_ends(answers: Sequence[Ends], seed: int = 0) -> Replay:
    """The same from how far every step gets."""
    steps = expected_steps(answers)
    tokens = np.array([len(a) for a in answers], dtype=np.int64)
    total = float(steps.sum())
    return Replay(
        mean_accepted_tokens=int(tokens.sum()) / total if total else float("nan"),
        interval=_bootstrap(tokens, steps, seed),
        steps=total,
        tokens=int(tokens.sum()),
    )


def _bootstrap(tokens: npt.NDArray[np.int64], steps: npt.NDArray[np.float64], seed: int) -> tuple[float, float] | None:
    if len(tokens) < 2 or not steps.any():
        return None
    target_idx = np.random.default_rng(seed).integers(0, len(tokens), (RESAMPLES, len(tokens)))
    drawn = steps[target_idx].sum(1)
    low, high = np.percentile(tokens[target_idx].sum(1)[drawn > 0] / drawn[drawn > 0], (2.5, 97.5))
    return float(low), float(high)


def _pad(answers: Sequence[Ends]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """[A, longest T, widest D+1], zeros behind an answer's end, and the lengths [A]."""
    lengths = np.array([len(a) for a in answers], dtype=np.int64)
    table = np.zeros((len(answers), int(lengths.max(initial=0)), max((a.shape[1] for a in answers), default=1)))
    for row, answer in zip(table, answers, strict=True):
        row[: len(answer), : answer.shape[1]] = answer
    return table, lengths
