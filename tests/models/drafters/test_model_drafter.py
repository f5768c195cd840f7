"""A causal LM as drafter: nothing is read twice, and the base stays as it is."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import AdaptiveLength, DraftConfig
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.token_tree import TokenTree
from support import Context, TinyBase, refuses

PROMPTS = [[5, 6, 7, 5, 6, 7], [9], list(range(40, 90))]


@contextmanager
def tokens_of_passes(model: BaseModel) -> Iterator[list[int]]:
    """Record how many tokens of a row a model reads in every pass."""
    passes: list[int] = []
    embedding = model.model.get_input_embeddings()
    with embedding.register_forward_pre_hook(lambda module, inputs: passes.append(inputs[0].shape[-1])):
        yield passes


@pytest.mark.parametrize("rows", [1, 2])
def test_accepted_drafts_are_not_read_again(tiny_base: TinyBase, rows: int) -> None:
    """After a full acceptance one pass takes the last draft and the bonus: nothing lags behind."""
    base, drafter = tiny_base(), early_exit(tiny_base(), 2, num_tokens=3)
    session = Context.of(drafter, rows).read(torch.arange(8).expand(rows, -1)).session
    last = torch.full((rows,), 7)
    for tree in (TokenTree.chain(3), TokenTree.expansion([2, 2, 1])):
        drafted = session.draft(last, DraftConfig(tree=tree)).tokens
        path = [0]
        while tree.parents.count(path[-1]):
            path.append(tree.parents.index(path[-1]))
        with tokens_of_passes(drafter.model) as passes:
            session.commit(drafted[:, path], [len(path)] * rows, None, torch.tensor(path).expand(rows, -1))
            last = torch.full((rows,), base.vocab_size - 1)
            session.draft(last, DraftConfig(tree=TokenTree.chain(3)))
        assert passes == [2, 1, 1]


def test_drafts_only_ids_that_the_model_knows(tiny_base: TinyBase) -> None:
    base = tiny_base()
    small = early_exit(base, 2).model
    small.vocab_size = 200  # as if the base's other ids were padding
    small.logits = lambda hidden: base.logits(hidden)[..., :200]  # type: ignore[method-assign]
    drafter = ModelDrafter(small, base)
    context = Context.of(drafter).read(torch.tensor([[5, 250, 7]]))
    proposal = context.draft(torch.tensor([299]), DraftConfig(tree=TokenTree.expansion([2, 1, 2, 1])))
    assert int(proposal.tokens[:, 1:].max()) < 200
    small.vocab_size = 301
    refuses("has 301 ids but the target has 300", ModelDrafter, small, base)


def test_adaptive_length(tiny_base: TinyBase) -> None:
    """+2 after a full acceptance, -1 otherwise, within the tree; one prompt at a time."""
    base = tiny_base()
    draft_config = DraftConfig(tree=TokenTree.chain(6), adaptive=AdaptiveLength(start=2))
    model = ModelDrafter(base, num_tokens=6)
    right = decode(base, model, PROMPTS[0], max_new_tokens=30, draft_config=draft_config, ignore_eos=True)
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
    refuses("needs 1 to 2 layers, got 3", early_exit, base, 3)
