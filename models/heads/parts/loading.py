"""The types of heads, and loading a saved head with the base that it names."""

import pkgutil
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from drafthead.errors import UserError, one_line
from drafthead.models.base.base_config import ADAPTER, SAVED_KEYS, SWITCHES, BaseConfig
from drafthead.models.base.base_model import BaseModel, meta_base
from drafthead.models.base.parts import BaseParts
from drafthead.models.base.text_model import LOAD_ERRORS, build, parameter_limit
from drafthead.models.heads.parts import head_folder
from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig
from drafthead.settings.schema import check

PACKAGE = "drafthead.models.heads"
RANDOM_LIMIT = 20_000_000
"""Largest number of parameters of a random base that a head names; no file bounds it."""


def load_base(name: str, device: torch.device | str | None = None, **settings: Any) -> BaseModel:
    """Load a frozen base.

    Args:
        name: a Hub id, a folder or ``embedded:smollm2``.
        device: device to load it onto, such as "cuda:1"; None is the machine's accelerator, else the CPU.
        **settings: fields of ``BaseConfig``.
    """
    return BaseModel.load(BaseConfig(name=name, **settings), device)


def load_parts(name: str, device: torch.device | str | None = None, **settings: Any) -> BaseParts:
    """Load a frozen base without its layers, for heads that get hidden states from elsewhere.

    Embedding, final norm and output head are read, and a few rows of each layer, which identify the base. The arguments
    are those of ``load_base``.
    """
    return BaseParts.of_checkpoint(BaseConfig(name=name, **settings), device)


def load_head(
    name: str | Path,
    base: BaseParts | None = None,
    revision: str | None = None,
    device: torch.device | str | None = None,
    any_base: bool = False,
) -> DraftHead:
    """Load a head from a folder or a Hub repository.

    Args:
        name: folder or repository.
        base: base, or parts of it, to attach the head to; None loads the base that the head names.
        revision: branch, tag or commit of the repository (None: its newest commit); a folder ignores it.
        device: device to load the base onto if ``base`` is None; None is the machine's accelerator, else the CPU.
        any_base: also accept a ``base`` that the head was not trained for, if its sizes are equal: a fine-tune.
    """
    folder = head_folder.resolve_folder(name, revision)
    return _attached(folder, base, any_base) if base else load_base_and_head(folder, None, device)[1]


def load_base_and_head(
    name: str | Path, base: BaseConfig | None = None, device: torch.device | str | None = None
) -> tuple[BaseModel, DraftHead]:
    """Load a head and its base onto ``device``. If ``base`` names no base, load the base that the head was trained for;
    settings saved with the head then replace defaults."""
    folder, config = _named(name, base)
    model = BaseModel.load(config, device)
    return model, _attached(folder, model)


def load_parts_and_head(name: str | Path, base: BaseConfig | None = None) -> tuple[BaseParts, DraftHead]:
    """Load a head onto its base without the base's layers, as ``load_base_and_head`` does with them."""
    folder, config = _named(name, base)
    parts = BaseParts.of_checkpoint(config)
    return parts, _attached(folder, parts)


def _named(name: str | Path, base: BaseConfig | None) -> tuple[Path, BaseConfig]:
    """Return the folder of a head, and ``base`` or, if it names none, the base that the head was trained for."""
    folder = head_folder.resolve_folder(name)
    trained = head_folder.read_head_config(folder)["base"]
    config = base or BaseConfig()
    if not config.name and not config.random:
        config = _with_saved(config, folder, trained.get("recipe"))
    return folder, config


