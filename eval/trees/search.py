"""Search for the fastest static token tree: greedily on joint counts, or by Sequoia's dynamic program.

Both use simulated acceptance. ``accept_probs[t, k, s]`` is the probability that a step from position t, after k
accepted drafts, accepts the next token as candidate s (``simulate.py``). The machine's ``CostModel`` then decides which
tree is fastest.

Shape legend: T positions of one answer, K draft positions, S candidates at a node, M nodes (root included).
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drafthead.data.utils.floats import Floats
from drafthead.eval.trees.cost_model import CostModel
from drafthead.eval.trees.simulate import (
    AcceptProbs,
    SimulatedAcceptance,
    accepted_length_probs,
    simulate_acceptance,
    simulate_steps,
    start_probs,
)
from drafthead.models.token_tree import TokenTree

PRIOR_WEIGHT = 20.0
"""Number of observations that a candidate's marginal accuracy counts as, next to the joint counts of its path."""
ROUNDS = 3
"""Number of searches. From the second on, only positions where decoding with the last tree starts a step count."""


@dataclass(frozen=True)
class TreeOrder:
    """Nodes in the order in which a growing tree takes them: the first m are the best tree of m drafts."""

    paths: list[tuple[int, ...]]
    values: list[float]
    """Estimated probability that each node is accepted."""

    def tree(self, drafts: int) -> TokenTree:
        """Return the tree of the root and the first ``drafts`` nodes."""
        return TokenTree.from_paths(self.paths[:drafts])


def _started(answers: Sequence[AcceptProbs], tree: TokenTree) -> list[Floats]:
    """Return the probability that decoding with ``tree`` starts a step at each position, often after a rejection."""
    return start_probs([accepted_length_probs(a, tree) for a in answers])


def greedy_tree(answers: Sequence[AcceptProbs], size: int, rounds: int = ROUNDS) -> TreeOrder:
    """Order nodes by greedy search: the first m accept the most tokens, counted at positions where steps start.

    Medusa (2401.10774) scores a node by the product of its ranks' marginal accuracies, as if draft positions were
    independent. Here a node's value is how often its whole path was accepted, shrunk towards that product by
    ``PRIOR_WEIGHT`` observations. A child is never likelier than its parent, so greedy search is optimal for this
    value. ``size`` nodes are ordered, root excluded. With one round all positions have the same weight.
    """
    order = _greedy_order(answers, size, None)
    for _ in range(rounds - 1):
        order = _greedy_order(answers, size, _started(answers, order.tree(size)))
    return order


def _greedy_order(answers: Sequence[AcceptProbs], size: int, weights: Sequence[Floats] | None) -> TreeOrder:
    table, weight = _stack(answers, weights)
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
    """Return P(candidate s is the accepted one | the node is reached) by depth and candidate, [K, S].

    At each depth, a position counts with its weight times the probability that some candidate was accepted at every
    depth above. ``weights`` has the positions' weights [T] for each answer; None: 1.
    """
    table, weight = _stack(answers, weights)
    known = np.nan_to_num(table)
    accepted = np.zeros(table.shape[1:])
    for k in range(table.shape[1]):
        here = weight * ~np.isnan(table[:, k, 0])
        accepted[k] = here @ known[:, k] / max(float(here.sum()), np.finfo(float).tiny)
        weight = here * known[:, k].sum(-1)
    return accepted


def _stack(answers: Sequence[AcceptProbs], weights: Sequence[Floats] | None) -> tuple[Floats, Floats]:
    """Return all positions [T, K, S] and their weights [T], 1 by default."""
    table = np.concatenate(list(answers)) if answers else np.zeros((0, 1, 1))
    return table, np.ones(len(table)) if weights is None else np.concatenate(list(weights))


@dataclass(frozen=True)
class SequoiaTrees:
    """The best tree of every size and depth bound, under acceptance by depth and candidate."""

    expected: Floats
    """[L+1, M+1]: mean accepted length with exactly m nodes (root included) and at most l drafts on
    a path; ``-inf`` where no such tree exists, as in column 0."""
    _children: list[npt.NDArray[np.int64]] = field(repr=False)
    """Per depth bound l: [l+1, M+1], number of children of a node at depth d whose best subtree has m nodes."""
    _kept: list[npt.NDArray[np.int64]] = field(repr=False)
    """Per depth bound l: [l+1, S+1, M+1], nodes of a subtree of m nodes and b children without its b-th branch."""

    def at_most(self, nodes: int, depth: int) -> int:
        """Return the largest size up to ``nodes`` for which a tree within the depth bound exists."""
        return int(np.flatnonzero(self.expected[depth, : nodes + 1] > 0)[-1])

    def tree(self, nodes: int, depth: int) -> TokenTree:
        """Return the best tree of exactly ``nodes`` nodes, which must exist (``expected``), within the depth bound."""
        paths: list[tuple[int, ...]] = []
        pending: list[tuple[tuple[int, ...], int]] = [((), nodes)]
        while pending:
            path, size = pending.pop()
            paths.append(path)
            for child in range(int(self._children[depth][len(path), size]), 0, -1):
                size_before = int(self._kept[depth][len(path), child, size])
                pending.append(((*path, child - 1), size - size_before))
                size = size_before
        return TokenTree.from_paths(paths)


