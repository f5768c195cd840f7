"""Warped distributions against the processors of transformers' ``generate``, and the random numbers of a row."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from drafthead.models.decoding.candidates import MISSING, draw_candidates
from drafthead.models.decoding.drafter import DraftSampling, Proposal
from drafthead.models.decoding.processed import ProcessedSampler
from drafthead.models.decoding.random_source import _BLOCK, DRAFT, VERIFY, PerRowRng
from drafthead.models.decoding.sampling import Contexts, OutputSampler, Sampler
from drafthead.models.decoding.step import target_probs
from drafthead.models.token_tree import TokenTree
from support import p_value, refuses

VOCABULARY = 50
SETTINGS = {
    "temperature": Sampler(temperature=0.7),
    "plain": Sampler(temperature=1.0),
    "top_k": Sampler(temperature=1.0, top_k=5),
    "top_k beyond the vocabulary": Sampler(temperature=1.0, top_k=1000),
    "top_p": Sampler(temperature=1.3, top_p=0.8),
    "min_p": Sampler(temperature=1.0, min_p=0.1),
    "typical_p": Sampler(temperature=1.0, typical_p=0.6),
    "eta": Sampler(temperature=1.0, eta=0.02),
    "repetition_penalty": Sampler(temperature=1.0, repetition_penalty=1.7),
    "reward for repetition": Sampler(temperature=1.0, repetition_penalty=0.6),
    "all": Sampler(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, typical_p=0.9, eta=0.005, repetition_penalty=1.2),
}


@pytest.fixture(scope="module")
def model() -> GenerationMixin:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def probs_of_generate(
    model: GenerationMixin, sampler: Sampler, logits: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return the distribution that ``generate`` would sample from."""
    config = GenerationConfig(
        do_sample=True,
        temperature=sampler.temperature,
        top_k=sampler.top_k,
        top_p=sampler.top_p,
        min_p=sampler.min_p or None,
        typical_p=sampler.typical_p,
        eta_cutoff=sampler.eta,
        repetition_penalty=sampler.repetition_penalty,
    )
    processors = model._get_logits_processor(config, input_ids_seq_length=ids.shape[1], device="cpu")
    return processors(ids, logits.clone()).softmax(-1)


@pytest.mark.parametrize("name", SETTINGS)
def test_probs_are_those_of_generate(model: GenerationMixin, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6, VOCABULARY, generator=generator)
    ids = torch.randint(0, VOCABULARY, (6, 9), generator=generator)
    before = logits.clone()
    probs = SETTINGS[name].probs(logits, ids)
    torch.testing.assert_close(probs, probs_of_generate(model, SETTINGS[name], logits, ids), rtol=0, atol=0)
    assert logits.equal(before), "the logits are the caller's"
    torch.testing.assert_close(probs.sum(-1), torch.ones(6))
    if name not in ("plain", "top_k beyond the vocabulary"):
        assert not probs.allclose(logits.softmax(-1)), "the setting must do something"


@pytest.mark.parametrize("scale", [0.1, 3.0], ids=["flat", "peaked"])
def test_top_p_of_a_large_vocabulary_keeps_what_sorting_it_keeps(scale: float) -> None:
    """Some rows have more tokens in the nucleus than are looked at first."""
    logits = scale * torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0))
    logits[0] *= 3
    probs = Sampler(temperature=1.0, top_p=0.8).probs(logits)
    sorted_probs, ids = logits.softmax(-1).sort(-1, descending=True)
    before = torch.zeros_like(logits).scatter(-1, ids, sorted_probs.cumsum(-1) - sorted_probs)
    differs = (probs > 0) != (before < 0.8)
    assert bool(((before - 0.8).abs()[differs] < 1e-5).all()) and int(differs.sum()) < 8, "to rounding at the edge"
    torch.testing.assert_close(probs.sum(-1), torch.ones(4))


def test_temperature_0_is_the_argmax_exactly() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [float("-inf"), -1.0, -2.0, -3.0]])
    assert Sampler().probs(logits).tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]], "the first of equal ones, as argmax does"
    penalised = Sampler(repetition_penalty=2.0).probs(logits, torch.tensor([[1], [1]]))
    assert penalised.argmax(-1).tolist() == [2, 1]
    assert Sampler().greedy and Sampler().plain_greedy
    assert Sampler(repetition_penalty=2.0).greedy and not Sampler(repetition_penalty=2.0).plain_greedy
    assert not Sampler(temperature=0.1).greedy
    with pytest.raises(ValueError, match="repetition penalty"):
        Sampler(repetition_penalty=1.1).probs(torch.randn(1, 8))


