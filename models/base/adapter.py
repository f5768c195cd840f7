"""Adapters of a base in peft's format: merging at load, copying, and digests. Only safetensors are read.

A base with a merged adapter counts as another base. Its fingerprint combines the original's, a digest of the adapter
(stored in the model's config) and that of the merged weights. So the base is recognised in another dtype, and if
somebody else merged the adapter.
"""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from drafthead.errors import UserError, one_line
from drafthead.files.local import check_header, read_json, safe_join
from drafthead.models.base.fingerprint import ADAPTER_DIGEST, fingerprint, short_hash
from drafthead.models.base.text_model import LOAD_ERRORS

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SCALES = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
"""Keys of an adapter's config that, with its weights, determine what it adds to a base."""
PATTERNS = ("exclude_modules", "modules_to_save", "layers_pattern", "rank_pattern", "alpha_pattern")
"""Keys of an adapter's config whose texts peft uses as regular expressions."""
KEEP_BASE = ("gaussian", "orthogonal", "eva")  # ways to start a LoRA that leave the base's weights unchanged


def digest_of(original: str, folder: Path) -> str:
    """Return 16 hex digits for the adapter, and the second half of its base's fingerprint, ``original``."""
    weights = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    config = read_json(folder / CONFIG)
    settings = json.dumps({key: config.get(key) for key in SCALES}, sort_keys=True)
    original = original.partition("=")[0]
    return short_hash(f"{original[:16]},{weights},{settings}".encode()) + original[16:]


def merge(model: Any, name: str, base_names: Iterable[str] = ()) -> Any:
    """Merge the LoRA adapter in folder ``name`` into a stock model in place, and return it; refuse other adapters. Warn
    if the adapter was trained on a base whose name is not among ``base_names``."""
    folder = Path(name)
    for file_name in (CONFIG, WEIGHTS):
        if not safe_join(folder, file_name).is_file():
            what = f"no adapter in {folder} ({file_name} is missing)"
            raise UserError(f"{what}; set base.adapter to a folder that peft saved, with safe_serialization")
    config = read_json(folder / CONFIG)
    if unsupported := _unsupported(config):
        what = f"{folder / CONFIG} has {unsupported}, which is not supported"
        raise UserError(f"{what}; merge it into its base with peft's merge_and_unload, save that, and set base.name")
    check_header(folder / WEIGHTS)
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            names = set(file.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / WEIGHTS} cannot be read ({one_line(error)}); copy the adapter again") from None
    digest = digest_of(fingerprint(model), folder)
    from peft import LoraConfig, PeftModel, get_peft_model_state_dict  # takes seconds to import

    try:
        with warnings.catch_warnings(action="ignore"):  # peft and transformers warn about each other
            settings = LoraConfig.from_pretrained(str(folder))
            if isinstance(settings.target_modules, str) and settings.target_modules != "all-linear":
                # A regular expression may match without end; the tensors name the same layers.
                settings.target_modules = {re.sub(r"^base_model\.model\.|\.lora_[A-Z].*", "", name) for name in names}
            # The adapter is made on the meta device, so that sizes in the config take no memory.
            adapted = PeftModel.from_pretrained(model, str(folder), config=settings, low_cpu_mem_usage=True)
    except LOAD_ERRORS as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip().rstrip(".")
        if sizes := re.fullmatch(r"size mismatch for (\S+): .*Size\((\[.*?\])\) from .*Size\((\[.*?\])\)", why):
            why = f"size mismatch: {sizes[1]} is {sizes[2]} in the adapter, but {sizes[3]} would fit"
    else:
        # peft only warns if names differ.
        needed = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
        extra, absent = sorted(names - needed), sorted(needed - names)
        why = f"{len(extra)} tensors belong to layers that the base does not have, such as {extra[0]}" if extra else ""
        why = why or (f"{len(absent)} tensors are missing in the adapter, such as {absent[0]}" if absent else "")
    if why:
        raise UserError(f"the adapter in {folder} does not fit the base: {why}; set base.name to the adapter's base")
    known = {*map(_last_part, base_names)} - {""}
    if (trained_on := _last_part(config.get("base_model_name_or_path"))) and known and trained_on not in known:
        warnings.warn(
            f"the adapter in {folder} was trained on {config['base_model_name_or_path']}, but is merged into "
            f"{next(iter(base_names))}. Fine-tunes of one model have equal shapes, so check base.name",
            stacklevel=2,
        )
    merged = adapted.merge_and_unload()
    setattr(merged.config, ADAPTER_DIGEST, digest)
    return merged


def _unsupported(config: Any) -> str | None:
    """Name the first setting of an adapter's config that is not supported."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        return f"an adapter of type {config.get('peft_type') if isinstance(config, dict) else None}, not LORA"
    if config.get("megatron_config"):
        return "megatron_config, by which peft imports any module"
    if not isinstance(start := config.get("init_lora_weights"), bool | None) and start not in KEEP_BASE:
        return f"init_lora_weights={start!r}, by which peft changes the base"
    for key in PATTERNS:  # peft uses them as regular expressions, which may match without end
        patterns = [config.get(key)] if isinstance(config.get(key), str) else config.get(key) or []
        if odd := next((p for p in patterns if not (isinstance(p, str) and re.fullmatch(r"[\w.-]*", p))), None):
            return f"{key} with {odd!r}, a regular expression"
    return None


def _last_part(name: object) -> str:
    """Return the last part of a base's path or Hub id; "" for a commit hash, as in the Hub's cache."""
    part = str(name or "").rstrip("/").rpartition("/")[2].lower()
    return "" if re.fullmatch("[0-9a-f]{40}", part) else part


def copy(source: Path, folder: Path) -> None:
    if folder.exists() and source.resolve() == folder.resolve():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, WEIGHTS):
        shutil.copyfile(source / name, folder / name)
