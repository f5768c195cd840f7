"""Adapters of a base in peft's own format: read and merged at load, saved, and told apart by what they do to a base.

A base with a merged adapter is another base: its fingerprint mixes that of the untouched one with a digest of the
adapter. The mark is kept in the model's config, so a merged model that is saved whole is recognised as the same base.
Adapters are safetensors only.
"""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafthead.data.utils.errors import UserError, one_line
from drafthead.data.utils.files import atomic_rename, read_json, safe_join, write_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SCALES = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
"""Settings that decide, beside the weights, what an adapter adds to a base."""
MARK = "drafthead_adapter"
"""Key of a model's config that tells of a merged adapter."""


def fingerprint(model: Any, mark: str | None = None) -> str:
    """Hash of the sizes and of two small weights: tells fine-tunes of one architecture apart.

    Args:
        model: as loaded, not fused or prepacked yet (with a mark: at any time).
        mark: of the adapter merged into it, which then stands for the output head's rows. An adapter may change those,
            and rounds differently in every dtype.
    """
    settings = model.config
    parts = [f"{settings.hidden_size},{settings.vocab_size},{settings.num_hidden_layers}".encode()]
    small = [model.model.norm.weight]
    if mark is None:
        small.append(model.get_output_embeddings().weight[: min(64, settings.vocab_size)])
    for weight in small:
        # Through bfloat16, so that the same weights loaded in another dtype are the same base.
        parts.append(weight.detach().to(torch.bfloat16).float().cpu().numpy().tobytes())
    return hashlib.sha256(b"".join(parts) + (mark or "").encode()).hexdigest()[:16]


def mark_of(model: Any) -> str | None:
    """The mark of the adapter merged into a loaded model; None when there is none."""
    mark: str | None = getattr(model.config, MARK, None)
    return mark


def mark_for(untouched: str, folder: Path) -> str:
    """The mark that a base of fingerprint ``untouched`` gets from the adapter in ``folder``."""
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    config = read_json(folder / CONFIG)
    settings = json.dumps({key: config.get(key) for key in SCALES}, sort_keys=True)
    return hashlib.sha256(f"{untouched},{digest},{settings}".encode()).hexdigest()[:16]


def merge(model: Any, name: str) -> Any:
    """A stock model with the adapter in folder ``name`` merged into its weights, and marked.

    Raises:
        UserError: no adapter in safetensors there, or one that does not fit the model.
    """
    folder = Path(name)
    keys = _check(folder)
    mark = mark_for(fingerprint(model, mark_of(model)), folder)
    from peft import PeftModel, get_peft_model_state_dict  # takes seconds to import

    try:
        with quiet():
            adapted = PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, OSError, SafetensorError, re.error) as error:
        raise UserError(
            f"the adapter in {folder} does not fit the base: {_last_line(error)}; name the base it was trained on"
        ) from None
    wanted = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if odd := sorted(wanted ^ keys):
        raise UserError(
            f"the adapter in {folder} does not fit the base: {len(odd)} tensors are on one side only, {odd[0]} first; "
            "name the base it was trained on"
        )
    merged = adapted.merge_and_unload()
    setattr(merged.config, MARK, mark)
    return merged


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of peft and transformers to each other, and those of what is checked here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _check(folder: Path) -> set[str]:
    """Names of the tensors of an adapter."""
    for name in (CONFIG, WEIGHTS):
        if not safe_join(folder, name).is_file():
            raise UserError(
                f"no adapter in {folder}: it has no {name}; base.adapter needs a folder that peft saved, with "
                "safe_serialization"
            )
    config = read_json(folder / CONFIG)
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA" or config.get("megatron_config"):  # which would have peft import a module that the file names
        raise UserError(
            f"{folder / CONFIG} is of an adapter of type {kind}, only plain LORA is read here; merge it into its base "
            "with peft's merge_and_unload, save that, and name the folder as base.name"
        )
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / WEIGHTS} cannot be read ({one_line(error)}); copy the adapter again") from None


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def save(folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write an adapter.

    Args:
        folder: is made if needed.
        weights: named as peft names them.
        config: plain values of peft's own config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{WEIGHTS}.tmp"
    values = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
    save_file(values, aside, metadata={"format": "pt"})
    atomic_rename(aside, folder / WEIGHTS)
    write_json(folder / CONFIG, dict(config))


def copy(source: Path, folder: Path) -> None:
    """Copy an adapter into ``folder``; nothing happens when it is there already."""
    if folder.exists() and source.resolve() == folder.resolve():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, WEIGHTS):
        shutil.copyfile(source / name, folder / name)