def test_a_temperature_that_overflows_is_refused() -> None:
    logits = torch.tensor([[3.0, 2.0, -4.0]])
    assert Sampler(temperature=1e-5).probs(logits).tolist() == [[1, 0, 0]]
    prompts = torch.zeros(1, 1, dtype=torch.int64)
    processors = LogitsProcessorList([TemperatureLogitsWarper(1e-38)])
    for refused in (Sampler, OutputSampler, lambda **_: ProcessedSampler(processors, prompts, [0], 0, True)):
        refuses(r"temperature must be 0 \(greedy\) or at least 1e-05, got 1e-38", refused, temperature=1e-38)


def test_processors_made_in_inference_mode_serve_outside() -> None:
    """They are kept, and one holds a tensor."""
    sampler = Sampler(temperature=0.91, eta=0.0123)
    logits = torch.randn(2, 20, requires_grad=True)
    with torch.inference_mode():
        sampler.probs(logits)
    sampler.probs(logits).square().sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_processors_see_the_path_of_every_node() -> None:
    """The rule ``typical`` asks for all nodes of a tree at once, whose paths differ."""
    prompts = torch.tensor([[1, 2, 3], [0, 4, 5]])
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])
    sampler = ProcessedSampler(processors, prompts, [0, 1], 0, sample=True)
    contexts = Contexts(torch.tensor([[1, 2, 3, 6], [4, 5, 7, 7]]), torch.tensor([4, 3]), [0, 1])
    tokens = torch.tensor([[6, 10, 11, 12, 13], [7, 20, 21, 22, 23]])  # roots end the contexts
    shape = TokenTree.expansion([2, 1]).shape
    proposal = Proposal(tokens=tokens, shape=shape, draft_sampling=DraftSampling.TOP_K)
    logits = torch.randn(2, 5, VOCABULARY, generator=torch.Generator().manual_seed(0))
    target = target_probs(logits, sampler, contexts, proposal)
    together = target(torch.arange(5).expand(2, -1))
    alone = torch.cat([target(torch.full((2, 1), node)) for node in range(5)], 1)
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


# Random numbers of a row ----------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def rng(seeds: list[int], positions: list[int] | None = None, stream: int = VERIFY) -> PerRowRng:
    return PerRowRng(seeds, positions or [0] * len(seeds), stream, CPU)


def ask(source: PerRowRng, rows: int, times: int, active: torch.Tensor | None = None) -> torch.Tensor:
    """[times, rows] decisions at one half."""
    half = torch.full((rows,), 0.5)
    active = torch.ones(rows, dtype=torch.bool) if active is None else active
    return torch.stack([source.bernoulli(half, half * 2, active) for _ in range(times)])


def test_decisions_and_samples_follow_their_probs() -> None:
    rows = 4000
    p, q, active = torch.full((rows,), 0.3), torch.full((rows,), 0.4), torch.ones(rows).bool()
    accepted = rng(list(range(rows))).bernoulli(p, q, active)
    assert abs(float(accepted.float().mean()) - 0.75) < 0.03
    probs = torch.tensor([0.5, 0.0, 2.0, 1.5])  # not normalised
    drawn = rng(list(range(rows))).categorical(probs.expand(rows, 2, 4))
    for column in drawn.T:
        counts = torch.bincount(column, minlength=4)
        assert counts[1] == 0
        assert p_value(counts[[0, 2, 3]], probs[[0, 2, 3]] / 4 * rows) > 1e-3
    assert (drawn[:, 0] != drawn[:, 1]).any()


PROBABILITIES = st.floats(0, 1, width=32, allow_subnormal=False)


class Fixed(PerRowRng):
    """A source whose uniform numbers are all ``value``."""

    def __init__(self, value: float, rows: int) -> None:
        super().__init__([0] * rows, [0] * rows, VERIFY, CPU)
        self.value, self.rows = value, rows

    def uniform(self, part: int, count: int, offset: int) -> torch.Tensor:
        return torch.full((self.rows, count), self.value, dtype=torch.float64)


@given(p=PROBABILITIES, q=PROBABILITIES, seed=st.integers(0, 2**40))
def test_nothing_accepts_the_impossible_or_rejects_the_certain(p: float, q: float, seed: int) -> None:
    accepted = rng([seed]).bernoulli(torch.tensor([p]), torch.tensor([q]), torch.tensor([True]))
    if p == 0:
        assert not accepted
    elif p >= q:
        assert accepted


