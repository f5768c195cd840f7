"""The fitted acceptance of drafts is that of the answers, by depth and rank."""

from dataclasses import replace

import numpy as np
import pytest

from drafthead.data.answers.store import Answer
from drafthead.eval.trees.acceptance_fit import (
    Fates,
    calibration_error,
    calibration_rows,
    candidate_fates,
    fit_acceptance,
    fit_pooled,
)
from drafthead.eval.trees.simulate import read_hidden_states, text_ranks
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.cost_tree import AcceptanceModel, PooledAcceptance
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.medusa import MedusaConfig
from support import TinyBase, leaning


def answers(base: BaseModel, prompts: list[list[int]]) -> list[Answer]:
    plain = [decode(base, None, ids, max_new_tokens=25, ignore_eos=True).tokens for ids in prompts]
    return [Answer.of(ids + tokens, len(ids)) for ids, tokens in zip(prompts, plain, strict=True)]


def drawn(model: AcceptanceModel, count: int, seed: int) -> Fates:
    """Return fates of drafts that are accepted as ``model`` says."""
    generator = np.random.default_rng(seed)
    likelihoods = -np.sort(-generator.dirichlet([0.3] * 4, count))[:, :3]
    depths = generator.integers(1, 3, count)
    probs = np.stack([model.probs(q, depth) for q, depth in zip(likelihoods, depths, strict=True)])
    probs /= np.maximum(1.0, probs.sum(1, keepdims=True))
    accepted = (generator.random(count)[:, None] > probs.cumsum(1)).sum(1)
    return Fates(likelihoods, accepted, depths, np.zeros((count, 2), np.int64), np.tile(np.arange(3), (count, 1)))


def test_a_known_model_is_found_again() -> None:
    known = AcceptanceModel(weight=0.6, bias=[[-1.0, -1.2, -1.5], [-1.5, -1.6, -2.0]])
    fates, others = drawn(known, 20_000, 0), drawn(known, 20_000, 1)
    fitted = fit_acceptance(fates)
    assert fitted.weight == pytest.approx(0.6, abs=0.05)
    assert np.array(fitted.bias) == pytest.approx(np.array(known.bias), abs=0.15)
    shares = [np.mean(others.accepted[others.depths == k] == 0) for k in (1, 2)]
    assert np.array(fitted.mean)[:, 0] == pytest.approx(shares, abs=0.02)
    assert calibration_error(fitted, others) < 0.01 < calibration_error(AcceptanceModel(), others)
    for row in calibration_rows(fitted, others):
        assert row["predicted"] == pytest.approx(row["accepted"], abs=0.03)


def test_fates_are_the_ranks_of_the_answers(tiny_base: TinyBase) -> None:
    base = tiny_base()
    texts = answers(base, [[5, 17, 99, 42, 7], [7, 3]])
    head = leaning(MedusaConfig(num_draft_tokens=3).build(base), [(text.ids, text.boundary) for text in texts], size=30)
    fates = candidate_fates(base, head, texts, Sampler(), width=4)
    assert fates is not None
    ranks = np.concatenate(list(text_ranks(head, texts)))
    for k in range(3):
        known = ranks[:, k][ranks[:, k] >= 0]
        counted = np.bincount(np.minimum(known, 4), minlength=5).tolist()
        assert np.bincount(fates.accepted[fates.depths == k + 1], minlength=5).tolist() == counted
    assert (fates.accepted == 0).any() and read_hidden_states(base, head, texts[0]).final.shape[1] == len(texts[0].ids)


def test_a_known_pool_is_found_again() -> None:
    """Copies are accepted as a pool of both drafters' probabilities says; where the head drafts nothing, none count."""
    known, trusting, count = PooledAcceptance(copied=1.2, drafted=0.4, bias=[0.5]), AcceptanceModel(), 20_000
    generator = np.random.default_rng(0)
    head, copy = -np.sort(-generator.dirichlet([0.3] * 3, count)), generator.uniform(0.1, 0.9, (count, 1))
    starts = np.stack([np.arange(count), np.zeros(count, np.int64)], 1)
    depths, ids = np.ones(count, np.int64), np.tile(np.arange(3), (count, 1))
    copied = generator.integers(0, 4, (count, 1))  # 3: no candidate of the head
    own = [float(row[min(token, 2)]) for row, token in zip(head, copied[:, 0], strict=True)]
    probs = [known.prob(float(p), q, 1) for p, q in zip(copy[:, 0], own, strict=True)]
    accepted = (generator.random(count) > probs).astype(np.int64)
    drafted, copies = Fates(head, accepted, depths, starts, ids), Fates(copy, accepted, depths, starts, copied)
    fitted = fit_pooled(copies, trusting, drafted, trusting)
    assert fitted is not None
    assert [fitted.copied, fitted.drafted, *fitted.bias] == pytest.approx([1.2, 0.4, 0.5], abs=0.08)
    assert fit_pooled(replace(copies, depths=depths + 1), trusting, drafted, trusting) is None


def test_copies_count_up_to_the_first_rejection(tiny_base: TinyBase) -> None:
    base = tiny_base()
    texts = [Answer.of([1, 2, 3, 4, 1, 2, 3, 9, 9, 9, 9], 5)]
    lookup = PromptLookup(3, max_ngram=1)
    fates = candidate_fates(base, lookup, texts, Sampler(temperature=100.0))
    assert fates is not None and (fates.likelihoods == 0.5).all()
    # After 2: drafts 3 4 1, and 4 is wrong. After 3: 4 is wrong. After the first 9: nothing; after the others: 9.
    assert list(zip(fates.depths.tolist(), (fates.accepted == 0).tolist(), strict=True)) == [
        *[(1, True), (2, False), (1, False), (1, True), (1, True)]
    ]
    assert candidate_fates(base, lookup, [Answer.of([1, 2, 3, 4, 5], 3)], Sampler(temperature=100.0)) is None
    assert fates.starts.tolist() == [[0, t] for t in (0, 0, 1, 3, 4)]
    # A step from 0 accepts one draft and ends before 2; one from 3 accepts a draft, so none starts at 4.
    assert fates.of_steps(None).starts.tolist() == [[0, t] for t in (0, 0, 3)]
    none = np.zeros((3, 2), np.int64)
    longer = Fates(np.ones((3, 1)), none[:, 0], np.arange(1, 4), none, none[:, :1])
    assert fates.of_steps(longer).starts.tolist() == [[0, t] for t in (0, 0, 4)]
