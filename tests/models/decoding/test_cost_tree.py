"""Trees by cost: the best tree is found, nothing is drafted that does not pay, and the text stays the same."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import isnan
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import drafthead
from drafthead.eval.config import EvalConfig
from drafthead.eval.timing.methods import methods
from drafthead.eval.trees import cost_model
from drafthead.eval.trees.cost_model import ensure_costs
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.candidates import LogitsSource
from drafthead.models.decoding.cost_growth import DraftTree, grow_by_cost, price_drafts
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import AcceptanceModel, CostTree, Pace, PooledAcceptance, TreeCosts, best_count
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, Proposal
from drafthead.models.decoding.loop import decode, decode_batch, default_draft_config
from drafthead.models.decoding.random_source import DRAFT, PerRowRng
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.combined import CombinedDrafter
from drafthead.models.drafters.experimental.horizontal_cascade import HorizontalCascade
from drafthead.models.drafters.expression import build_drafter, parse_drafter
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.token_tree import TokenTree
from support import TinyBase, cases, noisy_head, refuses

TRUSTING = AcceptanceModel(mean=[[1.0, 0.0]])  # every node is expected to have a sure child
PROMPTS = [[5, 6, 7] * 4, [9], list(range(40, 90))]


def costs(verify: dict[int, float], draft: float = 0.0, acceptance: AcceptanceModel = TRUSTING) -> TreeCosts:
    by_depth = [draft * depth for depth in range(5)]
    model = CostModel(verify=verify, draft=by_depth[-1], overhead=0.0, context=8, draft_by_depth=by_depth)
    return TreeCosts(costs={1: model}, acceptance=acceptance)


CHEAP = {1: 1.0, 2: 1.02, 16: 1.3, 32: 2.0}
RELAY, LOOKUP = "relay:head@1+prompt_lookup@2", "head+prompt_lookup"
DEAR = {n: 1.0 + 2.0 * (n - 1) for n in range(1, 33)}


class Table(LogitsSource):
    """Random logits of every path of a row, over few tokens."""

    def __init__(self, rows: int, seed: int = 0, at_once: bool = False) -> None:
        self._rows, self._seed, self._at_once = rows, seed, at_once
        self.started: list[int] = []
        self.levels = 0

    @property
    def drafts_at_once(self) -> bool:
        return self._at_once

    def after(self, row: int, path: tuple[int, ...]) -> Tensor:
        seed = hash((self._seed, row, path)) % 2**31
        return 3 * torch.randn(4, generator=torch.Generator().manual_seed(seed))

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.levels += 1
        if self.levels == 1:
            self.paths: list[list[tuple[int, ...]]] = [[()] for _ in range(self._rows)]
        else:
            self.paths = [
                [(*self.paths[row][at], token) for at, token in zip(above, ids, strict=True)]
                for row, (above, ids) in enumerate(zip(parents.tolist(), tokens.tolist(), strict=True))
            ]
        return torch.stack(
            [torch.stack([self.after(row, path) for path in paths]) for row, paths in enumerate(self.paths)]
        )


def grown(source: Table, tree: CostTree, rows: int, others: list[DraftTree] | None = None) -> Proposal:
    roots, config = torch.zeros(rows, dtype=torch.int64), DraftConfig(tree=tree, speedup=1.0)
    return grow_by_cost(source, source.started.append, roots, config, torch.arange(4), 4, others=others or ())


def paths_of(proposal: Proposal, row: int) -> dict[tuple[int, ...], int]:
    """Return the drafted paths of tokens."""
    paths: list[tuple[int, ...]] = [()]
    parents = proposal.shape.parents.expand_as(proposal.tokens)[row].tolist()
    for token, parent in zip(proposal.tokens[row, 1:].tolist(), parents[1:], strict=True):
        if parent >= 0:
            paths.append((*paths[parent], token))
    return {path: n for n, path in enumerate(paths) if path}


def scores_of(source: Table, row: int, depth: int) -> dict[tuple[int, ...], float]:
    """Return the products of probabilities along all paths."""
    scores = {(): 1.0}
    for length in range(1, depth + 1):
        for path in product(range(4), repeat=length):
            scores[path] = scores[path[:-1]] * float(source.after(row, path[:-1]).softmax(-1)[path[-1]])
    del scores[()]
    return scores


@cases("rows, at_once", (1, False), (1, True), (3, False))
def test_the_best_tree_of_all_is_grown(rows: int, at_once: bool) -> None:
    """All trees of up to 12 nodes are compared, over a staircase in which a smaller one can be a worse choice."""
    verify = {1: 1.0, 2: 1.4, 3: 1.4, 4: 1.4, 5: 1.8, 9: 1.8, 10: 2.9, 12: 3.0}
    tree = CostTree(costs=costs(verify), nodes=12, depth=3)
    for seed in range(10):
        source = Table(rows, seed, at_once)
        proposal = grown(source, tree, rows)
        ordered = [sorted(scores_of(source, row, 3).values(), reverse=True) for row in range(rows)]
        prices = tree.costs.prices(rows)
        values = {
            n: sum(sum(each[:n]) for each in ordered) - prices.rate(1.0) * float(prices.verify[n]) for n in range(12)
        }
        best = max(values, key=lambda n: values[n])
        for row, scores in enumerate(ordered):
            drafted = paths_of(proposal, row)
            assert sum(scores_of(source, row, 3)[path] for path in drafted) == pytest.approx(sum(scores[:best]))
            assert len(drafted) == best
        assert proposal.forecast is not None and proposal.forecast.tokens == pytest.approx(
            [1 + sum(each[:best]) for each in ordered]
        )


def test_heads_that_draft_at_once_get_trees_of_the_same_size_in_batches() -> None:
    """Rows share the price of a node, so nodes of low scores get children, too."""
    tree = CostTree(costs=costs({1: 1.0, 8: 1.02, 64: 1.2, 512: 4.0}), nodes=16, width=4, depth=3)
    for seed in range(4):
        at_once, by_level = (grown(Table(8, seed, at_once), tree, 8) for at_once in (True, False))
        assert len(at_once.shape) == len(by_level.shape)


def test_a_level_is_drafted_only_while_it_is_expected_to_pay() -> None:
    likely, unlikely = AcceptanceModel(mean=[[0.9]]), AcceptanceModel(mean=[[0.01]])
    for model, draft, verify, levels in ((likely, 0.0, CHEAP, 3), (unlikely, 0.1, CHEAP, 0), (likely, 0.0, DEAR, 0)):
        source = Table(1)
        proposal = grown(source, CostTree(costs=costs(verify, draft, model), depth=3), 1)
        assert source.levels == levels and source.started == [3] * (levels > 0)
        assert (len(proposal.shape) > 1) == (levels > 0)
    expected = AcceptanceModel(mean=[[0.9], [0.9], [0.0]])
    source = Table(1, at_once=True)
    grown(source, CostTree(costs=costs(CHEAP, 0.01, expected), depth=3), 1)
    assert source.started == [2], "a head that drafts at once is not asked for a level that will not pay"


def test_drafts_of_others_compete_in_the_same_order() -> None:
    """A draft of both drafters is one node; the others' drafts below it stay."""
    source = Table(1)
    likeliest = int(source.after(0, ()).argmax())
    other = int(source.after(0, ()).argmin())

    def drafts() -> DraftTree:
        found = DraftTree(0)
        for token, parent, score in ((likeliest, 0, 0.5), (other, 1, 0.45), (other, 2, 0.4), (other, 0, 1e-9)):
            found.merge(token, parent, score)
        return found

    tree = CostTree(costs=costs(CHEAP), nodes=6, depth=1)
    proposal = grown(source, tree, 1, [drafts()])
    paths = paths_of(proposal, 0)
    assert {(likeliest,), (likeliest, other), (likeliest, other, other)} <= {*paths} and (other,) not in paths
    assert proposal.forecast is not None and proposal.forecast.tokens[0] > 1 + 0.5 + 0.45 + 0.4
    pooled = PooledAcceptance(copied=1.0, drafted=0.0, bias=[0.0])  # trusts the other drafter alone
    trusting = CostTree(costs=replace(costs(CHEAP), pooled=pooled), nodes=6, depth=1)
    forecast = grown(Table(1), trusting, 1, [drafts()]).forecast
    # The head's three other candidates share what is left, 0.5. Then "other", one of them, is given next to nothing.
    rest = scores_of(source, 0, 1)
    dropped = 0.5 * rest[other,] / (1 - rest[likeliest,])
    left = (0.5 - dropped) / (1 - dropped)
    assert forecast is not None and forecast.tokens[0] == pytest.approx(1 + 0.5 + 0.45 + 0.4 + left, abs=1e-4)
    alone = price_drafts(torch.zeros(1, dtype=torch.int64), DraftConfig(tree=tree), [drafts()])
    assert {*paths_of(alone, 0)} == {(likeliest,), (likeliest, other), (likeliest, other, other)}


