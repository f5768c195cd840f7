"""Simulated acceptance along texts of tiny random bases: against the heads' own logits and real decoding."""

import math
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from drafthead.data.answers.store import Answer
from drafthead.errors import UserError
from drafthead.eval.config import SuiteConfig
from drafthead.eval.metrics.steps import mean_accepted_length, step_table
from drafthead.eval.trees import simulate
from drafthead.eval.trees.calibrate import speedup_by_cost
from drafthead.eval.trees.finished_answers import base_answers
from drafthead.eval.trees.simulate import (
    AcceptProbsConfig,
    read_hidden_states,
    simulate_texts,
    text_accept_probs,
    text_ranks,
)
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import CostTree, TreeCosts
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, DynamicTree
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.draft_model import ModelDrafter
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead
from drafthead.models.simulation.acceptance import accept_probs_of_ranks, simulate_acceptance
from drafthead.models.simulation.ranks import answer_ranks
from drafthead.models.token_tree import TokenTree
from support import TinyBase, leaning, refuses, row_of

PROMPTS = [[5, 17, 99, 42, 7], [7, 3], [250, 31, 8, 8, 120, 64, 2]]
TREE = TokenTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 3), (0, 0, 0), (0, 1, 2), (2, 3, 1)])
GREEDY, WARM = Sampler(temperature=0.0), Sampler(temperature=0.7)


