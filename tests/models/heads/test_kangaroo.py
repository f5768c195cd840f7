"""Kangaroo: one pass shared by drafting and verification, and its threshold."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, DynamicTree
from drafthead.models.decoding.loop import decode, default_draft_config
from drafthead.models.decoding.random_source import DRAFT, PerRowRng
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.kangaroo import KangarooConfig, KangarooHead
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.token_tree import TokenTree
from support import Context, TinyBase, randomised

PROMPTS = [[5, 6, 7] * 4, [9], list(range(40, 70))]
PLANS = {
    "chain": DraftConfig(tree=TokenTree.chain(4)),
    "tree": DraftConfig(tree=TokenTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 3)])),
    "wide": DraftConfig(tree=TokenTree.expansion([8, 4])),
    "stops": DraftConfig(tree=TokenTree.expansion([4, 2, 1]), confidence_threshold=0.05),
    "dynamic": DraftConfig(tree=DynamicTree(nodes=9, width=4, depth=3)),
}
SAMPLED = {
    kind: DraftConfig(tree=TokenTree.expansion([3, 2, 1]), draft_sampling=kind, sampler=Sampler(temperature=0.3))
    for kind in (DraftSampling.WITH_REPLACEMENT, DraftSampling.WITHOUT_REPLACEMENT)
}


def adapter(base: BaseModel, confidence_threshold: float = 0.0) -> KangarooHead:
    config = KangarooConfig(exit_layer=2, num_draft_tokens=4, confidence_threshold=confidence_threshold)
    return randomised(config.build(base), 0.1).eval()


@pytest.mark.parametrize("name", [*PLANS, *SAMPLED])
@pytest.mark.parametrize("rows", [1, 3])
def test_verification_goes_on_from_the_exit_states(tiny_base: TinyBase, name: str, rows: int) -> None:
    """The begun pass, finished, is the whole pass: hidden states of all nodes, and what is left in the cache.

    A sample drawn twice is two nodes of the tree, and what follows the second was drafted after it.
    """
    base, draft_config = tiny_base(), (PLANS | SAMPLED)[name]
    head, prompts = adapter(base), torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6], [1, 2, 1, 2]])[:rows]
    equal = 0
    for seed in range(10 if name in SAMPLED else 1):
        shared = []
        for begun in (True, False):
            cache = base.new_cache(64, rows=rows)
            context = Context.of(head, rows, cache)
            context = context.read(prompts, base.forward(prompts, cache, spec=head.spec))
            rng = PerRowRng([seed + n for n in range(rows)], [4] * rows, DRAFT, base.device)
            proposal = context.draft(torch.arange(30, 30 + rows), draft_config, rng)
            assert proposal.partial_forward is not None and proposal.partial_forward.layers == 2
            partial_forward = proposal.partial_forward if begun else None
            actual = base.verify(proposal.tokens, proposal.shape, cache, partial_forward).final
            real = (proposal.shape.parents.expand(rows, -1) >= 0) | (torch.arange(actual.shape[1]) == 0)
            cache.crop()
            shared.append((actual[real], cache.keys[:, :, :, 4 : 4 + actual.shape[1]].clone(), proposal.tokens))
        (a, keys_a, tokens_a), (b, keys_b, tokens_b) = shared
        assert torch.equal(tokens_a, tokens_b)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        if real.all():  # padding holds anything
            torch.testing.assert_close(keys_a, keys_b, rtol=1e-4, atol=1e-4)
        equal += int((tokens_a[:, 1:2] == tokens_a[:, 2:4]).any())
    assert equal > 0 or name != DraftSampling.WITH_REPLACEMENT


def test_only_the_remaining_layers_run(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head, runs = adapter(base), Counter[int]()
    layers = enumerate(base.model.model.layers)
    hooks = [layer.register_forward_hook(lambda *_, n=n: runs.update([n])) for n, layer in layers]
    result = decode(base, head, PROMPTS[0], max_new_tokens=12, draft_config=PLANS["chain"], ignore_eos=True)
    for hook in hooks:
        hook.remove()
    steps = len(result.steps)
    # The deep layer: the prompt and one pass per step. The shallow ones: the prompt, and per step every draft (one of
    # them the root's) and the last draft, after which nothing was drafted.
    assert runs[2] == 1 + steps
    assert runs[0] == runs[1] == 1 + sum(s.depth + 1 for s in result.steps)


@pytest.mark.parametrize("rows", [1, 2])
def test_led_along_a_text_it_drafts_the_same(tiny_base: TinyBase, rows: int) -> None:
    """Without a target's cache (replay, calibration) the shallow states are its own; an older state drafts the same."""
    base = tiny_base()
    head = adapter(base)
    ids, last = torch.arange(3, 3 + 6 * rows).view(rows, 6), torch.tensor([9, 2])[:rows]
    cache = base.new_cache(64, rows=rows)
    hidden = base.forward(ids, cache, spec=head.spec)
    led, shared = (Context.of(head, rows, target).read(ids, hidden) for target in (None, cache))
    for draft_config in PLANS.values():
        later = led.read(ids + 30, hidden)
        actual = [context.draft(last, draft_config).tokens for context in (led, shared, later, led)]
        assert torch.equal(actual[0], actual[1]) and torch.equal(actual[0], actual[3])
        assert torch.equal(led.select([rows - 1]).draft(last[-1:], draft_config).tokens, actual[0][-1:])


def test_threshold_is_the_default_and_stops_drafting(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    head = adapter(base, confidence_threshold=0.3)
    head.save_pretrained(tmp_path)
    loaded = load_head(tmp_path, base)
    assert default_draft_config(loaded).confidence_threshold == 0.3
    depths, full = (
        [s.depth for s in decode(base, loaded, PROMPTS[2], max_new_tokens=30, ignore_eos=True, **never).steps]
        for never in ({}, {"draft_config": DraftConfig(tree=TokenTree.chain(4))})
    )
    assert min(depths[:-1]) >= 1 and sum(depths) / len(depths) < sum(full) / len(full)
