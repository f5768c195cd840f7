"""Acceptance rules: against walks by hand, and what must hold of every one of them."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.eval.lossless.enumerate import Committed, committed
from drafthead.eval.lossless.tabular_lm import PrefixTable, TableDraft
from drafthead.models.decoding.acceptance import AcceptanceRule, block, greedy, speculative, typical
from drafthead.models.decoding.contract import DraftPlan, DynamicTree, Proposal, Siblings, Verdict
from drafthead.models.decoding.random_source import VERIFY, RowCoins
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.token_tree import TokenTree, TreeShape
from support import lookup, token_trees

VOCABULARY = 5
RAW = Sampler(temperature=1.0)
SEEDS = st.integers(0, 2**31)
SAMPLED = st.sampled_from([Siblings.WITH_REPLACEMENT, Siblings.WITHOUT_REPLACEMENT])
RULES: dict[str, Callable[..., Verdict]] = {"exact": speculative, "block": block, "typical": typical}


@given(token_trees(), SEEDS)
def test_greedy_rule_equals_walking_the_tree(tree: TokenTree, seed: int) -> None:
    """The vectorised rule against a loop from the root, on tokens with many collisions."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 3, (2, len(tree)), generator=generator)
    target = torch.randint(0, 3, (2, len(tree)), generator=generator)
    verdict = greedy(Proposal(tokens=tokens, shape=tree.shape, siblings=Siblings.DETERMINISTIC), target)
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


def random_proposal(shape: TreeShape, rows: int, siblings: Siblings, generator: torch.Generator) -> Proposal:
    """Tokens and laws that need not fit: a rule has to treat every row as if it were alone all the same."""
    tokens = torch.randint(0, VOCABULARY, (rows, len(shape)), generator=generator)
    if siblings is Siblings.DETERMINISTIC:
        return Proposal(tokens=tokens, shape=shape, siblings=siblings)
    law_of = torch.randint(-1, 3, shape.children.shape, generator=generator)
    laws = random_laws(rows, 3, generator=generator)
    return Proposal(tokens=tokens, shape=shape, siblings=siblings, laws=laws, law_of=law_of)


def row_of(proposal: Proposal, row: int, tree: TokenTree) -> Proposal:
    """One row without its padding."""
    shape, nodes = tree.shape, len(tree)
    law_of = proposal.law_of
    return Proposal(
        tokens=proposal.tokens[row : row + 1, :nodes],
        shape=shape,
        siblings=proposal.siblings,
        laws=None if proposal.laws is None else proposal.laws[row : row + 1],
        law_of=None if law_of is None else law_of[row : row + 1, :nodes, : shape.children.shape[2]],
    )


@settings(max_examples=120, deadline=None)
@given(data=st.data(), rule=st.sampled_from(["greedy", *RULES]), seed=SEEDS)
def test_rows_with_different_trees_are_judged_as_if_alone(data: st.DataObject, rule: str, seed: int) -> None:
    chains = st.integers(0, 4).map(TokenTree.chain)
    several = data.draw(st.lists(chains if rule == "block" else token_trees(8), min_size=2, max_size=4))
    siblings = data.draw(st.sampled_from(list(Siblings)))
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, several))
    parents = torch.tensor([[*tree.parents, *[-1] * (width - len(tree))] for tree in several])
    proposal = random_proposal(TreeShape.from_parents(parents), len(several), siblings, generator)
    laws = random_laws(len(several), width, generator=generator)
    seeds = list(range(len(several)))

    def judged(drafted: Proposal, law: Tensor, row_seeds: list[int]) -> Verdict:
        if rule == "greedy":
            return greedy(drafted, law.argmax(-1))
        coins = RowCoins(row_seeds, [0] * len(row_seeds), VERIFY, torch.device("cpu"))
        return RULES[rule](drafted, lookup(law), coins)

    together = judged(proposal, laws, seeds)
    for row, tree in enumerate(several):
        alone = judged(row_of(proposal, row, tree), laws[row : row + 1, : len(tree)], seeds[row : row + 1])
        assert together.accepted[row] == alone.accepted[0] and together.bonus[row] == alone.bonus[0]
        count = int(alone.accepted[0]) + 1
        assert together.nodes[row, :count].tolist() == alone.nodes[0, :count].tolist()
        assert not together.nodes[row, count:].any()