def answered(base: BaseModel, temperature: float, new: int, copies: int = 1, seed: int = 0) -> list[Answer]:
    """Plain answers, sampled without any cache; the rows' lengths differ."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt] * copies)
        for _ in range(new + len(prompt)):
            logits = base.model(ids).logits[:, -1].float()
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                token = (logits / temperature).softmax(-1).multinomial(1, generator=generator)
            ids = torch.cat([ids, token], 1)
        texts += [Answer.of(row.tolist(), len(prompt)) for row in ids]
    return texts


@cache
def fitted(base: BaseModel, reads_last: bool = False) -> MedusaHead:
    head = MedusaConfig(num_draft_tokens=3, reads_last_token=reads_last).build(base)
    return leaning(head, [(text.ids, text.boundary) for text in answered(base, 0.0, 40)], size=20)


@pytest.fixture
def base(tiny_base: TinyBase) -> BaseModel:
    return tiny_base()


@pytest.mark.parametrize("reads_last", [False, True])
def test_top_k_accept_probs_are_the_ranks(base: BaseModel, reads_last: bool) -> None:
    """The simulation position by position equals calibration in one pass."""
    head, texts = fitted(base, reads_last), answered(base, 0.0, 30)
    accept_probs = text_accept_probs(base, head, texts, GREEDY, AcceptProbsConfig(width=4))
    for text, probs in zip(texts, accept_probs, strict=True):
        batch = row_of([text.ids], text.boundary, padding=0)
        (ranks,) = answer_ranks(head, batch, base.hidden_states(batch, head.spec))
        assert np.array_equal(probs, accept_probs_of_ranks(ranks, 4), equal_nan=True)
        assert probs[:, 0, 0].sum() > 3, "a head that is never right shows nothing"


@pytest.mark.parametrize("sampler", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_deterministic_plan_is_the_tree_on_ranks(base: BaseModel, sampler: Sampler) -> None:
    """Drafting for real at every position, against probs of the whole family."""
    head, texts = fitted(base), answered(base, sampler.temperature, 25)
    whole = text_accept_probs(base, head, texts, sampler, AcceptProbsConfig())
    simulated = simulate_texts(base, head, texts, DraftConfig(tree=TREE), sampler)
    assert simulated == replace(simulate_acceptance(whole, TREE), nodes={len(TREE): 1.0})
    assert simulated.steps < simulated.tokens


def test_a_dynamic_tree_of_all_candidates_is_the_expansion(base: BaseModel) -> None:
    head, texts = fitted(base), answered(base, 0.0, 25)
    dynamic = DraftConfig(tree=DynamicTree(nodes=13, width=3, depth=2))
    static = DraftConfig(tree=TokenTree.expansion([3, 3]))
    assert simulate_texts(base, head, texts, dynamic, GREEDY) == simulate_texts(base, head, texts, static, GREEDY)


def test_the_time_of_trees_by_cost_is_what_their_nodes_cost(base: BaseModel) -> None:
    """Nine nodes cost as much as one, so that at least as many are drafted, and drafting costs nothing."""
    head, texts = fitted(base), answered(base, 0.0, 25)
    steps = CostModel(verify={1: 1.0, 9: 1.0, 32: 1.5}, draft=0.0, overhead=1.0, context=8)
    head.tree_costs = TreeCosts(costs={1: steps})
    tree = CostTree(costs=head.tree_costs, depth=head.depth)
    simulated = simulate_texts(base, head, texts, DraftConfig(tree=tree), GREEDY)
    assert simulated.nodes is not None and min(simulated.nodes) > 1
    cost = sum(share * steps.step(n, 1) for n, share in simulated.nodes.items()) / steps.step(1, 0)
    assert simulated.cost == pytest.approx(cost)
    nodes = sum(n * share for n, share in simulated.nodes.items())
    expected = simulated.mean_accepted_length / cost, nodes
    assert speedup_by_cost(head, texts, 0.0) == pytest.approx(expected)


def warmed(logits: Tensor, temperature: float) -> Tensor:
    return (logits.double() / temperature).softmax(-1)


def test_probs_do_not_depend_on_the_batch(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    head, texts = fitted(base), answered(base, 0.7, 8, copies=2)
    draft_config = AcceptProbsConfig(draft_sampling=DraftSampling.WITH_REPLACEMENT, width=3)
    together = text_accept_probs(base, head, texts, WARM, draft_config)
    monkeypatch.setattr(simulate, "MAX_VALUES", 1000)
    for a, b in zip(together, text_accept_probs(base, head, texts, WARM, draft_config), strict=True):
        assert np.allclose(a, b, rtol=1e-4, equal_nan=True)


def test_a_draft_vocabulary_misses_the_tokens_outside_it(base: BaseModel) -> None:
    texts = answered(base, 0.7, 20)
    head = MedusaConfig(num_draft_tokens=2, draft_vocab_size=100).build(base, torch.arange(100)).eval()
    for draft_sampling in DraftSampling:
        draft_config = AcceptProbsConfig(draft_sampling=draft_sampling, width=2)
        for text, probs in zip(texts, text_accept_probs(base, head, texts, WARM, draft_config), strict=True):
            outside = np.array(text.ids[text.boundary + 1 :]) >= 100
            assert outside.any() and (probs[outside, 0] == 0).all()
            assert draft_sampling is DraftSampling.TOP_K or (probs[~outside, 0, 0] > 0).all()


def test_what_cannot_be_simulated_is_refused(base: BaseModel) -> None:
    head, texts = fitted(base), answered(base, 0.0, 20)
    chain = DraftConfig(tree=TokenTree.chain(2))
    sampled = {"draft_sampling": DraftSampling.WITH_REPLACEMENT}
    run = simulate_texts
    block = AcceptanceRule(name="block")
    with pytest.raises(UserError, match="block verification judges a chain as a whole"):
        run(base, head, texts, DraftConfig(tree=TREE, **sampled), WARM, rule=block)
    refuses("no text has two answer tokens", run, base, head, [Answer.of([1, 2, 3], 2)], chain, GREEDY)
    refuses("PromptLookup.*distributions", text_accept_probs, base, PromptLookup(2), texts, GREEDY, AcceptProbsConfig())


@pytest.mark.parametrize(("made", "sampler"), [(0.0, WARM), (0.7, GREEDY), (1.5, WARM)])
def test_texts_of_another_temperature_are_refused(base: BaseModel, made: float, sampler: Sampler) -> None:
    texts = answered(base, made, 40, copies=4)
    with pytest.raises(UserError, match="samples of the target"):
        simulate_texts(base, fitted(base), texts, DraftConfig(tree=TokenTree.chain(1)), sampler)


@torch.no_grad()
def test_a_drafter_that_sees_its_path_is_led_along_the_text(base: BaseModel) -> None:
    """The base as its own drafter: the distribution before a token is the same from wherever the step started."""
    drafter, texts = ModelDrafter(base, num_tokens=3), answered(base, 0.7, 6)
    draft_config = AcceptProbsConfig(
        draft_sampling=DraftSampling.WITH_REPLACEMENT, sampler=Sampler(temperature=1.5), width=1
    )
    for text, probs in zip(texts, text_accept_probs(base, drafter, texts, WARM, draft_config), strict=True):
        logits = base.model(torch.tensor([text.ids])).logits[0]
        p, q = warmed(logits, 0.7), warmed(logits, 1.5)
        for t, k in product(range(text.positions), range(3)):
            at = text.boundary + 1 + t + k
            if at < len(text.ids):
                x = text.ids[at]
                assert probs[t, k, 0] == pytest.approx(min(1.0, float(q[at - 1, x] / p[at - 1, x])), rel=1e-3)


CASES = {  # test_simulate.py enumerates the others
    "deterministic": (DraftSampling.TOP_K, TREE, "exact"),
    "block": (DraftSampling.WITH_REPLACEMENT, TokenTree.chain(3), "block"),
}


@pytest.mark.parametrize("case", ["deterministic", pytest.param("block", marks=pytest.mark.slow)])
def test_sampled_decoding_takes_the_simulated_steps(base: BaseModel, case: str) -> None:
    """Decoding's own texts, simulated: what is left is the chance of acceptance, and it averages out."""
    draft_sampling, tree, name = CASES[case]
    config = DraftConfig(tree=tree, draft_sampling=draft_sampling, sampler=Sampler(temperature=0.9))
    drafter, rule = ModelDrafter(base, num_tokens=3), AcceptanceRule(name=name)
    settings = {"max_new_tokens": 16, "draft_config": config, "sampler": WARM, "rule": rule, "ignore_eos": True}
    seeds = 2 if draft_sampling is DraftSampling.TOP_K else 8  # without chance every answer agrees exactly
    prompts = [(seed, prompt) for prompt in PROMPTS for seed in range(seeds)]
    results = [decode(base, drafter, prompt, seed=seed, **settings) for seed, prompt in prompts]
    pairs = zip(prompts, results, strict=True)
    texts = [Answer.of(prompt + result.tokens, len(prompt)) for (_, prompt), result in pairs]
    simulated = [simulate_texts(base, drafter, [text], config, WARM, rule) for text in texts]
    assert [f.tokens for f in simulated] == [sum(s.committed for s in result.steps) for result in results]
    expected, steps = np.array([f.steps for f in simulated]), np.array([len(result.steps) for result in results])
    assert expected.sum() < 0.95 * sum(f.tokens for f in simulated), "nothing accepted proves nothing"
    if draft_sampling is DraftSampling.TOP_K:
        assert expected == pytest.approx(steps)
    else:
        error = float((steps - expected).std(ddof=1)) * math.sqrt(len(steps))
        assert 0 < abs(expected.sum() - steps.sum()) < 4 * error


