"""The rules against plain Python over nodes, and their limits: equal laws, zero probabilities, padding, ragged rows.

That the rules keep the target's law is shown by enumeration, in test_certify.py.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.decoding.acceptance import AcceptanceRule, block, greedy, speculative, typical
from drafthead.models.decoding.contract import Acceptance, DraftSampling, DynamicTree, Proposal
from drafthead.models.decoding.random_source import VERIFY, PerRowRng
from drafthead.models.token_tree import NO_CHILD, TokenTree, TreeShape
from support import lookup

V = 5
DET, IID, DISTINCT = DraftSampling.TOP_K, DraftSampling.WITH_REPLACEMENT, DraftSampling.WITHOUT_REPLACEMENT


class Dice:
    """Coins that say what they were asked: the same numbers for all rows, and the law of the bonus kept."""

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


def laws_for(rows: int, nodes: int, chance: torch.Generator, sparse: bool = True) -> Tensor:
    dist = torch.rand(rows, nodes, V, dtype=torch.float64, generator=chance) ** 3
    if sparse:  # some tokens impossible, as after truncation
        dist *= torch.rand(dist.shape, generator=chance) < 0.7
        dist[..., 0] += 1e-3
    return dist / dist.sum(-1, keepdim=True)


def random_proposal(seed: int, rows: int, nodes: int, draft_sampling: DraftSampling) -> tuple[Proposal, Tensor]:
    """Ragged trees with padding and nodes that are tried twice, and the target's laws [B, N, V]."""
    chance = torch.Generator().manual_seed(seed)
    parents = torch.full((rows, nodes), -1)
    for node in range(1, nodes):
        above = torch.randint(0, node, (rows,), generator=chance)
        reached = (above == 0) | (parents.gather(1, above[:, None])[:, 0] >= 0)
        kept = reached & (torch.rand(rows, generator=chance) < 0.85)
        parents[:, node] = torch.where(kept, above, -1)
    shape = TreeShape.from_parents(parents)
    tokens = torch.randint(V, (rows, nodes), generator=chance)
    target = laws_for(rows, nodes, chance)
    if draft_sampling is DET:
        return Proposal(tokens=tokens, shape=shape, draft_sampling=DET), target
    drafts = laws_for(rows, 2 * nodes, chance, sparse=False)
    children = shape.children
    if draft_sampling is IID:  # a merged tree may try a node twice
        children = torch.cat(
            [children, torch.where(torch.rand(children.shape, generator=chance) < 0.3, children, 0)], 2
        )
        order = (children == NO_CHILD).sort(dim=2, stable=True).indices
        children = children.gather(2, order)
    else:  # without replacement the samples of one law differ
        for node in range(1, nodes):
            brothers = [n for n in range(1, node)]
            for row in range(rows):
                taken = {int(tokens[row, n]) for n in brothers if parents[row, n] == parents[row, node] >= 0}
                free = [t for t in range(V) if t not in taken]
                if int(tokens[row, node]) in taken and free:
                    tokens[row, node] = free[0]
    prob_index = 2 * torch.arange(nodes)[None, :, None] + torch.randint(2, children.shape, generator=chance)
    deterministic = torch.rand(children.shape, generator=chance) < 0.2
    prob_index = torch.where(deterministic, -1, prob_index)
    proposal = Proposal(
        tokens=tokens,
        shape=replace(shape, children=children),
        draft_sampling=draft_sampling,
        probs=drafts,
        prob_index=prob_index,
    )
    return proposal, target


def by_hand(proposal: Proposal, target: Tensor, uniforms: list[float], row: int) -> tuple[list[int], list[float]]:
    """One row's walk, a number at a time: accepted nodes and the law of the bonus."""
    chance = iter(uniforms)
    shape, tokens = proposal.shape, proposal.tokens[row].tolist()
    children = shape.children[row if len(shape.children) > 1 else 0].tolist()
    node, path = 0, [0]
    while True:
        p, moved = target[row, node].tolist(), False
        tried: list[tuple[int, int]] = []
        for trial, child in enumerate(children[node]):
            if child == NO_CHILD:
                continue
            token = tokens[child]
            source = -1
            if proposal.prob_index is not None:
                source = int(proposal.prob_index[row if len(proposal.prob_index) > 1 else 0, node, trial])
            if source < 0 or proposal.probs is None:
                q = [float(t == token) for t in range(V)]
            else:
                q = proposal.probs[row, source].tolist()
                if proposal.draft_sampling is DISTINCT:
                    q = [0.0 if (source, t) in tried else v for t, v in enumerate(q)]
                    q = [v / sum(q) for v in q]
            tried.append((source, token))
            if next(chance) * q[token] < p[token]:
                node, moved = child, True
                path.append(node)
                break
            left = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
            p = [v / sum(left) for v in left] if sum(left) > 0 else p
        if not moved:
            return path, p


