"""Every way in which a saved head can be wrong is one clear error."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json, write_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.common.contract import DraftHead
from drafthead.models.heads.common.files import resolve_folder
from drafthead.models.heads.medusa import MedusaConfig

TinyBase = Callable[..., BaseModel]


@pytest.fixture
def saved(tiny_base: TinyBase, tmp_path: Path) -> Path:
    MedusaConfig(num_draft_tokens=3, draft_vocab_size=100).build(tiny_base(), torch.arange(100)).save_pretrained(
        tmp_path
    )
    return tmp_path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"settings": {"num_draft_tokens": 99}},
            r"config.json has bad settings \(head.num_draft_tokens must be in .*got 99",
        ),
        ({"settings": {"num_draft_tokens": "three"}}, r"config.json has bad settings"),
        ({"settings": [3]}, "has a list as settings, expected a dict"),
        ({"base": "smollm2"}, "has a str as base, expected a dict"),
        ({"head_type": "common"}, "head_type must be one of draft_lm, .*, got 'common'"),
        ({"draft_vocab": None}, r"model.safetensors does not fit its config: size mismatch for \S+"),
    ],
)
def test_bad_configs(saved: Path, tiny_base: TinyBase, change: dict[str, object], says: str) -> None:
    config = read_json(saved / "config.json")
    write_json(saved / "config.json", {**config, **change})
    with pytest.raises(UserError, match=says):
        DraftHead.from_pretrained(saved, tiny_base())


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"paths": []}, r"tree.json is no tree.json \('choices'\)"),
        ([[0]], "is no tree.json"),
        ({"choices": [[0, 0]]}, "has no parent"),
        ({"choices": [[0] * d for d in range(1, 5)]}, "is 4 deep, but the head drafts 3 positions"),
    ],
)
def test_bad_trees(saved: Path, tiny_base: TinyBase, tree: object, says: str) -> None:
    write_json(saved / "tree.json", tree)
    with pytest.raises(UserError, match=says):
        DraftHead.from_pretrained(saved, tiny_base())


def test_a_name_that_the_hub_forbids() -> None:
    with pytest.raises(UserError, match=r"no draft head at some one/-head: it is no local folder, and the Hub said: "):
        resolve_folder("some one/-head")
