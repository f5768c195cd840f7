"""Adapters of a base in peft's own format: read and merged at load, copied, and identified by what they do to a base.

A base with a merged adapter is another base: its fingerprint mixes the original's with a digest of the adapter. The
digest is kept in the model's config, so a merged model that is saved whole is recognised as the same base. Adapters are
safetensors only.
"""

import hashlib
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from drafthead.data.utils.errors import UserError, one_line
from drafthead.data.utils.files import read_json, safe_join
from drafthead.models.base.base_config import LOAD_ERRORS

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SCALES = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
"""Settings that decide, beside the weights, what an adapter adds to a base."""
DIGEST = "drafthead_adapter"
"""Key of a model's config that holds the digest of the adapter merged into it."""


def fingerprint(model: Any, digest: str | None = None) -> str:
    """Hash of the sizes and of two small weights: tells fine-tunes of one architecture apart.

    The model is as loaded, not fused or prepacked yet (with an adapter: at any time). ``digest`` is of an adapter to
    count as merged; None: of the one that is, if any. It replaces the output head's rows, which an adapter may change
    and which round differently in every dtype.
    """
    settings = model.config
    digest = digest or getattr(settings, DIGEST, None)
    parts = [f"{settings.hidden_size},{settings.vocab_size},{settings.num_hidden_layers}".encode()]
    norm = getattr(model.model.norm, "weight", None)
    # Olmo's norm has no weights.
    small = [next(model.model.layers[0].parameters())[:64] if norm is None else norm]
    if digest is None:
        small.append(model.get_output_embeddings().weight[: min(64, settings.vocab_size)])
    for weight in small:
        # Through bfloat16, so that the same weights loaded in another dtype are the same base.
        parts.append(weight.detach().to(torch.bfloat16).float().cpu().numpy().tobytes())
    return hashlib.sha256(b"".join(parts) + (digest or "").encode()).hexdigest()[:16]


def digest_of(original: str, folder: Path) -> str:
    """Digest of the adapter in ``folder`` on a base of fingerprint ``original``."""
    weights = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    config = read_json(folder / CONFIG)
    settings = json.dumps({key: config.get(key) for key in SCALES}, sort_keys=True)
    return hashlib.sha256(f"{original},{weights},{settings}".encode()).hexdigest()[:16]


def merge(model: Any, name: str) -> Any:
    """A stock model with the adapter in folder ``name`` merged into its weights."""
    folder = Path(name)
    found = _tensor_names(folder)
    digest = digest_of(fingerprint(model), folder)
    from peft import PeftModel, get_peft_model_state_dict  # takes seconds to import

    try:
        with warnings.catch_warnings(action="ignore"):  # of peft and transformers to each other
            adapted = PeftModel.from_pretrained(model, str(folder))
    except (*LOAD_ERRORS, re.error) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    else:
        # Where names differ, peft only warns.
        odd = sorted(found ^ set(get_peft_model_state_dict(adapted, save_embedding_layers=False)))
        why = f"{len(odd)} tensors are on one side only, {odd[0]} first" if odd else ""
    if why:
        raise UserError(f"the adapter in {folder} does not fit the base: {why}; name the base it was trained on")
    merged = adapted.merge_and_unload()
    setattr(merged.config, DIGEST, digest)
    return merged


def copy(source: Path, folder: Path) -> None:
    """Copy an adapter into ``folder``; nothing happens when it is there already."""
    if folder.exists() and source.resolve() == folder.resolve():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, WEIGHTS):
        shutil.copyfile(source / name, folder / name)


def _tensor_names(folder: Path) -> set[str]:
    """Names of the tensors of an adapter, once its files are known to be safe and of the right kind."""
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
