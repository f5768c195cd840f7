"""Acceptance rules: against walks by hand, and what must hold of every one of them."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.eval.lossless.enumerate import CommittedProbs, committed
from drafthead.eval.lossless.tabular_lm import TableDraft, TabularLM
from drafthead.models.decoding.acceptance import AcceptanceRule, block, greedy, speculative, typical
from drafthead.models.decoding.contract import Acceptance, DraftConfig, DraftSampling, DynamicTree, Proposal
from drafthead.models.decoding.random_source import VERIFY, PerRowRng
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.token_tree import TokenTree, TreeShape
from support import lookup, token_trees

VOCABULARY = 5
RAW = Sampler(temperature=1.0)
SEEDS = st.integers(0, 2**31)
SAMPLED = st.sampled_from([DraftSampling.WITH_REPLACEMENT, DraftSampling.WITHOUT_REPLACEMENT])
RULES: dict[str, Callable[..., Acceptance]] = {"exact": speculative, "block": block, "typical": typical}


@given(token_trees(), SEEDS)
def test_greedy_rule_equals_walking_the_tree(tree: TokenTree, seed: int) -> None:
    """The vectorised rule against a loop from the root, on tokens with many collisions."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 3, (2, len(tree)), generator=generator)
    target = torch.randint(0, 3, (2, len(tree)), generator=generator)
    verdict = greedy(Proposal(tokens=tokens, shape=tree.shape, draft_sampling=DraftSampling.TOP_K), target)
    for row in range(2):
        paths = {0: [0]}
        for node, parent in enumerate(tree.parents[1:], start=1):
            if parent in paths and tokens[row, node] == target[row, parent]:
                paths[node] = [*paths[parent], node]
        longest = max(len(p) for p in paths.values())
        first = min(n for n, p in paths.items() if len(p) == longest)
        assert verdict.accepted[row] == longest - 1
        assert verdict.nodes[row].tolist() == paths[first] + [0] * (verdict.nodes.shape[1] - longest)
        assert verdict.bonus[row] == target[row, first]


def random_laws(*shape: int, generator: torch.Generator) -> Tensor:
    """Some tokens are impossible."""
    logits = 2 * torch.randn(*shape, VOCABULARY, generator=generator)
    cut = torch.rand(*shape, VOCABULARY, generator=generator) < 0.2
    cut[..., 0] = False
    return logits.masked_fill(cut, -torch.inf).softmax(-1)


def random_proposal(shape: TreeShape, rows: int, draft_sampling: DraftSampling, generator: torch.Generator) -> Proposal:
    """Tokens and laws that need not fit: a rule has to treat every row as if it were alone all the same."""
    tokens = torch.randint(0, VOCABULARY, (rows, len(shape)), generator=generator)
    if draft_sampling is DraftSampling.TOP_K:
        return Proposal(tokens=tokens, shape=shape, draft_sampling=draft_sampling)
    prob_index = torch.randint(-1, 3, shape.children.shape, generator=generator)
    probs = random_laws(rows, 3, generator=generator)
    return Proposal(tokens=tokens, shape=shape, draft_sampling=draft_sampling, probs=probs, prob_index=prob_index)


def row_of(proposal: Proposal, row: int, tree: TokenTree) -> Proposal:
    """One row without its padding."""
    shape, nodes = tree.shape, len(tree)
    prob_index = proposal.prob_index
    return Proposal(
        tokens=proposal.tokens[row : row + 1, :nodes],
        shape=shape,
        draft_sampling=proposal.draft_sampling,
        probs=None if proposal.probs is None else proposal.probs[row : row + 1],
        prob_index=None if prob_index is None else prob_index[row : row + 1, :nodes, : shape.children.shape[2]],
    )


@settings(max_examples=120, deadline=None)
@given(data=st.data(), rule=st.sampled_from(["greedy", *RULES]), seed=SEEDS)
def test_rows_with_different_trees_are_judged_as_if_alone(data: st.DataObject, rule: str, seed: int) -> None:
    chains = st.integers(0, 4).map(TokenTree.chain)
    several = data.draw(st.lists(chains if rule == "block" else token_trees(8), min_size=2, max_size=4))
    draft_sampling = data.draw(st.sampled_from(list(DraftSampling)))
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, several))
    parents = torch.tensor([[*tree.parents, *[-1] * (width - len(tree))] for tree in several])
    proposal = random_proposal(TreeShape.from_parents(parents), len(several), draft_sampling, generator)
    probs = random_laws(len(several), width, generator=generator)
    seeds = list(range(len(several)))

    def judged(drafted: Proposal, dist: Tensor, row_seeds: list[int]) -> Acceptance:
        if rule == "greedy":
            return greedy(drafted, dist.argmax(-1))
        rng = PerRowRng(row_seeds, [0] * len(row_seeds), VERIFY, torch.device("cpu"))
        return RULES[rule](drafted, lookup(dist), rng)

    together = judged(proposal, probs, seeds)
    for row, tree in enumerate(several):
        alone = judged(row_of(proposal, row, tree), probs[row : row + 1, : len(tree)], seeds[row : row + 1])
        assert together.accepted[row] == alone.accepted[0] and together.bonus[row] == alone.bonus[0]
        count = int(alone.accepted[0]) + 1
        assert together.nodes[row, :count].tolist() == alone.nodes[0, :count].tolist()
        assert not together.nodes[row, count:].any()