def masses(tree: TokenTree, rule: AcceptanceRule, siblings: Siblings, seed: int) -> tuple[Committed, Tensor, Tensor]:
    """What is committed, enumerated; and the laws of target and drafter after the root."""
    target = PrefixTable.random(VOCABULARY, tree.depth, seed)
    table = target.near(seed + 1, 1.0)
    draft = TableDraft(table=table, plan=DraftPlan(tree=tree, siblings=siblings, sampler=RAW))
    return committed(draft, target, RAW, rule, tree.depth), target.laws(RAW)[0], table.laws(RAW)[0]


def mean_accepted(found: Committed) -> float:
    return sum(length * float(mass.sum()) for length, mass in enumerate(found.by_length))


@settings(max_examples=25, deadline=None)
@given(rule=st.sampled_from(["exact", "block"]), seed=SEEDS)
def test_a_single_draft_is_accepted_with_the_overlap(rule: str, seed: int) -> None:
    found, p, q = masses(TokenTree.chain(1), AcceptanceRule(name=rule), Siblings.WITH_REPLACEMENT, seed)
    assert mean_accepted(found) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)
    certain, p, q = masses(TokenTree.chain(1), AcceptanceRule(name=rule), Siblings.DETERMINISTIC, seed)
    assert mean_accepted(certain) == pytest.approx(float(p[q.argmax()]), abs=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    depth=st.integers(1, 3), siblings=st.sampled_from([Siblings.WITH_REPLACEMENT, Siblings.DETERMINISTIC]), seed=SEEDS
)
def test_block_accepts_at_least_as_much_as_token_by_token(depth: int, siblings: Siblings, seed: int) -> None:
    tree = TokenTree.chain(depth)
    one, many = (mean_accepted(masses(tree, AcceptanceRule(name=n), siblings, seed)[0]) for n in ("exact", "block"))
    assert many >= one - 1e-12


def test_block_accepts_more_where_a_chain_allows_it() -> None:
    tree, kind = TokenTree.chain(3), Siblings.WITH_REPLACEMENT
    one, many = (mean_accepted(masses(tree, AcceptanceRule(name=n), kind, 1)[0]) for n in ("exact", "block"))
    assert many > one + 0.01


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_more_siblings_accept_more(seed: int) -> None:
    exact = AcceptanceRule()
    for siblings in Siblings:
        one, three = (mean_accepted(masses(TokenTree.expansion([k]), exact, siblings, seed)[0]) for k in (1, 3))
        assert three > one


