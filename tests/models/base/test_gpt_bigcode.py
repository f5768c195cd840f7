"""GPT-BigCode as a base: other names, learned positions, one key/value head, biases, an MLP without a gate."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from drafthead.models.base.base_model import BaseModel, PartialForward
from drafthead.models.base.config import BaseConfig
from drafthead.models.base.layers import attention_sizes
from drafthead.models.decoding.contract import DraftConfig
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.drafters.draft_model import early_exit
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig
from drafthead.models.token_tree import TokenTree
from support import TINY, randomised

PROMPTS = [[5, 6, 7] * 4, [9], list(range(40, 70))]
TREE = TokenTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 3)])
HEADS = {
    "medusa": MedusaConfig(num_draft_tokens=3, draft_vocab_size=100),
    "hydra": HydraConfig(num_draft_tokens=3),
    "mlp_speculator": MLPSpeculatorConfig(num_draft_tokens=3, inner_dim=24),
}


def tiny(**settings: object) -> BaseModel:
    # num_key_value_heads and intermediate_size as debug=tiny gives them: a GPT-BigCode has neither.
    shape = TINY | {"model_type": "gpt_bigcode", "head_dim": None, "bos_token_id": 0, "eos_token_id": 0}
    given = {key: value for key, value in {**shape, **settings}.items() if value is not None}
    config = BaseConfig(random=True, shape=given, tokenizer="builtin:tiny", dtype="float32")
    return BaseModel.load(config)


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return tiny()


def test_plain_decoding_equals_transformers(base: BaseModel) -> None:
    for ids in PROMPTS:
        wanted = base.model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
        assert ids + decode(base, None, ids, max_new_tokens=20).tokens == wanted[0].tolist()


@pytest.mark.parametrize("multi_query", [True, False])
def test_the_cache_holds_what_attention_makes(multi_query: bool) -> None:
    base = tiny(multi_query=multi_query, head_dim=3)
    assert attention_sizes(base.model.config) == (1 if multi_query else 4, 8)
    assert base.new_cache(7).keys.shape == (3, 1, 1 if multi_query else 4, 7, 8)


@pytest.mark.parametrize("graphs", ["never", "always"])
@pytest.mark.parametrize("name", HEADS)
def test_greedy_equals_plain_decoding(name: str, graphs: str, base: BaseModel) -> None:
    if graphs == "always":
        base = BaseModel.load(replace(base.config, graphs="always"))
    config = HEADS[name]
    d2t = torch.arange(0, 300, 3) if config.draft_vocab_size else None
    head = randomised(config.build(base, d2t), 0.05).eval()
    plain = [decode(base, None, ids, max_new_tokens=14, ignore_eos=True).tokens for ids in PROMPTS]
    for tree in (TokenTree.chain(3), TREE):
        how: dict[str, Any] = {"max_new_tokens": 14, "draft_config": DraftConfig(tree=tree), "ignore_eos": True}
        assert [decode(base, head, ids, **how).tokens for ids in PROMPTS] == plain
        assert [found.tokens for found in decode_batch(base, head, PROMPTS, **how)] == plain


def test_parts_of_the_stack(base: BaseModel) -> None:
    """An early exit drafts with its own layers, and the last layers go on from what the first leave."""
    shallow = early_exit(base, 2)
    assert len(shallow.model.model.transformer.h) == 2 and len(base.model.transformer.h) == 3
    plain = decode(base, None, PROMPTS[0], max_new_tokens=14, ignore_eos=True)
    found = decode(base, shallow, PROMPTS[0], max_new_tokens=14, ignore_eos=True)
    assert found.tokens == plain.tokens and sum(step.accepted for step in found.steps) > 0
    ids = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        states = base.model(ids, output_hidden_states=True).hidden_states
        done = PartialForward(layers=2, hidden=states[2])
        chain = TokenTree.chain(ids.shape[1] - 1).shape
        hidden = base.verify(ids, chain, base.new_cache(40), partial_forward=done).final
        torch.testing.assert_close(hidden, states[-1], rtol=1e-4, atol=1e-5)


def test_the_names_are_in_no_register(base: BaseModel) -> None:
    """Else weights would be saved, adapted and packed twice."""
    for model in (base.model, early_exit(base, 2).model.model):
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        assert names and not [name for name in names if name.startswith("model") or ".layers" in name]