def masses(
    tree: TokenTree, rule: AcceptanceRule, draft_sampling: DraftSampling, seed: int
) -> tuple[CommittedProbs, Tensor, Tensor]:
    """What is committed, enumerated; and the laws of target and drafter after the root."""
    target = TabularLM.random(VOCABULARY, tree.depth, seed)
    table = target.near(seed + 1, 1.0)
    draft = TableDraft(table=table, draft_config=DraftConfig(tree=tree, draft_sampling=draft_sampling, sampler=RAW))
    return committed(draft, target, RAW, rule, tree.depth), target.probs(RAW)[0], table.probs(RAW)[0]


def mean_accepted(found: CommittedProbs) -> float:
    return sum(length * float(mass.sum()) for length, mass in enumerate(found.by_length))


@settings(max_examples=25, deadline=None)
@given(rule=st.sampled_from(["exact", "block"]), seed=SEEDS)
def test_a_single_draft_is_accepted_with_the_overlap(rule: str, seed: int) -> None:
    found, p, q = masses(TokenTree.chain(1), AcceptanceRule(name=rule), DraftSampling.WITH_REPLACEMENT, seed)
    assert mean_accepted(found) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)
    certain, p, q = masses(TokenTree.chain(1), AcceptanceRule(name=rule), DraftSampling.TOP_K, seed)
    assert mean_accepted(certain) == pytest.approx(float(p[q.argmax()]), abs=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    depth=st.integers(1, 3),
    draft_sampling=st.sampled_from([DraftSampling.WITH_REPLACEMENT, DraftSampling.TOP_K]),
    seed=SEEDS,
)
def test_block_accepts_at_least_as_much_as_token_by_token(depth: int, draft_sampling: DraftSampling, seed: int) -> None:
    tree = TokenTree.chain(depth)
    one, many = (
        mean_accepted(masses(tree, AcceptanceRule(name=n), draft_sampling, seed)[0]) for n in ("exact", "block")
    )
    assert many >= one - 1e-12


def test_block_accepts_more_where_a_chain_allows_it() -> None:
    tree, kind = TokenTree.chain(3), DraftSampling.WITH_REPLACEMENT
    one, many = (mean_accepted(masses(tree, AcceptanceRule(name=n), kind, 1)[0]) for n in ("exact", "block"))
    assert many > one + 0.01


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_more_siblings_accept_more(seed: int) -> None:
    exact = AcceptanceRule()
    for draft_sampling in DraftSampling:
        one, three = (mean_accepted(masses(TokenTree.expansion([k]), exact, draft_sampling, seed)[0]) for k in (1, 3))
        assert three > one