@given(st.integers(0, 10_000), st.integers(2, 9), st.sampled_from([DET, IID, DISTINCT]))
@settings(max_examples=80, deadline=None)
def test_the_walk_is_that_of_plain_python(seed: int, nodes: int, draft_sampling: DraftSampling) -> None:
    rows = 16
    proposal, target = random_proposal(seed, rows, nodes, draft_sampling)
    uniforms = torch.rand(64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    rng = Dice(uniforms)
    verdict = speculative(proposal, lookup(target), rng, return_probs=True)
    for row in range(rows):
        path, bonus = by_hand(proposal, target, uniforms, row)
        assert int(verdict.accepted[row]) == len(path) - 1
        padded = path + [0] * (verdict.nodes.shape[1] - len(path))
        assert verdict.nodes[row].tolist() == padded
        torch.testing.assert_close(rng.bonus[row], torch.tensor(bonus, dtype=torch.float64))
        assert verdict.probs is not None
        torch.testing.assert_close(verdict.probs[row, : len(path)], target[row, path])
        assert (verdict.probs[row, len(path) :] == 0).all()


@pytest.mark.parametrize("draft_sampling", [DET, IID, DISTINCT])
def test_a_row_is_judged_alike_alone_and_in_a_batch(draft_sampling: DraftSampling) -> None:
    proposal, target = random_proposal(3, 6, 9, draft_sampling)
    cpu = torch.device("cpu")
    among = speculative(proposal, lookup(target), PerRowRng(list(range(6)), [2] * 6, VERIFY, cpu))
    for row in range(6):
        shape = proposal.shape
        fields = {k: getattr(shape, k)[row : row + 1] for k in ("parents", "depths", "ancestors", "children")}
        one = replace(
            proposal,
            tokens=proposal.tokens[row : row + 1],
            shape=replace(shape, **fields),
            probs=None if proposal.probs is None else proposal.probs[row : row + 1],
            prob_index=None if proposal.prob_index is None else proposal.prob_index[row : row + 1],
        )
        alone = speculative(one, lookup(target[row : row + 1]), PerRowRng([row], [2], VERIFY, cpu))
        count = int(among.accepted[row])
        assert alone.nodes[0, : count + 1].tolist() == among.nodes[row, : count + 1].tolist()
        assert int(alone.accepted[0]) == count and int(alone.bonus[0]) == int(among.bonus[row])


def chain(tokens: Tensor, probs: Tensor | None) -> Proposal:
    """[B, K] drafts of one chain, [B, K, V] laws."""
    shape = TokenTree.chain(tokens.shape[1]).shape
    root = tokens.new_zeros(len(tokens), 1)
    prob_index = (
        None if probs is None else torch.arange(tokens.shape[1] + 1)[None, :, None].clamp(max=probs.shape[1] - 1)
    )
    return Proposal(
        tokens=torch.cat([root, tokens], 1),
        shape=shape,
        draft_sampling=DET if probs is None else IID,
        probs=probs,
        prob_index=prob_index,
    )


@pytest.mark.parametrize("rule", [speculative, block])
@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_a_chain_of_one_is_accepted_with_the_overlap(rule: Callable[..., Acceptance], seed: int) -> None:
    """Leviathan's beta: sum over tokens of q(x) min(1, p(x) / q(x)) = sum of min(p, q)."""
    chance = torch.Generator().manual_seed(seed)
    p, q = laws_for(1, 2, chance), laws_for(1, 1, chance)
    every = torch.arange(V)[:, None]
    rng = Dice([0.5] * 8)
    rule(chain(every, q.expand(V, -1, -1)), lookup(p.expand(V, -1, -1)), rng)
    accepted = (q[0, 0] * rng.chances[0]).sum()
    torch.testing.assert_close(accepted, torch.minimum(p[0, 0], q[0, 0]).sum())


@pytest.mark.parametrize("rule", [speculative, block])
def test_an_empty_residual_falls_back_to_the_target(rule: Callable[..., Acceptance]) -> None:
    """Equal laws are rejected by rounding only; then p is right, and 0 / 0 is not."""

    class Never(Dice):
        def bernoulli(self, p: Tensor, q: Tensor, active: Tensor) -> Tensor:
            return torch.zeros_like(active)

    dist = laws_for(1, 1, torch.Generator().manual_seed(0))
    rng = Never([])
    rule(chain(torch.tensor([[0]]), dist), lookup(dist.expand(1, 2, -1)), rng)
    torch.testing.assert_close(rng.bonus, dist[0])


@pytest.mark.parametrize("rule", [speculative, block])
@pytest.mark.parametrize("sampled", [True, False])
def test_the_smallest_number_accepts_no_impossible_token(rule: Callable[..., Acceptance], sampled: bool) -> None:
    p = torch.tensor([[[0.0, 0.5, 0.5, 0.0, 0.0]]]).double().expand(1, 2, -1)
    q = torch.tensor([[[0.9, 0.1, 0.0, 0.0, 0.0]]]).double() if sampled else None
    rng = Dice([0.0] * 4)
    verdict = rule(chain(torch.tensor([[0]]), q), lookup(p), rng)
    assert verdict.accepted.tolist() == [0] and rng.bonus[0, 0] == 0


def test_lenience_accepts_more() -> None:
    p = torch.tensor([[[0.2, 0.8, 0.0, 0.0, 0.0]]]).double().expand(1, 2, -1)
    q = torch.tensor([[[0.8, 0.2, 0.0, 0.0, 0.0]]]).double()
    for lenience, chance in ((1.0, 0.25), (0.5, 0.5), (0.1, 1.0)):
        rng = Dice([0.5] * 4)
        speculative(chain(torch.tensor([[0]]), q), lookup(p), rng, lenience=lenience)
        torch.testing.assert_close(rng.chances[0], torch.tensor([chance], dtype=torch.float64))


@given(st.integers(0, 10_000), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_greedy_is_the_longest_path_of_argmaxes(seed: int, nodes: int) -> None:
    rows = 3
    proposal, target = random_proposal(seed, rows, nodes, DET)
    choices = target.argmax(-1)
    verdict = greedy(proposal, choices)
    parents = proposal.shape.parents.tolist()
    for row in range(rows):
        paths: dict[int, list[int]] = {0: [0]}
        for node in range(1, nodes):
            above = parents[row][node]
            if above in paths and proposal.tokens[row, node] == choices[row, above]:
                paths[node] = [*paths[above], node]
        longest = max(paths.values(), key=len)  # the first among equal ones
        count = int(verdict.accepted[row])
        assert verdict.nodes[row, : count + 1].tolist() == longest
        assert (verdict.nodes[row, count + 1 :] == 0).all()
        assert int(verdict.bonus[row]) == int(choices[row, longest[-1]])


def test_greedy_takes_one_shape_for_all_rows() -> None:
    tree = TokenTree.expansion([2, 1])  # nodes 1, 2 under the root, 3 under 1, 4 under 2
    tokens = torch.tensor([[0, 1, 2, 3, 4], [0, 2, 1, 4, 3]])
    verdict = greedy(
        Proposal(tokens=tokens, shape=tree.shape, draft_sampling=DET),
        torch.tensor([[1, 3, 0, 2, 0], [1, 0, 3, 0, 4]]),
    )
    assert verdict.nodes.tolist() == [[0, 1, 3], [0, 2, 4]]
    assert verdict.accepted.tolist() == [2, 2] and verdict.bonus.tolist() == [2, 4]


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
        own = probs[above][int(proposal.tokens[row, node])]
        if above in paths and own > threshold(probs[above]):
            paths[node], scores[node] = [*paths[above], node], scores[above] + math.log(own)
    best = max(paths, key=lambda node: (len(paths[node]), scores[node]))
    dist, cut = probs[best], threshold(probs[best])
    kept = [v if v > cut or v == max(dist) else 0.0 for v in dist]
    return paths[best], [v / sum(kept) for v in kept]


@given(st.integers(0, 10_000), st.integers(1, 12), st.sampled_from([(0.09, 0.3), (0.3, 0.9)]))
@settings(max_examples=60, deadline=None)
def test_typical_acceptance_is_that_of_plain_python(seed: int, nodes: int, numbers: tuple[float, float]) -> None:
    rows, (epsilon, delta) = 3, numbers
    proposal, target = random_proposal(seed, rows, nodes, DET)
    rng = Dice([])
    verdict = typical(proposal, lookup(target), rng, epsilon=epsilon, delta=delta)
    for row in range(rows):
        path, bonus = typical_by_hand(proposal, target, row, epsilon, delta)
        count = int(verdict.accepted[row])
        assert verdict.nodes[row, : count + 1].tolist() == path
        torch.testing.assert_close(rng.bonus[row], torch.tensor(bonus, dtype=torch.float64))


@given(st.integers(0, 10_000), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_block_keeps_at_least_what_token_by_token_keeps(seed: int, depth: int) -> None:
    """In expectation over drafts and decisions, on laws that do not depend on the prefix."""
    chance = torch.Generator().manual_seed(seed)
    p, q = laws_for(1, depth + 1, chance), laws_for(1, depth, chance)
    drafts = torch.cartesian_prod(*[torch.arange(V)] * depth).view(-1, depth)
    weight = q[0].expand(len(drafts), -1, -1).gather(2, drafts[..., None])[..., 0].prod(1)
    means = []
    for rule in (speculative, block):
        total = torch.zeros((), dtype=torch.float64)
        for script in range(1 << depth):
            rng = Scripted(script, depth)
            verdict = rule(chain(drafts, q.expand(len(drafts), -1, -1)), lookup(p.expand(len(drafts), -1, -1)), rng)
            total += (weight * rng.chance(len(drafts)) * verdict.accepted).sum()
        means.append(float(total))
    assert means[1] >= means[0] - 1e-12
    alpha = torch.minimum(p[0, :depth], q[0]).sum(-1)
    assert means[0] == pytest.approx(float(alpha.cumprod(0).sum()))  # token by token: sum of the products of overlaps


class Scripted(Dice):
    """Decisions by the bits of a number; unused bits must be 0 to count."""

    def __init__(self, script: int, length: int) -> None:
        super().__init__([])
        self._bits = torch.tensor([script >> place & 1 for place in range(length)] + [0])
        self._weight: Tensor | None = None

    def bernoulli(self, p: Tensor, q: Tensor, active: Tensor) -> Tensor:
        if self._used is None:
            self._used = torch.zeros_like(active, dtype=torch.int64)
            self._weight = torch.ones_like(p)
        yes = self._bits[self._used].bool() & active
        likely = torch.where(p < q, p / q.clamp(min=1e-300), (p > 0).double())
        self._weight = self._weight * torch.where(active, torch.where(yes, likely, 1 - likely), 1.0)
        self._used = self._used + active
        return yes

    def chance(self, rows: int) -> Tensor:
        assert self._used is not None and self._weight is not None
        spare = torch.arange(len(self._bits)) >= self._used[:, None]
        return torch.where((spare & (self._bits > 0)).any(1), 0.0, self._weight)


def test_rules_know_whether_they_are_lossless() -> None:
    assert AcceptanceRule().lossless and AcceptanceRule(name="block").lossless
    assert not AcceptanceRule(name="typical").lossless
    assert not AcceptanceRule(name="lenient", lenience=0.5).lossless
    assert AcceptanceRule(name="lenient", lenience=1.0).lossless


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"name": "medusa"}, "rule.name must be exact, block, typical or lenient, got 'medusa'"),
        ({"name": "typical", "epsilon": 0.0}, r"rule.epsilon must be in \(0, 1\], got 0.0"),
        ({"name": "lenient", "lenience": 1.5}, r"rule.lenience must be in \(0, 1\], got 1.5"),
    ],
)
def test_bad_rules_are_named(settings_: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AcceptanceRule(**settings_)  # type: ignore[arg-type]


@pytest.mark.parametrize("tree", [TokenTree.expansion([2]), TokenTree.expansion([1, 2]), DynamicTree(nodes=8)])
def test_block_refuses_trees(tree: TokenTree | DynamicTree) -> None:
    with pytest.raises(UserError, match="block verification judges a chain.*use tree=chain, or rule.name=exact"):
        AcceptanceRule(name="block").check(DET, tree)
    AcceptanceRule().check(IID, tree)


def test_block_takes_chains() -> None:
    for depth in (0, 1, 5):
        AcceptanceRule(name="block").check(IID, TokenTree.chain(depth))


@pytest.mark.parametrize("name", ["exact", "block", "typical", "lenient"])
def test_nothing_drafted(name: str) -> None:
    """The root alone: the bonus comes from the target's law."""
    dist = laws_for(2, 1, torch.Generator().manual_seed(1), sparse=False)
    proposal = Proposal(tokens=torch.zeros(2, 1, dtype=torch.int64), shape=TokenTree.chain(0).shape, draft_sampling=DET)
    rng = Dice([])
    verdict = AcceptanceRule(name=name).verify(proposal, lookup(dist), rng)
    assert verdict.nodes.tolist() == [[0], [0]] and verdict.accepted.tolist() == [0, 0]
    if name != "typical":
        torch.testing.assert_close(rng.bonus, dist[:, 0])
