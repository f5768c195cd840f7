"""With any drafter: greedy text is plain decoding's, alone and in a batch, and a state never changes."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, DynamicTree
from drafthead.models.decoding.loop import decode, decode_batch, default_draft_config
from drafthead.models.decoding.random_source import DRAFT, PerRowRng
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.combined import CombinedDrafter
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.drafters.experimental.horizontal_cascade import HorizontalCascade
from drafthead.models.drafters.experimental.max_gram import MaxGram
from drafthead.models.drafters.experimental.vertical_cascade import VerticalCascade
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.token_tree import TokenTree
from support import Context, TinyBase, randomised

PROMPTS = [[5, 6, 7] * 4, [9], list(range(40, 90))]
DYNAMIC = DraftConfig(tree=DynamicTree(nodes=13, width=3, depth=4))


def combined(base: BaseModel, nodes: int | None = None) -> Drafter:
    trees = [TokenTree.expansion([2, 2]), TokenTree.chain(4)]
    return CombinedDrafter([early_exit(base, 2, num_tokens=3), PromptLookup(4, matches=2)], trees, nodes)


def with_adapter(base: BaseModel) -> Drafter:
    """The lookup's nodes are not in the pass that the adapter began; a dynamic tree drops nodes that are in it."""
    config = KangarooConfig(exit_layer=2, num_draft_tokens=4, confidence_threshold=0.0)
    return CombinedDrafter([randomised(config.build(base), 0.1).eval(), PromptLookup(num_tokens=3)])


CASES: dict[str, tuple[Callable[[BaseModel], Drafter], DraftConfig | None]] = {
    "chain": (lambda base: early_exit(base, 2), None),
    "expansion": (lambda base: early_exit(base, 2), DraftConfig(tree=TokenTree.expansion([2, 1, 2, 1]))),
    "dynamic": (lambda base: early_exit(base, 2), DYNAMIC),
    "confident": (
        lambda base: early_exit(base, 2),
        DraftConfig(tree=TokenTree.chain(5), confidence_threshold=0.3),
    ),
    "the target itself": (lambda base: ModelDrafter(base), None),
    "nested target itself": (lambda base: VerticalCascade(base, None, num_tokens=5), None),
    "nested with lookup": (lambda base: VerticalCascade(early_exit(base, 2).model, PromptLookup(), num_tokens=5), None),
    "nested twice": (
        lambda base: VerticalCascade(
            early_exit(base, 2).model, VerticalCascade(early_exit(base, 1).model, None, num_tokens=2)
        ),
        None,
    ),
    "combined": (combined, None),
    "combined with early exit": (with_adapter, None),
    "combined with early exit, dynamic": (with_adapter, DraftConfig(tree=DynamicTree(nodes=7, width=8, depth=4))),
    "combined, dynamic": (combined, DYNAMIC),
    "combined, 2 nodes": (lambda base: combined(base, 2), None),
    "combined, 5 nodes": (lambda base: combined(base, 5), None),
    "lookup": (lambda base: PromptLookup(), None),
    "lookup, three matches": (lambda base: PromptLookup(matches=3), None),
    "lookup, max-gram": (lambda base: MaxGram(4, torch.arange(1, 301) % 300), None),
    "lookup, memory": (lambda base: PromptLookup(memory=200), None),
    "relay": (lambda base: HorizontalCascade([early_exit(base, 2), PromptLookup(3)], [2, 3]), None),
    "relay, lookup first": (lambda base: HorizontalCascade([PromptLookup(3), early_exit(base, 2)], [3, 2]), None),
    "relay, confident": (
        lambda base: HorizontalCascade([early_exit(base, 2), PromptLookup(3)], [3, 3]),
        DraftConfig(tree=TokenTree.chain(6), confidence_threshold=0.3),
    ),
    "relay of a cascade": (
        lambda base: HorizontalCascade(
            [VerticalCascade(early_exit(base, 2).model, PromptLookup(), num_tokens=3), PromptLookup(3)], [3, 3]
        ),
        None,
    ),
}
DEPEND_ON_OTHER_ROWS = ("nodes", "memory")
"""Rows share the room of a small union, and remembered answers."""


