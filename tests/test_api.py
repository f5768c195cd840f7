"""The public Python API, on a tiny head that was saved and loaded again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import drafthead
from drafthead.errors import UserError
from drafthead.files.local import read_json, write_json
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.generate import text_pieces
from drafthead.models.drafters.draft_model import ModelDrafter
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree
from support import TinyBase, randomised, refuses


@pytest.fixture
def saved(tiny_base: TinyBase, tmp_path: Path) -> Path:
    config = MedusaConfig(num_draft_tokens=3, own_lm_head=True, draft_vocab_size=100)
    head = randomised(config.build(tiny_base(), torch.arange(100)))
    head.tree = TokenTree.from_paths([(0,), (1,), (0, 0)])
    head.save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def test_a_head_loads_its_base(saved: Path) -> None:
    head = drafthead.load_head(saved)
    answer = drafthead.generate(head.base, head, "Why is the sky blue?", max_new_tokens=12)
    plain = drafthead.generate(head.base, None, "Why is the sky blue?", max_new_tokens=12)
    assert answer.tokens == plain.tokens and answer.text == plain.text
    ids = torch.tensor([[3, 4, 5]])
    assert drafthead.generate(head.base, head, ids, max_new_tokens=5).tokens == (
        drafthead.generate(head.base, None, [3, 4, 5], max_new_tokens=5).tokens
    )


def test_streamed_pieces_are_the_answer_with_accepted_drafts_marked(tiny_base: TinyBase) -> None:
    base = tiny_base()
    drafter = ModelDrafter(tiny_base(), base, num_tokens=3)
    answer = drafthead.generate(base, drafter, "Why?", max_new_tokens=40)
    streamed = drafthead.stream(base, drafter, "Why?", max_new_tokens=40)
    pieces = iter(streamed)
    assert next(pieces).text and len(streamed.sequence.answer) < 8, "decoded before it was asked for"
    rest = list(pieces)
    assert streamed.sequence.answer == answer.tokens
    assert streamed.mean_accepted_length == answer.mean_accepted_length and streamed.tokens_per_second > 0
    assert 0 < sum(piece.accepted for piece in rest) <= streamed.accepted
    ids = base.tokenizer("wörld 😀 end").input_ids
    marked = list(text_pieces(base.tokenizer, [(token, n % 2 == 0) for n, token in enumerate(ids)]))
    assert "".join(text for text, _ in marked) == base.tokenizer.decode(ids, skip_special_tokens=True)
    assert "\ufffd" not in "".join(text for text, _ in marked)
    assert drafthead.generate(base, None, "Why?", max_new_tokens=40).text == "".join(
        text for text, _ in drafthead.stream(base, None, "Why?", max_new_tokens=40)
    )


@pytest.mark.parametrize("shape", [(2, 3), (3, 1), (1, 2, 2)])
def test_ids_of_several_prompts_are_not_joined_into_one(tiny_base: TinyBase, shape: tuple[int, ...]) -> None:
    ids = torch.full(shape, 5)
    for answer in (drafthead.generate, drafthead.stream):
        with pytest.raises(UserError, match=r"shape \[\d, .*custom_generate=drafthead.custom_generate"):
            answer(tiny_base(), None, ids, max_new_tokens=2)


def test_bad_calls(tiny_base: TinyBase) -> None:
    with pytest.raises(UserError, match="the text holds half a character") as error:
        drafthead.generate(tiny_base(), PromptLookup(3), "a\ud800")
    assert "\n" not in str(error.value) and str(error.value).isascii()
    with pytest.raises(AttributeError, match="lod_head"):
        drafthead.lod_head  # noqa: B018


def test_a_saved_head_cannot_turn_on_remote_code_or_undo_an_override(saved: Path) -> None:
    config = read_json(saved / "config.json")
    config["base"]["recipe"] |= {"trust_remote_code": True, "prepack": False, "wings": 2}
    write_json(saved / "config.json", config)
    base, _ = load_base_and_head(saved, BaseConfig(max_context=200))
    assert base.config.trust_remote_code is False and base.config.prepack
    assert base.max_context == 200


@pytest.mark.parametrize("own_lm_head", [True, False])
def test_a_head_drafts_for_a_base_in_bfloat16(tiny_base: TinyBase, own_lm_head: bool) -> None:
    base = tiny_base()
    half = BaseModel.load(replace(base.config, dtype="bfloat16"))
    config = MedusaConfig(num_draft_tokens=2, own_lm_head=own_lm_head, draft_vocab_size=100)
    head = config.build(half, torch.arange(100)).eval()
    draft_config = DraftConfig(tree=TokenTree.from_paths([(0,), (1,), (0, 0)]))
    assert len(drafthead.generate(half, head, [3, 4, 5], max_new_tokens=6, draft_config=draft_config).tokens) >= 1


def test_fingerprints_of_other_dtypes(tiny_base: TinyBase, saved: Path) -> None:
    base = tiny_base()
    assert BaseModel.load(replace(base.config, dtype="bfloat16")).fingerprint == base.fingerprint
    assert tiny_base(seed=1).fingerprint != base.fingerprint
    half = BaseModel.load(replace(tiny_base().config, dtype="float16"))
    refuses("fingerprint .*float16 rounds tiny weights.* try bfloat16 or float32", drafthead.load_head, saved, half)
