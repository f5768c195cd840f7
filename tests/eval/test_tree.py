"""Tree search and replay, against brute force and real decoding."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from drafthead.data.contracts import Proposal, Siblings, TokenTree
from drafthead.eval.tree import accepted_at, replay, search, visited
from drafthead.eval.verify import greedy

RANKS = arrays(np.int64, st.tuples(st.integers(1, 40), st.just(3)), elements=st.integers(0, 3))


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    paths: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from([(), *[p for p in paths if len(p) < 3]]))
        paths.append((*parent, draw(st.integers(0, 2))))
    return TokenTree.from_paths(paths)


def test_search_finds_the_best_tree_of_each_size() -> None:
    """Against all trees of up to 4 nodes on skewed ranks, with enough data that the prior is small."""
    generator = np.random.default_rng(0)
    first = generator.choice(4, p=[0.4, 0.3, 0.2, 0.1], size=4000)
    # The second draft is right mostly after the second candidate: a product of marginals cannot see that.
    second = np.where(first == 1, 0, generator.integers(1, 4, size=4000))
    ranks = [np.stack([first, second], 1)]
    order = search(ranks, 4, width=3)
    every = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    for size in (1, 2, 3, 4):
        best = max(
            float(accepted_at(ranks[0], TokenTree.from_paths(list(c))).mean())
            for c in combinations(every, size)
            if all(p[:-1] in c or len(p) == 1 for p in c)
        )
        assert float(accepted_at(ranks[0], order.tree(size)).mean()) == pytest.approx(best)
    assert order.paths[:2] == [(0,), (1,)] and order.paths[2] == (1, 0)
    assert order.values == sorted(order.values, reverse=True)


@given(RANKS, trees())
def test_accepted_is_the_longest_offered_path(ranks: np.ndarray, tree: TokenTree) -> None:
    accepted = accepted_at(ranks, tree)
    for t, row in enumerate(ranks.tolist()):
        offered = [len(p) for p in tree.paths if tuple(row[: len(p)]) == p]
        assert accepted[t] == max(offered)


@given(RANKS, trees())
def test_replay_counts_steps(ranks: np.ndarray, tree: TokenTree) -> None:
    positions, accepted = visited(ranks, tree), accepted_at(ranks, tree)
    assert positions[0] == 0
    assert list(positions[1:]) == [p + accepted[p] + 1 for p in positions[:-1]]
    assert replay([ranks], tree) == len(ranks) / len(positions)


@given(trees(), st.integers(0, 2**31))
def test_greedy_rule_equals_walking_the_tree(tree: TokenTree, seed: int) -> None:
    """The vectorised rule against a loop from the root, on tokens with many collisions."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 3, (2, len(tree)), generator=generator)
    target = torch.randint(0, 3, (2, len(tree)), generator=generator)
    verdict = greedy(Proposal(tokens=tokens, tree=tree, siblings=Siblings.DETERMINISTIC), target)
    for row in range(2):
        paths = {0: [0]}
        for node, parent in enumerate(tree.parents[1:], start=1):
            if parent in paths and tokens[row, node] == target[row, parent]:
                paths[node] = [*paths[parent], node]
        longest = max(len(p) for p in paths.values())
        first = min(n for n, p in paths.items() if len(p) == longest)
        assert verdict.accepted[row] == longest - 1
        assert verdict.nodes[row, :longest].tolist() == paths[first]
        assert verdict.bonus[row] == target[row, first]