ON_GEMMA = ("chain", "expansion", "nested twice", "combined", "relay")


@pytest.mark.parametrize(("architecture", "name"), [*product(["llama"], CASES), *product(["gemma"], ON_GEMMA)])
def test_greedy_text_is_plain_text(tiny_base: TinyBase, small_caches: None, architecture: str, name: str) -> None:
    """The drafters' caches grow on the way."""
    base = tiny_base(architecture)
    make, draft_config = CASES[name]
    drafter, new = make(base), 43
    plain = [decode(base, None, p, max_new_tokens=new, ignore_eos=True).tokens for p in PROMPTS]
    single = [decode(base, drafter, p, max_new_tokens=new, draft_config=draft_config, ignore_eos=True) for p in PROMPTS]
    batch = decode_batch(base, drafter, PROMPTS, max_new_tokens=new, draft_config=draft_config, ignore_eos=True)
    assert [r.tokens for r in single] == [r.tokens for r in batch] == plain
    # Near the end, a row alone drafts less than in a batch with longer rows.
    accepted = [[[step.accepted for step in r.steps if step.position < 37] for r in rs] for rs in (single, batch)]
    assert accepted[0] == accepted[1] or any(word in name for word in DEPEND_ON_OTHER_ROWS)
    assert 0 < sum(map(sum, accepted[0])), "drafts must be accepted for the test to say something"
    if "target itself" in name:
        assert all([step.accepted for step in result.steps] == [5] * 7 for result in batch)


SAMPLED = DraftConfig(
    tree=TokenTree.chain(3), draft_sampling=DraftSampling.WITH_REPLACEMENT, sampler=Sampler(temperature=1.0, top_k=3)
)
STATES = {name: case for name, case in CASES.items() if "early exit" not in name} | {
    "nested, sampled": (
        lambda base: VerticalCascade(base, early_exit(base, 2), num_tokens=3, draft_config=SAMPLED),
        SAMPLED,
    )
}
Reads = list[tuple[Tensor, Tensor]]
"""Tokens [B, T] and counts [B], update by update."""


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", STATES)
def test_states_stay_as_they_were(tiny_base: TinyBase, name: str, rows: int) -> None:
    """Whatever other states drafted meanwhile, and whatever of it a shared memory kept."""
    make, chosen = STATES[name]
    drafter = make(tiny_base())
    draft_config = chosen or default_draft_config(drafter)

    def drafted(context: Context, last: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        rng = PerRowRng([7] * len(last), [9] * len(last), DRAFT, last.device)
        proposal = context.draft(last, draft_config, rng)
        return proposal.tokens.tolist(), proposal.shape.parents.tolist()

    def afresh(reads: Reads) -> Context:
        context = Context.of(drafter, len(reads[0][0]))
        for tokens, counts in reads:
            context = context.read(tokens, counts=counts)
        return context

    prompt = 10 * torch.arange(rows)[:, None] + torch.arange(6) % 3
    last, committed = prompt[:, 0], torch.tensor([2, 1, 2][:rows])
    prefill: Reads = [(prompt, torch.tensor([6, 4, 5][:rows]))]
    old = afresh(prefill)
    path = torch.tensor(drafted(old, last)[0])[:, :2]
    further, elsewhere = [*prefill, (path, committed)], [*prefill, (path + 1, committed)]
    new, other = (old.read(reads[-1][0], counts=committed) for reads in (further, elsewhere))
    for context, reads in ((new, further), (other, elsewhere), (old, prefill), (new, further)):
        assert drafted(context, last) == drafted(afresh(reads), last)
    alone = afresh([(tokens[-1:], counts[-1:]) for tokens, counts in further])
    assert drafted(new.select([rows - 1]), last[-1:]) == drafted(alone, last[-1:])
