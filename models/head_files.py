"""The files of a saved head: where they are, and what is checked before a head is made of them."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafthead.data.errors import UserError
from drafthead.data.files import read_json
from drafthead.data.token_tree import TokenTree
from drafthead.models.base import BaseModel
from drafthead.models.hub import fetch, refuse_pickles

FORMAT = 1


def resolve_folder(name: str | Path, revision: str | None = None) -> Path:
    """A local folder as it is, a Hub repository downloaded.

    Raises:
        UserError: neither exists, or the repository holds weights only as pickles.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.is_absolute() or str(name).count("/") != 1:
        raise UserError(
            f"no draft head at {name}: give a run's head folder (outputs/NAME/head) or a Hub repository (user/name)"
        )
    return fetch(str(name), revision)


def read_head_config(folder: Path) -> dict[str, Any]:
    """The checked ``config.json`` of a saved head (no weights are read).

    Raises:
        UserError: not a head of ours, or of a newer format.
    """
    config = read_json(folder / "config.json")
    wanted = {"format", "head", "settings", "base", "draft_vocab"}
    if not isinstance(config, dict) or not wanted <= set(config):
        raise UserError(
            f"{folder}/config.json is no drafthead config (it needs {sorted(wanted)}); is this a head folder?"
        )
    if config["format"] != FORMAT:
        raise UserError(f"{folder} has format {config['format']}, this version reads {FORMAT}; update drafthead")
    for key, kind in (("head", str), ("settings", dict), ("base", dict)):
        if not isinstance(config[key], kind):
            raise UserError(
                f"{folder}/config.json has a {type(config[key]).__name__} as {key}, expected a {kind.__name__}; copy "
                "the head again"
            )
    return config


def read_tree(path: Path, depth: int) -> TokenTree:
    """The tree in a ``tree.json``.

    Raises:
        UserError: no such file, no tree in it, or one deeper than the ``depth`` positions that the head drafts.
    """
    content = read_json(path)
    try:
        tree = TokenTree.from_paths([tuple(c) for c in content["choices"]])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is no tree.json ({error}); it needs choices: a list of rank paths") from None
    if tree.depth > depth:
        raise UserError(
            f"the tree in {path} is {tree.depth} deep, but the head drafts {depth} positions; give a shallower one"
        )
    return tree


def read_threshold(path: Path, default: float) -> float:
    """The confidence threshold in a ``tree.json``, ``default`` where it has none.

    Raises:
        UserError: it is no threshold.
    """
    found = read_json(path).get("stop_below", default)
    if not isinstance(found, int | float) or not 0 <= found < 1:
        raise UserError(f"{path} has stop_below={found!r}, which must be in [0, 1); correct it or choose a tree anew")
    return float(found)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a saved head.

    Raises:
        UserError: no file, a damaged one, or pickles alone.
    """
    path = folder / "model.safetensors"
    if not path.exists():
        refuse_pickles(folder, [found.name for found in folder.iterdir()])
    try:
        return load_file(path)
    except (FileNotFoundError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy the head again") from None


def check_base(folder: Path, trained: dict[str, Any], base: BaseModel) -> None:
    """Compare the base that a head was ``trained`` for with ``base``.

    Raises:
        UserError: they differ.
    """
    actual = base.identity()
    for key in ("hidden_size", "vocab_size", "num_layers", "fingerprint"):
        if trained.get(key) != actual[key]:
            raise UserError(
                f"the head in {folder} was trained for {trained.get('name')} ({key} {trained.get(key)}), but the base "
                f"is {actual['name']} ({key} {actual[key]}); name no base, and the head's own is loaded"
            )
