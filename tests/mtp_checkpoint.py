"""Tiny random checkpoints with an MTP layer, as large models are published."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel

LAYERS = 2
BASE, ADDED = "model-00001.safetensors", "model-00002.safetensors"


def checkpoint(shape: dict[str, Any], folder: Path, own_prefix: bool = False) -> BaseModel:
    """Write a random bfloat16 checkpoint with an MTP layer in a file of its own, and return its base.
    The first file has a stale copy of one tensor, as the index does not tell. ``own_prefix``: Qwen3-Next's names."""
    settings = shape | {"num_hidden_layers": LAYERS + 1, "num_nextn_predict_layers": 1}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    tensors, width, prefix = load_file(folder / "model.safetensors"), config.hidden_size, f"model.layers.{LAYERS}."
    (folder / "model.safetensors").unlink()
    names = ["enorm", "hnorm", "shared_head.norm", "eh_proj"]
    if own_prefix:
        names = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"]
        tensors = {name.replace(prefix, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
        prefix = "mtp."
    for name in names:
        size = (width, 2 * width) if name in ("eh_proj", "fc") else (width,)
        tensors[f"{prefix}{name}.weight"] = (0.2 * torch.randn(size)).bfloat16()
    added = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    others = {name: tensor for name, tensor in tensors.items() if name not in added}
    first = min(added)
    save_file({**others, first: torch.zeros_like(added[first])}, folder / BASE, {"format": "pt"})
    save_file(added, folder / ADDED, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {**dict.fromkeys(others, BASE), **dict.fromkeys(added, ADDED)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    written = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    if "layer_types" in written:
        written["layer_types"] = written["layer_types"][:LAYERS]
    (folder / "config.json").write_text(json.dumps(written))
    tiny_tokenizer().save_pretrained(folder)
    return base_of(folder)


def base_of(folder: Path) -> BaseModel:
    return BaseModel.load(BaseConfig(name=str(folder), tokenizer="builtin:tiny", dtype="float32"))
