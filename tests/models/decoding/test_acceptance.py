"""Acceptance rules against plain Python over nodes, their limits, and what must hold of every one of them.

That the rules keep the target's distribution is shown by enumeration, in test_certify.py.
"""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafthead.eval.lossless.enumerate import CommittedProbs, committed
from drafthead.eval.lossless.tabular_lm import TableDraft, TabularLM
from drafthead.models.decoding import acceptance
from drafthead.models.decoding.acceptance import (
    Acceptance,
    AcceptanceRule,
    block,
    greedy,
    naive_sampling,
    speculative,
    typical,
)
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, Proposal
from drafthead.models.decoding.random_source import VERIFY, PerRowRng
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.token_tree import TokenTree, TreeShape
from support import lookup

V = 5
DET, IID = DraftSampling.TOP_K, DraftSampling.WITH_REPLACEMENT
RAW = Sampler(temperature=1.0)
SEEDS = st.integers(0, 2**31)


class Dice:
    """Random numbers, equal for all rows, that record the decisions asked for and the bonus's distribution."""

    def __init__(self, uniforms: list[float]) -> None:
        self._uniforms = torch.tensor(uniforms, dtype=torch.float64)
        self._used: Tensor | None = None
        self.chances: list[Tensor] = []
        self.bonus = torch.empty(0)

    def bernoulli(self, p: Tensor, q: Tensor, active: Tensor) -> Tensor:
        if self._used is None:
            self._used = torch.zeros_like(active, dtype=torch.int64)
        u = self._uniforms[self._used]
        self._used = self._used + active
        self.chances.append(torch.where(p < q, p / q, (p > 0).double()))
        return active & (u * q < p)

    def categorical(self, probs: Tensor) -> Tensor:
        self.bonus = probs[:, 0] / probs[:, 0].sum(-1, keepdim=True)
        return probs.argmax(-1)


def random_probs(rows: int, nodes: int, chance: torch.Generator, sparse: bool = True) -> Tensor:
    dist = torch.rand(rows, nodes, V, dtype=torch.float64, generator=chance) ** 3
    if sparse:  # some tokens impossible, as after truncation
        dist *= torch.rand(dist.shape, generator=chance) < 0.7
        dist[..., 0] += 1e-3
    return dist / dist.sum(-1, keepdim=True)


def random_proposal(seed: int, rows: int, nodes: int) -> tuple[Proposal, Tensor]:
    """Ragged trees with padding, and the target's probs [B, N, V]."""
    chance = torch.Generator().manual_seed(seed)
    parents = torch.full((rows, nodes), -1)
    for node in range(1, nodes):
        above = torch.randint(0, node, (rows,), generator=chance)
        reached = (above == 0) | (parents.gather(1, above[:, None])[:, 0] >= 0)
        active = reached & (torch.rand(rows, generator=chance) < 0.85)
        parents[:, node] = torch.where(active, above, -1)
    tokens = torch.randint(V, (rows, nodes), generator=chance)
    proposal = Proposal(tokens=tokens, shape=TreeShape.from_parents(parents), draft_sampling=DET)
    return proposal, random_probs(rows, nodes, chance)


def typical_by_hand(
    proposal: Proposal, target: Tensor, row: int, epsilon: float, delta: float
) -> tuple[list[int], list]:
    def threshold(dist: list[float]) -> float:
        entropy = -sum(v * math.log(v) for v in dist if v > 0)
        return min(epsilon, delta * math.exp(-entropy))

    probs = target[row].tolist()
    paths, scores = {0: [0]}, {0: 0.0}
    for node in range(1, proposal.tokens.shape[1]):
        above = int(proposal.shape.parents[row, node])
        p = probs[above][int(proposal.tokens[row, node])]
        if above in paths and p > threshold(probs[above]):
            paths[node], scores[node] = [*paths[above], node], scores[above] + math.log(p)
    best = max(paths, key=lambda node: (len(paths[node]), scores[node]))
    dist, cut = probs[best], threshold(probs[best])
    truncated = [v if v > cut or v == max(dist) else 0.0 for v in dist]
    return paths[best], [v / sum(truncated) for v in truncated]