def test_the_ratio_of_sums_is_largest_at_its_own_price() -> None:
    """Half of the steps accept with 0.95, half with 0.2; a step with n drafts takes 1 + n / 10."""
    seconds = 1 + 0.1 * np.arange(33)
    chains = [rate ** np.arange(1, 33) for rate in (0.95, 0.2)]

    def speed(counts: list[int]) -> float:
        pairs = list(zip(chains, counts, strict=True))
        return sum(1 + chain[:n].sum() for chain, n in pairs) / sum(seconds[n] for _, n in pairs)

    pace = Pace(1.0)
    for step in range(20000):
        chain = chains[step % 2]
        count = int(best_count(chain.tolist(), seconds.tolist(), pace.speedup)[0])
        pace.count(1 + float(chain[:count].sum()), float(seconds[count]))
    own = [int(((1 + np.insert(chain.cumsum(), 0, 0)) / seconds).argmax()) for chain in chains]
    fixed = max(speed([n, n]) for n in range(33))
    assert (fixed, speed(own), pace.speedup) == pytest.approx((2.5, 3.44, 3.547), abs=0.01)
    assert Pace(0.5).speedup == 1.0, "decoding without drafts is always a choice"


def test_drawn_drafts_are_all_verified_and_numbered_before_they_are_drawn() -> None:
    """Numbers of children depend on the distributions only: rows that draw other tokens at first have as many."""
    source = Table(64)
    shared = Table(1)
    source.after = lambda row, path: shared.after(0, (len(path),))  # type: ignore[method-assign]
    config = DraftConfig(
        tree=CostTree(costs=costs(CHEAP), nodes=9, width=3, depth=3),
        draft_sampling=DraftSampling.WITHOUT_REPLACEMENT,
        speedup=1.0,
    )
    rng = PerRowRng(list(range(64)), [0] * 64, DRAFT, torch.device("cpu"))
    proposal = grow_by_cost(
        source, source.started.append, torch.zeros(64, dtype=torch.int64), config, torch.arange(4), 4, rng
    )
    assert (proposal.shape.parents == proposal.shape.parents[:1]).all() and len(proposal.shape) > 3
    assert len({tuple(row) for row in proposal.tokens.tolist()}) > 1


