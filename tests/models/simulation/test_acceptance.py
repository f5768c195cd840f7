"""Simulated acceptance on finished answers against exact enumeration of decoding, with every kind of drafting."""

from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from drafthead.models.decoding.drafter import DraftSampling
from drafthead.models.simulation.acceptance import (
    accept_probs_of_ranks,
    accepted_length_probs,
    block_accept_probs,
    candidate_accept_probs,
    simulate_acceptance,
    simulate_steps,
    start_probs,
    trials_in_order,
)
from drafthead.models.token_tree import TokenTree
from support import cases, token_trees

RANKS = arrays(np.int64, st.tuples(st.integers(1, 40), st.just(3)), elements=st.integers(0, 3))
V, LENGTH, DEPTH = 3, 4, 2
Context = tuple[int, ...]


@given(RANKS, token_trees())
def test_a_step_accepts_the_longest_offered_path(ranks: np.ndarray, tree: TokenTree) -> None:
    table = accepted_length_probs(accept_probs_of_ranks(ranks, 4), tree)
    for t, row in enumerate(ranks.tolist()):
        offered = [len(p) for p in tree.paths if tuple(row[: len(p)]) == p]
        assert table[t].tolist() == np.eye(tree.depth + 1)[max(offered)].tolist()


@given(st.lists(RANKS, min_size=1, max_size=3), token_trees())
def test_steps_are_counted(answers: list[np.ndarray], tree: TokenTree) -> None:
    """Answers of different lengths, each against a loop over its steps."""
    tables = [accepted_length_probs(accept_probs_of_ranks(a, 4), tree) for a in answers]
    counts, lengths = [], []
    for table, started in zip(tables, start_probs(tables), strict=True):
        positions, t = [], 0
        while t < len(table):
            positions.append(t)
            lengths.append(int(table[t].argmax()))
            t += lengths[-1] + 1
        assert np.flatnonzero(started).tolist() == positions and set(started) <= {0.0, 1.0}
        counts.append(len(positions))
    simulated = simulate_steps(tables)
    assert simulated.steps == sum(counts)
    assert simulated.mean_accepted_length == sum(len(a) for a in answers) / sum(counts)
    assert [start @ committed for start, committed in simulated.by_position] == [len(a) for a in answers]
    reached = [sum(length >= depth for length in lengths) for depth in range(tree.depth + 1)]
    shares = [b / a if a else np.nan for a, b in zip(reached, reached[1:], strict=False)]
    assert simulated.by_depth == pytest.approx(shares, nan_ok=True)


def test_no_draft_is_accepted_after_the_end() -> None:
    probs = accept_probs_of_ranks(np.array([[0, 0], [0, -1]]), 1)
    assert accepted_length_probs(probs, TokenTree.chain(2)).tolist() == [[0, 0, 1], [0, 1, 0]]


def test_the_interval_is_over_answers() -> None:
    """Half of the answers take 1 step for 3 tokens, half 3: the mean is in the interval, which shrinks with them."""
    tables = [np.eye(3)[[2, 1, 0]], np.eye(1)[[0, 0, 0]]]
    few, many = simulate_steps(tables * 4), simulate_steps(tables * 100)
    assert few.mean_accepted_length == many.mean_accepted_length == 1.5
    assert few.interval[0] < many.interval[0] < 1.5 < many.interval[1] < few.interval[1]
    assert simulate_steps(tables[:1]).interval is None


def test_sampled_siblings_are_tried_in_order() -> None:
    tree = TokenTree.from_paths([(1,), (3,), (3, 2), (3, 5)])
    assert set(trials_in_order(tree).paths) == {(), (0,), (1,), (1, 0), (1, 1)}


# Sampling, against exact enumeration -------------------------------------------------------------------------


@cache
def dist(kind: str, context: Context, k: int = 0) -> np.ndarray:
    """The target's distribution after a context, or an independent head's for its k-th draft."""
    seed = [ord(kind[0]), k, len(context), *context]
    return np.random.default_rng(seed).dirichlet([0.8] * V)


def outcomes(root: Context, tree: TokenTree, draft_sampling: DraftSampling) -> Iterator[tuple[Context, float]]:
    """Every (committed tokens, probability) of one step: the walk of the rule, candidate by candidate."""

    def walk(node: int, path: Context, mass: float) -> Iterator[tuple[Context, float]]:
        children = [n for n, parent in enumerate(tree.parents) if parent == node]
        yield from trial(children, path, dist("target", root + path), dist("draft", root, len(path)), mass)

    def trial(children: list[int], path: Context, p: np.ndarray, q: np.ndarray, mass: float) -> Iterator:
        if not children:
            yield from (((*path, x), mass * p[x]) for x in range(V))
            return
        for x in range(V):
            yield from walk(children[0], (*path, x), mass * min(p[x], q[x]))
        rejected = np.maximum(q - p, 0)
        residual = np.maximum(p - q, 0) / max(np.maximum(p - q, 0).sum(), 1e-300)
        if draft_sampling is DraftSampling.WITH_REPLACEMENT:
            yield from trial(children[1:], path, residual, q, mass * rejected.sum())
            return
        for x in range(V):
            without = np.where(np.arange(V) == x, 0, q)
            yield from trial(children[1:], path, residual, without / max(without.sum(), 1e-300), mass * rejected[x])

    yield from walk(0, (), 1.0)


