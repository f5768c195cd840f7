"""What differs between versions of torch and transformers: renamed arguments, and undocumented names.

A release may drop an undocumented name without notice, so ``pyproject.toml`` bounds both versions. Names with a
fallback are looked up at first use, never at import. ``tests/models/kernels/test_private_apis.py`` compares this list
with the source and with the installed versions.
"""

from functools import cache, reduce
from importlib import import_module
from typing import Any

import transformers
from torch import nn

NEWEST = 5, 24  # newest minor version of transformers that is tested
_INSTALLED = tuple(int(number) for number in transformers.__version__.split(".")[:2])
CACHE = "cache" if _INSTALLED >= (5, 24) else "past_key_values"
"""The name of the argument for keys and values in models, layers and attention, and of the field in outputs."""
_FUSED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")
_FUSED_PARTS = ("Attention", "MLP", "RMSNorm")
_UNPACKED = "fallback: linear layers are not prepacked, and few rows take up to 1.7 times as long"
_UNFUSED = "fallback: this layer of a base stays transformers' own, and decoding it takes longer"
_CHECKPOINTS = "required: the text model of a composite checkpoint cannot be loaded"
_TENSORS = "required: single tensors of a checkpoint cannot be found"
_ESTIMATE = "required: mode=estimate cannot run a step without memory"
PRIVATE_NAMES = {
    "torch.ops.mkldnn._reorder_linear_weight": _UNPACKED,
    "torch.ops.mkldnn._linear_pointwise": _UNPACKED,
    "torch.ops.mkldnn.data_ptr": "fallback: prepacked weights are not moved into huge pages",
    "torch.ops.mkldnn._nbytes": "fallback: prepacked weights are not moved into huge pages",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "fallback: products stay in float32",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": _ESTIMATE,
    "torch.utils._python_dispatch.TorchDispatchMode": _ESTIMATE,
    "torch.utils._pytree.tree_map_only": _ESTIMATE,
    **{
        f"transformers.models.{family}.modeling_{family}.{family.capitalize()}{suffix}": _UNFUSED
        for family in _FUSED_FAMILIES
        for suffix in _FUSED_PARTS
    },
    "transformers.models.llama.modeling_llama.LlamaRotaryEmbedding": "required: heads with attention cannot be built",
    "transformers.masking_utils.sdpa_mask": "required: no base can be loaded",
    "transformers.conversion_mapping.get_checkpoint_conversion_mapping": _CHECKPOINTS,
    "transformers.conversion_mapping.register_checkpoint_conversion_mapping": _CHECKPOINTS,
    "transformers.conversion_mapping.get_model_conversion_mapping": _TENSORS,
    "transformers.core_model_loading.WeightConverter": _TENSORS,
    "transformers.core_model_loading.WeightRenaming": _TENSORS,
    "transformers.core_model_loading.dot_natural_key": _TENSORS,
    "transformers.core_model_loading.rename_source_key": _TENSORS,
    "transformers.modeling_outputs.CausalLMOutputWithPast": _CHECKPOINTS,
    "transformers.utils.cached_file": "required: the config in a GGUF file cannot be read",
    "transformers.utils.logging": "required: no base can be loaded",
    "transformers.generation.GenerateDecoderOnlyOutput": "required: custom_generate cannot return a dict",
    "transformers.generation.logits_process": "required: custom_generate cannot tell processors without state",
    "transformers.generation.streamers.BaseStreamer": "required: transformers' generate cannot be timed",
    "transformers.convert_slow_tokenizer.bytes_to_unicode": "required: the tiny test model cannot be built",
    **dict.fromkeys(
        (
            "transformers.utils.SAFE_WEIGHTS_INDEX_NAME",
            "transformers.utils.SAFE_WEIGHTS_NAME",
            "transformers.utils.hub.get_checkpoint_shard_files",
        ),
        "required: finds the files of a checkpoint, to compare their size with its config",
    ),
    "transformers.utils.chat_template_utils.render_jinja_template": "required: renders conversations",
}
"""Full name -> ``fallback`` or ``required``, with the consequence if the name is missing."""


def other_base() -> str:
    """Return the remedy for a base that cannot be run: another base, or a tested version of transformers."""
    if _INSTALLED <= NEWEST:
        return "choose another base (docs/reference/bases.md lists families)"
    major, minor = NEWEST
    untested = f"transformers {transformers.__version__} is newer than the tested {major}.{minor}"
    return f"{untested}; run: pip install 'transformers<{major}.{minor + 1}'"


@cache
def look_up(name: str) -> Any | None:
    """Return the object called ``name``, one of ``PRIVATE_NAMES``, or None if the installed version lacks it."""
    assert name in PRIVATE_NAMES
    package, *attributes = name.split(".")
    try:
        if package == "transformers":
            return getattr(import_module(".".join([package, *attributes[:-1]])), attributes[-1])
        return reduce(getattr, attributes, import_module(package))
    except (AttributeError, ImportError):
        return None


def stock_part(module: nn.Module) -> str | None:
    """Return ``Attention``, ``MLP`` or ``RMSNorm`` if ``module`` is exactly this class of a family that can be fused.
    Classes are compared by name, so that no module of another family is imported. Subclasses give None, because they
    may compute something else."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    if PRIVATE_NAMES.get(name) != _UNFUSED:
        return None
    return next(suffix for suffix in _FUSED_PARTS if name.endswith(suffix))


def is_gemma_norm(module: nn.Module) -> bool:
    """Return True for Gemma's RMSNorm, whose stored weight is the difference from one."""
    return stock_part(module) == "RMSNorm" and type(module).__name__ == "GemmaRMSNorm"