@given(SEEDS, st.integers(1, 5), st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_a_cpu_accepts_what_a_device_does(seed: int, rows: int, nodes: int) -> None:
    """A CPU walks by loops. Five tokens, so that siblings are often equal."""
    proposal, target = random_proposal(seed, rows, nodes)
    results = []
    for on_host in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(acceptance, "is_host", lambda device, on_host=on_host: on_host)
            rng = PerRowRng(list(range(rows)), [seed % 99] * rows, VERIFY, torch.device("cpu"))
            accepted = naive_sampling(proposal, lookup(target), rng)
            results.append((greedy(proposal, target.argmax(-1)), accepted))
    for host, device in zip(*results, strict=True):
        width = host.nodes.shape[1]  # that of the longest walk
        assert torch.equal(host.nodes, device.nodes[:, :width]) and not device.nodes[:, width:].any()
        assert torch.equal(host.accepted, device.accepted) and torch.equal(host.bonus, device.bonus)


@given(st.integers(0, 10_000), st.integers(1, 12), st.sampled_from([(0.09, 0.3), (0.3, 0.9)]))
@settings(max_examples=60, deadline=None)
def test_typical_acceptance_is_that_of_plain_python(seed: int, nodes: int, numbers: tuple[float, float]) -> None:
    rows, (epsilon, delta) = 3, numbers
    proposal, target = random_proposal(seed, rows, nodes)
    rng = Dice([])
    acceptance = typical(proposal, lookup(target), rng, epsilon=epsilon, delta=delta)
    for row in range(rows):
        path, bonus = typical_by_hand(proposal, target, row, epsilon, delta)
        count = int(acceptance.accepted[row])
        assert acceptance.nodes[row, : count + 1].tolist() == path
        torch.testing.assert_close(rng.bonus[row], torch.tensor(bonus, dtype=torch.float64))


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=4), st.sampled_from(list(DraftSampling)), SEEDS)
def test_block_judges_every_chain_as_if_alone(depths: list[int], draft_sampling: DraftSampling, seed: int) -> None:
    """Tokens and probs need not fit for that. The probs are the target's after the accepted nodes."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(depths), max(depths) + 1
    inside = torch.arange(width) <= torch.tensor(depths)[:, None]
    shape = TreeShape.from_parents(torch.where(inside, torch.arange(-1, width - 1), -1))
    tokens = torch.randint(V, (rows, width), generator=generator)
    sampled = draft_sampling is not DET
    probs = random_probs(rows, 3, generator) if sampled else None
    prob_index = torch.randint(-1, 3, shape.children.shape, generator=generator) if sampled else None
    target = random_probs(rows, width, generator)

    def judged(first: int, last: int, nodes: int, shape: TreeShape) -> Acceptance:
        proposal = Proposal(
            tokens=tokens[first:last, :nodes],
            shape=shape,
            draft_sampling=draft_sampling,
            probs=None if probs is None else probs[first:last],
            prob_index=None if prob_index is None else prob_index[first:last, :nodes],
        )
        rng = PerRowRng(list(range(first, last)), [0] * (last - first), VERIFY, torch.device("cpu"))
        return block(proposal, lookup(target[first:last, :nodes]), rng, return_probs=True)

    together = judged(0, rows, width, shape)
    for row, depth in enumerate(depths):
        alone = judged(row, row + 1, depth + 1, TokenTree.chain(depth).shape)
        assert together.accepted[row] == alone.accepted[0] and together.bonus[row] == alone.bonus[0]
        count = int(alone.accepted[0]) + 1
        assert together.nodes[row, :count].tolist() == alone.nodes[0, :count].tolist()
        assert not together.nodes[row, count:].any()
    committed = torch.arange(together.nodes.shape[1]) <= together.accepted[:, None]
    torch.testing.assert_close(together.probs, torch.where(committed[..., None], lookup(target)(together.nodes), 0.0))


def one_draft(probs: Tensor | None) -> Proposal:
    """Token 0 drafted after token 0, sampled from ``probs`` [1, 1, V] or top-k."""
    return Proposal(
        tokens=torch.zeros(1, 2, dtype=torch.int64),
        shape=TokenTree.chain(1).shape,
        draft_sampling=DET if probs is None else IID,
        probs=probs,
        prob_index=None if probs is None else torch.zeros(1, 2, 1, dtype=torch.int64),
    )


@pytest.mark.parametrize("rule", [speculative, block])
def test_an_empty_residual_falls_back_to_the_target(rule: Callable[..., Acceptance]) -> None:
    """Equal distributions are rejected by rounding only; then p is right, and 0 / 0 is not."""

    class Never(Dice):
        def bernoulli(self, p: Tensor, q: Tensor, active: Tensor) -> Tensor:
            return torch.zeros_like(active)

    dist = random_probs(1, 1, torch.Generator().manual_seed(0))
    rng = Never([])
    rule(one_draft(dist), lookup(dist.expand(1, 2, -1)), rng)
    torch.testing.assert_close(rng.bonus, dist[0])


@pytest.mark.parametrize("rule", [speculative, block])
@pytest.mark.parametrize("sampled", [True, False])
def test_the_smallest_number_accepts_no_impossible_token(rule: Callable[..., Acceptance], sampled: bool) -> None:
    p = torch.tensor([[[0.0, 0.5, 0.5, 0.0, 0.0]]]).double().expand(1, 2, -1)
    q = torch.tensor([[[0.9, 0.1, 0.0, 0.0, 0.0]]]).double() if sampled else None
    rng = Dice([0.0] * 4)
    acceptance = rule(one_draft(q), lookup(p), rng)
    assert acceptance.accepted.tolist() == [0] and rng.bonus[0, 0] == 0


def masses(
    tree: TokenTree, rule: AcceptanceRule, draft_sampling: DraftSampling, seed: int
) -> tuple[CommittedProbs, Tensor, Tensor]:
    """Return the enumerated distribution of committed tokens, and the probs of target and drafter after the root."""
    target = TabularLM.random(V, tree.depth, seed)
    table = target.near(seed + 1, 1.0)
    draft = TableDraft(table=table, draft_config=DraftConfig(tree=tree, draft_sampling=draft_sampling, sampler=RAW))
    return committed(draft, target, RAW, rule, tree.depth), target.probs(RAW)[0], table.probs(RAW)[0]


def mean_accepted(found: CommittedProbs) -> float:
    return sum(length * float(mass.sum()) for length, mass in enumerate(found.by_length))


@settings(max_examples=15, deadline=None)
@given(depth=st.integers(1, 3), draft_sampling=st.sampled_from([IID, DET]), seed=SEEDS)
@example(depth=3, draft_sampling=IID, seed=1)
def test_block_accepts_at_least_as_much_as_token_by_token(depth: int, draft_sampling: DraftSampling, seed: int) -> None:
    tree = TokenTree.chain(depth)
    one, many = (
        mean_accepted(masses(tree, AcceptanceRule(name=n), draft_sampling, seed)[0]) for n in ("exact", "block")
    )
    assert many >= one - 1e-12
    if (depth, draft_sampling, seed) == (3, IID, 1):
        assert many > one + 0.01


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_more_candidates_accept_more(seed: int) -> None:
    exact = AcceptanceRule()
    for draft_sampling in DraftSampling:
        one, three = (mean_accepted(masses(TokenTree.expansion([k]), exact, draft_sampling, seed)[0]) for k in (1, 3))
        assert three > one


def test_lenience_1_is_the_exact_rule() -> None:
    for rule in (AcceptanceRule(name="lenient", lenience=1.0), AcceptanceRule(name="lenient", lenience=0.5)):
        lenient, exact = (masses(TokenTree.chain(2), r, IID, 3)[0] for r in (rule, AcceptanceRule()))
        same = all(torch.equal(a, b) for a, b in zip(lenient.by_length, exact.by_length, strict=True))
        assert same == rule.lossless
        assert same or mean_accepted(lenient) > mean_accepted(exact)
