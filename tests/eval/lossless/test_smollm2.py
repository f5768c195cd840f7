"""The engine on the real embedded model: greedy equality of every drafter, and the distribution of sampled answers."""

from collections import Counter
from functools import cache

import pytest

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.contract import DraftConfig, Drafter, DraftSampling, DynamicTree
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.combined import CombinedDrafter
from drafthead.models.drafters.draft_model import early_exit
from drafthead.models.drafters.nested import Nested
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.common.loading import load_base
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead
from drafthead.models.token_tree import TokenTree
from support import p_value_of_answers, probs_of_answers

pytestmark = pytest.mark.slow
SAMPLER = Sampler(temperature=1.0, top_k=3)
SAMPLES = 240
TEXTS = (
    "The capital of France is",
    "One, two, three, four, five, six,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):",
)


@cache
def base() -> BaseModel:
    return load_base("embedded:smollm2")


@cache
def untrained_head() -> MedusaHead:
    """Drafts the base's own next token again and again: right often enough to be accepted and rejected."""
    return MedusaConfig(num_draft_tokens=2, own_lm_head=False).build(base()).eval()


def prompts() -> list[list[int]]:
    return [base().tokenizer(text).input_ids for text in TEXTS]


@pytest.mark.parametrize("kind", ["head", "dynamic", "lookup", "early exit", "merged", "nested"])
def test_greedy_text_is_plain_text_alone_and_in_a_batch(kind: str) -> None:
    exit_model = early_exit(base(), 24, num_tokens=2)
    drafters: dict[str, Drafter] = {
        "head": untrained_head(),
        "dynamic": untrained_head(),
        "lookup": PromptLookup(num_tokens=3),
        "early exit": exit_model,
        "merged": CombinedDrafter([untrained_head(), PromptLookup(num_tokens=3)]),
        "nested": Nested(exit_model.model, PromptLookup(num_tokens=3), num_tokens=3),
    }
    draft_config = DraftConfig(tree=DynamicTree(nodes=6, width=3, depth=2)) if kind == "dynamic" else None
    plain = [decode(base(), None, ids, max_new_tokens=24, ignore_eos=True).tokens for ids in prompts()]
    batch = decode_batch(
        base(), drafters[kind], prompts(), max_new_tokens=24, draft_config=draft_config, ignore_eos=True
    )
    alone = decode(base(), drafters[kind], prompts()[0], max_new_tokens=24, draft_config=draft_config, ignore_eos=True)
    assert [result.tokens for result in batch] == plain
    assert alone.tokens == plain[0]
    assert sum(step.accepted for result in batch for step in result.steps) > 0


@cache
def dist(prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    return probs_of_answers(base(), prompt, SAMPLER, length=3)


@pytest.mark.parametrize("batch", [1, 4])
def test_sampled_answers_follow_the_distribution_of_the_base(batch: int) -> None:
    prompt = prompts()[0]
    draft_config = DraftConfig(tree=TokenTree.expansion([2, 1]), draft_sampling=DraftSampling.WITHOUT_REPLACEMENT)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for start in range(0, SAMPLES, batch):
        seeds = list(range(start, start + batch))
        results = decode_batch(
            base(),
            untrained_head(),
            [prompt] * batch,
            max_new_tokens=3,
            draft_config=draft_config,
            sampler=SAMPLER,
            seeds=seeds,
            ignore_eos=True,
        )
        for result in results:
            counts[tuple(result.tokens)] += 1
            accepted += sum(step.accepted for step in result.steps)
    assert accepted > 0, "drafts must be accepted for the test to say something"
    assert p_value_of_answers(counts, dist(tuple(prompt))) > 1e-4
