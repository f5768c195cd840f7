"""Which tree pays on this machine: expected tokens per second from replayed acceptance and measured step costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drafthead.eval.trees.cost_model import StepCosts
from drafthead.eval.trees.search import SequoiaTrees, first_accepted, search_visited, sequoia
from drafthead.eval.trees.simulate import Chances, Replay, ends, replay, replay_ends, visits
from drafthead.models.token_tree import TokenTree


@dataclass(frozen=True)
class Choice:
    """A tree and what it is expected to do."""

    tree: TokenTree
    expected_tokens: float
    """Mean accepted tokens by replay."""
    expected_speedup: float
    """Against plain decoding with v(1), by the measured step costs."""
    model_tokens: float
    """Mean accepted tokens by the model that the tree was searched under."""


@dataclass(frozen=True)
class Machine:
    """Expected speed of trees on a machine whose step costs were measured."""

    costs: StepCosts

    def step(self, tree: TokenTree) -> float:
        """Seconds of a whole step."""
        return self.costs.step(len(tree), tree.depth)

    def choice(self, answers: Sequence[Chances], tree: TokenTree, model_tokens: float) -> Choice:
        """What ``tree`` is expected to do on ``answers``; its search expected ``model_tokens``."""
        tokens = replay(answers, tree).mean_accepted_tokens
        speedup = tokens * self.step(TokenTree.chain(0)) / self.step(tree)
        return Choice(tree, tokens, speedup, model_tokens)


def best(choices: Iterable[Choice]) -> Choice:
    """The highest expected speedup; the smaller tree of equals."""
    return max(choices, key=lambda c: (c.expected_speedup, -len(c.tree)))


def cross_fitted(
    answers: Sequence[Chances], sizes: Sequence[int], method: str = "search", seed: int = 0
) -> list[Replay]:
    """What the searched tree of each size (root included) does on answers that it was not searched on.

    Two folds: each half of the answers is replayed with the tree of the other. A size that no tree has gives the
    next smaller one.
    """
    halves = [list(answers[0::2]), list(answers[1::2] or answers)]
    largest, depth = max(sizes), answers[0].shape[1]
    replays = []
    if method == "search":
        orders = [search_visited(half, largest - 1) for half in reversed(halves)]
        trees = [[order.tree(size - 1) for order in orders] for size in sizes]
    else:
        found = [_sequoia_visited(half, largest, depth) for half in reversed(halves)]
        trees = [[f.tree(f.at_most(size, depth), depth) for f in found] for size in sizes]
    for pair in trees:
        parts = [[ends(a, tree) for a in half] for half, tree in zip(halves, pair, strict=True)]
        replays.append(replay_ends(parts[0] + parts[1] if len(answers) > 1 else parts[0], seed))
    return replays


def searched(answers: Sequence[Chances], machine: Machine, nodes: int) -> list[Choice]:
    """The best trees of 2 to ``nodes`` nodes by greedy search on joint counts, of every depth that changes the cost."""
    depth = answers[0].shape[1]
    choices = []
    for bound in range(1, depth + 1) if machine.costs.draft_by_depth is not None else [depth]:
        cut = [a[:, :bound] for a in answers]
        order = search_visited(cut, nodes - 1)
        for drafts in range(1, len(order.paths) + 1):
            choices.append(machine.choice(cut, order.tree(drafts), 1.0 + sum(order.values[:drafts])))
    return choices


def programmed(answers: Sequence[Chances], machine: Machine, nodes: int) -> list[Choice]:
    """The best trees of 2 to ``nodes`` nodes by Sequoia's program, of every depth that changes the cost."""
    depth = answers[0].shape[1]
    trees = _sequoia_visited(answers, nodes, depth)
    choices = []
    for bound in range(1, depth + 1) if machine.costs.draft_by_depth is not None else [depth]:
        for size in range(2, nodes + 1):
            expected = float(trees.expected[bound, size])
            if expected > 0:  # -inf: no tree has exactly this size and depth bound
                choices.append(machine.choice(answers, trees.tree(size, bound), expected))
    return choices


def _sequoia_visited(answers: Sequence[Chances], nodes: int, depth: int, rounds: int = 3) -> SequoiaTrees:
    """Sequoia's program, with acceptance measured where decoding with the tree found before starts its steps."""
    trees = sequoia(first_accepted(answers), nodes, depth)
    for _ in range(rounds - 1):
        tree = trees.tree(trees.at_most(nodes, depth), depth)
        started = visits([ends(a, tree) for a in answers])
        trees = sequoia(first_accepted(answers, started), nodes, depth)
    return trees


METHODS = {"search": searched, "sequoia": programmed}
"""Ways to find trees: on joint counts of whole paths, or on acceptance by depth and trial."""
