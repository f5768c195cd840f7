"""Nested decoding: its text is plain decoding's, and its random numbers are its own.

The distribution of sampled text is tested here for every drafter that samples from a causal LM.
"""

from collections.abc import Callable

import pytest

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.combined import CombinedDrafter, union
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.drafters.experimental.vertical_cascade import VerticalCascade
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.token_tree import TokenTree
from support import TinyBase, assert_distributed, assert_same_in_any_batch

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


def test_a_row_draws_the_same_whatever_its_neighbours(tiny_base: TinyBase) -> None:
    base = tiny_base()
    drafter = two_deep(early_exit(base, 2).model, base)
    settings = {"max_new_tokens": 24, "draft_config": sampled(CHAIN), "sampler": SAMPLER, "ignore_eos": True}
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


def test_refusals(tiny_base: TinyBase) -> None:
    base, wide = tiny_base(), DraftConfig(tree=TokenTree.expansion([2]))
    with pytest.raises(UserError, match="nested drafting drafts chains"):
        decode(base, VerticalCascade(base, None), [1, 2], max_new_tokens=8, draft_config=wide)