class Fixed:
    """Coins that accept what they are told to, where it is possible; a bonus is the likeliest token."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.bonus = torch.empty(0)

    def bernoulli(self, p: Tensor, q: Tensor, active: Tensor) -> Tensor:
        return active & (p > 0) & self.wanted

    def categorical(self, probs: Tensor) -> Tensor:
        self.bonus = probs[:, 0]
        return probs.argmax(-1)


def chain_proposal(tokens: list[int], q: Tensor) -> Proposal:
    tree = TokenTree.chain(len(tokens))
    return Proposal(
        tokens=torch.tensor([[0, *tokens]]),
        shape=tree.shape,
        draft_sampling=DraftSampling.WITH_REPLACEMENT,
        probs=q[None],
        prob_index=torch.arange(len(tokens) + 1).clamp(max=len(tokens) - 1)[None, :, None],
    )


@pytest.mark.parametrize("rule", [speculative, block])
def test_an_empty_residual_falls_back_to_the_law(rule: Callable[..., Acceptance]) -> None:
    """p equals q, so a rejection is impossible but for rounding: it must not divide by zero."""
    dist = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0])
    rng = Fixed(False)
    verdict = rule(chain_proposal([3], dist[None]), lookup(dist.expand(1, 2, -1)), rng)
    assert verdict.accepted.tolist() == [0] and rng.bonus[0].tolist() == dist.tolist()


@pytest.mark.parametrize("rule", [speculative, block])
def test_a_token_that_the_target_never_emits_is_not_accepted(rule: Callable[..., Acceptance]) -> None:
    p, q = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]), torch.full((5,), 0.2)
    verdict = rule(chain_proposal([3, 1], q.expand(2, -1)), lookup(p.expand(1, 3, -1)), Fixed(True))
    assert verdict.accepted.tolist() == [0] and verdict.bonus.tolist() == [1]


@settings(max_examples=40, deadline=None)
@given(token_trees(8), st.sampled_from(["exact", "block"]), SAMPLED, SEEDS)
def test_laws_are_those_after_the_accepted_nodes(
    tree: TokenTree, rule: str, draft_sampling: DraftSampling, seed: int
) -> None:
    tree = TokenTree.chain(tree.depth) if rule == "block" else tree
    generator = torch.Generator().manual_seed(seed)
    proposal = random_proposal(tree.shape, 3, draft_sampling, generator)
    probs = random_laws(3, len(tree), generator=generator)
    rng = PerRowRng([seed, 1, 2], [0] * 3, VERIFY, torch.device("cpu"))
    verdict = AcceptanceRule(name=rule).verify(proposal, lookup(probs), rng, return_probs=True)
    assert verdict.probs is not None and verdict.probs.shape == (3, verdict.nodes.shape[1], VOCABULARY)
    kept = torch.arange(verdict.nodes.shape[1]) <= verdict.accepted[:, None]
    torch.testing.assert_close(verdict.probs, torch.where(kept[..., None], lookup(probs)(verdict.nodes), 0.0))


@settings(max_examples=60, deadline=None)
@given(token_trees(10), SEEDS)
def test_typical_acceptance_equals_walking_the_tree(tree: TokenTree, seed: int) -> None:
    """Medusa's rule in a loop: the longest path whose tokens all pass, the likeliest of equally long ones."""
    generator = torch.Generator().manual_seed(seed)
    probs = random_laws(1, len(tree), generator=generator).double()
    proposal = random_proposal(tree.shape, 1, DraftSampling.TOP_K, generator)
    rng = Fixed(False)
    verdict = typical(proposal, lookup(probs), rng, epsilon=0.2, delta=0.5)
    limit = torch.clamp(0.5 * torch.exp(-torch.special.entr(probs[0]).sum(-1)), max=0.2)
    paths = {0: ([0], 1.0)}
    for node, parent in enumerate(tree.parents[1:], start=1):
        chance = float(probs[0, parent, proposal.tokens[0, node]])
        if parent in paths and chance > limit[parent]:
            paths[node] = ([*paths[parent][0], node], paths[parent][1] * chance)
    nodes, likelihood = max(paths.values(), key=lambda p: (len(p[0]), p[1]))
    assert verdict.accepted.item() == len(nodes) - 1
    found = paths[int(verdict.nodes[0, verdict.accepted[0]])]
    assert found[1] == pytest.approx(likelihood) and verdict.nodes[0, : len(nodes)].tolist() == found[0]
    dist = probs[0, found[0][-1]]
    passing = torch.where((dist > limit[found[0][-1]]) | (dist == dist.max()), dist, 0.0)
    torch.testing.assert_close(rng.bonus[0] / rng.bonus[0].sum(), passing / passing.sum())


def test_lenience_1_is_the_exact_rule() -> None:
    for rule in (AcceptanceRule(name="lenient", lenience=1.0), AcceptanceRule(name="lenient", lenience=0.5)):
        lenient, exact = (
            masses(TokenTree.chain(2), r, DraftSampling.WITH_REPLACEMENT, 3)[0] for r in (rule, AcceptanceRule())
        )
        same = all(torch.equal(a, b) for a, b in zip(lenient.by_length, exact.by_length, strict=True))
        assert same == rule.lossless
        assert same or mean_accepted(lenient) > mean_accepted(exact)


def test_which_rules_keep_the_law() -> None:
    kept = {name: AcceptanceRule(name=name, lenience=0.9).lossless for name in ("exact", "block", "typical", "lenient")}
    assert kept == {"exact": True, "block": True, "typical": False, "lenient": False}


def test_block_refuses_what_branches() -> None:
    rule = AcceptanceRule(name="block")
    rule.check(DraftSampling.WITH_REPLACEMENT, TokenTree.chain(3))
    for tree in (TokenTree.expansion([2, 1]), DynamicTree(nodes=4, width=1)):
        with pytest.raises(UserError, match="block verification judges a chain as a whole"):
            rule.check(DraftSampling.TOP_K, tree)
        AcceptanceRule().check(DraftSampling.TOP_K, tree)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"name": "medusa"}, "rule.name must be exact, block, typical or lenient, got 'medusa'"),
        ({"epsilon": 0.0}, r"rule.epsilon must be in \(0, 1\], got 0.0"),
        ({"delta": 1.5}, r"rule.delta must be in \(0, 1\], got 1.5"),
        ({"lenience": 2.0}, r"rule.lenience must be in \(0, 1\], got 2.0"),
    ],
)
def test_limits(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AcceptanceRule(**setting)  # type: ignore[arg-type]


def test_typical_takes_the_likeliest_of_equally_long_paths() -> None:
    dist = torch.tensor([0.2, 0.3, 0.4, 0.1, 0.0], dtype=torch.float64).expand(1, 3, -1)
    for tokens in ([0, 1, 2], [0, 2, 1]):
        proposal = Proposal(
            tokens=torch.tensor([tokens]), shape=TokenTree.expansion([2]).shape, draft_sampling=DraftSampling.TOP_K
        )
        rng = PerRowRng([0], [0], VERIFY, torch.device("cpu"))
        verdict = typical(proposal, lookup(dist), rng)
        assert verdict.nodes.tolist() == [[0, tokens.index(2)]]
