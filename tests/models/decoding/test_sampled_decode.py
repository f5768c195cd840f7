"""Sampled speculative decoding of a real small model: its distribution, and equal answers for equal seeds."""

from collections import Counter, defaultdict
from functools import cache
from itertools import product

import pytest
import torch

from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling
from drafthead.models.decoding.loop import decode_batch
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import DecodeResult
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead
from drafthead.models.token_tree import TokenTree
from support import assert_distributed, hidden_and_probs, p_value_of_answers, probs_of_answers, small_base

PROMPTS = [[5, 6, 7], [250], [9, 10, 11, 12, 13, 14, 15], [100, 40]]
KINDS = {
    "deterministic": DraftConfig(tree=TokenTree.expansion([2, 2])),
    "with replacement": DraftConfig(tree=TokenTree.expansion([2, 2]), draft_sampling=DraftSampling.WITH_REPLACEMENT),
    "without replacement": DraftConfig(
        tree=TokenTree.expansion([2, 2]), draft_sampling=DraftSampling.WITHOUT_REPLACEMENT
    ),
    "block": DraftConfig(tree=TokenTree.chain(2), draft_sampling=DraftSampling.WITH_REPLACEMENT),
}
LENGTH = 3
SAMPLER = Sampler(temperature=1.0, top_k=3)
PENALISED = Sampler(temperature=0.5, repetition_penalty=1.3)
ONE_IN = 1e-4
"""Chance that a test of a correct decoder fails with other seeds; these are fixed."""


@cache
def dist(prompt: tuple[int, ...], sampler: Sampler) -> dict[tuple[int, ...], float]:
    return probs_of_answers(small_base(), prompt, sampler, LENGTH)


@cache
def fitted_head() -> MedusaHead:
    """A head that is often right after the prompts, but does not know their distributions."""
    head = MedusaConfig(num_draft_tokens=2).build(small_base()).eval()
    with torch.no_grad():
        for prompt, k in product(PROMPTS, range(2)):
            hidden = hidden_and_probs(small_base(), prompt, SAMPLER)[0]
            chances: defaultdict[int, float] = defaultdict(float)
            for answer, chance in dist(tuple(prompt), SAMPLER).items():
                chances[answer[k + 1]] += chance
            most = max(chances.values())
            for token, chance in chances.items():
                head.projections.weights[k][token] += (6 + 6 * chance / most) * hidden / (hidden @ hidden)
    return head


def answers(
    kind: str, rows: list[int], seeds: list[int], length: int = LENGTH, sampler: Sampler = SAMPLER
) -> list[DecodeResult]:
    """One answer to the prompt of every row, in one batch."""
    return decode_batch(
        small_base(),
        fitted_head(),
        [PROMPTS[row] for row in rows],
        max_new_tokens=length,
        draft_config=KINDS[kind],
        sampler=sampler,
        rule=AcceptanceRule(name="block" if kind == "block" else "exact"),
        seeds=seeds,
        ignore_eos=True,
    )


def texts(kind: str, rows: list[int], seeds: list[int], sampler: Sampler) -> list[list[int]]:
    return [result.tokens for result in answers(kind, rows, seeds, 16, sampler)]


@pytest.mark.parametrize("kind", KINDS)
def test_distribution_in_a_batch(kind: str) -> None:
    """Rows of different prompts and lengths, each with the distribution of plain sampling."""
    rule = AcceptanceRule(name="block" if kind == "block" else "exact")
    options = {"draft_config": KINDS[kind], "sampler": SAMPLER, "rule": rule}
    assert_distributed(small_base(), fitted_head(), PROMPTS, 140, LENGTH, **options)


def test_the_tests_would_see_another_distribution() -> None:
    """Compare with equally many plain samples at another temperature."""
    other = dist(tuple(PROMPTS[0]), Sampler(temperature=0.6, top_k=3))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor(list(other.values())).multinomial(160, replacement=True, generator=generator)
    counts = Counter(list(other)[i] for i in drawn.tolist())
    assert p_value_of_answers(counts, dist(tuple(PROMPTS[0]), SAMPLER)) < ONE_IN < p_value_of_answers(counts, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_decides_the_text_whatever_the_batch(kind: str) -> None:
    """Prompts of different lengths: what a row repeats is its own affair."""
    seeds, sampler = [11, 2**40, -3, 7], Sampler(temperature=1.0, top_p=0.95, repetition_penalty=1.5)
    together = texts(kind, [0, 1, 2, 3], seeds, sampler)
    assert together == texts(kind, [0, 1, 2, 3], seeds, sampler)
    assert together == [texts(kind, [row], [seeds[row]], sampler)[0] for row in range(4)]
    assert together[::-1] == texts(kind, [3, 2, 1, 0], seeds[::-1], sampler)
    others = texts(kind, [0, 0, 0, 0], seeds, sampler)
    assert len({tuple(text) for text in others}) == 4, "seeds that differ"


@pytest.mark.parametrize("sampler", [SAMPLER, Sampler(temperature=0.7), PENALISED], ids=["top k", "all", "penalty"])
def test_likeliest_drafts_leave_a_seeds_text_as_it_is(sampler: Sampler) -> None:
    """The target draws every token, with plain decoding's random number for it."""
    rows, seeds = [0, 1, 2, 3], [3, 1, 2**40, -7]
    drafted = answers("deterministic", rows, seeds, 16, sampler)
    plain = decode_batch(small_base(), None, PROMPTS, max_new_tokens=16, sampler=sampler, seeds=seeds, ignore_eos=True)
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]
    assert any(step.accepted for result in drafted for step in result.steps), "nothing was drafted well"
    assert texts("with replacement", rows, seeds, sampler) != [result.tokens for result in plain]
