"""GPT-BigCode as a base: other names, learned positions, one key/value head, biases, an MLP without a gate."""

from dataclasses import replace

import pytest
import torch

from drafthead.models.base.base_model import BaseModel, PartialForward
from drafthead.models.base.structure import attention_sizes
from drafthead.models.decoding.loop import decode
from drafthead.models.drafters.draft_model import early_exit
from drafthead.models.token_tree import TokenTree
from support import TinyBase


@pytest.mark.parametrize("multi_query", [True, False])
def test_the_cache_holds_what_attention_makes(tiny_base: TinyBase, multi_query: bool) -> None:
    """GPT-BigCode ignores num_key_value_heads and head_dim."""
    config = tiny_base("gpt_bigcode").config
    base = BaseModel.load(replace(config, shape=config.shape | {"multi_query": multi_query, "head_dim": 3}))
    assert attention_sizes(base.model.config) == (1 if multi_query else 4, 8)
    assert base.new_cache(7).keys.shape == (3, 1, 1 if multi_query else 4, 7, 8)


def test_parts_of_the_stack(tiny_base: TinyBase) -> None:
    """An early exit drafts with the first layers, and the last layers continue from their output."""
    base = tiny_base("gpt_bigcode")
    shallow = early_exit(base, 2)
    assert len(shallow.model.model.transformer.h) == 2 and len(base.model.transformer.h) == 3
    plain = decode(base, None, [5, 6, 7] * 4, max_new_tokens=14, ignore_eos=True)
    drafted = decode(base, shallow, [5, 6, 7] * 4, max_new_tokens=14, ignore_eos=True)
    assert drafted.tokens == plain.tokens and sum(step.accepted for step in drafted.steps) > 0
    ids = torch.arange(40, 70)[None]
    with torch.inference_mode():
        states = base.model(ids, output_hidden_states=True).hidden_states
        done = PartialForward(layers=2, hidden=states[2])
        chain = TokenTree.chain(ids.shape[1] - 1).shape
        hidden = base.verify(ids, chain, base.new_cache(40), partial_forward=done).final
        torch.testing.assert_close(hidden, states[-1], rtol=1e-4, atol=1e-5)


def test_second_names_are_not_registered(tiny_base: TinyBase) -> None:
    """Registered twice, weights would be saved, adapted and packed twice."""
    base = tiny_base("gpt_bigcode")
    for model in (base.model, early_exit(base, 2).model.model):
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        assert names and not [name for name in names if name.startswith("model") or ".layers" in name]
