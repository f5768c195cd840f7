"""Greedy text with any drafter is plain decoding's, alone and in a batch."""

from collections.abc import Callable

import pytest

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.contract import DraftConfig, Drafter, DynamicTree
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.drafters.combined import CombinedDrafter
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.drafters.nested import Nested
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.token_tree import TokenTree

PROMPTS = [[5, 6, 7] * 4, [9], list(range(40, 90))]
DYNAMIC = DraftConfig(tree=DynamicTree(nodes=13, width=3, depth=4))


def combined(base: BaseModel) -> Drafter:
    trees = [TokenTree.expansion([2, 2]), TokenTree.chain(4)]
    return CombinedDrafter([early_exit(base, 2, num_tokens=3), PromptLookup(4, matches=2)], trees)


CASES: dict[str, tuple[Callable[[BaseModel], Drafter], DraftConfig | None]] = {
    "chain": (lambda base: early_exit(base, 2), None),
    "expansion": (lambda base: early_exit(base, 2), DraftConfig(tree=TokenTree.expansion([2, 1, 2, 1]))),
    "dynamic": (lambda base: early_exit(base, 2), DYNAMIC),
    "confident": (
        lambda base: early_exit(base, 2),
        DraftConfig(tree=TokenTree.chain(5), confidence_threshold=0.3),
    ),
    "the target itself": (lambda base: ModelDrafter(base), None),
    "nested without a drafter": (lambda base: Nested(early_exit(base, 2).model, None, num_tokens=3), None),
    "nested with lookup": (lambda base: Nested(early_exit(base, 2).model, PromptLookup(), num_tokens=5), None),
    "nested twice": (
        lambda base: Nested(early_exit(base, 2).model, Nested(early_exit(base, 1).model, None, num_tokens=2)),
        None,
    ),
    "combined": (combined, None),
    "combined, dynamic": (combined, DYNAMIC),
    "lookup": (lambda base: PromptLookup(), None),
    "lookup, three matches": (lambda base: PromptLookup(matches=3), None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("architecture", ["llama", "gemma"])
def test_greedy_text_is_plain_text(tiny_base: Callable[..., BaseModel], architecture: str, name: str) -> None:
    base = tiny_base(architecture)
    make, draft_config = CASES[name]
    drafter, new = make(base), 43
    plain = [decode(base, None, p, max_new_tokens=new, ignore_eos=True).tokens for p in PROMPTS]
    single = [decode(base, drafter, p, max_new_tokens=new, draft_config=draft_config, ignore_eos=True) for p in PROMPTS]
    batch = decode_batch(base, drafter, PROMPTS, max_new_tokens=new, draft_config=draft_config, ignore_eos=True)
    assert [r.tokens for r in single] == [r.tokens for r in batch] == plain
    # Near the end a row alone drafts less than one beside longer ones.
    accepted = [[[step.accepted for step in r.steps if step.position < 37] for r in rs] for rs in (single, batch)]
    assert accepted[0] == accepted[1]
    assert 0 < sum(map(sum, accepted[0])), "drafts must be accepted for the test to say something"
    if name == "the target itself":
        assert all([step.accepted for step in result.steps] == [5] * 7 for result in batch)
