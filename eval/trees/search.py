"""Search for the fastest static token tree: greedily on joint counts, or by Sequoia's dynamic program. Both use
simulated acceptance. ``accept_probs[t, k, s]`` is the probability that a step from position t, after k accepted drafts,
accepts the next token as candidate s (``simulate.py``). ``calibrate.py`` then chooses the fastest of the trees by the
machine's ``CostModel``.
Shape legend: T positions of one answer, K draft positions, S candidates at a node, M nodes (root included)."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from drafthead.data.intervals import Floats
from drafthead.models.simulation.acceptance import (
    AcceptProbs,
    SimulatedAcceptance,
    accepted_length_probs,
    simulate_steps,
    start_probs,
)
from drafthead.models.token_tree import TokenTree

PRIOR_WEIGHT = 20.0  # weight, in observations, of a candidate's marginal accuracy against the joint counts of its path
ROUNDS = 3  # searches for a tree; see `greedy_tree`
SearchMethod = Literal["greedy", "sequoia"]


@dataclass(frozen=True)
class TreeOrder:
    """Nodes in the order in which a growing tree adds them: the first m nodes are the best tree of m drafts."""

    paths: list[tuple[int, ...]]  # numbers (from 0) of the candidates from the root's child to each node
    values: list[float]  # estimated probability that each node's whole path is accepted

    def tree(self, drafts: int) -> TokenTree:
        return TokenTree.from_paths(self.paths[:drafts])


def _started(answers: Sequence[AcceptProbs], tree: TokenTree) -> list[Floats]:
    """Return per answer the probability [T] that decoding with ``tree`` starts a step at each position."""
    return start_probs([accepted_length_probs(a, tree) for a in answers])


def greedy_tree(answers: Sequence[AcceptProbs], size: int, rounds: int = ROUNDS) -> TreeOrder:
    """Order ``size`` nodes (root excluded) by greedy search, so that the first m nodes are the best tree of m drafts.
    Medusa (2401.10774) scores a node by the product of its ranks' marginal accuracies. Here a node's value is how often
    its whole path was accepted, shrunk towards that product by ``PRIOR_WEIGHT`` observations. A child is never likelier
    than its parent, so greedy search is optimal for this value. After the first of ``rounds``, a position's weight is
    the probability that decoding with the tree found before starts a step there."""
    order = _greedy_order(answers, size, None)
    for _ in range(rounds - 1):
        order = _greedy_order(answers, size, _started(answers, order.tree(size)))
    return order


def _greedy_order(answers: Sequence[AcceptProbs], size: int, weights: Sequence[Floats] | None) -> TreeOrder:
    table = np.concatenate(answers)
    weight = np.ones(len(table)) if weights is None else np.concatenate(weights)
    known = np.nan_to_num(table)
    depth = table.shape[1]
    valid = ~np.isnan(table[:, :, 0])
    seen = np.maximum((weight[:, None] * valid).sum(0), 1.0)
    marginal = np.einsum("t,tks->ks", weight, known) / seen[:, None]
    frontier: list[tuple[float, tuple[int, ...]]] = []
    # Per path [T]: the weight of each position times the probability that it accepts the whole path.
    accepted: dict[tuple[int, ...], Floats] = {(): weight * valid[:, 0]}

    def push_children(parent: float, path: tuple[int, ...]) -> None:
        """Add the children of ``path``, whose value is ``parent``, to the frontier."""
        k = len(path)
        counts, total = accepted[path] @ known[:, k], float(accepted[path].sum())
        conditional = (counts + PRIOR_WEIGHT * marginal[k]) / (total + PRIOR_WEIGHT)
        for s, value in enumerate(np.minimum(conditional, 1.0).tolist()):
            heapq.heappush(frontier, (-parent * value, (*path, s)))

    push_children(1.0, ())
    order = TreeOrder([], [])
    while frontier and len(order.paths) < size:
        negative, path = heapq.heappop(frontier)
        order.paths.append(path)
        order.values.append(-negative)
        if len(path) < depth:
            accepted[path] = accepted[path[:-1]] * known[:, len(path) - 1, path[-1]]
            push_children(-negative, path)
    return order


def first_accepted(answers: Sequence[AcceptProbs], weights: Sequence[Floats] | None = None) -> Floats:
    """Return P(candidate s is accepted | some candidate was accepted at every depth above) by depth, [K, S].
    ``weights`` has the positions' weights [T] of each answer (default: all 1)."""
    table = np.concatenate(answers)
    weight = np.ones(len(table)) if weights is None else np.concatenate(weights)
    known = np.nan_to_num(table)
    accepted = np.zeros(table.shape[1:])
    for k in range(table.shape[1]):
        here = weight * ~np.isnan(table[:, k, 0])
        accepted[k] = here @ known[:, k] / max(float(here.sum()), np.finfo(float).tiny)
        weight = here * known[:, k].sum(-1)
    return accepted