@pytest.mark.slow
def test_greedy_decoding_takes_exactly_the_simulated_steps(base: BaseModel) -> None:
    head, chain = fitted(base), DraftConfig(tree=TokenTree.chain(3))
    for prompt, new in product([*PROMPTS, [7]], (2, 3, 30)):
        for draft_config in (DraftConfig(tree=TREE), DraftConfig(tree=TREE, confidence_threshold=0.2), chain):
            real = decode(base, head, prompt, max_new_tokens=new, draft_config=draft_config, ignore_eos=True)
            text = Answer.of(prompt + real.tokens, len(prompt))
            simulated = simulate_texts(base, head, [text], draft_config, GREEDY)
            assert simulated.steps == len(real.steps)
            assert simulated.mean_accepted_length == mean_accepted_length(step_table({"": [real]}))


def test_hidden_states_of_the_answering_stand_in_for_a_pass_over_its_texts(base: BaseModel) -> None:
    config = SuiteConfig(suite="builtin", limit=6, max_new_tokens=12)
    without_states, with_states = (base_answers(base, config, keep_hidden_states=keep) for keep in (False, True))
    assert [text.ids for text in with_states] == [text.ids for text in without_states]
    assert len({len(text.ids) for text in with_states}) > 1
    head, config = fitted(base), DraftConfig(tree=TREE)
    eagle = Eagle3Config(layers=[0, 1, 2]).build(base)
    deep = read_hidden_states(base, eagle, with_states[0])
    assert deep.layers is not None, "what was with_states is the final state alone"
    expected = text_ranks(head, without_states), simulate_texts(base, head, without_states, config, GREEDY)
    with base.model.model.register_forward_pre_hook(lambda *_: pytest.fail("the texts are read again")):
        actual = text_ranks(head, with_states), simulate_texts(base, head, with_states, config, GREEDY)
    for a, b in zip(actual[0], expected[0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert actual[1].mean_accepted_length == expected[1].mean_accepted_length
