"""The files of a saved head: writing them, and finding, reading and checking them before a head is built."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.errors import UserError, one_line
from drafthead.files import local
from drafthead.files.hub import fetch, refuse_pickles
from drafthead.models.base.parts import BaseParts
from drafthead.models.base.text_model import EXTRA_PARAMETERS, parameter_limit
from drafthead.models.decoding.cost_tree import TreeCosts
from drafthead.models.decoding.drafter import Drafter
from drafthead.models.token_tree import TokenTree
from drafthead.settings.schema import check

FORMAT = 2  # version of ``config.json``
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TREES = "tree.json"
CUSTOM_GENERATE = {
    "custom_generate/generate.py": '"""Speculative decoding with the draft head of this repository or folder."""\n\n'
    "from drafthead import generate_with_head as generate\n",
    "custom_generate/requirements.txt": "drafthead\n",
}
"""Path -> text of files in a head's folder for transformers: ``model.generate(..., custom_generate="user/head")``."""
MAX_NODES, MAX_RANKS = 4096, 1 << 16
"""Limits for trees read from a file: nodes of a tree, and ranks of candidates. Useful trees are far smaller."""


def resolve_folder(name: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a saved head: ``name`` itself, or the download of the Hub repository ``name``; reject other
    names. ``revision`` is a branch, tag or commit of the repository (None: its newest commit)."""
    path = Path(name)
    if not (path / "config.json").exists() and (path / "head" / "config.json").exists():
        raise UserError(f"{path} is the folder of a run, not of a head; give {path / 'head'}")
    if path.is_dir():
        return path
    if path.is_absolute() or str(name).count("/") != 1:
        what = f"no draft head at {name}"
        raise UserError(f"{what}: give a run's head folder (outputs/NAME/head) or a Hub repository (user/name)")
    return fetch(str(name), revision)


def read_head_config(folder: Path) -> dict[str, Any]:
    """Return a saved head's ``config.json``, after a check of its keys, their types and its version."""
    config = local.read_json(local.safe_join(folder, "config.json"))
    types = {"format": int, "head_type": str, "settings": dict, "base": dict, "draft_vocab": int}
    if not isinstance(config, dict) or not set(types) <= set(config):
        what = f"{folder}/config.json is not that of a drafthead head"
        raise UserError(f"{what}; a published head needs `drafthead import from={folder}` first")
    if config["format"] != FORMAT:
        older = isinstance(config["format"], int) and config["format"] < FORMAT
        remedy = "train the head again" if older else "update drafthead"
        raise UserError(f"{folder} has format {config['format']}, but this version reads {FORMAT}; {remedy}")
    for key, expected in types.items():
        if not isinstance(config[key], expected) and not (key == "draft_vocab" and config[key] is None):
            what = f"{folder}/config.json has {key} of type {type(config[key]).__name__}, expected {expected.__name__}"
            raise UserError(f"{what}; copy the head again")
    return config


def check_parameters(folder: Path, described: Callable[[], int], weights: dict[str, Tensor]) -> None:
    """Reject a head whose settings describe far more parameters (``described()``) than ``weights`` has, before memory
    is allocated."""
    stored = sum(tensor.numel() for tensor in weights.values())
    most = 2 * stored + EXTRA_PARAMETERS
    what = f"the settings describe more than {most:,} parameters, the file has {stored:,}"
    error = UserError(f"{folder}/model.safetensors does not fit its config: {what}; copy the head again")
    try:
        with parameter_limit(2 * most, error):  # some heads build a layer and replace it
            count = described()
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError) as bad:
        raise UserError(f"{folder}/config.json has bad settings ({one_line(bad)}); copy the head again") from None
    if count > most:
        raise error


def write_trees(folder: Path, drafter: Drafter) -> None:
    if drafter.tree is None:
        return
    content: dict[str, Any] = {"choices": drafter.tree.paths[1:], "confidence_threshold": drafter.confidence_threshold}
    if drafter.batch_trees:
        content["batches"] = {str(rows): tree.paths[1:] for rows, tree in drafter.batch_trees.items()}
    if drafter.tree_costs is not None:
        content |= {"costs": asdict(drafter.tree_costs), "by_cost": drafter.prefers_cost}
    local.write_json(folder / TREES, content)