def decoding_steps(context: Context, tree: TokenTree, draft_sampling: DraftSampling) -> float:
    """Expected steps of decoding up to ``LENGTH`` tokens, by enumeration."""
    if len(context) >= LENGTH:
        return 0.0
    following: dict[Context, float] = {}
    for tokens, mass in outcomes(context, tree, draft_sampling):
        after = (context + tokens)[:LENGTH]
        following[after] = following.get(after, 0.0) + mass
    assert sum(following.values()) == pytest.approx(1.0)
    return 1.0 + sum(
        mass * decoding_steps(after, tree, draft_sampling) for after, mass in following.items() if mass > 0
    )


@cache
def text_position(text: Context, root: int, draft_sampling: DraftSampling, width: int, repeats: int) -> np.ndarray:
    """Acceptance of a text's last token, averaged over the draws of rejected tokens."""
    p, q = dist("target", text[:-1]), dist("draft", text[:root], len(text) - 1 - root)
    rows = [torch.from_numpy(a).expand(repeats, -1) for a in (p, q)]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.full((repeats,), text[-1])
    return candidate_accept_probs(*rows, tokens, draft_sampling, width, generator).mean(0).numpy()


@cases(
    "draft_sampling, tree",
    (DraftSampling.WITH_REPLACEMENT, TokenTree.chain(2)),
    (DraftSampling.WITH_REPLACEMENT, TokenTree.expansion([3, 2])),
    (DraftSampling.WITH_REPLACEMENT, TokenTree.from_paths([(0,), (1,), (1, 0), (1, 1)])),
    (DraftSampling.WITHOUT_REPLACEMENT, TokenTree.chain(2)),
    (DraftSampling.WITHOUT_REPLACEMENT, TokenTree.from_paths([(0,), (1,), (2,), (0, 0), (1, 0), (1, 1)])),
    ids=["chain", "iid", "iid uneven", "chain without", "without"],
)
def test_it_expects_the_steps_of_real_decoding(draft_sampling: DraftSampling, tree: TokenTree) -> None:
    """Averaged over the target's own texts it is decoding, with heads that do not see the path."""
    replacing = draft_sampling is DraftSampling.WITH_REPLACEMENT
    width = max(tree.parents.count(n) for n in range(len(tree)))
    expected, repeats = 0.0, 1 if replacing or width == 1 else 4000
    for text in product(range(V), repeat=LENGTH):
        probability = float(np.prod([dist("target", text[:i])[x] for i, x in enumerate(text)]))
        table = np.full((LENGTH, DEPTH, width), np.nan)
        for t, k in product(range(LENGTH), range(DEPTH)):
            if t + k < LENGTH:
                table[t, k] = text_position(text[: t + k + 1], t, draft_sampling, width, repeats)
        expected += probability * simulate_acceptance([table], tree).steps
    tolerance = 1e-9 if repeats == 1 else 5e-3  # rejected tokens are drawn
    assert expected == pytest.approx(decoding_steps((), tree, draft_sampling), abs=tolerance)


def test_block_verification_against_enumeration() -> None:
    """Sun et al.'s algorithm on every draft block of 2: how often at least k drafts of it are accepted."""
    at_least = np.zeros(3)
    for block in product(range(V), repeat=2):
        drafted = dist("draft", (), 0)[block[0]] * dist("draft", (), 1)[block[1]]
        first = min(1.0, dist("target", ())[block[0]] / dist("draft", (), 0)[block[0]])
        second = min(1.0, first * dist("target", block[:1])[block[1]] / dist("draft", (), 1)[block[1]])
        excess = np.maximum(first * dist("target", block[:1]) - dist("draft", (), 1), 0).sum()
        stop_here = excess / (excess + 1 - first) if first < 1 else 1.0
        at_least[2] += drafted * second
        at_least[1] += drafted * (second + (1 - second) * stop_here)
    simulated = np.zeros(3)
    for text in product(range(V), repeat=2):
        p = torch.tensor([[dist("target", text[:i])[x] for i, x in enumerate(text)]])
        q = torch.tensor([[dist("draft", (), i)[x] for i, x in enumerate(text)]])
        simulated[1:] += float(p.prod()) * block_accept_probs(p, q)[0].numpy().cumprod()
    assert simulated[1:] == pytest.approx(at_least[1:])