def _with_saved(config: BaseConfig, folder: Path, recipe: Any) -> BaseConfig:
    """Return ``config`` with the settings of the base in a head's ``recipe`` in place of defaults. They only locate the
    base and switch its reasoning, so a downloaded config cannot turn on trust_remote_code."""
    if not isinstance(recipe, dict):
        raise UserError(f"{folder}/config.json has a base.recipe of type {type(recipe).__name__}; copy the head again")
    saved_settings = {k: v for k, v in recipe.items() if k in SAVED_KEYS}
    if isinstance(variables := recipe.get("chat_template_kwargs"), dict):
        saved_settings["chat_template_kwargs"] = {k: v for k, v in variables.items() if k in SWITCHES}
    if recipe.get("adapter") is not None:
        # The adapter is always in the head's folder; a path in the config is not followed.
        saved_settings["adapter"] = str(folder / ADAPTER)
    default = BaseConfig()
    unset = {k: v for k, v in saved_settings.items() if getattr(config, k) == getattr(default, k)}
    try:
        config = replace(config, **unset)
        if config.random:
            too_large = UserError(f"a random base of more than {RANDOM_LIMIT:,} parameters; give your own with base=")
            with parameter_limit(RANDOM_LIMIT, too_large), torch.device("meta"):
                build(config.transformers_config())
    except LOAD_ERRORS as error:
        why = one_line(error)
        raise UserError(f"{folder}/config.json names a base with bad settings ({why}); copy the head again") from None
    return config


def _attached(folder: Path, base: BaseParts, any_base: bool = False) -> DraftHead:
    """Return the head in a folder in evaluation mode; reject bad files, and another base unless ``any_base``."""
    config = head_folder.read_head_config(folder)
    head_folder.check_base(folder, config["base"], base, any_base)
    weights = head_folder.read_weights(folder, config.get("weights_sha256"))
    d2t = head_folder.draft_ids(folder, config, weights, base.vocab_size)
    settings = saved_head_config(folder, config)
    bare = meta_base(base.model_config)
    head_folder.check_parameters(folder, lambda: settings.without_weights(bare).num_parameters(), weights)
    head = settings.build(base, d2t, start=False)
    try:
        missing, unexpected = head.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{folder}/model.safetensors does not fit its config: {reason}; copy both again") from None
    if missing or unexpected:
        what = f"{folder}/model.safetensors does not fit its config: missing {missing}, unknown {unexpected}"
        raise UserError(f"{what}; copy both again")
    head_folder.read_trees(folder, head)
    return head.eval()


def saved_head_config(folder: Path, content: dict[str, Any]) -> DraftHeadConfig:
    """Return the config of the head in ``folder``, whose ``config.json`` is ``content``."""
    try:
        return parse_head({**content["settings"], "head_type": content["head_type"]})
    except UserError as error:
        raise UserError(f"{folder}/config.json has bad settings ({error}); copy the head again") from None


def head_types() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(import_module(PACKAGE).__path__) if not module.ispkg]


def config_class(head_type: str) -> type[DraftHeadConfig]:
    if head_type not in head_types():
        raise UserError(f"head_type must be one of {', '.join(head_types())}, got {head_type!r}")
    module = import_module(f"{PACKAGE}.{head_type}")
    classes = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, DraftHeadConfig)]
    (config,) = (kind for kind in classes if kind.__module__ == module.__name__)
    return config


def parse_head(node: dict[str, Any]) -> DraftHeadConfig:
    """Return the config of a head's settings, ``{head_type: medusa, num_draft_tokens: 3, ...}``."""
    settings = {**node}
    kind = config_class(str(settings.pop("head_type", "")))
    known = [field.name for field in fields(kind)]
    if unknown := [name for name in settings if name not in known]:
        # A recipe's keys belong to the recipe's head, also if the command line chooses another head.
        what = f"{kind.__name__} has no {', '.join(unknown)}; the recipe sets them for another head, or they are"
        why = f"misspelt or not declared in that class (it has {', '.join(known)})"
        how = " ".join(f"~head.{name}" for name in unknown)
        raise UserError(f"head: {what} {why}. Choose a recipe of this head, or leave them out: {how}")
    return check(settings, kind, prefix="head")