def write_head(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Write ``model.safetensors``, ``config.json`` (``config``, the format's version and the weights' checksum) and the
    files of ``CUSTOM_GENERATE`` into a head's folder."""
    with local.disk_errors("the head", folder):
        with local.new_file(folder / "model.safetensors") as tmp_path:
            save_file({k: v.detach().contiguous().cpu() for k, v in weights.items()}, tmp_path)
            checksum = local.file_digest(tmp_path)
        local.write_json(folder / "config.json", {"format": FORMAT, **config, "weights_sha256": checksum})
        write_custom_generate(folder)


def write_custom_generate(folder: Path) -> None:
    """Write the files of ``CUSTOM_GENERATE`` into the existing ``folder``."""
    for name, text in CUSTOM_GENERATE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        local.write_atomic(folder / name, text)


def read_trees(folder: Path, drafter: Drafter) -> None:
    """Set the trees, confidence threshold and costs of ``drafter`` from ``tree.json``, if ``folder`` has one."""
    path = local.safe_join(folder, TREES)
    if not path.exists():
        return
    content = local.read_json(path)
    drafter.tree = _parse_tree(path, content, drafter.depth)
    batches = content.get("batches", {})
    if not isinstance(batches, dict) or not all(re.fullmatch("[1-9][0-9]{0,8}", n) and n != "1" for n in batches):
        what = f"{path} is not a tree.json: batches must map numbers of rows above 1 to trees"
        raise UserError(f"{what}; calibrate the trees again")
    drafter.batch_trees = {int(n): _parse_tree(path, {"choices": c}, drafter.depth) for n, c in batches.items()}
    threshold = content.get("confidence_threshold", drafter.confidence_threshold)
    if not isinstance(threshold, int | float) or not 0 <= threshold < 1:
        what = f"{path} has confidence_threshold={threshold!r}, which must be in [0, 1)"
        raise UserError(f"{what}; correct it or calibrate again")
    drafter.confidence_threshold = float(threshold)
    if (costs := content.get("costs")) is not None:
        try:
            drafter.tree_costs = check(costs, TreeCosts, "costs")
        except (TypeError, ValueError) as error:
            raise UserError(f"{path} has unusable costs ({error}); calibrate again") from None
    drafter.prefers_cost = content.get("by_cost", False)
    if type(drafter.prefers_cost) is not bool or (drafter.prefers_cost and drafter.tree_costs is None):
        what = f"{path} has by_cost={json.dumps(drafter.prefers_cost)}"
        raise UserError(f"{what}, which must be false, or true beside costs; correct it, or run stages=[tree] again")


def read_tree(path: Path, depth: int) -> TokenTree:
    """Return the tree for batch size 1 from the ``tree.json`` at ``path``; reject more than ``depth`` levels."""
    return _parse_tree(path, local.read_json(local.safe_join(path.parent, path.name)), depth)


def _parse_tree(path: Path, content: Any, depth: int) -> TokenTree:
    choices = content.get("choices") if isinstance(content, dict) else None
    if isinstance(choices, list) and len(choices) > MAX_NODES:
        raise UserError(f"{path} has {len(choices)} nodes, at most {MAX_NODES} are allowed; give a smaller tree")
    try:
        choices = content["choices"]
        if not all(isinstance(c, list) and all(type(rank) is int and rank < MAX_RANKS for rank in c) for c in choices):
            raise ValueError(f"a path is a list of ranks, whole numbers below {MAX_RANKS}")
        tree = TokenTree.from_paths([tuple(c) for c in choices])
    except (KeyError, TypeError, ValueError) as error:
        what = f"{path} is not a tree.json ({error})"
        raise UserError(f"{what}; give it the key 'choices' with a list of paths, each a list of ranks") from None
    if tree.depth > depth:
        what = f"the tree in {path} is {tree.depth} deep, but the head drafts {depth} positions"
        raise UserError(f"{what}; give a shallower tree")
    return tree


def read_weights(folder: Path, checksum: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of ``model.safetensors``; reject non-finite numbers, and another sha256 than ``checksum``
    (None: an older config has none)."""
    path = local.safe_join(folder, "model.safetensors")
    if not path.exists():
        refuse_pickles(folder, [file.name for file in folder.iterdir()])
    local.check_header(path)
    try:
        if checksum is not None and local.file_digest(path) != checksum:
            raise SafetensorError("it does not have the checksum that config.json states")
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}); copy the head again") from None
    check_tensors(weights, path)
    return weights


def check_tensors(tensors: dict[str, Tensor], source: Path) -> None:
    """Reject tensors of the file or folder ``source`` that are quantised or not finite."""
    for name, tensor in tensors.items():
        whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        if tensor.dtype not in FLOATS and not (whole and tensor.ndim < 2):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{source} has {name} as {dtype}, expected floats; use weights that are not quantised")
        if tensor.dtype in FLOATS and not torch.isfinite(tensor).all():
            raise UserError(f"{source} has numbers in {name} that are not finite; copy it again")


def draft_ids(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], vocab_size: int) -> Tensor | None:
    """Return the base's id of each draft id of a saved head, [W] int64; None if it drafts over the whole vocabulary."""
    count = config["draft_vocab"]
    if count is None:
        return None
    ids = weights.get("d2t")
    if ids is None or ids.ndim != 1 or ids.dtype != torch.int64 or len(ids) != count:
        saved = "no d2t" if ids is None else f"a d2t of {list(ids.shape)} {str(ids.dtype).removeprefix('torch.')}"
        what = f"{folder}/model.safetensors has {saved}, expected the {count} ids of the draft vocabulary, int64"
        raise UserError(f"{what}; copy the head again")
    check_draft_ids(ids, vocab_size, f"the draft vocabulary (d2t) in {folder}", "; copy the head again")
    return ids


def check_draft_ids(ids: Tensor, vocab_size: int, name: str = "the draft vocabulary", remedy: str = "") -> None:
    """Reject a draft vocabulary ``ids`` [W] that is empty, repeats an id, or has ids outside [0, ``vocab_size``)."""
    if len(ids) == 0 or int(ids.max()) >= vocab_size or int(ids.min()) < 0:
        raise UserError(f"{name} must have ids in [0, {vocab_size}), got {ids.tolist()[:4]}...{remedy}")
    if (repeated := len(ids) - len(set(ids.tolist()))) > 0:
        raise UserError(f"{name} must have different ids, but {repeated} of {len(ids)} are repeated{remedy}")


def check_base(folder: Path, trained: dict[str, Any], base: BaseParts, any_base: bool = False) -> None:
    """Reject ``base`` if the head in ``folder`` was trained for another one: ``trained``, from the head's config. With
    ``any_base``, reject only a base of other sizes."""
    actual = base.identity()
    for key in ("hidden_size", "vocab_size", "num_layers", *(() if any_base else ("fingerprint",))):
        saved = trained.get(key)
        if saved != actual[key] and not (key == "fingerprint" and local.same_base(str(saved), actual[key])):
            remedy = "give a head of this base, or the head's own base"
            if key == "fingerprint":
                remedy += ", or attach the head to this base with `drafthead import`"
                if base.dtype == torch.float16:
                    # The lost digits cannot be restored, so the fingerprint of the other dtypes is unknown here.
                    remedy += " (float16 rounds tiny weights, which changes the fingerprint: try bfloat16 or float32)"
            what = f"the head in {folder} was trained for {described(trained)} ({key} {saved})"
            raise UserError(f"{what}, but the base is {described(actual)} ({key} {actual[key]}); {remedy}")


def adapter_of(identity: dict[str, Any]) -> str | None:
    """Return the adapter in a base's identity, a folder or its place in the head's folder; None: it has none."""
    recipe = identity.get("recipe")
    return recipe.get("adapter") if isinstance(recipe, dict) else None


def described(identity: dict[str, Any]) -> str:
    """Return the name of a base, and whether it has an adapter."""
    adapter = adapter_of(identity)
    return f"{identity.get('name')} {f'with the adapter {adapter}' if adapter else 'without an adapter'}"
