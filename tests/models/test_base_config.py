"""Bases that are not there, or not whole: what a user is told."""

from collections.abc import Callable
from pathlib import Path

import pytest

from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.config import BaseConfig

TinyBase = Callable[..., BaseModel]


def test_a_base_that_is_not_there(tiny_base: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "file").touch()
    tiny_base().model.config.save_pretrained(tmp_path / "folder")
    cases = {
        "/nowhere/x": "no base model at /nowhere/x: there is no such folder; correct base.name",
        "./nowhere": "no base model at ./nowhere: there is no such folder",
        str(tmp_path / "file"): "file: that is a file; correct base.name",
        str(tmp_path / "folder"): f"no tokenizer in {tmp_path / 'folder'}, .*base.tokenizer=",
        "nobody/nothing": "'nobody/nothing' is no local folder and could not be fetched: .*debug=tiny",
    }
    for name, says in cases.items():
        with pytest.raises(UserError, match=says) as found:
            BaseModel.load(BaseConfig(name=name))
        assert "\n" not in str(found.value)
        if "folder" not in name:
            with pytest.raises(UserError, match=says):
                BaseConfig(name=name).transformers_config()
    folder = str(tmp_path / "folder")
    with pytest.raises(UserError, match="base.tokenizer=/nowhere could not be loaded: .* Name a folder"):
        BaseModel.load(BaseConfig(name=folder, tokenizer="/nowhere"))
    with pytest.raises(UserError, match=f"the base model in {folder} could not be loaded: .*save_pretrained"):
        BaseModel.load(BaseConfig(name=folder, tokenizer="builtin:tiny"))
