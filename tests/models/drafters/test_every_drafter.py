"""With any drafter: greedy text is plain decoding's, alone and in a batch, and a state never changes."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import AcceptanceModel, CostTree, TreeCosts
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, DynamicTree
from drafthead.models.decoding.loop import decode, decode_batch, default_draft_config
from drafthead.models.decoding.random_source import DRAFT, PerRowRng
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.combined import CombinedDrafter
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.drafters.experimental.horizontal_cascade import HorizontalCascade
from drafthead.models.drafters.experimental.max_gram import MaxGram
from drafthead.models.drafters.experimental.vertical_cascade import VerticalCascade
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.draft_lm import DraftLMConfig
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.token_tree import TokenTree
from support import Context, TinyBase, assert_rows_are_independent, assert_same_in_any_batch, random_ids, randomised

PROMPTS = [[5, 6, 7] * 4, [9], list(range(40, 90))]
DYNAMIC = DraftConfig(tree=DynamicTree(nodes=13, width=3, depth=4))
COSTS = CostModel(verify={1: 1.0, 4: 1.1, 8: 1.2, 64: 9.0}, draft=0.02, overhead=0.0, context=8)
SURE = AcceptanceModel(weight=0.2)  # of drafts that a random drafter is not sure of
BY_COST = DraftConfig(
    tree=CostTree(costs=TreeCosts(costs={1: COSTS}, acceptance=SURE, lookup=SURE), nodes=9, width=3, depth=4)
)


def combined(base: BaseModel, nodes: int | None = None) -> Drafter:
    trees = [TokenTree.expansion([2, 2]), TokenTree.chain(4)]
    return CombinedDrafter([early_exit(base, 2, num_tokens=3), PromptLookup(4, matches=2)], trees, nodes)


def with_adapter(base: BaseModel) -> Drafter:
    """The lookup's nodes are not in the pass that the adapter began; a dynamic tree drops nodes that are in it."""
    config = KangarooConfig(exit_layer=2, num_draft_tokens=4, confidence_threshold=0.0)
    return CombinedDrafter([randomised(config.build(base), 0.1).eval(), PromptLookup(num_tokens=3)])


def exit_after(base: BaseModel, layers: int) -> BaseModel:
    return early_exit(base, layers).model


DRAFTERS: dict[str, Callable[[BaseModel], Drafter]] = {
    "chain": lambda base: early_exit(base, 2),
    "expansion": lambda base: early_exit(base, 2),
    "dynamic": lambda base: early_exit(base, 2),
    "confident": lambda base: early_exit(base, 2),
    "the target itself": lambda base: ModelDrafter(base),
    "nested target itself": lambda base: VerticalCascade(base, None, num_tokens=5),
    "nested with lookup": lambda base: VerticalCascade(exit_after(base, 2), PromptLookup(), num_tokens=5),
    "nested twice": lambda base: VerticalCascade(
        exit_after(base, 2), VerticalCascade(exit_after(base, 1), None, num_tokens=2)
    ),
    "combined": combined,
    "by cost": lambda base: early_exit(base, 2),
    "by cost, combined": combined,
    "by cost, with early exit": with_adapter,
    "by cost, lookup": lambda base: PromptLookup(4, matches=2),
    "combined, dynamic": combined,
    "combined, 2 nodes": lambda base: combined(base, 2),
    "combined, 5 nodes": lambda base: combined(base, 5),
    "combined with early exit": with_adapter,
    "combined with early exit, dynamic": with_adapter,
    "lookup": lambda base: PromptLookup(),
    "lookup, three matches": lambda base: PromptLookup(matches=3),
    "lookup, max-gram": lambda base: MaxGram(4, torch.arange(1, 301) % 300),
    "lookup, memory": lambda base: PromptLookup(memory=200),
    "relay": lambda base: HorizontalCascade([early_exit(base, 2), PromptLookup(3)], [2, 3]),
    "relay, lookup first": lambda base: HorizontalCascade([PromptLookup(3), early_exit(base, 2)], [3, 2]),
    "relay, confident": lambda base: HorizontalCascade([early_exit(base, 2), PromptLookup(3)], [3, 3]),
    "relay of a cascade": lambda base: HorizontalCascade(
        [VerticalCascade(exit_after(base, 2), PromptLookup(), num_tokens=3), PromptLookup(3)], [3, 3]
    ),
    "sampled": lambda base: VerticalCascade(base, early_exit(base, 2), num_tokens=3, draft_config=SAMPLED),
}
SAMPLED = DraftConfig(
    tree=TokenTree.chain(3), draft_sampling=DraftSampling.WITH_REPLACEMENT, sampler=Sampler(temperature=1.0, top_k=3)
)
CONFIGS = {
    "expansion": DraftConfig(tree=TokenTree.expansion([2, 1, 2, 1])),
    "dynamic": DYNAMIC,
    "confident": DraftConfig(tree=TokenTree.chain(5), confidence_threshold=0.3),
    "combined, dynamic": DYNAMIC,
    **dict.fromkeys(("by cost", "by cost, combined", "by cost, with early exit", "by cost, lookup"), BY_COST),
    "combined with early exit, dynamic": DraftConfig(tree=DynamicTree(nodes=7, width=8, depth=4)),
    "relay, confident": DraftConfig(tree=TokenTree.chain(6), confidence_threshold=0.3),
    "sampled": SAMPLED,
}
"""Settings for drafting, if not the drafter's own."""
GREEDY = [name for name in DRAFTERS if name != "sampled"]
DEPEND_ON_OTHER_ROWS = ("nodes", "memory", "by cost")
"""Rows share the room of a small union, remembered answers, and the price of time."""


