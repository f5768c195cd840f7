"""Static token trees: searched for the most accepted tokens, and replayed without decoding.

Both work on ranks: ``ranks[t, k]`` says which of the head's candidates for draft position k+1 at position t is the
token that the base really produced (0: the first; ``MISS``-like large numbers: none that a tree would offer; -1:
the text ends before). At greedy decoding the base's answer does not depend on the drafts, so the ranks along a
finished answer say exactly what any tree would have had accepted there.

Shape legend: T positions of one answer, K draft positions.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drafthead.data.contracts import TokenTree

Ranks = npt.NDArray[np.int64]

PRIOR_WEIGHT = 20.0
"""Observations that the product of marginal accuracies counts for beside the joint counts of a path."""


@dataclass(frozen=True)
class TreeOrder:
    """Nodes in the order in which a growing tree should take them; the first m are the best tree of m drafts."""

    paths: list[tuple[int, ...]]
    values: list[float]
    """Estimated probability that each node is accepted."""

    def tree(self, drafts: int) -> TokenTree:
        """The tree of the first ``drafts`` nodes and the root."""
        return TokenTree.from_paths(self.paths[:drafts])


def search(answers: Sequence[Ranks], size: int, width: int = 10) -> TreeOrder:
    """Greedy search of the tree with the most accepted tokens on measured ranks.

    Medusa (2401.10774) scores a node by the product of its ranks' marginal accuracies, as if draft positions were
    independent. Here a node's value is how often its whole path was right, shrunk towards that product
    by ``PRIOR_WEIGHT`` observations. A child is never likelier than its parent, so greedy is optimal for the value.

    Args:
        answers: per held-out answer [T, K] ranks.
        size: nodes to order, root excluded.
        width: ranks below it are candidates.
    """
    rows = np.concatenate([a[a[:, 0] >= 0] for a in answers]) if answers else np.empty((0, 1), dtype=np.int64)
    depth = rows.shape[1]
    counts: Counter[tuple[int, ...]] = Counter()
    reached = np.zeros(depth)
    marginal = np.zeros((depth, width))
    for k in range(depth):
        valid = rows[:, k][rows[:, k] >= 0]
        reached[k] = max(1, len(valid))
        marginal[k] = np.bincount(valid[valid < width], minlength=width)[:width] / reached[k]
    for row in rows.tolist():
        for k, rank in enumerate(row):
            if not 0 <= rank < width:
                break
            counts[tuple(row[: k + 1])] += 1

    def value(path: tuple[int, ...], parent: float, parent_path: tuple[int, ...]) -> float:
        k = len(path) - 1
        seen = counts[parent_path] if parent_path else reached[0]
        conditional = (counts[path] + PRIOR_WEIGHT * marginal[k, path[-1]]) / (seen + PRIOR_WEIGHT)
        return float(parent * min(1.0, conditional))

    frontier: list[tuple[float, tuple[int, ...]]] = [(-value((r,), 1.0, ()), (r,)) for r in range(width)]
    heapq.heapify(frontier)
    paths: list[tuple[int, ...]] = []
    values: list[float] = []
    while frontier and len(paths) < size:
        negative, path = heapq.heappop(frontier)
        paths.append(path)
        values.append(-negative)
        if len(path) < depth:
            for r in range(width):
                heapq.heappush(frontier, (-value((*path, r), -negative, path), (*path, r)))
    return TreeOrder(paths, values)


def accepted_at(ranks: Ranks, tree: TokenTree) -> npt.NDArray[np.int64]:
    """[T] drafts that ``tree`` would have had accepted by a step at each position."""
    nodes = set(tree.paths)
    accepted = np.zeros(len(ranks), dtype=np.int64)
    for t, row in enumerate(ranks.tolist()):
        k = 0
        while k < len(row) and row[k] >= 0 and tuple(row[: k + 1]) in nodes:
            k += 1
        accepted[t] = k
    return accepted


def visited(ranks: Ranks, tree: TokenTree) -> npt.NDArray[np.int64]:
    """Positions at which greedy decoding with ``tree`` would have started a step."""
    accepted = accepted_at(ranks, tree)
    positions, t = [], 0
    while t < len(ranks):
        positions.append(t)
        t += int(accepted[t]) + 1
    return np.array(positions, dtype=np.int64)


def replay(answers: Sequence[Ranks], tree: TokenTree) -> float:
    """Mean accepted tokens (bonus included) that greedy decoding with ``tree`` would have had on these answers."""
    steps = tokens = 0
    for ranks in answers:
        steps += len(visited(ranks, tree))
        tokens += len(ranks)
    return tokens / steps if steps else float("nan")


def search_visited(answers: Sequence[Ranks], size: int, rounds: int = 3) -> TreeOrder:
    """``search`` on the positions where decoding really starts a step.

    Steps start behind a rejection more often than elsewhere, and drafting is harder there; so the search is
    repeated on the positions that decoding with the tree found before would visit.
    """
    order = search(answers, size)
    for _ in range(rounds - 1):
        tree = order.tree(min(size, len(order.paths)))
        order = search([a[visited(a, tree)] for a in answers], size)
    return order
