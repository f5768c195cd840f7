"""Draws whose random numbers the drafter knows."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from drafthead.models.decoding import acceptance, growth
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.coupling import Coupling, Races, chance_of, exponentials
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, DynamicTree
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.decoding.random_source import VERIFY, PerRowRng
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.draft_model import early_exit
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.token_tree import TokenTree
from support import TinyBase, assert_distributed, noisy_head, p_value, refuses

CPU = torch.device("cpu")
ROWS = 20_000
PROBS = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.04, 0.009, 0.001])


def draws(seed: int) -> PerRowRng:
    """The source of 20,000 positions of an answer."""
    return PerRowRng([seed] * ROWS, list(range(ROWS)), VERIFY, CPU, Races())


@pytest.mark.parametrize("seed", [0, -7, 2**60])
def test_a_token_arrives_first_with_its_probability(seed: int) -> None:
    drawn = draws(seed).categorical(PROBS.expand(ROWS, 1, 7), offset=0)[:, 0]
    counts = torch.bincount(drawn, minlength=7)
    assert counts[1] == 0 and p_value(counts[PROBS > 0], PROBS[PROBS > 0] * ROWS) > 1e-3
    both = torch.bincount(7 * drawn[:-1] + drawn[1:], minlength=49).double().view(7, 7)[[0, 2, 3]][:, [0, 2, 3]]
    expected = (PROBS[[0, 2, 3], None] * PROBS[[0, 2, 3]] * ROWS).double()
    assert p_value(both.flatten(), expected.flatten() * both.sum() / expected.sum()) > 1e-3, "of neighbours"


def test_numbers_are_exponential_and_those_of_a_later_step() -> None:
    numbers = exponentials(tuple(range(-500, 500)), 1000, CPU)
    bins = -torch.log1p(-torch.arange(20) / 20)
    counts = torch.bincount(torch.bucketize(numbers.flatten(), bins, right=True) - 1, minlength=20)
    assert p_value(counts, torch.full((20,), numbers.numel() / 20)) > 1e-3
    assert abs(float(torch.corrcoef(numbers).fill_diagonal_(0).abs().max())) < 6 / math.sqrt(1000)
    assert torch.equal(draws(5).exponentials(9, 3)[:-2], draws(5).exponentials(9, 1)[2:])


def test_every_token_arrives() -> None:
    """A number that float32 rounds up to infinity would keep out a token even if no other one can be drawn."""
    draws = PerRowRng([3], [56], VERIFY, CPU, Races())
    probs = torch.zeros(1, 1, 151_936)
    probs[..., 117_082] = 1.0
    assert draws.categorical(probs, offset=0).item() == 117_082
    assert torch.isfinite(draws.exponentials(151_936, 1)).all()


def test_a_chance_is_right_on_average() -> None:
    """Over all random numbers, a token that is expected with P arrives first with P."""
    numbers = exponentials(tuple(range(ROWS)), 1, CPU)[:, 0].tolist()
    for prob in (0.05, 0.5, 0.99):
        chances = torch.tensor([chance_of(prob, number) for number in numbers])
        assert float(chances.mean()) == pytest.approx(prob, abs=4 * float(chances.std()) / math.sqrt(ROWS))
    assert 0 < chance_of(1e-6, 30.0) < chance_of(1 - 1e-6, 30.0) <= 1


def test_drafts_are_what_the_target_would_draw_with_their_probabilities() -> None:
    """Check any draft vocabulary, at every level, under top-k; the cut tokens come last."""
    sampler, d2t = Sampler(temperature=0.6, top_k=5, coupled=True), torch.randperm(300)[:40]
    logits = torch.randn(2, 3, 40)
    probs = torch.zeros(2, 3, 300).index_copy_(2, d2t, sampler.probs(logits.flatten(0, 1)).view(2, 3, 40))
    draws = PerRowRng([7, 8], [4, 9], VERIFY, CPU, Races())
    for level in (1, 3):
        scores = Coupling(partial(draws.exponentials, 300), sampler.warp, 0.6).logits(logits, d2t, level)
        for node in range(3):
            drawn = draws.categorical(probs[:, node, None], offset=level - 1)[:, 0]
            assert torch.equal(d2t[scores[:, node].argmax(-1)], drawn)
        assert ((scores > -torch.inf).sum(-1) == 5).all()
    tokens, depths = torch.tensor([[1, 5, 6], [2, 7, 8]]), torch.tensor([[0, 1, 2], [0, 1, 1]])
    numbers = Coupling(partial(draws.exponentials, 300), sampler.warp, 0.6).at(tokens, depths, 2)
    one, two = (draws.exponentials(300, level) for level in (1, 2))
    assert numbers.tolist() == [[0, one[0, 5], two[0, 6]], [0, one[1, 7], one[1, 8]]]


@pytest.mark.parametrize("sampler", [{"top_k": 1}, {"top_p": 0.3}])
def test_a_dynamic_tree_keeps_the_parents_of_tokens_that_cannot_be_drawn(
    tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch, sampler: dict[str, Any]
) -> None:
    """Computed as on an accelerator, where orphans would take the places of other children."""
    for module in (growth, acceptance):
        monkeypatch.setattr(module, "is_host", lambda device: False)
    base = tiny_base()
    options = {"max_new_tokens": 20, "sampler": Sampler(temperature=1.0, **sampler, coupled=True), "ignore_eos": True}
    tree = DraftConfig(tree=DynamicTree(nodes=16, width=3, depth=5))
    for seed in range(3):
        plain = decode(base, None, [5, 6, 7], seed=seed, **options).tokens
        drafted = decode(base, early_exit(base, 2, num_tokens=5), [5, 6, 7], seed=seed, draft_config=tree, **options)
        assert drafted.tokens == plain


@pytest.mark.parametrize("tree", [TokenTree.chain(2), TokenTree.expansion([2, 2])])
def test_answers_have_the_targets_distribution(tiny_base: TinyBase, tree: TokenTree) -> None:
    base = tiny_base()
    options = {"sampler": Sampler(temperature=1.3, top_k=3, coupled=True), "draft_config": DraftConfig(tree=tree)}
    assert_distributed(base, early_exit(base, 2), [[5, 6, 7]], copies=1500, length=3, **options)


def test_what_cannot_be_coupled_is_refused(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head = noisy_head(MedusaConfig(num_draft_tokens=3), base, 0.1)
    drawn = DraftConfig(tree=TokenTree.chain(2), draft_sampling=DraftSampling.WITH_REPLACEMENT)
    options = {"max_new_tokens": 5, "sampler": Sampler(temperature=1.0, coupled=True)}
    refuses("got draft_sampling=with_replacement; leave", decode, base, head, [5, 6], draft_config=drawn, **options)
    refuses("got rule.name=typical; leave", decode, base, head, [5, 6], rule=AcceptanceRule(name="typical"), **options)
    greedy = decode(base, head, [5, 6], max_new_tokens=5).tokens
    (same,) = decode_batch(base, head, [[5, 6]], max_new_tokens=5, sampler=Sampler(coupled=True))
    assert same.tokens == greedy, "nothing is drawn"
    assert (
        decode(base, head, [5, 6], max_new_tokens=5, sampler=Sampler(coupled=True), draft_config=drawn).tokens == greedy
    )
    assert repr(Sampler(temperature=1.0)) != repr(Sampler(temperature=1.0, coupled=True))
    assert "coupled" not in repr(Sampler()), "evaluations of earlier versions resume"
