"""A saved head and the base that it names, ready to decode."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drafthead.models.base.base_config import ADAPTER, SAVED_KEYS, BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.head_folder import read_head_config, resolve_folder


def load_base(name: str, **settings: Any) -> BaseModel:
    """A frozen base, on the GPU if there is one: hub id, folder or ``embedded:smollm2``; ``BaseConfig``'s settings."""
    return BaseModel.load(BaseConfig(name=name, **settings), default_device())


def load_head(name: str | Path, base: BaseModel | None = None, revision: str | None = None) -> DraftHead:
    """A head from a folder or a Hub repository, attached to ``base``; without one, to the base that it names.

    ``revision`` is a branch, tag or commit of the repository; None is its newest commit.
    """
    folder = resolve_folder(name, revision)
    return DraftHead.from_pretrained(folder, base) if base else load_base_and_head(folder)[1]


def load_base_and_head(name: str | Path, base: BaseConfig | None = None) -> tuple[BaseModel, DraftHead]:
    """Load a head from a folder or a Hub repository, and its base onto the GPU if there is one.

    ``base``: overrides; without a name (and not random) the base that the head was trained for is loaded.
    """
    folder = resolve_folder(name)
    trained = read_head_config(folder)["base"]
    config = base or BaseConfig()
    if not config.name and not config.random:
        # Only what finds the base again, and only where the caller said nothing: a downloaded config cannot turn on
        # trust_remote_code or undo an override.
        default = BaseConfig()
        recipe = dict(trained.get("recipe") or {})
        remembered = {k: v for k, v in recipe.items() if k in SAVED_KEYS}
        if recipe.get("adapter") is not None:
            # Where it lies beside the head; what a config says of other places is not followed.
            remembered["adapter"] = str(folder / ADAPTER)
        config = replace(config, **{k: v for k, v in remembered.items() if getattr(config, k) == getattr(default, k)})
    model = BaseModel.load(config, default_device())
    return model, DraftHead.from_pretrained(folder, model)


def default_device() -> str:
    """The GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