def sequoia(acceptance: Floats, nodes: int, depth: int) -> SequoiaTrees:
    """Run Sequoia's dynamic program (2402.12374) over size, depth bound and number of children.

    T is the mean accepted length of the best tree of m nodes and depth up to l whose root has b children. It consists
    of a tree of y nodes whose root has b-1 children, and the b-th child's subtree of m-y nodes::

        T[m, l, b] = max_y T[y, l, b-1] + P[b] max_b' T[m-y, l-1, b'],    T[1, l, 0] = 1

    A node's children are always its first candidates, because a candidate is tried only when those before it
    failed. ``acceptance`` [K, S] is P(candidate b is the first accepted one) at each depth.
    """
    values, children, sizes = zip(*(_one_bound(acceptance[:bound], nodes) for bound in range(depth + 1)), strict=True)
    return SequoiaTrees(np.stack(values), list(children), list(sizes))


def _one_bound(acceptance: Floats, nodes: int) -> tuple[Floats, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Solve for one depth bound, deepest level first. Return the values [M+1], children and kept sizes of the trees."""
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
    return below, child_count, keep


def sequoia_tree(answers: Sequence[AcceptProbs], nodes: int, depth: int) -> SequoiaTrees:
    """Return Sequoia's trees of up to ``nodes`` nodes (root included) and ``depth`` drafts on a path.

    The first of ``ROUNDS`` searches weights all positions equally. A later one weights each by the probability that
    decoding with the tree found before starts a step there.
    """
    trees = sequoia(first_accepted(answers), nodes, depth)
    for _ in range(ROUNDS - 1):
        tree = trees.tree(trees.at_most(nodes, depth), depth)
        trees = sequoia(first_accepted(answers, _started(answers, tree)), nodes, depth)
    return trees


@dataclass(frozen=True)
class Choice:
    """A tree and its expected performance."""

    tree: TokenTree
    expected_tokens: float
    """Mean accepted length, simulated."""
    expected_speedup: float
    """Speedup over autoregressive decoding, as predicted by ``CostModel``."""
    model_tokens: float
    """Mean accepted length as estimated by the search."""

    @classmethod
    def of(cls, answers: Sequence[AcceptProbs], costs: CostModel, tree: TokenTree, model_tokens: float) -> "Choice":
        """Return ``tree`` with its expected performance on ``answers``."""
        tokens = simulate_acceptance(answers, tree).mean_accepted_length
        return cls(tree, tokens, costs.speedup(tokens, len(tree), tree.depth), model_tokens)

    def to_json(self) -> dict[str, float]:
        """Return JSON values: the fields, with the tree's nodes and depth instead of the tree."""
        values = {key: value for key, value in vars(self).items() if key != "tree"}
        return {"nodes": len(self.tree), "depth": self.tree.depth} | values


def fastest(choices: Iterable[Choice]) -> Choice:
    """Return the choice with the highest expected speedup; among equals the smallest tree."""
    return max(choices, key=lambda c: (c.expected_speedup, -len(c.tree)))


def _depths(answers: Sequence[AcceptProbs], costs: CostModel) -> Iterable[int]:
    """Return the depth limits to search: every depth if drafting costs depend on it, else only the largest."""
    depth = answers[0].shape[1]
    return [depth] if costs.draft_by_depth is None else range(1, depth + 1)


def greedy_choices(answers: Sequence[AcceptProbs], costs: CostModel, nodes: int) -> list[Choice]:
    """Return the best trees of 2 to ``nodes`` nodes for each limit of ``_depths``, by greedy search on joint counts."""
    choices = []
    for bound in _depths(answers, costs):
        shallow = [a[:, :bound] for a in answers]
        order = greedy_tree(shallow, nodes - 1)
        expected = 1.0 + np.cumsum(order.values)
        choices += [Choice.of(shallow, costs, order.tree(n), float(e)) for n, e in enumerate(expected, start=1)]
    return choices


def sequoia_choices(answers: Sequence[AcceptProbs], costs: CostModel, nodes: int) -> list[Choice]:
    """Return the best trees of 2 to ``nodes`` nodes for each limit of ``_depths``, by Sequoia's program."""
    trees = sequoia_tree(answers, nodes, answers[0].shape[1])
    return [
        Choice.of(answers, costs, trees.tree(size, bound), float(trees.expected[bound, size]))
        for bound in _depths(answers, costs)
        for size in range(2, nodes + 1)
        if trees.expected[bound, size] > 0  # -inf: no tree has exactly this size and depth bound
    ]


METHODS: Mapping[str, Callable[[Sequence[AcceptProbs], CostModel, int], list[Choice]]] = {
    "greedy": greedy_choices,
    "sequoia": sequoia_choices,
}
"""Tree searches: ``greedy`` uses joint counts of whole paths, ``sequoia`` acceptance by depth and candidate."""


def cross_fitted(
    answers: Sequence[AcceptProbs], sizes: Sequence[int], method: str = "greedy", seed: int = 0
) -> list[SimulatedAcceptance]:
    """Simulate the best tree of each size (root included) on answers that were not used to search it.

    Each half of the answers is simulated with the tree of the other half; a single answer, with its own tree. If no
    tree has a size, the next smaller size is used.
    """
    halves = [answers[0::2], answers[1::2] or answers]
    largest, depth = max(sizes), answers[0].shape[1]

    def trees(half: Sequence[AcceptProbs]) -> list[TokenTree]:
        """Return the best tree of every size."""
        if method == "greedy":
            order = greedy_tree(half, largest - 1)
            return [order.tree(size - 1) for size in sizes]
        simulated = sequoia_tree(half, largest, depth)
        return [simulated.tree(simulated.at_most(size, depth), depth) for size in sizes]

    of_other = [trees(half) for half in reversed(halves)]
    simulated = []
    for pair in zip(*of_other, strict=True):
        parts = [[accepted_length_probs(a, tree) for a in half] for half, tree in zip(halves, pair, strict=True)]
        simulated.append(simulate_steps(parts[0] + parts[1] if len(answers) > 1 else parts[0], seed))
    return simulated