def test_extreme_numbers_and_probabilities() -> None:
    """The generator may return 0 exactly: ``u * q <= p`` would then accept a token that the target never emits."""
    source, everywhere = Fixed(0.0, rows=2), torch.tensor([True, True])
    assert source.bernoulli(torch.tensor([0.0, 1e-30]), torch.tensor([0.5, 0.5]), everywhere).tolist() == [False, True]
    assert source.categorical(torch.tensor([[[0.0, 0.3, 0.7]], [[0.0, 0.0, 1.0]]]))[:, 0].tolist() == [1, 2]
    probs = torch.tensor([[[0.1, 0.2, 0.3, 0.0]]]) / 3
    assert Fixed(math.nextafter(1.0, 0.0), rows=1).categorical(probs).item() == 2
    assert 0 <= rng([0]).categorical(torch.zeros(1, 1, 5)).item() < 5


def test_more_numbers_than_one_block() -> None:
    times = 3 * _BLOCK + 5
    decisions = ask(rng([1, 2]), 2, times)
    assert decisions[:, 0].tolist() == ask(rng([1]), 1, times)[:, 0].tolist()
    for block in decisions[:, 0].split(_BLOCK):  # type: ignore[no-untyped-call]
        assert 0 < block.float().mean() < 1, "a block of equal decisions"
    assert decisions[:_BLOCK, 0].tolist() != decisions[_BLOCK : 2 * _BLOCK, 0].tolist()


def test_seed_position_and_stream_each_matter() -> None:
    def numbers(seed: int, position: int, stream: int) -> tuple[bool, ...]:
        return tuple(ask(rng([seed], [position], stream), 1, 60)[:, 0].tolist())

    streams = {numbers(s, p, stream) for s in (0, 1, -1) for p in (0, 1, 2) for stream in (DRAFT, VERIFY)}
    assert len(streams) == 18
    assert numbers(3, 4, DRAFT) == numbers(3, 4, DRAFT)


# Candidates ----------------------------------------------------------------------------------------------------

PROBS = torch.tensor([0.4, 0.0, 0.35, 0.25])
ROWS = 4000


def drawn(probs: torch.Tensor, count: int, kind: DraftSampling) -> torch.Tensor:
    rows = probs.shape[0]
    return draw_candidates(probs, count, kind, rng(list(range(rows)), stream=DRAFT))


def joint(kind: DraftSampling) -> dict[tuple[int, ...], float]:
    """Probabilities of two candidates of one node."""
    exact: dict[tuple[int, ...], float] = {}
    for first, second in product(range(4), repeat=2):
        left = 1.0 - PROBS[first].item() * (kind is DraftSampling.WITHOUT_REPLACEMENT)
        allowed = kind is DraftSampling.WITH_REPLACEMENT or first != second
        exact[first, second] = allowed * PROBS[first].item() * PROBS[second].item() / left
    return exact


@pytest.mark.parametrize("kind", [DraftSampling.WITH_REPLACEMENT, DraftSampling.WITHOUT_REPLACEMENT])
def test_two_candidates_have_their_joint_distribution(kind: DraftSampling) -> None:
    samples = drawn(PROBS.expand(ROWS, 1, 4), 2, kind)[:, 0]
    expected = joint(kind)
    assert sum(expected.values()) == pytest.approx(1)
    possible = [pair for pair, chance in expected.items() if chance > 0]
    counts = torch.tensor([int((samples == torch.tensor(pair)).all(-1).sum()) for pair in possible])
    assert counts.sum() == ROWS
    assert p_value(counts, torch.tensor([expected[pair] * ROWS for pair in possible])) > 1e-3


def test_candidates_are_of_their_parent_and_its_support() -> None:
    probs = torch.stack([PROBS, torch.eye(4)[2], torch.full((4,), 0.25)])[None]
    samples = drawn(probs, 5, DraftSampling.WITHOUT_REPLACEMENT)[0]
    assert sorted(samples[0].tolist()) == [MISSING, MISSING, 0, 2, 3] and samples[0, 3:].tolist() == [MISSING] * 2
    assert samples[1].tolist() == [2, *[MISSING] * 4]
    assert sorted(samples[2].tolist()) == [MISSING, 0, 1, 2, 3]
    probs = torch.eye(5)[None, [3, 1]].expand(2, -1, -1)
    assert drawn(probs, 2, DraftSampling.WITH_REPLACEMENT).tolist() == [[[3, 3], [1, 1]]] * 2
