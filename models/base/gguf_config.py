"""The config of a base in a GGUF file. Keys that transformers ignores are added, or the file is refused.

llama.cpp writes scaled rotary embeddings and unusual sizes as tensors or keys for which transformers uses defaults, so
the base would load but compute something else than in llama.cpp.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import cached_file

from drafthead.errors import UserError
from drafthead.models.base.text_model import check_lengths

SAME = {
    "attention.sliding_window": "sliding_window",
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Keys of a GGUF file without prefix (``llama.``) -> keys of a transformers config."""
WIDE_GEMMA = {"gemma2": 46, "gemma3_text": 62}
"""Model type -> number of layers of its 27B checkpoint, which scales queries differently (a rule of llama.cpp)."""
MAX_PARTS = 10_000_000
"""Largest number of values in the header of a GGUF file. A vocabulary of 250,000 tokens has about 2 million."""
FACTORS = "rope_freqs.weight"  # tensor that the rotary frequencies are divided by
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ELSEWHERE = "use the checkpoint that it was converted from: set base.name, without base.gguf_file"


def gguf_config(name: str, gguf_file: str, **options: Any) -> PreTrainedConfig:
    """Return the config of the base in ``gguf_file`` of ``name``, a folder or a Hub id."""
    path = cached_file(name, gguf_file, revision=options.get("revision"))
    reader = checked_reader(Path(str(path)))
    fields, tensors = reader.fields, {entry.name: entry for entry in reader.tensors}
    architecture = fields["general.architecture"].contents()
    keys = {n.removeprefix(f"{architecture}."): f.contents() for n, f in fields.items() if n.startswith(architecture)}
    check_lengths(keys, gguf_file)
    config = AutoConfig.from_pretrained(name, gguf_file=gguf_file, **options)
    changes = _sizes(gguf_file, config, keys)
    scaling = keys.get("rope.scaling.type", "none")
    if scaling != "none" and config.model_type != "gpt_oss":
        raise UserError(f"{gguf_file} scales its rotary embedding ({scaling}), which is not supported; {ELSEWHERE}")
    if left := [tensor for tensor in tensors if tensor.startswith("rope_factors_")]:
        raise UserError(f"{gguf_file} holds {left[0]}, which is not supported; {ELSEWHERE}")
    if FACTORS in tensors:
        factors = torch.from_numpy(tensors[FACTORS].data.copy())
        theta = config.rope_parameters["rope_theta"]
        for original in (8192, 4096, 2048, 16384, 32768):  # no key has Llama 3's original context
            rope = LLAMA3 | {"factor": float(factors.max()), "original_max_position_embeddings": original}
            if torch.allclose(llama3_factors(rope, theta, 2 * len(factors)), factors.flatten(), rtol=1e-4):
                changes["rope_parameters"] = rope | {"rope_theta": theta}
                break
        else:
            raise UserError(f"{gguf_file} has rotary factors other than those of Llama 3; {ELSEWHERE}")
    return type(config)(**{**config.to_dict(), **changes}) if changes else config


def checked_reader(path: Path) -> Any:
    """Return gguf's reader of a file; raise a ``ValueError`` if the header is damaged or takes much memory."""
    from gguf import GGUFReader  # imported here, as most bases are not GGUF files

    class CheckedReader(GGUFReader):  # type: ignore[misc]
        """Reader that stops at the end of the file instead of the lengths that the header states."""

        parts = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **options: Any) -> Any:
            self.parts += 1
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data) or self.parts > MAX_PARTS:
                raise ValueError(f"{path} ends within its header, or has a header of more than {MAX_PARTS:,} values")
            return super()._get(offset, dtype, count, *order, **options)

    return CheckedReader(path)


def _sizes(gguf_file: str, config: PreTrainedConfig, keys: dict[str, Any]) -> dict[str, Any]:
    """Return changes of ``config``, from the ``keys`` of the file without prefix (``llama.``)."""
    changes: dict[str, Any] = {}
    for key, field in SAME.items():
        now = getattr(config, field, None)
        if field == "head_dim":
            now = now or config.hidden_size // config.num_attention_heads
        if keys.get(key) in (None, now):
            continue
        if field == "head_dim" and hasattr(config, "global_head_dim"):
            continue  # transformers reads the file's key into global_head_dim
        if not hasattr(config, field):
            raise UserError(f"{gguf_file} has {key}={keys[key]}, which {config.model_type} does not read; {ELSEWHERE}")
        changes[field] = keys[key]
    if config.model_type in WIDE_GEMMA:
        wide = config.num_hidden_layers == WIDE_GEMMA[config.model_type]
        size = config.hidden_size // config.num_attention_heads if wide else changes.get("head_dim", config.head_dim)
        changes["query_pre_attn_scalar"] = size
    return changes


def llama3_factors(scaling: dict[str, Any], theta: float, size: int) -> Tensor:
    """Return the divisors [E / 2] float32 of the rotary frequencies for Llama 3's scaling, where E = ``size`` is the
    rotated width of a head. Short wavelengths have the divisor 1, long ones ``factor``, with a smooth transition
    between."""
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    smooth = ((old / wavelengths - low) / (high - low)).clamp(0, 1)
    factors: Tensor = 1 / ((1 - smooth) / factor + smooth)
    return factors.float()