class Fixed:
    """Coins that accept what they are told to, where it is possible; a bonus is the likeliest token."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.bonus = torch.empty(0)

    def accept(self, p: Tensor, q: Tensor, active: Tensor) -> Tensor:
        return active & (p > 0) & self.wanted

    def draw(self, laws: Tensor) -> Tensor:
        self.bonus = laws[:, 0]
        return laws.argmax(-1)


def chain_proposal(tokens: list[int], q: Tensor) -> Proposal:
    tree = TokenTree.chain(len(tokens))
    return Proposal(
        tokens=torch.tensor([[0, *tokens]]),
        shape=tree.shape,
        siblings=Siblings.WITH_REPLACEMENT,
        laws=q[None],
        law_of=torch.arange(len(tokens) + 1).clamp(max=len(tokens) - 1)[None, :, None],
    )


@pytest.mark.parametrize("rule", [speculative, block])
def test_an_empty_residual_falls_back_to_the_law(rule: Callable[..., Verdict]) -> None:
    """p equals q, so a rejection is impossible but for rounding: it must not divide by zero."""
    law = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0])
    coins = Fixed(False)
    verdict = rule(chain_proposal([3], law[None]), lookup(law.expand(1, 2, -1)), coins)
    assert verdict.accepted.tolist() == [0] and coins.bonus[0].tolist() == law.tolist()


@pytest.mark.parametrize("rule", [speculative, block])
def test_a_token_that_the_target_never_emits_is_not_accepted(rule: Callable[..., Verdict]) -> None:
    p, q = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]), torch.full((5,), 0.2)
    verdict = rule(chain_proposal([3, 1], q.expand(2, -1)), lookup(p.expand(1, 3, -1)), Fixed(True))
    assert verdict.accepted.tolist() == [0] and verdict.bonus.tolist() == [1]


@settings(max_examples=40, deadline=None)
@given(token_trees(8), st.sampled_from(["exact", "block"]), SAMPLED, SEEDS)
def test_laws_are_those_after_the_accepted_nodes(tree: TokenTree, rule: str, siblings: Siblings, seed: int) -> None:
    tree = TokenTree.chain(tree.depth) if rule == "block" else tree
    generator = torch.Generator().manual_seed(seed)
    proposal = random_proposal(tree.shape, 3, siblings, generator)
    laws = random_laws(3, len(tree), generator=generator)
    coins = RowCoins([seed, 1, 2], [0] * 3, VERIFY, torch.device("cpu"))
    verdict = AcceptanceRule(name=rule).verify(proposal, lookup(laws), coins, keep_laws=True)
    assert verdict.laws is not None and verdict.laws.shape == (3, verdict.nodes.shape[1], VOCABULARY)
    kept = torch.arange(verdict.nodes.shape[1]) <= verdict.accepted[:, None]
    torch.testing.assert_close(verdict.laws, torch.where(kept[..., None], lookup(laws)(verdict.nodes), 0.0))


@settings(max_examples=60, deadline=None)
@given(token_trees(10), SEEDS)
def test_typical_acceptance_equals_walking_the_tree(tree: TokenTree, seed: int) -> None:
    """Medusa's rule in a loop: the longest path whose tokens all pass, the likeliest of equally long ones."""
    generator = torch.Generator().manual_seed(seed)
    laws = random_laws(1, len(tree), generator=generator).double()
    proposal = random_proposal(tree.shape, 1, Siblings.DETERMINISTIC, generator)
    coins = Fixed(False)
    verdict = typical(proposal, lookup(laws), coins, epsilon=0.2, delta=0.5)
    limit = torch.clamp(0.5 * torch.exp(-torch.special.entr(laws[0]).sum(-1)), max=0.2)
    paths = {0: ([0], 1.0)}
    for node, parent in enumerate(tree.parents[1:], start=1):
        chance = float(laws[0, parent, proposal.tokens[0, node]])
        if parent in paths and chance > limit[parent]:
            paths[node] = ([*paths[parent][0], node], paths[parent][1] * chance)
    nodes, likelihood = max(paths.values(), key=lambda p: (len(p[0]), p[1]))
    assert verdict.accepted.item() == len(nodes) - 1
    found = paths[int(verdict.nodes[0, verdict.accepted[0]])]
    assert found[1] == pytest.approx(likelihood) and verdict.nodes[0, : len(nodes)].tolist() == found[0]
    law = laws[0, found[0][-1]]
    passing = torch.where((law > limit[found[0][-1]]) | (law == law.max()), law, 0.0)
    torch.testing.assert_close(coins.bonus[0] / coins.bonus[0].sum(), passing / passing.sum())


def test_lenience_1_is_the_exact_rule() -> None:
    for rule in (AcceptanceRule(name="lenient", lenience=1.0), AcceptanceRule(name="lenient", lenience=0.5)):
        lenient, exact = (
            masses(TokenTree.chain(2), r, Siblings.WITH_REPLACEMENT, 3)[0] for r in (rule, AcceptanceRule())
        )
        same = all(torch.equal(a, b) for a, b in zip(lenient.by_length, exact.by_length, strict=True))
        assert same == rule.lossless
        assert same or mean_accepted(lenient) > mean_accepted(exact)


def test_which_rules_keep_the_law() -> None:
    kept = {name: AcceptanceRule(name=name, lenience=0.9).lossless for name in ("exact", "block", "typical", "lenient")}
    assert kept == {"exact": True, "block": True, "typical": False, "lenient": False}


def test_block_refuses_what_branches() -> None:
    rule = AcceptanceRule(name="block")
    rule.check(Siblings.WITH_REPLACEMENT, TokenTree.chain(3))
    for tree in (TokenTree.expansion([2, 1]), DynamicTree(nodes=4, width=1)):
        with pytest.raises(UserError, match="block verification judges a chain as a whole"):
            rule.check(Siblings.DETERMINISTIC, tree)
        AcceptanceRule().check(Siblings.DETERMINISTIC, tree)


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
    law = torch.tensor([0.2, 0.3, 0.4, 0.1, 0.0], dtype=torch.float64).expand(1, 3, -1)
    for tokens in ([0, 1, 2], [0, 2, 1]):
        proposal = Proposal(
            tokens=torch.tensor([tokens]), shape=TokenTree.expansion([2]).shape, siblings=Siblings.DETERMINISTIC
        )
        coins = RowCoins([0], [0], VERIFY, torch.device("cpu"))
        verdict = typical(proposal, lookup(law), coins)
        assert verdict.nodes.tolist() == [[0, tokens.index(2)]]
