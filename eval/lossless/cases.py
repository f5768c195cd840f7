"""Cases that ``drafthead certify`` enumerates (rules, ways to draft, samplers, tree shapes) and cases to be refused.
Vocabularies are chosen so that a case has some thousands of random outcomes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from drafthead.eval.lossless.tabular_lm import Draft, TableDraft, TabularLM, combined_draft, relay_draft
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import AcceptanceModel, CostTree, TreeCosts
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, DynamicTree, Proposal
from drafthead.models.decoding.random_source import DRAFT, PerRowRng, RandomSource
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.token_tree import TokenTree, TreeShape

EXACT, BLOCK = AcceptanceRule(), AcceptanceRule(name="block")
LOSSY = (AcceptanceRule(name="typical"), AcceptanceRule(name="lenient", lenience=0.7))
RAW = Sampler(temperature=1.0)
SAMPLERS = (
    RAW,
    Sampler(temperature=0.7),
    Sampler(temperature=1.0, top_k=3),
    Sampler(temperature=1.0, top_p=0.8),
    Sampler(temperature=1.0, min_p=0.2),
    Sampler(temperature=1.0, eta=0.3),
    Sampler(temperature=1.0, typical_p=0.7),
    Sampler(temperature=1.0, repetition_penalty=1.5),
    Sampler(temperature=0.8, top_k=4, top_p=0.9, repetition_penalty=1.3),
    Sampler(),
    Sampler(repetition_penalty=1.5),
)
OTHER_DRAFT_SAMPLERS = ((Sampler(temperature=1.0, top_p=0.8), RAW), (RAW, Sampler(temperature=0.7, top_k=2)))
"""Pairs (the target's sampler, another one for the drafts): the output must be exact with any draft sampler."""
TOP_K, WITH, WITHOUT = DraftSampling.TOP_K, DraftSampling.WITH_REPLACEMENT, DraftSampling.WITHOUT_REPLACEMENT
SAMPLED = (WITH, WITHOUT)
EVERY = (TOP_K, *SAMPLED)
DRAFT_SPREAD = 1.5  # standard deviation of the drafter's logits from the target's


@dataclass(frozen=True, kw_only=True)
class Part:
    """Settings of one of the drafters of a ``Shape``."""

    tree: TokenTree | DynamicTree | CostTree
    shared: bool = False  # all nodes of a tree level share one distribution and its samples, as in Medusa
    draft_vocabulary: int | None = None  # number of ids that the drafter can draft
    top_k: bool = False  # use top-k drafting even if the other drafters sample
    confidence_threshold: float = 0.0
    prefix_threshold: float = 0.0


@dataclass(frozen=True)
class Shape:
    """A tree drafted by one drafter, by several combined, or by several in turn along one path (a relay)."""

    name: str
    vocabulary: int
    parts: tuple[Part, ...]
    kinds: tuple[DraftSampling, ...] = EVERY  # the shape is enumerated once for each of these ways to draw its drafts
    relay: bool = False  # the drafters draft in turn along one path, not in one tree

    @property
    def depth(self) -> int:
        depths = [drafter.tree.depth for drafter in self.parts]
        return sum(depths) if self.relay else max(depths)

    def draft(self, draft_sampling: DraftSampling, sampler: Sampler | None, target: TabularLM, seed: int) -> Draft:
        """Return a function that drafts this shape from random tables near ``target`` (no ``sampler``: top-k)."""
        drafts: list[TableDraft] = []
        for number, drafter in enumerate(self.parts):
            draft_config = DraftConfig(
                tree=drafter.tree,
                confidence_threshold=drafter.confidence_threshold,
                prefix_threshold=drafter.prefix_threshold,
            )
            if sampler is not None and not drafter.top_k:
                draft_config = replace(draft_config, draft_sampling=draft_sampling, sampler=sampler)
            table = target.near(seed + number, DRAFT_SPREAD)
            drafts.append(TableDraft(table, draft_config, drafter.shared, drafter.draft_vocabulary))
        if self.relay:
            return partial(relay_draft, drafts)
        return drafts[0] if len(drafts) == 1 else partial(combined_draft, drafts)


CHAIN_1, CHAIN_2, CHAIN_3 = (Part(tree=TokenTree.chain(k)) for k in (1, 2, 3))
TREE_21, TREE_22, TREE_312 = (Part(tree=TokenTree.expansion(widths)) for widths in ([2, 1], [2, 2], [3, 1, 2]))
UNBALANCED = Part(tree=TokenTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]))
CHAINS = (Shape("chain 1", 8, (CHAIN_1,)), Shape("chain 2", 8, (CHAIN_2,)), Shape("chain 3", 7, (CHAIN_3,)))
STOPPING_312 = replace(TREE_312, shared=True, prefix_threshold=0.4)
STOPPING_2 = replace(CHAIN_2, confidence_threshold=0.4)
COSTS = TreeCosts(
    costs={1: CostModel(verify={1: 1.0, 2: 1.05, 4: 1.15, 8: 1.9}, draft=0.0, overhead=0.0, context=1)},
    acceptance=AcceptanceModel(weight=0.8, bias=[[0.4, 0.2], [0.0]]),
)
BY_COST = Part(tree=CostTree(costs=COSTS, nodes=5, width=3, depth=2))
STOPPING = Shape("chain 3, stops by its prefix below 0.5", 6, (replace(CHAIN_3, prefix_threshold=0.5),))
SHAPES = (
    *CHAINS,
    Shape("<3>", 8, (Part(tree=TokenTree.expansion([3])),)),
    Shape("<2,2>", 4, (TREE_22,)),
    Shape("<3,1,2>", 3, (TREE_312,), (TOP_K, WITHOUT)),
    Shape("<3,1,2>", 2, (TREE_312,)),
    Shape("unbalanced, 6 drafts", 4, (UNBALANCED,)),
    Shape("<2,2>, a distribution per level", 6, (replace(TREE_22, shared=True),)),
    Shape("<3,1,2>, a distribution per level", 4, (replace(TREE_312, shared=True),)),
    Shape("<2,2>, drafts 3 of the ids", 5, (replace(TREE_22, draft_vocabulary=3),)),
    Shape("chain 3, stops below 0.4", 6, (replace(CHAIN_3, confidence_threshold=0.4),), (TOP_K,)),
    STOPPING,
    Shape("<2,2>, stops by its prefix below 0.6", 4, (replace(TREE_22, prefix_threshold=0.6),)),
    Shape("<3,1,2>, a distribution per level, stops by its prefix below 0.4", 3, (STOPPING_312,)),
    Shape("dynamic, 7 nodes", 6, (Part(tree=DynamicTree(nodes=7, width=2, depth=3)),), (TOP_K,)),
    Shape("by cost, at most 5 nodes", 5, (BY_COST,)),
    Shape("by cost, at most 5 nodes, a distribution per level", 5, (replace(BY_COST, shared=True),)),
    Shape(
        "by cost, at most 5 nodes, drafts 3 of the ids, + chain 1", 4, (replace(BY_COST, draft_vocabulary=3), CHAIN_1)
    ),
    Shape("chain 1 + chain 1", 8, (CHAIN_1, CHAIN_1)),
    Shape("chain 2 + chain 2", 4, (CHAIN_2, CHAIN_2)),
    Shape("<2,1> + chain 2", 3, (TREE_21, CHAIN_2)),
    Shape("chain 1 + chain 2 + chain 1", 4, (CHAIN_1, CHAIN_2, CHAIN_1)),
    Shape("<2,1>, a distribution per level, + <2,1>", 3, (replace(TREE_21, shared=True), TREE_21)),
    Shape("top-k <2,1> + chain 2", 4, (replace(TREE_21, top_k=True), CHAIN_2), SAMPLED),
    Shape("<2,1> + top-k chain 2", 4, (TREE_21, replace(CHAIN_2, top_k=True)), SAMPLED),
    Shape("relay: chain 1, chain 2", 6, (CHAIN_1, CHAIN_2), relay=True),
    Shape("relay: chain 1, top-k chain 2", 6, (CHAIN_1, replace(CHAIN_2, top_k=True)), SAMPLED, relay=True),
    Shape("relay: top-k chain 1, chain 2", 6, (replace(CHAIN_1, top_k=True), CHAIN_2), SAMPLED, relay=True),
    Shape("relay: chain 2 that stops below 0.4, chain 1", 6, (STOPPING_2, CHAIN_1), (TOP_K,), relay=True),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination of settings to enumerate."""

    rule: AcceptanceRule
    draft_sampling: DraftSampling
    shape: Shape
    sampler: Sampler
    draft_sampler: Sampler | None  # None: top-k drafting
    greedy: bool = False  # accept drafts that equal the target's argmax, as decoding does at temperature 0

    def tables(self, seed: int) -> tuple[TabularLM, Draft]:
        target = TabularLM.random(self.shape.vocabulary, self.shape.depth, seed)
        return target, self.shape.draft(self.draft_sampling, self.draft_sampler, target, seed + 1)


def cases() -> Iterator[Case]:
    """Yield all cases to enumerate, grouped by rule, draft sampling and shape."""
    for shape in SHAPES:
        for kind in shape.kinds:
            yield from _with_samplers(EXACT, kind, shape)
            yield replace(_case(EXACT, kind, shape, Sampler()), greedy=True)
    for shape in (*CHAINS, STOPPING):
        for kind in (TOP_K, WITH):  # one child is drawn alike with and without replacement
            yield from _with_samplers(BLOCK, kind, shape)
    for rule, shape, kind in product(LOSSY, (CHAINS[0], CHAINS[2], SHAPES[4]), EVERY):
        yield _case(rule, kind, shape, RAW)


def _with_samplers(rule: AcceptanceRule, kind: DraftSampling, shape: Shape) -> Iterator[Case]:
    for sampler in SAMPLERS:
        yield _case(rule, kind, shape, sampler)
    for sampler, draft_sampler in () if kind is TOP_K else OTHER_DRAFT_SAMPLERS:
        yield replace(_case(rule, kind, shape, sampler), draft_sampler=draft_sampler)


def _case(rule: AcceptanceRule, kind: DraftSampling, shape: Shape, sampler: Sampler) -> Case:
    """Return a case. Sampled drafts use ``sampler`` too, without its penalty; at temperature 1 if it is greedy."""
    sampler_of_drafts = RAW if sampler.greedy else replace(sampler, repetition_penalty=1.0)
    draft_sampler = None if kind is TOP_K else sampler_of_drafts
    return Case(rule=rule, draft_sampling=kind, shape=shape, sampler=sampler, draft_sampler=draft_sampler)


@dataclass(frozen=True)
class Refusal:
    """A combination that would bias the output: ``build`` must raise a ``UserError`` or a ``ValueError``."""

    rule: str
    draft_sampling: str
    shape: str
    build: Callable[[], object]


def _argmax_with_probs() -> Proposal:
    """Propose the likeliest token, but with softmax probabilities, as if it had been drawn from them."""
    zeros, probs = torch.zeros(1, 2, dtype=torch.int64), torch.full((1, 1, 4), 0.25)
    return Proposal(
        tokens=zeros, shape=TokenTree.chain(1).shape, draft_sampling=TOP_K, probs=probs, prob_index=zeros[..., None]
    )


def _two_kinds() -> Proposal:
    target = TabularLM.random(4, 1, 0)
    drafts = [CHAINS[0].draft(kind, RAW, target, 0) for kind in SAMPLED]
    return combined_draft(drafts, torch.zeros(1, dtype=torch.int64), PerRowRng([0], [0], DRAFT, torch.device("cpu")))


def refusals() -> tuple[Refusal, ...]:
    tree, dynamic, sampled = TREE_22.tree, DynamicTree(nodes=7), partial(DraftConfig, draft_sampling=WITH)
    dropping = partial(sampled, tree=TokenTree.chain(1), confidence_threshold=0.2)
    return (
        Refusal("exact", "top k, with probs", "chain 1", _argmax_with_probs),
        Refusal("exact", "sampled at temperature 0", "<2,2>", partial(sampled, tree=tree, sampler=Sampler())),
        Refusal("exact", "sampled", "chain 1, drops a draft by its own probability", dropping),
        Refusal("exact", "sampled", "dynamic", partial(sampled, tree=dynamic)),
        Refusal("exact", "with and without replacement", "chain 1 + chain 1", _two_kinds),
        Refusal("block", "sampled", "<2,2>", lambda: BLOCK.check(sampled(tree=tree))),
        Refusal("block", "top k", "dynamic", lambda: BLOCK.check(DraftConfig(tree=dynamic))),
    )


@dataclass(frozen=True)
class Counterexample:
    """A published way to shorten drafts. It looks at the drafts that it drops, which biases the output."""

    draft_sampling: str
    shape: str
    target: TabularLM
    draft: Draft
    depth: int
    expected: float  # total variation from the target's distribution, calculated by hand
    rule: str = "exact"


def _table(*rows: tuple[float, ...]) -> TabularLM:
    """Return a table; ``rows`` are the tokens' probabilities after the empty and each longer prefix."""
    return TabularLM(torch.tensor(rows, dtype=torch.float64).log())


def _shortened(table: TabularLM, depth: int, length: Callable[[Proposal], torch.Tensor]) -> Draft:
    """Sample chains of ``depth`` drafts, of which only the first ``length(proposal)`` are verified."""
    draft_config = DraftConfig(tree=TokenTree.chain(depth), draft_sampling=WITH, sampler=RAW)

    def draft(last_token: torch.Tensor, rng: RandomSource) -> Proposal:
        proposal = TableDraft(table, draft_config)(last_token, rng)
        parents = proposal.shape.parents.expand(len(last_token), -1)
        is_kept = torch.arange(depth + 1) <= length(proposal)[:, None]
        return replace(proposal, shape=TreeShape.from_parents(torch.where(is_kept, parents, -1), width=1))

    return draft


def _by_own_probability(proposal: Proposal) -> torch.Tensor:
    """Return the number of drafts to verify: 0 if the draft's own probability is below 0.2, else 1."""
    assert proposal.probs is not None
    return (proposal.probs[:, 0].gather(1, proposal.tokens[:, 1:2])[:, 0] >= 0.2).long()


def _by_search(proposal: Proposal) -> torch.Tensor:
    """Return the number of drafts with the most expected tokens per second, found by a search over all lengths. The
    first draft's confidence is 0.6, the second's 0.9 after token 0 and 0.1 after token 1. Verifying one or two drafts
    takes 1.7 times as long as verifying none, because another request's drafts fill the batch. The search looks at the
    sampled token, which biases the output."""
    second = torch.where(proposal.tokens[:, 1] == 0, 0.6 * 0.9, 0.6 * 0.1)
    rates = torch.stack([torch.ones_like(second), torch.full_like(second, 1.6 / 1.7), (1.6 + second) / 1.7], 1)
    return rates.argmax(1)


def counterexamples() -> tuple[Counterexample, ...]:
    """Return biased samplers whose bias ``certify`` must find. Otherwise its other results would prove nothing."""
    even, uneven = (0.5, 0.5), (0.7, 0.3)
    dropped = _shortened(_table((0.9, 0.1), even, even), 1, _by_own_probability)
    pruned = _shortened(_table(*[even] * 7), 2, _by_search)
    search = "drafts pruned for a batch, by a search after sampling"
    # A tree by cost that is chosen after its drafts were drawn: it drops drafts that do not pay.
    thirds = (0.5, 0.3, 0.2)
    unlikely = _shortened(_table(*[thirds] * 4), 1, lambda drawn: (drawn.tokens[:, 1] != 2).long())
    below = _shortened(_table(even, (0.9, 0.1), *[even] * 5), 2, lambda drawn: 2 * (drawn.tokens[:, 2] == 0).long())
    return (
        # (0.55, 0.45) instead of (0.5, 0.5)
        Counterexample("drops a draft by its own probability", "chain 1", _table(even, even, even), dropped, 1, 0.05),
        # (0.85, 0.15) instead of (0.7, 0.3): DSpark, appendix A
        Counterexample(search, "chain 2", _table(uneven, *[even] * 6), pruned, 2, 0.15),
        # (0.6, 0.36, 0.04) instead of (0.5, 0.3, 0.2)
        Counterexample("by cost, drops a node for its own token", "chain 1", _table(*[thirds] * 4), unlikely, 1, 0.16),
        # The second draft is rejected unseen if it is token 1: (0.585, 0.015, 0.325, 0.075) instead of
        # (0.45, 0.05, 0.25, 0.25) for the first two tokens
        Counterexample(
            "by cost, drops a node for what was drawn below it",
            "chain 2",
            _table(even, (0.9, 0.1), *[even] * 5),
            below,
            2,
            0.21,
        ),
    )


@dataclass(frozen=True)
class GrammarCase:
    """A target under the masks of a grammar, with drafts that the masks have not changed. A step must commit what plain
    masked decoding does, which renormalises every token's distribution. This is not the model's distribution given that
    the whole text obeys the grammar (2605.07698)."""

    draft_sampling: str
    shape: str
    target: TabularLM  # with masks
    conditional: TabularLM  # the model's distribution of texts that obey the grammar
    draft: Draft
    depth: int
    expected: float  # total variation between the two, calculated by hand
    rule: str = "exact"


def grammar_cases() -> tuple[GrammarCase, ...]:
    """Return a grammar over the tokens a and b that allows the texts aa, ba and bb. The model writes a b after a with
    probability 0.9, which the grammar forbids. Masks give (0.5, 0.25, 0.25) for the three texts; the model's own
    probabilities are in the ratio 0.05 : 0.25 : 0.25."""
    even = (0.5, 0.5)
    model, masked = _table(even, (0.1, 0.9), even), _table(even, (1.0, 0.0), even)
    conditional = _table((1 / 11, 10 / 11), (1.0, 0.0), even)
    drafts = _shortened(model, 1, lambda proposal: torch.ones_like(proposal.tokens[:, 0]))
    name = "chain 1, the target's tokens masked by a grammar"
    return (GrammarCase("drafts without masks", name, masked, conditional, drafts, 1, 0.5 - 1 / 11),)