ON_GEMMA = ("chain", "expansion", "nested twice", "combined", "relay")


@pytest.mark.parametrize(("architecture", "name"), [*product(["llama"], GREEDY), *product(["gemma"], ON_GEMMA)])
def test_greedy_text(tiny_base: TinyBase, small_caches: None, architecture: str, name: str) -> None:
    """The drafters' caches grow on the way."""
    base = tiny_base(architecture)
    drafter, draft_config, new = DRAFTERS[name](base), CONFIGS.get(name), 25
    plain = [decode(base, None, p, max_new_tokens=new, ignore_eos=True).tokens for p in PROMPTS]
    single = [decode(base, drafter, p, max_new_tokens=new, draft_config=draft_config, ignore_eos=True) for p in PROMPTS]
    options: dict[str, Any] = {"max_new_tokens": new, "draft_config": draft_config, "ignore_eos": True}
    batch, refilled = (decode_batch(base, drafter, PROMPTS, batch_size=size, **options) for size in (None, 2))
    assert [r.tokens for r in single] == [r.tokens for r in batch] == [r.tokens for r in refilled] == plain
    # Near the end, a row alone drafts less than in a batch with longer rows.
    runs = single, batch, refilled
    accepted = [[[step.accepted for step in r.steps if step.position < 19] for r in rs] for rs in runs]
    same = accepted[0] == accepted[1] == accepted[2]
    assert same or any(word in name for word in DEPEND_ON_OTHER_ROWS)
    assert 0 < sum(map(sum, accepted[0])), "drafts must be accepted for the test to say something"
    if "target itself" in name:
        assert all([step.accepted for step in result.steps] == [5] * 4 for result in batch)


COUPLED = Sampler(temperature=1.2, top_k=50, coupled=True)


@pytest.mark.parametrize("name", GREEDY)
def test_coupled_draws_keep_the_text_of_a_seed(tiny_base: TinyBase, name: str) -> None:
    """A drafter with the target's own probabilities drafts what the target will draw, whatever the temperature."""
    base = tiny_base()
    drafter, options = DRAFTERS[name](base), {"max_new_tokens": 19, "sampler": COUPLED, "ignore_eos": True}
    plain = [result.tokens for result in decode_batch(base, None, PROMPTS, **options)]
    options["draft_config"] = CONFIGS.get(name)
    single = [decode(base, drafter, ids, seed=seed, **options) for seed, ids in enumerate(PROMPTS)]
    batch = decode_batch(base, drafter, PROMPTS, **options)
    assert [result.tokens for result in single] == [result.tokens for result in batch] == plain
    if name == "the target itself":
        assert all([step.accepted for step in result.steps] == [5, 5, 5] for result in single)


@pytest.mark.parametrize("kind", ["dynamic", "by cost", "combined", "combined by cost", "relay"])
def test_trees_have_what_will_be_drawn(tiny_base: TinyBase, kind: str) -> None:
    """If the drafter has the target's probabilities, the next token at least is in every tree."""
    base = tiny_base()
    itself, lookup = ModelDrafter(base, num_tokens=4), PromptLookup(3)
    drafter: Drafter = itself
    if "combined" in kind:
        drafter = CombinedDrafter([itself, lookup])
    elif kind == "relay":
        drafter = HorizontalCascade([itself, lookup], [4, 2])
    config = {"dynamic": DYNAMIC, "cost": BY_COST}.get(kind.rpartition(" ")[2])
    for seed, ids in enumerate(PROMPTS):
        result = decode(
            base, drafter, ids, seed=seed, max_new_tokens=19, sampler=COUPLED, draft_config=config, ignore_eos=True
        )
        accepted = [step.accepted for step in result.steps if step.proposed]
        assert min(accepted) >= 1 and sum(accepted) > 8


