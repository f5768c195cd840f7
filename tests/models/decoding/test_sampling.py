"""Warped distributions against the list of processors that transformers' ``generate`` builds for the same settings."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from drafthead.models.decoding.drafter import DraftSampling, Proposal
from drafthead.models.decoding.processed import ProcessedSampler
from drafthead.models.decoding.sampling import Contexts, OutputSampler, Sampler
from drafthead.models.decoding.step import target_probs
from drafthead.models.token_tree import TokenTree
from support import refuses

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


def test_a_temperature_that_overflows_is_refused() -> None:
    logits = torch.tensor([[3.0, 2.0, -4.0]])
    assert Sampler(temperature=1e-5).probs(logits).tolist() == [[1, 0, 0]]
    prompts = torch.zeros(1, 1, dtype=torch.int64)
    processors = LogitsProcessorList([TemperatureLogitsWarper(1e-38)])
    for refused in (Sampler, OutputSampler, lambda **_: ProcessedSampler(processors, prompts, [0], 0, True)):
        refuses(r"temperature must be 0 \(greedy\) or at least 1e-05, got 1e-38", refused, temperature=1e-38)


def test_a_penalty_needs_the_context() -> None:
    with pytest.raises(ValueError, match="repetition penalty"):
        Sampler(repetition_penalty=1.1).probs(torch.randn(1, 8))


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
