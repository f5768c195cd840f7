"""Speculative decoding commits what plain greedy decoding does, and samples from the same distribution."""

from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product

import pytest
import torch

from drafthead.errors import UserError
from drafthead.eval.timing.methods import transformers_generate
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.structure import capture_hidden_states
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling
from drafthead.models.decoding.loop import EXACT, GREEDY, check_ids, decode, decode_batch
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import DecodeConfig, DecodeResult, DecodeState
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead
from drafthead.models.kernels.attention import captured_queries
from drafthead.models.token_tree import TokenTree
from plain_heads import deep_base, eagle
from support import (
    TinyBase,
    assert_distributed,
    hidden_and_probs,
    leaning,
    p_value_of_answers,
    probs_of_answers,
    refuses,
    small_base,
)

PROMPT = [5, 17, 99, 42, 7]
TREE = TokenTree.from_paths(
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 3), (0, 0, 0), (0, 1, 0), (0, 1, 2), (1, 0, 0), (2, 3, 1)]
)


def trained_head(base: BaseModel, plain: list[int]) -> MedusaHead:
    return leaning(MedusaConfig(num_draft_tokens=3).build(base), [(PROMPT + plain, len(PROMPT))], size=30)


def test_the_transformers_baseline_is_greedy_whatever_the_model_asks_for(tiny_base: TinyBase) -> None:
    base = tiny_base()
    plain = decode(base, None, PROMPT, max_new_tokens=30)
    defaults, settings = base.model.generation_config, {"repetition_penalty": 5.0, "do_sample": True, "top_k": 3}
    before = {name: getattr(defaults, name) for name in settings}
    try:
        defaults.update(**settings)
        assert transformers_generate(base, PROMPT, 30).tokens == plain.tokens
        assert base.model.generation_config is defaults
    finally:
        defaults.update(**before)


def test_threads_share_a_base() -> None:
    """Two threads decode different prompts at once, and one runs the model between; no states are mixed up."""
    base = deep_base()
    head = eagle(base, layers=[2, 3, 4])
    prompts = [list(range(5, 25)), list(range(60, 87))]
    expected = [decode(base, head, ids, max_new_tokens=12, ignore_eos=True) for ids in prompts]
    with ThreadPoolExecutor(3) as pool:
        plain = pool.submit(lambda: [base.model(torch.arange(3, 12)[None]) for _ in range(20)])
        calls = [pool.submit(decode, base, head, prompts[n % 2], max_new_tokens=12, ignore_eos=True) for n in range(4)]
    for n, call in enumerate(calls):
        assert call.result().tokens == expected[n % 2].tokens
        accepted = [[step.accepted for step in result.steps] for result in (call.result(), expected[n % 2])]
        assert accepted[0] == accepted[1]
    assert len(plain.result()) == 20


def test_states_of_another_thread_are_not_taken(tiny_base: TinyBase) -> None:
    model = tiny_base().model
    with torch.no_grad(), capture_hidden_states(model, [1]) as states, captured_queries() as queries:
        model(torch.arange(4)[None])
        first, count = states[1], len(queries)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model, torch.arange(9)[None]).result()
        assert states[1] is first and len(queries) == count > 0


@pytest.mark.parametrize("max_new", range(1, 12))
def test_max_new_tokens_inside_a_block(tiny_base: TinyBase, max_new: int) -> None:
    base = tiny_base()
    plain = decode(base, None, PROMPT, max_new_tokens=60, ignore_eos=True).tokens
    head = trained_head(base, plain)
    streamed: list[int] = []
    settings = {"draft_config": DraftConfig(tree=TREE), "on_tokens": streamed.extend, "ignore_eos": True}
    result = decode(base, head, PROMPT, max_new_tokens=max_new, **settings)
    assert result.tokens == streamed == plain[:max_new]
    assert 1 + sum(s.committed for s in result.steps) == max_new


def test_eos_inside_a_block(tiny_base: TinyBase) -> None:
    """Whichever token of the answer is EOS, decoding stops right after its first occurrence."""
    base = BaseModel.load(tiny_base().config)
    plain = decode(base, None, PROMPT, max_new_tokens=40, ignore_eos=True).tokens
    head = trained_head(base, plain)
    for eos in set(plain):
        base.model.generation_config.eos_token_id = eos
        result = decode(base, head, PROMPT, max_new_tokens=40, draft_config=DraftConfig(tree=TREE))
        assert result.tokens == plain[: plain.index(eos) + 1]


def test_bad_prompts(tiny_base: TinyBase) -> None:
    base = tiny_base()
    refuses("the prompt is empty", decode, base, None, [], max_new_tokens=4)
    with pytest.raises(UserError, match="510 tokens, which with max_new_tokens=4 exceed the base's context of 512"):
        decode(base, None, [1] * 510, max_new_tokens=4)
    with pytest.raises(UserError, match="answer 1 has 513 tokens, which exceed the base's context of 512; shorten it$"):
        check_ids(base, [1] * 513, 0, "answer 1")
    refuses("token id 300 at position 0", decode, base, None, [300], max_new_tokens=4)
    refuses("max_new_tokens", decode, base, None, [3], max_new_tokens=0)


def test_nothing_after_eos_or_the_limit_is_committed(tiny_base: TinyBase) -> None:
    """Tokens, caches and the drafter's state end together, at the first EOS or where the room ends."""
    base = tiny_base()
    plain = decode(base, None, PROMPT, max_new_tokens=40, ignore_eos=True).tokens
    head = trained_head(base, plain)
    for eos, room in ((plain[1], 9), (plain[2], 9), (-1, 2), (plain[2], 1)):
        config = DecodeConfig(draft_config=DraftConfig(tree=TREE), sampler=GREEDY, rule=EXACT, eos_ids=frozenset({eos}))
        state = DecodeState.empty(base, head, config, 1, 40)
        state.read_prompts([PROMPT])
        output = state.step([0], [1], most_tokens=[room])
        assert int(output.acceptance.accepted) >= 2, "the cut must be inside what was accepted"
        length = min(room, plain.index(eos) if eos in plain else room)
        assert output.tokens == [plain[1 : 1 + length]]
        assert int(state.cache.positions(torch.zeros(1, 1, dtype=torch.int64))) == len(PROMPT) + length
        assert state.last_token.tolist() == [plain[length]]


# Sampling from a real small model -------------------------------------------------------------------------------------


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
