"""Draws whose random numbers the drafter knows."""

import math

import pytest
import torch

from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.coupling import Coupling, exponentials
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling
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
    return PerRowRng([seed] * ROWS, list(range(ROWS)), VERIFY, CPU, coupled=True)


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


def test_a_chance_is_right_on_average() -> None:
    """Over all random numbers, a token that is expected with P arrives first with P."""
    numbers = exponentials(tuple(range(ROWS)), 1, CPU)
    coupling = Coupling(lambda level: numbers, Sampler(temperature=1.0).warp, 1.0)
    for prob in (0.05, 0.5, 0.99):
        chances = torch.tensor([coupling.chance(prob, row, 0, 1) for row in range(ROWS)])
        assert float(chances.mean()) == pytest.approx(prob, abs=4 * float(chances.std()) / math.sqrt(ROWS))


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
    refuses("needs the exact rule", decode, base, head, [5, 6], draft_config=drawn, **options)
    refuses("needs the exact rule", decode, base, head, [5, 6], rule=AcceptanceRule(name="typical"), **options)
    greedy = decode(base, head, [5, 6], max_new_tokens=5).tokens
    (same,) = decode_batch(base, head, [[5, 6]], max_new_tokens=5, sampler=Sampler(coupled=True))
    assert same.tokens == greedy, "nothing is drawn"