@pytest.mark.parametrize("build", [MedusaConfig(num_draft_tokens=3).build, HydraConfig(num_draft_tokens=3).build])
@pytest.mark.parametrize("kind", DraftSampling)
def test_the_text_is_that_of_plain_decoding(tiny_base: TinyBase, build: Callable, kind: DraftSampling) -> None:  # type: ignore[type-arg]
    """Alone, with prompt lookup, and in a batch whose rows share the price of time."""
    base = tiny_base()
    head = build(base).eval()
    plain = [decode(base, None, ids, max_new_tokens=20, ignore_eos=True).tokens for ids in PROMPTS]
    tree = CostTree(costs=costs(CHEAP), depth=3)
    config = DraftConfig(tree=tree, draft_sampling=kind)
    for drafter in (head, CombinedDrafter([head, PromptLookup(6, matches=2)]), PromptLookup(6)):
        single = [
            decode(base, drafter, ids, max_new_tokens=20, draft_config=config, ignore_eos=True) for ids in PROMPTS
        ]
        assert [result.tokens for result in single] == plain
        assert any(step.proposed for result in single for step in result.steps)
        assert all(step.expected >= 1 for result in single for step in result.steps[:-1])
        if kind is DraftSampling.TOP_K:
            batch = decode_batch(base, drafter, PROMPTS, max_new_tokens=20, draft_config=config, ignore_eos=True)
            assert [result.tokens for result in batch] == plain


