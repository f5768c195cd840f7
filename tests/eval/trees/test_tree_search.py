"""Tree search against all trees of small sizes, and Sequoia's program against brute force under its own model."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthead.eval.trees.search import first_accepted, greedy_tree, sequoia
from drafthead.models.simulation.acceptance import accept_probs_of_ranks, accepted_length_probs
from drafthead.models.token_tree import TokenTree


def accepted(ranks: np.ndarray, tree: TokenTree) -> float:
    """Mean drafts accepted over all positions."""
    table = accepted_length_probs(accept_probs_of_ranks(ranks, 4), tree)
    return float((table @ np.arange(table.shape[1])).mean())


def all_trees(drafts: int, depth: int, width: int) -> list[TokenTree]:
    """Every tree of that many drafts whose nodes' children are their first trials."""
    paths = [()]
    level = [()]
    for _ in range(depth):
        level = [(*p, r) for p in level for r in range(width)]
        paths += level
    return [
        TokenTree.from_paths(list(chosen))
        for chosen in combinations(paths[1:], drafts)
        if all((p[:-1] == () or p[:-1] in chosen) and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in chosen) for p in chosen)
    ]


def modelled(tree: TokenTree, acceptance: np.ndarray) -> float:
    """Expected tokens a step when trial b at depth d is the accepted one with probability ``acceptance[d, b]``."""
    return sum(float(np.prod([acceptance[d, b] for d, b in enumerate(path)])) for path in tree.paths)


def test_search_finds_the_best_tree_of_each_size() -> None:
    """Against all trees of up to 4 nodes on skewed ranks, with enough data that the prior is small."""
    generator = np.random.default_rng(0)
    first = generator.choice(4, p=[0.4, 0.3, 0.2, 0.1], size=4000)
    # The second draft is right mostly after the second candidate: a product of marginals cannot see that.
    second = np.where(first == 1, 0, generator.integers(1, 4, size=4000))
    ranks = np.stack([first, second], 1)
    order = greedy_tree([accept_probs_of_ranks(ranks, 3)], 4, rounds=1)
    every = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    for size in (1, 2, 3, 4):
        trees = [c for c in combinations(every, size) if all(p[:-1] in c or len(p) == 1 for p in c)]
        best = max(accepted(ranks, TokenTree.from_paths(list(tree))) for tree in trees)
        assert accepted(ranks, order.tree(size)) == pytest.approx(best)
    assert order.paths[:2] == [(0,), (1,)] and order.paths[2] == (1, 0)
    assert order.values == sorted(order.values, reverse=True)


def test_positions_count_where_steps_start() -> None:
    """Of 7 positions rank 0 is right at 4; every second of them is skipped by a step that accepted it."""
    answer = accept_probs_of_ranks(np.tile([[1], [1], [1], [0], [0], [0], [0]], (50, 1)), 2)
    assert greedy_tree([answer], 1, rounds=1).paths == [(0,)]
    assert greedy_tree([answer], 1, rounds=2).paths == [(1,)]


acceptances = st.integers(0, 2**32 - 1).map(
    # Rows sum to less than 1, in no order: a later trial may be accepted more often than an earlier one.
    lambda seed: np.random.default_rng(seed).dirichlet([0.7] * 4, size=3)[:, :3]
)


@settings(max_examples=30, deadline=None)
@given(acceptances, st.integers(0, 5), st.integers(0, 3))
def test_sequoia_is_the_best_of_all_trees(acceptance: np.ndarray, drafts: int, depth: int) -> None:
    solution = sequoia(acceptance[:depth], 6)
    trees = all_trees(drafts, depth, 3)
    if not trees:
        assert np.isneginf(solution.expected[drafts + 1])
        return
    tree = solution.tree(drafts + 1)
    assert len(tree) == drafts + 1 and tree.depth <= depth
    assert modelled(tree, acceptance) == pytest.approx(max(modelled(t, acceptance) for t in trees))
    assert solution.expected[drafts + 1] == pytest.approx(modelled(tree, acceptance))


def test_a_trial_that_is_never_accepted_makes_no_infeasible_tree_feasible() -> None:
    shallow, deep = (sequoia(np.zeros((depth, 2)), 8).expected for depth in (1, 2))
    assert not np.isnan(shallow).any() and not np.isnan(deep).any()
    assert np.isneginf(shallow[4:]).all() and (deep[1:8] == 1.0).all() and np.isneginf(deep[8])


def test_acceptance_is_measured_where_a_node_is_reached() -> None:
    ranks = np.array([[0, 1], [1, 1], [5, 0], [0, -1]])
    acceptance = first_accepted([accept_probs_of_ranks(ranks, 2)])
    # The third position never gets to the second draft, the fourth has none.
    assert np.allclose(acceptance, [[0.5, 0.25], [0.0, 1.0]])