@dataclass(frozen=True)
class SequoiaTrees:
    """The best tree of every size if acceptance depends only on depth and candidate number. The root has depth 0."""

    expected: Floats  # [M+1]: mean accepted length of the best tree of m nodes, root included; -inf if there is none
    _children: npt.NDArray[np.int64] = field(repr=False)
    """[K+1, M+1], index [d, m]: number of children of a node at depth d in its best subtree of m nodes."""
    _kept: npt.NDArray[np.int64] = field(repr=False)
    """[K+1, S+1, M+1], index [d, b, m]: in the best subtree of m nodes whose root is at depth d and has b children, the
    number of nodes without the branch of the last child."""

    def tree(self, nodes: int) -> TokenTree:
        """Return the best tree of exactly ``nodes`` nodes, root included. A tree of this size must exist."""
        paths: list[tuple[int, ...]] = []
        pending: list[tuple[tuple[int, ...], int]] = [((), nodes)]
        while pending:
            path, size = pending.pop()
            paths.append(path)
            for child in range(int(self._children[len(path), size]), 0, -1):
                size_before = int(self._kept[len(path), child, size])
                pending.append(((*path, child - 1), size - size_before))
                size = size_before
        return TokenTree.from_paths(paths)


def sequoia(acceptance: Floats, nodes: int) -> SequoiaTrees:
    """Run Sequoia's dynamic program (2402.12374) for trees of up to ``nodes`` nodes, root included.
    ``acceptance`` [K, S] is P(candidate b is the first accepted one) at each depth; trees are at most K drafts deep.
    T is the mean accepted length of the best tree of m nodes and depth up to l whose root has b children. It consists
    of a tree of y nodes whose root has b-1 children, and the b-th child's subtree of m-y nodes. P[b] is ``acceptance``
    of the b-th child::

        T[m, l, b] = max_y T[y, l, b-1] + P[b] max_b' T[m-y, l-1, b'],    T[1, l, 0] = 1

    A node's children are always its first candidates, because a candidate is tried only when those before it failed.
    The program starts at the deepest level."""
    depth, candidates = acceptance.shape
    # Row m, column y: y nodes in the root and its children so far, and m - y in the subtree of the next child.
    m, y = np.ogrid[: nodes + 1, : nodes + 1]
    subtree = np.where(m > y, m - y, 0)  # size 0 is infeasible
    below = np.full(nodes + 1, -np.inf)  # best value of a subtree one level deeper, by its size
    below[1] = 1.0
    leaf = below.copy()
    child_count = np.zeros((depth + 1, nodes + 1), dtype=np.int64)
    keep = np.zeros((depth + 1, candidates + 1, nodes + 1), dtype=np.int64)
    for d in range(depth - 1, -1, -1):
        # value: with exactly b children, best: with any number.
        value = leaf.copy()
        best = leaf.copy()
        for b in range(1, candidates + 1):
            # A candidate that is never accepted adds nothing: -inf times 0 must stay infeasible.
            gain = np.where(np.isneginf(below), -np.inf, acceptance[d, b - 1] * np.maximum(below, 0.0))
            options = value[None, :] + gain[subtree]
            keep[d, b] = options.argmax(1)
            value = options.max(1)
            better = value > best
            child_count[d][better] = b
            best = np.where(better, value, best)
        below = best
    return SequoiaTrees(below, child_count, keep)


def best_trees(answers: Sequence[AcceptProbs], nodes: int, method: SearchMethod) -> dict[int, TokenTree]:
    """Return the best tree of each size from 2 to ``nodes`` (root included), by size; impossible sizes are missing.
    ``greedy`` uses joint counts of whole paths, ``sequoia`` acceptance by depth and candidate, both in ``ROUNDS``
    searches (see ``greedy_tree``)."""
    if method == "greedy":
        order = greedy_tree(answers, nodes - 1)
        return {drafts + 1: order.tree(drafts) for drafts in range(1, len(order.paths) + 1)}
    trees = sequoia(first_accepted(answers), nodes)
    for _ in range(ROUNDS - 1):
        largest = trees.tree(int(np.flatnonzero(trees.expected > 0)[-1]))
        trees = sequoia(first_accepted(answers, _started(answers, largest)), nodes)
    return {size: trees.tree(size) for size in range(2, nodes + 1) if trees.expected[size] > 0}


def cross_fitted(
    answers: Sequence[AcceptProbs], sizes: Sequence[int], method: SearchMethod = "greedy", seed: int = 0
) -> list[SimulatedAcceptance]:
    """Simulate the best tree of each size on answers that its search did not use: each half with the other's tree. A
    single answer is simulated with its own tree. If no tree has a size, the next smaller size is used."""
    halves = [answers[0::2], answers[1::2] or answers]
    first, second = (best_trees(half, max(sizes), method) for half in halves)
    simulated = []
    for size in sizes:
        trees = [found[max(n for n in found if n <= size)] for found in (second, first)]
        parts = [[accepted_length_probs(a, tree) for a in half] for half, tree in zip(halves, trees, strict=True)]
        simulated.append(simulate_steps(parts[0] + parts[1] if len(answers) > 1 else parts[0], seed))
    return simulated