def test_in_a_batch_in_which_nothing_pays_nothing_is_drafted(tiny_base: TinyBase) -> None:
    """Costs of one row are taken for 16, as a pass over 16 tokens; measured ones come first."""
    base = tiny_base()
    head = MedusaConfig(num_draft_tokens=3).build(base).eval()
    measured = costs({1: 1.0, 15: 1.1, 16: 1.1, 32: 20.0, 64: 60.0}, acceptance=AcceptanceModel(mean=[[0.6]]))

    def proposed(prices: TreeCosts, rows: int) -> set[int]:
        config = DraftConfig(tree=CostTree(costs=prices, depth=3))
        results = decode_batch(base, head, [[5, 6, 7]] * rows, max_new_tokens=6, draft_config=config, ignore_eos=True)
        return {step.proposed for result in results for step in result.steps[:-1]}

    assert proposed(measured, 16) == {0} != proposed(measured, 1)
    flat = CostModel(verify={1: 1.0, 32: 1.0}, draft=0.0, overhead=0.0, context=8)
    assert proposed(measured.with_rows(16, flat, 1.0), 16) != {0}


def test_the_drafter_does_not_read_a_batch_in_which_drafts_were_expected_not_to_pay(
    tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base()
    head = MedusaConfig(num_draft_tokens=3).build(base).eval()
    flat = CostModel(verify=CHEAP, draft=0.0, overhead=0.0, context=8)
    of_two, of_four = (DraftConfig(tree=CostTree(costs=costs(CHEAP).with_rows(n, flat, 0.98), depth=3)) for n in (2, 4))
    opened = []
    open_session = head.open
    monkeypatch.setattr(head, "open", lambda rows, *more: (opened.append(rows), open_session(rows, *more))[1])
    options = {"max_new_tokens": 6, "ignore_eos": True}
    plain = decode(base, None, PROMPTS[0], **options).tokens
    root = DraftConfig(tree=TokenTree.chain(0))
    for config, rows, read in ((of_two, 3, []), (of_four, 3, []), (root, 1, []), (of_two, 1, [1])):
        results = decode_batch(base, head, PROMPTS[:1] * rows, draft_config=config, **options)
        assert [result.tokens for result in results] == [plain] * rows and opened == read


def test_a_batch_is_expected_to_gain_what_its_best_chain_does(
    tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base()
    head = MedusaConfig(num_draft_tokens=3).build(base).eval()
    fitted = AcceptanceModel(mean=[[0.5], [0.4]])
    dear = CostModel(verify={1: 1.0, 2: 1.6, 4: 2.0}, draft=0.0, overhead=0.0, context=8)
    monkeypatch.setattr(cost_model, "measure_costs", lambda *given, **named: dear)
    for rows, acceptance, speedup in ((1, fitted, 1.3), (8, AcceptanceModel(), 1.0), (8, fitted, 1.7 / 1.8)):
        head.tree_costs = replace(costs(CHEAP, acceptance=acceptance), speedup={1: 1.3})
        ensure_costs(base, head, rows, again=True)
        assert head.tree_costs.speedup == {rows: pytest.approx(speedup)}


def test_trees_are_named(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head = noisy_head(MedusaConfig(num_draft_tokens=3), base, 0.1)
    refuses("tree=cost needs the costs of a step", drafthead.generate, base, head, PROMPTS[0], tree="cost")
    refuses("names no tree", drafthead.generate, base, head, PROMPTS[0], tree="cots")
    head.tree_costs = costs(CHEAP)
    answer = drafthead.generate(base, head, PROMPTS[0], tree="cost", max_new_tokens=9)
    assert answer.tokens == drafthead.generate(base, None, PROMPTS[0], max_new_tokens=9).tokens
    assert all(step.expected >= 1 for step in answer.steps[:-1])
    chain = DraftConfig(tree=TokenTree.chain(1))
    refuses("give one of them", drafthead.stream, base, head, PROMPTS[0], tree="cost", draft_config=chain)
    tree = EvalConfig(tree="cost:9").draft_config(head).tree
    assert isinstance(tree, CostTree) and (tree.nodes, tree.depth) == (9, 3)
    for wrong in ("cost:1", "cost:33", "cost:x"):
        refuses("cannot be read", EvalConfig, tree=wrong)


def test_a_head_may_prefer_trees_by_cost(tiny_base: TinyBase, tmp_path: Path) -> None:
    """By default they are then drafted by the head and by head+B, but not with settings of static trees."""
    base = tiny_base()
    head = noisy_head(MedusaConfig(num_draft_tokens=3), base, 0.1)
    head.tree, head.tree_costs, head.prefers_cost = TokenTree.chain(2), costs(CHEAP), True
    head.save_pretrained(tmp_path)
    head = load_head(tmp_path, base)
    options = {"max_new_tokens": 9, "ignore_eos": True}
    plain = decode(base, None, PROMPTS[0], **options).tokens
    found = EvalConfig(drafter=f"head:{tmp_path}")
    for config, is_by_cost in (
        (EvalConfig(), True),
        (EvalConfig(drafter="head+prompt_lookup"), True),
        (EvalConfig(drafter="relay:head@1+prompt_lookup@2"), False),
        (EvalConfig(drafter="head@1+prompt_lookup"), False),
        (EvalConfig(drafter="head+prompt_lookup", tree_nodes=3), False),
        (EvalConfig(tree="static"), False),
        (replace(found, tree="static"), False),
        (found, False),
        (EvalConfig(draft_sampling="with_replacement"), False),
        (EvalConfig(confidence_threshold=0.0), False),
        (EvalConfig(length="heuristic"), False),
        (EvalConfig(rule=AcceptanceRule(name="block")), False),
    ):
        built, draft_config = config.build(base, head, config.draft_config(head))
        assert isinstance(draft_config.tree, CostTree) is is_by_cost == config.by_cost(head)
        answer = decode(base, built, PROMPTS[0], draft_config=draft_config, rule=config.rule, **options)
        assert answer.tokens == plain and (answer.steps[0].expected >= 1) is is_by_cost
        assert is_by_cost or config.drafter != "head@1+prompt_lookup" or built.trees[0].depth == 1
    assert isnan(drafthead.generate(base, head, PROMPTS[0], tree="static", max_new_tokens=9).steps[0].expected)
    block = drafthead.generate(base, head, PROMPTS[0], rule=AcceptanceRule(name="block"), max_new_tokens=9)
    assert block.tokens == plain and isnan(block.steps[0].expected)
    compared = methods(base, head, EvalConfig().draft_config(head), EvalConfig(baselines=[RELAY, LOOKUP]), head)
    (relayed,), (looked_up,) = (compared[name].answer([PROMPTS[0]]) for name in (RELAY, LOOKUP))
    assert isnan(relayed.steps[0].expected) and looked_up.steps[0].expected >= 1
    for combined, is_by_cost in (
        (CombinedDrafter([head, PromptLookup(3)]), True),
        (CombinedDrafter([head, PromptLookup(3)], nodes=3), False),
    ):
        assert isinstance(default_draft_config(combined).tree, CostTree) is is_by_cost
    named = build_drafter(parse_drafter(f"prompt_lookup+head:{tmp_path}"), base)[1]
    assert isinstance(named.tree, TokenTree)
    head.confidence_threshold = 0.5
    assert not head.by_cost and isinstance(default_draft_config(head).tree, TokenTree)


def test_what_a_tree_by_cost_cannot_do_is_refused(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head = MedusaConfig(num_draft_tokens=3).build(base).eval()
    tree = CostTree(costs=costs(CHEAP), depth=3)
    drawn = DraftConfig(tree=tree, draft_sampling=DraftSampling.WITH_REPLACEMENT, sampler=Sampler(temperature=1.0))
    refuses("one prompt at a time, got 2", decode_batch, base, head, PROMPTS[:2], max_new_tokens=4, draft_config=drawn)
    with pytest.raises(ValueError, match="set both thresholds to 0"):
        replace(drawn, prefix_threshold=0.5)
    relay, by_cost = HorizontalCascade([head, PromptLookup(3)], [2, 3]), DraftConfig(tree=tree)
    refuses("does not score its drafts", decode, base, relay, PROMPTS[0], max_new_tokens=4, draft_config=by_cost)
