"""The target drafting over a budget of its cache, and nested decoding, with the texts of plain decoding."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.combined import CombinedDrafter, union
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.drafters.experimental.triforce import Policy, TriForce
from drafthead.models.drafters.experimental.vertical_cascade import VerticalCascade
from drafthead.models.drafters.expression import build_drafter, parse_drafter
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.token_tree import TokenTree
from support import (
    Context,
    TinyBase,
    assert_distributed,
    assert_same_in_any_batch,
    cases,
    p_value_of_answers,
    probs_of_answers,
    random_ids,
    refuses,
)

PROMPT = random_ids(70, seed=3)


def test_kept_positions_by_hand() -> None:
    keys = torch.zeros(1, 2, 21, 4)
    keys[0, 0, 6:8, 0], keys[0, 0, 12, 1] = 1.0, 3.0  # chunks of 2: number 3 for the first unit, 6 for the second
    keys[0, 1, 9, 2] = 5.0  # number 4 of the other head
    query = torch.zeros(1, 4, 1, 4)  # two queries a head
    query[0, 0, 0, 0] = query[0, 1, 0, 1] = query[0, 2, 0, 2] = 1.0
    assert Policy.parse("recent").select(5, keys, None)[0, 0].tolist() == [16, 17, 18, 19, 20]
    assert Policy.parse("sinks:2").select(5, keys, None)[0, 1].tolist() == [0, 1, 18, 19, 20]
    picks = Policy.parse("retrieval:2").select(8, keys, [query])
    assert picks[0, 0].tolist() == [0, 1, 6, 7, 12, 13, 19, 20], "3 / 2 of position 12 is more than position 6 and 7"
    assert {8, 9} < set(picks[0, 1].tolist())
    assert Policy.parse("retrieval:2").select(30, keys, None).shape == (1, 2, 21)
    for wrong in ("recent:3", "sinks", "retrieval:0", "oldest"):
        refuses("unknown policy", Policy.parse, wrong)


@cases(
    "architecture, policy",
    ("llama", "recent"),
    ("llama", "sinks:4"),
    ("llama", "retrieval:4"),
    ("gemma", "retrieval:4"),
)
@pytest.mark.parametrize("inner", [None, PromptLookup(3)], ids=["plain", "lookup"])
def test_greedy_text(tiny_base: TinyBase, architecture: str, policy: str, inner: PromptLookup | None) -> None:
    base = tiny_base(architecture)
    plain = decode(base, None, PROMPT, max_new_tokens=60, ignore_eos=True).tokens
    for budget in (16, 999):
        drafter = TriForce(base, budget, policy, num_tokens=4, refresh=9, drafter=inner)
        decoded = decode(base, drafter, PROMPT, max_new_tokens=60, ignore_eos=True)
        assert decoded.tokens == plain
        accepted = [step.accepted == step.depth for step in decoded.steps]
        assert all(accepted) if budget == 999 else 0 < sum(s.accepted for s in decoded.steps)


@pytest.mark.slow
def test_sampled_answers_have_the_targets_distribution(tiny_base: TinyBase) -> None:
    base, sampler = tiny_base(), Sampler(temperature=1.0, top_k=2)
    drafter = TriForce(base, 16, "retrieval:4", num_tokens=2, drafter=PromptLookup(3))
    draft_config = DraftConfig(
        tree=TokenTree.chain(2),
        draft_sampling=DraftSampling.WITH_REPLACEMENT,
        sampler=Sampler(temperature=1.0, top_k=3),
    )
    prompt = [5, 6, 7, 8] * 8
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(150):
        decoded = decode(base, drafter, prompt, max_new_tokens=3, sampler=sampler, draft_config=draft_config, seed=seed)
        counts[tuple(decoded.tokens)] += 1
    assert p_value_of_answers(counts, probs_of_answers(base, prompt, sampler, 3)) > 0.01


def test_a_state_without_the_targets_cache_drafts_the_same(tiny_base: TinyBase) -> None:
    base = tiny_base()
    drafter = TriForce(base, 16, "retrieval:4", num_tokens=3, refresh=5)
    cache = base.new_cache(120)
    contexts = [Context.of(drafter), Context.of(drafter, cache=cache)]
    config, position = DraftConfig(tree=TokenTree.chain(3)), 40
    for count in (40, 3, 1, 2, 4):
        tokens = torch.tensor([PROMPT[:40] if count == 40 else PROMPT[position : position + count]])
        position += 0 if count == 40 else count
        base.forward(tokens, cache)
        contexts, last = [context.read(tokens) for context in contexts], torch.tensor([PROMPT[position]])
        drafts = [context.draft(last, config).tokens.tolist() for context in contexts]
        assert drafts[0] == drafts[1]


def test_by_name(tiny_base: TinyBase) -> None:
    base = tiny_base()
    drafter, config = build_drafter(parse_drafter("budget:64@4"), base)
    assert isinstance(drafter, TriForce) and (drafter.budget, drafter.policy) == (64, Policy("retrieval", 8))
    assert config.tree == TokenTree.chain(4)
    drafter, _ = build_drafter(parse_drafter("nested:budget:32:sinks:4@5+prompt_lookup@3"), base)
    assert isinstance(drafter, TriForce) and drafter.policy == Policy("sinks", 4) and drafter.depth == 5
    assert isinstance(drafter.drafter, PromptLookup)
    refuses("one prompt .*got 2", decode_batch, base, drafter, [[1, 2], [3]], max_new_tokens=4)
    in_turn = [decode_batch(base, d, [PROMPT, [3]], max_new_tokens=9, batch_size=1) for d in (drafter, None)]
    assert [result.tokens for result in in_turn[0]] == [result.tokens for result in in_turn[1]]
    refuses("too small for retrieval:8", TriForce, base, 15)
    refuses("unknown policy 'newest'", parse_drafter, "budget:64:newest")


# Nested decoding, and the distribution of sampled text for every drafter that samples from a causal LM ----------------


PROMPTS = [[5, 6, 7] * 4, [9], list(range(40, 70))]
CHAIN = TokenTree.chain(3)
SAMPLER = Sampler(temperature=1.0, top_k=3)
WITH, WITHOUT = DraftSampling.WITH_REPLACEMENT, DraftSampling.WITHOUT_REPLACEMENT


def sampled(tree: TokenTree, draft_sampling: DraftSampling = WITH) -> DraftConfig:
    return DraftConfig(tree=tree, draft_sampling=draft_sampling, sampler=SAMPLER)


def two_deep(model: BaseModel, base: BaseModel) -> VerticalCascade:
    """A nested drafter in a nested drafter, every level sampling its own drafts."""
    inner = VerticalCascade(
        early_exit(base, 1).model, early_exit(base, 2), num_tokens=2, draft_config=sampled(TokenTree.chain(2))
    )
    return VerticalCascade(model, inner, num_tokens=3, draft_config=sampled(TokenTree.chain(2)))


def test_the_target_itself_is_always_right(tiny_base: TinyBase) -> None:
    """With sampling, q equals p, so every draft is accepted."""
    base, draft_config = tiny_base(), sampled(TokenTree.chain(4))
    drafter = VerticalCascade(base, early_exit(base, 2), num_tokens=4, draft_config=draft_config)
    settings = {"max_new_tokens": 26, "draft_config": draft_config, "sampler": SAMPLER, "ignore_eos": True}
    for r in decode_batch(base, drafter, PROMPTS, **settings):
        assert [step.accepted for step in r.steps][:4] == [4] * 4
    base, wide = tiny_base(), DraftConfig(tree=TokenTree.expansion([2]))
    with pytest.raises(UserError, match="nested drafting drafts chains"):
        decode(base, VerticalCascade(base, None), [1, 2], max_new_tokens=8, draft_config=wide)


def test_a_row_draws_the_same_whatever_its_neighbours(tiny_base: TinyBase) -> None:
    base = tiny_base()
    drafter = two_deep(early_exit(base, 2).model, base)
    settings = {"max_new_tokens": 12, "draft_config": sampled(CHAIN), "sampler": SAMPLER, "ignore_eos": True}
    assert_same_in_any_batch(base, drafter, PROMPTS, **settings)


DRAFTERS: dict[str, tuple[Callable[[BaseModel, BaseModel], Drafter], DraftConfig]] = {
    "model": (lambda base, other: ModelDrafter(other), sampled(CHAIN)),
    "merged": (
        lambda base, other: CombinedDrafter(
            [early_exit(base, 1), ModelDrafter(other), PromptLookup(2)],
            [TokenTree.chain(3), TokenTree.expansion([2, 2]), TokenTree.chain(2)],
        ),
        sampled(TokenTree.expansion([4, 2, 1, 1])),
    ),
    "merged, little room": (  # the first tree gives way
        lambda base, other: CombinedDrafter(
            [early_exit(base, 1), ModelDrafter(other)], [TokenTree.expansion([2, 2]), TokenTree.chain(2)], nodes=5
        ),
        sampled(union([TokenTree.expansion([2, 2]), TokenTree.chain(2)]), WITHOUT),
    ),
    "nested": (
        lambda base, other: VerticalCascade(other, early_exit(base, 1), draft_config=sampled(TokenTree.chain(2))),
        sampled(CHAIN),
    ),
    "nested twice": (lambda base, other: two_deep(other, base), sampled(CHAIN)),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_text_has_the_targets_distribution(tiny_base: TinyBase, name: str) -> None:
    """Over all continuations of four tokens, of which steps commit three; the models share the base's layers.

    A model that drafts trees is tested as a head (``draft_lm``).
    """
    base, copies = tiny_base(), 400 if "nested" in name else 500
    make, draft_config = DRAFTERS[name]
    drafter = make(base, early_exit(base, 2).model)
    assert_distributed(base, drafter, [[5, 6, 7, 5, 6]], copies, 4, draft_config=draft_config, sampler=SAMPLER)
