"""A causal LM as drafter: plain decoding's text, nothing read twice, and a state that never changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding import draft_cache
from drafthead.models.decoding.contract import AdaptiveLength, DraftConfig, DraftState, DynamicTree, Proposal
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.token_tree import TokenTree

TinyBase = Callable[..., BaseModel]
PROMPTS = [[5, 6, 7, 5, 6, 7], [9], list(range(40, 90))]
PLANS = {
    "chain": DraftConfig(tree=TokenTree.chain(5)),
    "expansion": DraftConfig(tree=TokenTree.expansion([2, 1, 2, 1])),
    "dynamic": DraftConfig(tree=DynamicTree(nodes=12, width=3, depth=4)),
    "confident": DraftConfig(tree=TokenTree.chain(5), confidence_threshold=0.3),
}


class Counted:
    """How many tokens a model reads in every pass."""

    def __init__(self, model: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[int] = []
        for name in ("forward", "verify"):
            monkeypatch.setattr(model, name, self._counting(getattr(model, name)))

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tokens: torch.Tensor, *rest: Any, **named: Any) -> Any:
            self.passes.append(tokens.shape[1])
            return call(tokens, *rest, **named)

        return counted


@pytest.mark.parametrize("rows", [1, 2])
def test_accepted_drafts_are_not_read_again(tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """After a full acceptance one pass takes the last draft and the bonus: nothing lags behind."""
    base, drafter = tiny_base(), early_exit(tiny_base(), 2, num_tokens=3)
    state = drafter.update(drafter.init_state(rows), torch.arange(8).expand(rows, -1), None)
    last = torch.full((rows,), 7)
    reads = Counted(drafter.model, monkeypatch)
    for tree in (TokenTree.chain(3), TokenTree.expansion([2, 2, 1])):
        drafted = drafter.draft(state, last, DraftConfig(tree=tree)).tokens
        path = [0]
        while tree.parents.count(path[-1]):
            path.append(tree.parents.index(path[-1]))
        reads.passes.clear()
        state = drafter.update(state, drafted[:, path], None)
        drafter.draft(state, torch.full((rows,), base.vocab_size - 1), DraftConfig(tree=TokenTree.chain(3)))
        assert reads.passes == [2, 1, 1]


@pytest.mark.parametrize("draft_config", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("rows", [1, 3])
def test_states_stay_as_they_were(tiny_base: TinyBase, draft_config: DraftConfig, rows: int) -> None:
    """Whatever other states drafted meanwhile, and whatever of it the shared memory kept."""
    drafter = early_exit(tiny_base(), 2)
    prompt, counts = torch.arange(rows * 6).view(rows, 6), torch.tensor([6, 2, 4][:rows])
    old = drafter.update(drafter.init_state(rows), prompt, None, counts)
    last = torch.arange(rows) + 50
    first = drafter.draft(old, last, draft_config)
    accepted = torch.cat([last[:, None], first.tokens[:, 1:2]], 1)
    kept = torch.tensor([2, 1, 2][:rows])
    new = drafter.update(old, accepted, None, kept)
    other = drafter.update(old, accepted + 1, None, kept)
    for state in (new, other, old, new):
        assert_same(drafter.draft(state, last, draft_config), drafter.draft(afresh(drafter, state), last, draft_config))
    part = drafter.draft(new.select([rows - 1]), last[-1:], draft_config)
    assert_same(part, drafter.draft(afresh(drafter, new.select([rows - 1])), last[-1:], draft_config))


def afresh(drafter: ModelDrafter, state: DraftState) -> DraftState:
    """The same committed tokens in a state that has read nothing."""
    text = state.text  # type: ignore[attr-defined]
    return drafter.update(drafter.init_state(len(text.lengths)), text.tokens, None, text.lengths)


def assert_same(left: Proposal, right: Proposal) -> None:
    assert torch.equal(left.tokens, right.tokens)
    assert torch.equal(left.shape.parents, right.shape.parents)


def test_a_long_answer_outgrows_the_memory(tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_cache, "INITIAL_CAPACITY", 8)
    base, drafter = tiny_base(), ModelDrafter(tiny_base(), num_tokens=7)
    plain = [decode(base, None, p, max_new_tokens=97, ignore_eos=True).tokens for p in PROMPTS[:2]]
    single = [decode(base, drafter, p, max_new_tokens=97, ignore_eos=True) for p in PROMPTS[:2]]
    batch = decode_batch(base, drafter, PROMPTS[:2], max_new_tokens=97, ignore_eos=True)
    assert [r.tokens for r in single] == [r.tokens for r in batch] == plain
    assert all(step.accepted == 7 for r in (*single, *batch) for step in r.steps)


def test_drafts_only_ids_that_the_model_knows(tiny_base: TinyBase) -> None:
    base = tiny_base()
    small = early_exit(base, 2).model
    small.vocab_size = 200  # as if the base's other ids were padding
    small.logits = lambda hidden: base.logits(hidden)[..., :200]  # type: ignore[method-assign]
    drafter = ModelDrafter(small, base)
    state = drafter.update(drafter.init_state(1), torch.tensor([[5, 250, 7]]), None)
    assert int(drafter.draft(state, torch.tensor([299]), PLANS["expansion"]).tokens[:, 1:].max()) < 200
    small.vocab_size = 301
    with pytest.raises(UserError, match="has 301 ids but the target has 300"):
        ModelDrafter(small, base)


def test_adaptive_length(tiny_base: TinyBase) -> None:
    """+2 after a full acceptance, -1 otherwise, within the tree; one prompt at a time."""
    base = tiny_base()
    draft_config = DraftConfig(tree=TokenTree.chain(6), adaptive=AdaptiveLength(start=2))
    right = decode(
        base,
        ModelDrafter(base, num_tokens=6),
        PROMPTS[0],
        max_new_tokens=30,
        draft_config=draft_config,
        ignore_eos=True,
    )
    assert [step.depth for step in right.steps][:4] == [2, 4, 6, 6]
    plain = decode(base, None, PROMPTS[0], max_new_tokens=30, ignore_eos=True)
    wrong = ModelDrafter(tiny_base(seed=1), num_tokens=6)
    result = decode(base, wrong, PROMPTS[0], max_new_tokens=30, draft_config=draft_config, ignore_eos=True)
    assert [step.depth for step in result.steps][:3] == [2, 1, 1] and result.tokens == plain.tokens
    with pytest.raises(UserError, match="one prompt at a time, got 3"):
        decode_batch(base, wrong, PROMPTS, max_new_tokens=8, draft_config=draft_config)


def test_early_exit_leaves_the_base_as_it_is(tiny_base: TinyBase) -> None:
    base = tiny_base()
    tokens = torch.arange(5)[None]
    before = base.forward(tokens, base.new_cache(8)).final
    small = early_exit(base, 1).model
    small.forward(tokens, small.new_cache(8))
    assert base.num_layers == len(base.model.model.layers) == base.model.config.num_hidden_layers == 3
    assert torch.equal(base.forward(tokens, base.new_cache(8)).final, before)
    assert small.model.model.layers[0] is base.model.model.layers[0]
    with pytest.raises(UserError, match="needs 1 to 2 layers, got 3"):
        early_exit(base, 3)
