"""Loading a saved head and the base that it names, ready to decode."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drafthead.models.base.base_config import ADAPTER, SAVED_KEYS, BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.head_folder import read_head_config, resolve_folder


def load_base(name: str, device: torch.device | str | None = None, **settings: Any) -> BaseModel:
    """Load a frozen base.

    Args:
        name: a Hub id, a folder or ``embedded:smollm2``.
        device: device to load it onto, such as "cuda:1"; None is the machine's accelerator, else the CPU.
        **settings: fields of ``BaseConfig``.
    """
    return BaseModel.load(BaseConfig(name=name, **settings), device)


def load_head(
    name: str | Path,
    base: BaseModel | None = None,
    revision: str | None = None,
    device: torch.device | str | None = None,
) -> DraftHead:
    """Load a head from a folder or a Hub repository.

    Args:
        name: folder or repository.
        base: base to attach the head to; None loads the base that the head names.
        revision: branch, tag or commit of the repository; None is its newest commit.
        device: device to load the head's base onto, if it is not given; see :func:`load_base`.
    """
    folder = resolve_folder(name, revision)
    return DraftHead.from_pretrained(folder, base) if base else load_base_and_head(folder, None, device)[1]


def load_base_and_head(
    name: str | Path, base: BaseConfig | None = None, device: torch.device | str | None = None
) -> tuple[BaseModel, DraftHead]:
    """Load a head from a folder or a Hub repository, and its base, onto ``device`` (see :func:`load_base`).

    ``base`` has settings that override the saved ones. If it has no name and is not random, the base that the head
    was trained for is loaded.
    """
    folder = resolve_folder(name)
    trained = read_head_config(folder)["base"]
    config = base or BaseConfig()
    if not config.name and not config.random:
        # Saved settings only locate the base, and never override the caller's. So a downloaded config cannot turn on
        # trust_remote_code.
        default = BaseConfig()
        recipe = dict(trained.get("recipe") or {})
        saved_settings = {k: v for k, v in recipe.items() if k in SAVED_KEYS}
        if recipe.get("adapter") is not None:
            # The adapter is always in the head's folder; a path in the config is not followed.
            saved_settings["adapter"] = str(folder / ADAPTER)
        unset = {k: v for k, v in saved_settings.items() if getattr(config, k) == getattr(default, k)}
        config = replace(config, **unset)
    model = BaseModel.load(config, device)
    return model, DraftHead.from_pretrained(folder, model)