def test_many_candidates_of_a_second_drafter_by_cost(tiny_base: TinyBase) -> None:
    """Some of their chances are nearly 0."""
    base = tiny_base()
    trees = [TokenTree.chain(3), TokenTree.expansion([24])]
    drafter = CombinedDrafter([early_exit(base, 2), early_exit(base, 1)], trees)
    for seed in range(4):
        options = {"seed": seed, "max_new_tokens": 19, "sampler": Sampler(temperature=1.0, coupled=True)}
        drafted = decode(base, drafter, PROMPTS[0], draft_config=BY_COST, ignore_eos=True, **options)
        assert drafted.tokens == decode(base, None, PROMPTS[0], ignore_eos=True, **options).tokens


def test_rows_that_ended_under_a_penalty(tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a drafter they are kept for a while, without tokens."""
    base = tiny_base()
    monkeypatch.setattr(BaseModel, "eos_ids", frozenset(range(0, 300, 12)))
    sampler = Sampler(temperature=0.9, top_p=0.8, repetition_penalty=1.4)
    prompts = [random_ids(3 + 5 * n, n) for n in range(5)]
    assert_same_in_any_batch(base, None, prompts, sizes=[None], max_new_tokens=25, sampler=sampler)


@pytest.mark.parametrize("name", [name for name in DRAFTERS if not any(word in name for word in DEPEND_ON_OTHER_ROWS)])
def test_rows_are_independent(tiny_base: TinyBase, small_caches: None, name: str) -> None:
    base = tiny_base()
    drafter = DRAFTERS[name](base)
    assert_rows_are_independent(base, drafter, CONFIGS.get(name) or default_draft_config(drafter))


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["eagle3", "draft_lm", "head and lookup"])
def test_many_prompts_with_few_rows(
    tiny_base: TinyBase, name: str, temperature: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many prompts, whose answers end at EOS or at the limit, take the four rows of a batch in turn.

    Sampled answers depend on the drafts, which are sampled too.
    """
    base = tiny_base()
    monkeypatch.setattr(BaseModel, "eos_ids", frozenset(range(0, 300, 20)))
    config = Eagle3Config(ttt_steps=2, induction_rank=6) if name != "draft_lm" else DraftLMConfig(induction_rank=6)
    torch.manual_seed(0)
    drafter: Drafter = randomised(config.build(base), 0.05).eval()
    if name == "head and lookup":
        drafter = CombinedDrafter([drafter, PromptLookup(3)])
    prompts = [random_ids(1 + 7 * n % 40, n) for n in range(count)]
    draft_config = default_draft_config(drafter)
    if temperature:
        draft_config = replace(draft_config, draft_sampling=DraftSampling.WITH_REPLACEMENT)
    options = {"draft_config": draft_config, "sampler": Sampler(temperature=temperature)}
    assert_same_in_any_batch(base, drafter, prompts, sizes=[4], max_new_tokens=12, **options)


Reads = list[tuple[Tensor, Tensor]]
"""Tokens [B, T] and counts [B], update by update."""


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", [name for name in DRAFTERS if "early exit" not in name])
def test_states_stay_as_they_were(tiny_base: TinyBase, name: str, rows: int) -> None:
    """Whatever other states drafted meanwhile, and whatever of it a shared memory kept."""
    drafter = DRAFTERS[name](tiny_base())
    draft_config = CONFIGS.get(name) or default_draft_config(drafter)

    def drafted(context: Context, last: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        rng = PerRowRng([7] * len(last), [9] * len(last), DRAFT, last.device)
        proposal = context.draft(last, draft_config, rng)
        return proposal.tokens.tolist(), proposal.shape.parents.tolist()

    def afresh(reads: Reads) -> Context:
        context = Context.of(drafter, len(reads[0][0]))
        for tokens, counts in reads:
            context = context.read(tokens, counts=counts)
        return context

    prompt = 10 * torch.arange(rows)[:, None] + torch.arange(6) % 3
    last, committed = prompt[:, 0], torch.tensor([2, 1, 2][:rows])
    prefill: Reads = [(prompt, torch.tensor([6, 4, 5][:rows]))]
    old = afresh(prefill)
    path = torch.tensor(drafted(old, last)[0])[:, :2]
    further, elsewhere = [*prefill, (path, committed)], [*prefill, (path + 1, committed)]
    new, other = (old.read(reads[-1][0], counts=committed) for reads in (further, elsewhere))
    for context, reads in ((new, further), (other, elsewhere), (old, prefill), (new, further)):
        assert drafted(context, last) == drafted(afresh(reads), last)
    alone = afresh([(tokens[-1:], counts[-1:]) for tokens, counts in further])
    assert drafted(new.select([rows - 1]), last[-1:]) == drafted(alone, last[-1:])
