"""Renamed arguments and private names, compared with the source, with the installed versions and with fallbacks."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from importlib import import_module
from inspect import signature, unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import CausalLMOutputWithPast

from drafthead.models.base import base_model, parity
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.loop import decode
from drafthead.models.kernels import attention, linear, private_apis
from drafthead.models.kernels.fused import FusedMLP
from drafthead.models.kernels.linear import DtypeLinear, can_prepack, inference_linear, packs_bfloat16
from drafthead.models.kernels.private_apis import CACHE
from support import TinyBase, refuses

ROOT = Path(__file__).parents[3]
PROMPT = [5, 9, 11]
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
    **dict.fromkeys(private_apis._FUSED, _UNFUSED),
    "transformers.models.llama.modeling_llama.LlamaRotaryEmbedding": "required: heads with attention cannot be built",
    "transformers.masking_utils.sdpa_mask": "required: no base can be loaded",
    "transformers.conversion_mapping.get_checkpoint_conversion_mapping": _CHECKPOINTS,
    "transformers.conversion_mapping.register_checkpoint_conversion_mapping": _CHECKPOINTS,
    "transformers.conversion_mapping.get_model_conversion_mapping": _TENSORS,
    "transformers.core_model_loading.WeightConverter": _TENSORS,
    "transformers.core_model_loading.WeightRenaming": _TENSORS,
    "transformers.core_model_loading.dot_natural_key": _TENSORS,
    "transformers.core_model_loading.rename_source_key": _TENSORS,
    "transformers.core_model_loading.revert_weight_conversion": "required: MTP layers are not written back",
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


def look_up(name: str) -> Any | None:
    package, *attributes = name.split(".")
    try:
        if package == "transformers":
            return getattr(import_module(".".join([package, *attributes[:-1]])), attributes[-1])
        return reduce(getattr, attributes, import_module(package))
    except (AttributeError, ImportError):
        return None


def private_names(path: Path) -> Iterator[str]:
    """Undocumented names in the source of one module: by import from a submodule, or by attribute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith(("torch._C.", "torch.ops.")) and name.count(".") == 3:
                yield name


def test_the_source_uses_no_private_name_that_is_not_listed() -> None:
    folders = ("data", "models", "eval", "train", "drafthead/commands")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    used = {name for path in modules for name in private_names(path)}
    assert len(modules) > 100 and used <= set(PRIVATE_NAMES), used - set(PRIVATE_NAMES)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_the_tested_versions_have_every_name(name: str) -> None:
    assert look_up(name) is not None
    assert PRIVATE_NAMES[name].startswith(("fallback: ", "required: "))


def test_stock_layers_replace_private_operators(tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = decode(tiny_base(), None, PROMPT, max_new_tokens=16).tokens
    monkeypatch.setattr(linear, "_onednn", lambda operator: None)
    assert not can_prepack(torch.ones(4, 4)) and not packs_bfloat16()
    assert isinstance(inference_linear(torch.ones(4, 4)), DtypeLinear)
    base = BaseModel.load(tiny_base().config)
    assert base.prepacked == 0
    assert decode(base, None, PROMPT, max_new_tokens=16).tokens == tokens


def test_renamed_stock_classes_are_left_as_they_are(tiny_base: TinyBase) -> None:
    stock = BaseModel.load(replace(tiny_base().config, prepack=False))
    renamed = type("LlamaMLP2", (nn.Module,), {"__module__": type(stock.model.model.layers[0].mlp).__module__})
    assert private_apis.stock_part(renamed()) is None
    assert private_apis.stock_part(stock.model.model.layers[0].mlp) == "MLP"
    assert isinstance(BaseModel.load(tiny_base().config).model.model.layers[0].mlp, FusedMLP)


def test_a_cache_under_an_unknown_name_is_not_ignored(tiny_base: TinyBase) -> None:
    layer = tiny_base().model.model.layers[0].self_attn
    refuses("other_name", layer, torch.zeros(1, 1, 32), (torch.ones(1, 1, 8),) * 2, other_name=DynamicCache())


def arguments(function: Any) -> set[str]:
    return set(signature(unwrap(function)).parameters) - {"self", "kwargs"}


def test_stock_modules_have_the_arguments_that_we_use() -> None:
    for name in (name for name, part in private_apis._FUSED.items() if part == "Attention"):
        stock = look_up(name)
        assert stock is not None
        assert arguments(stock.forward) == {"hidden_states", "position_embeddings", "attention_mask", CACHE}, name
    assert {"input_ids", "position_ids", "attention_mask", CACHE, "use_cache"} <= arguments(LlamaModel.forward)
    needed = {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"}
    assert needed <= arguments(sdpa_attention_forward) & arguments(attention.grouped_sdpa)
    assert CACHE in arguments(CausalLMOutputWithPast)


def test_untested_versions_of_transformers_are_named(tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_base().config  # loaded once, before the patches
    monkeypatch.setattr(private_apis, "_INSTALLED", (5, 99))
    monkeypatch.setattr(FusedMLP, "forward", lambda self, x: x)
    monkeypatch.setattr(parity, "PASSED", set())
    monkeypatch.setattr(base_model, "choose_kernels", lambda *_: pytest.fail("kernels were timed before the check"))
    monkeypatch.setattr(base_model, "worth_measuring", lambda model: True)
    refuses("newer than the tested 5.24; run: pip install 'transformers<5.25'", BaseModel.load, config)
