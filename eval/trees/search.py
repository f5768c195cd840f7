"""Static token trees searched for the most accepted tokens: greedily on joint counts, and by Sequoia's program.

Both read what replay reads: ``chances[t, k, s]``, the probability that a step from position t with k drafts accepted
accepts the next token as trial s (``eval/replay.py``).

Shape legend: T positions of one answer, K draft positions, S trials at a node, M nodes (root included).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drafthead.eval.trees.simulate import Chances, ends, visits
from drafthead.models.token_tree import TokenTree

PRIOR_WEIGHT = 20.0
"""Observations that the product of marginal accuracies counts for beside the joint counts of a path."""
Weights = Sequence[npt.NDArray[np.float64]]
"""Per answer [T]: how much each position counts."""


@dataclass(frozen=True)
class TreeOrder:
    """Nodes in the order in which a growing tree should take them; the first m are the best tree of m drafts."""

    paths: list[tuple[int, ...]]
    values: list[float]
    """Estimated probability that each node is accepted."""

    def tree(self, drafts: int) -> TokenTree:
        """The tree of the first ``drafts`` nodes and the root."""
        return TokenTree.from_paths(self.paths[:drafts])


def search(answers: Sequence[Chances], size: int, weights: Weights | None = None) -> TreeOrder:
    """Greedy search of the tree with the most accepted tokens.

    Medusa (2401.10774) scores a node by the product of its ranks' marginal accuracies, as if draft positions were
    independent. Here a node's value is how often its whole path was accepted, shrunk towards that product
    by ``PRIOR_WEIGHT`` observations. A child is never likelier than its parent, so greedy is optimal for the value.

    Args:
        answers: per held-out answer [T, K, S]; every position of every answer counts, by ``weights``.
        size: nodes to order, root excluded.
        weights: by default 1.
    """
    table, weight = _stack(answers, weights)
    known = np.nan_to_num(table)
    _, depth, width = table.shape
    valid = ~np.isnan(table[:, :, 0])
    seen = np.maximum((weight[:, None] * valid).sum(0), 1.0)
    marginal = np.einsum("t,tks->ks", weight, known) / seen[:, None]
    frontier: list[tuple[float, tuple[int, ...]]] = []
    # Weight with which each path was accepted, per position; kept for nodes whose children may still be wanted.
    accepted: dict[tuple[int, ...], npt.NDArray[np.float64]] = {(): weight * valid[:, 0]}

    def push_children(parent: float, path: tuple[int, ...]) -> None:
        k = len(path)
        counts = accepted[path] @ known[:, k]
        total = float(accepted[path].sum())
        conditional = (counts + PRIOR_WEIGHT * marginal[k]) / (total + PRIOR_WEIGHT)
        for s, value in enumerate(np.minimum(conditional, 1.0).tolist()):
            heapq.heappush(frontier, (-parent * value, (*path, s)))

    push_children(1.0, ())
    paths: list[tuple[int, ...]] = []
    values: list[float] = []
    while frontier and len(paths) < size:
        negative, path = heapq.heappop(frontier)
        paths.append(path)
        values.append(-negative)
        if len(path) < depth:
            accepted[path] = accepted[path[:-1]] * known[:, len(path) - 1, path[-1]]
            push_children(-negative, path)
    return TreeOrder(paths, values)


def search_visited(answers: Sequence[Chances], size: int, rounds: int = 3) -> TreeOrder:
    """``search`` on the positions where decoding really starts a step.

    Steps start behind a rejection more often than elsewhere, and drafting is harder there; so the search is
    repeated on the positions that decoding with the tree found before would visit.
    """
    order = search(answers, size)
    for _ in range(rounds - 1):
        tree = order.tree(size)
        order = search(answers, size, visits([ends(a, tree) for a in answers]))
    return order


def first_accepted(answers: Sequence[Chances], weights: Weights | None = None) -> npt.NDArray[np.float64]:
    """Acceptance by depth and trial: [K, S], P(trial s is the one accepted | the node is reached).

    A depth is reached by the weight with which some trial was accepted on every depth above it.
    """
    table, weight = _stack(answers, weights)
    known = np.nan_to_num(table)
    accepted = np.zeros(table.shape[1:])
    for k in range(table.shape[1]):
        here = weight * ~np.isnan(table[:, k, 0])
        accepted[k] = here @ known[:, k] / max(float(here.sum()), np.finfo(float).tiny)
        weight = here * known[:, k].sum(-1)
    return accepted


@dataclass(frozen=True)
class SequoiaTrees:
    """The best tree of every size and depth bound, under acceptance by depth and trial."""

    expected: npt.NDArray[np.float64]
    """[L+1, M+1]: expected tokens a step (bonus included) with exactly m nodes (root included) and at most l drafts on
    a path; ``-inf`` where no such tree exists. Column 0 is empty."""
    _children: list[npt.NDArray[np.int64]] = field(repr=False)
    """Per depth bound l: [l+1, M+1] how many children the best subtree of m nodes has whose root is d deep."""
    _kept: list[npt.NDArray[np.int64]] = field(repr=False)
    """Per depth bound l: [l+1, S+1, M+1] nodes that such a root and its first b-1 children keep when it has b."""

    def at_most(self, nodes: int, depth: int) -> int:
        """The largest size up to ``nodes`` that a tree within the depth bound has."""
        return int(np.flatnonzero(self.expected[depth, : nodes + 1] > 0)[-1])

    def tree(self, nodes: int, depth: int) -> TokenTree:
        """The best tree of ``nodes`` nodes, root included, and at most ``depth`` drafts on a path.

        Raises:
            ValueError: no such tree exists.
        """
        if not (0 <= depth < len(self.expected) and 1 <= nodes < self.expected.shape[1]) or np.isneginf(
            self.expected[depth, nodes]
        ):
            raise ValueError(f"there is no tree of {nodes} nodes and at most {depth} drafts on a path here")
        paths: list[tuple[int, ...]] = []
        pending: list[tuple[tuple[int, ...], int]] = [((), nodes)]
        while pending:
            path, size = pending.pop()
            paths.append(path)
            for child in range(int(self._children[depth][len(path), size]), 0, -1):
                kept = int(self._kept[depth][len(path), child, size])
                pending.append(((*path, child - 1), size - kept))
                size = kept
        return TokenTree.from_paths(paths)


def sequoia(acceptance: npt.NDArray[np.float64], nodes: int, depth: int) -> SequoiaTrees:
    """Sequoia's dynamic program (2402.12374) over size, depth bound and number of children.

    A tree of m nodes whose root has b children is one of y nodes with b-1 children and a subtree of m-y nodes as the
    b-th child: ``T[m, l, b] = max_y T[y, l, b-1] + P[b] max_b' T[m-y, l-1, b']``, ``T[1, l, 0] = 1``. Children of a
    node are always its first trials, since a trial is only made when those before it failed.

    Args:
        acceptance: [S], or [K, S] by depth: P(trial b is the first accepted at a node that is reached).
        nodes: largest tree, root included.
        depth: largest depth bound; at most K where acceptance is given by depth.
    """
    if acceptance.ndim == 1:
        acceptance = np.tile(acceptance, (depth, 1))
    if len(acceptance) < depth:
        raise ValueError(f"acceptance is known for {len(acceptance)} draft positions, asked for {depth}")
    expected = np.full((depth + 1, nodes + 1), -np.inf)
    children, kept = [], []
    for bound in range(depth + 1):
        value, child_count, keep = _one_bound(acceptance[:bound], nodes)
        expected[bound] = value
        children.append(child_count)
        kept.append(keep)
    return SequoiaTrees(expected, children, kept)


def _one_bound(
    acceptance: npt.NDArray[np.float64], nodes: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The program for one depth bound, from the deepest level up: values of the whole tree [M+1], and the choices."""
    depth, trials = acceptance.shape
    m, y = np.ogrid[: nodes + 1, : nodes + 1]
    subtree = np.where(m > y, m - y, 0)  # size 0 is infeasible
    below = np.full(nodes + 1, -np.inf)
    below[1] = 1.0
    leaf = below.copy()
    child_count = np.zeros((depth + 1, nodes + 1), dtype=np.int64)
    keep = np.zeros((depth + 1, trials + 1, nodes + 1), dtype=np.int64)
    for d in range(depth - 1, -1, -1):
        value = leaf.copy()
        best = leaf.copy()
        for b in range(1, trials + 1):
            # A trial that is never accepted adds nothing: -inf times 0 must stay infeasible.
            gain = np.where(np.isneginf(below), -np.inf, acceptance[d, b - 1] * np.maximum(below, 0.0))
            options = value[None, :] + gain[subtree]
            keep[d, b] = options.argmax(1)
            value = options.max(1)
            better = value > best
            child_count[d][better] = b
            best = np.where(better, value, best)
        below = best
    return below, child_count, keep


def _stack(
    answers: Sequence[Chances], weights: Weights | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """All positions that have a target: [T, K, S] and their weights [T]."""
    table = np.concatenate(list(answers)) if answers else np.zeros((0, 1, 1))
    weight = np.ones(len(table)) if weights is None else np.concatenate(list(weights))
    return table, weight
