"""Nested decoding: plain decoding's text and law, random numbers of its own, and a state that never changes.

The law of sampled text is tested here for every drafter that samples from a causal LM.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.contract import DraftConfig, Drafter, DraftSampling
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.decoding.random_source import DRAFT, PerRowRng
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters import nested
from drafthead.models.drafters.combined import CombinedDrafter
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.drafters.nested import Nested
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.token_tree import TokenTree

TinyBase = Callable[..., BaseModel]
PROMPTS = [[5, 6, 7] * 4, [9], list(range(40, 70))]
CHAIN = TokenTree.chain(3)
SAMPLER = Sampler(temperature=1.0, top_k=3)
WITH, WITHOUT = DraftSampling.WITH_REPLACEMENT, DraftSampling.WITHOUT_REPLACEMENT


def sampled(tree: TokenTree, draft_sampling: DraftSampling = WITH) -> DraftConfig:
    return DraftConfig(tree=tree, draft_sampling=draft_sampling, sampler=SAMPLER)


def two_deep(model: BaseModel, base: BaseModel) -> Nested:
    """A nested drafter in a nested drafter, every level sampling its own drafts."""
    inner = Nested(
        early_exit(base, 1).model, early_exit(base, 2), num_tokens=2, draft_config=sampled(TokenTree.chain(2))
    )
    return Nested(model, inner, num_tokens=3, draft_config=sampled(TokenTree.chain(2)))


@pytest.mark.parametrize("draft_config", [None, sampled(TokenTree.chain(4))], ids=["greedy", "sampled"])
def test_the_target_itself_is_always_right(tiny_base: TinyBase, draft_config: DraftConfig | None) -> None:
    """Also when sampling: q equals p, so every draft is accepted."""
    base = tiny_base()
    drafter = Nested(base, early_exit(base, 2), num_tokens=4, draft_config=draft_config)
    sampler = SAMPLER if draft_config else Sampler()
    for r in decode_batch(
        base, drafter, PROMPTS, max_new_tokens=26, draft_config=draft_config, sampler=sampler, ignore_eos=True
    ):
        assert [step.accepted for step in r.steps][:4] == [4] * 4


def test_a_long_answer_outgrows_the_memory(tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested, "INITIAL_CAPACITY", 8)
    base = tiny_base()
    plain = decode(base, None, PROMPTS[0], max_new_tokens=61, ignore_eos=True)
    result = decode(base, Nested(base, None, num_tokens=3), PROMPTS[0], max_new_tokens=61, ignore_eos=True)
    assert result.tokens == plain.tokens and all(step.accepted == 3 for step in result.steps)


@pytest.mark.parametrize("rows", [1, 3])
def test_states_stay_as_they_were(tiny_base: TinyBase, rows: int) -> None:
    drafter = Nested(tiny_base(), early_exit(tiny_base(), 2), num_tokens=3, draft_config=sampled(TokenTree.chain(2)))
    draft_config, last, counts = sampled(CHAIN), torch.arange(rows) + 50, torch.tensor([6, 2, 4][:rows])

    def rng() -> PerRowRng:
        return PerRowRng([7] * rows, [9] * rows, DRAFT, last.device)

    def afresh(state: nested.NestedState) -> Tensor:
        text = state.text
        read = drafter.update(drafter.init_state(rows), text.tokens, None, text.lengths)
        return drafter.draft(read, last, draft_config, rng()).tokens

    old = drafter.update(drafter.init_state(rows), torch.arange(rows * 6).view(rows, 6), None, counts)
    first = drafter.draft(old, last, draft_config, rng())
    new = drafter.update(old, first.tokens[:, :3], None, torch.tensor([3, 1, 2][:rows]))
    for state in (old, new, old, new):
        assert torch.equal(drafter.draft(state, last, draft_config, rng()).tokens, afresh(state))
    part = drafter.draft(new.select([rows - 1]), last[-1:], draft_config, PerRowRng([7], [9], DRAFT, last.device))
    assert torch.equal(part.tokens, afresh(new)[-1:])


def test_a_row_draws_the_same_whatever_its_neighbours(tiny_base: TinyBase) -> None:
    base = tiny_base()
    drafter = two_deep(early_exit(base, 2).model, base)
    found = decode_batch(
        base, drafter, PROMPTS, max_new_tokens=24, draft_config=sampled(CHAIN), sampler=SAMPLER, ignore_eos=True
    )
    for seed, (prompt, together) in enumerate(zip(PROMPTS, found, strict=True)):
        alone = decode(
            base,
            drafter,
            prompt,
            max_new_tokens=24,
            draft_config=sampled(CHAIN),
            sampler=SAMPLER,
            seed=seed,
            ignore_eos=True,
        )
        assert alone.tokens == together.tokens


def test_seeds_inside_are_those_of_row_and_step(tiny_base: TinyBase) -> None:
    last = torch.zeros(2, dtype=torch.int64)
    found = [
        seed
        for position in (3, 4)
        for seed in nested._seeds(last, PerRowRng([1, 2], [position] * 2, DRAFT, torch.device("cpu")))
    ]
    assert len(set(found)) == 4 and min(found) > 2**40
    assert nested._seeds(last[:1], PerRowRng([2], [4], DRAFT, torch.device("cpu"))) == found[3:]


def law_of_text(base: BaseModel, prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """The exact probability of every continuation."""
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for path, probability in known.items():
            tokens = torch.tensor([[*prompt, *path]])
            hidden = base.forward(tokens, base.new_cache(tokens.shape[1])).final[:, -1]
            dist = SAMPLER.probs(base.logits(hidden))[0]
            for token in dist.nonzero()[:, 0].tolist():
                longer[*path, token] = probability * float(dist[token])
        known = longer
    return known


DRAFTERS: dict[str, tuple[Callable[[BaseModel, BaseModel], Drafter], DraftConfig]] = {
    "model": (lambda base, other: ModelDrafter(other), sampled(CHAIN)),
    "model, tree": (lambda base, other: ModelDrafter(other), sampled(TokenTree.expansion([2, 2]), WITHOUT)),
    "merged": (
        lambda base, other: CombinedDrafter(
            [early_exit(base, 1), ModelDrafter(other), PromptLookup(2)],
            [TokenTree.chain(3), TokenTree.expansion([2, 2]), TokenTree.chain(2)],
        ),
        sampled(TokenTree.expansion([4, 2, 1, 1])),
    ),
    "nested": (
        lambda base, other: Nested(other, early_exit(base, 1), draft_config=sampled(TokenTree.chain(2))),
        sampled(CHAIN),
    ),
    "nested twice": (lambda base, other: two_deep(other, base), sampled(CHAIN)),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_text_has_the_targets_law(tiny_base: TinyBase, name: str) -> None:
    """Chi-square over all continuations of four tokens, of which steps commit three."""
    base, rows = tiny_base(), 400 if "nested" in name else 800
    make, draft_config = DRAFTERS[name]
    drafter = make(base, related(base))
    prompt = [5, 6, 7, 5, 6]
    dist = law_of_text(base, prompt, 4)
    results = decode_batch(
        base, drafter, [prompt] * rows, max_new_tokens=4, draft_config=draft_config, sampler=SAMPLER, ignore_eos=True
    )
    steps = [step for r in results for step in r.steps if r.steps]
    assert 0.1 < sum(step.accepted for step in steps) / len(steps), "drafts must be accepted for the test to say much"
    counts = dict.fromkeys(dist, 0)
    for r in results:
        counts[tuple(r.tokens)] += 1  # a KeyError is a text of probability 0
    frequent = [path for path in dist if dist[path] * rows >= 5]
    cells = [(counts[path], dist[path] * rows) for path in frequent]
    rest = 1.0 - sum(dist[path] for path in frequent)
    cells.append((rows - sum(count for count, _ in cells), max(rest, 1e-9) * rows))
    chi_square = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    freedom = len(cells) - 1
    assert chi_square < freedom + 4.0 * (2 * freedom) ** 0.5, f"{chi_square:.1f} for {freedom} degrees of freedom"


def related(base: BaseModel) -> BaseModel:
    """A model that is near the base and yet another: its first two layers."""
    return early_exit(base, 2).model


def test_refusals(tiny_base: TinyBase) -> None:
    base = tiny_base()
    with pytest.raises(UserError, match="the inner rule typical is lossy"):
        Nested(base, None, rule=AcceptanceRule(name="typical"))
    with pytest.raises(UserError, match="nested drafting drafts chains"):
        decode(
            base, Nested(base, None), [1, 2], max_new_tokens=8, draft_config=DraftConfig(tree=TokenTree.expansion([2]))
        )
    with pytest.raises(UserError, match="block verification"):
        Nested(base, PromptLookup(2, matches=2), rule=AcceptanceRule(name="block"))
