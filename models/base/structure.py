"""Modules and sizes of a stock model: Llama's names for modules, outputs of layers, decoders over some layers.

Shape legend: B rows, T tokens, D width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from drafthead.errors import UserError
from drafthead.models.cache.layers import CacheShape
from drafthead.models.kernels.private_apis import other_base

OTHER_HEAD = "choose a head that does not run them (medusa, hydra, mlp_speculator)"
OWN_NAMES = {
    "gpt_bigcode": {"model": "transformer", "layers": "h", "norm": "ln_f"},
    "gpt2": {"model": "transformer", "layers": "h", "norm": "ln_f"},
    "gpt_neox": {"model": "gpt_neox", "layers": "layers", "norm": "final_layer_norm"},
    **dict.fromkeys(
        ("bamba", "falcon_h1", "jamba", "persimmon", "zamba2"),
        {"model": "model", "layers": "layers", "norm": "final_layernorm"},
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), {"model": "model", "layers": "layers", "norm": "embedding_norm"}),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2"), {"model": "backbone", "layers": "layers", "norm": "norm_f"}),
    "nemotron_h": {"model": "model", "layers": "layers", "norm": "norm_f"},
}
"""Model type -> {Llama's name of a module: the family's name}."""


def llama_like(model: Any) -> Any:
    """Return ``model`` with Llama's names for decoder, layers and final norm, set in place; refuse other structures."""
    if names := OWN_NAMES.get(model.config.model_type):
        set_part(model, "model", getattr(model, names["model"]))
        for name in ("layers", "norm"):
            set_part(model.model, name, getattr(model.model, names[name]))
    if not (hasattr(model, "model") and hasattr(model.model, "norm") and hasattr(model.model, "layers")):
        kind = model.config.model_type
        raise UserError(f"{kind} is not built like a Llama (model.layers, model.norm); {other_base()}")
    return model


def set_part(owner: Any, name: str, module: nn.Module) -> None:
    """Set the module that Llama calls ``name``, under Llama's name and the family's. If they differ, Llama's name goes
    into ``__dict__``: a module with two names would appear twice in ``parameters()``."""
    family_name = OWN_NAMES.get(owner.config.model_type, {}).get(name)
    if family_name is None:
        setattr(owner, name, module)
    else:
        setattr(owner, family_name, module)
        owner.__dict__[name] = module


def attention_sizes(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the number of key/value heads and the head width; the smallest if layers differ."""
    heads: int = config.num_attention_heads
    if hasattr(config, "multi_query"):  # GPT-BigCode ignores all other keys
        return (1 if config.multi_query else heads), config.hidden_size // heads
    kv_heads = smallest(config, "num_key_value_heads") or heads
    return kv_heads, smallest(config, "head_dim") or config.hidden_size // heads


def smallest(config: PreTrainedConfig, key: str) -> int | None:
    """Return the smallest integer under ``key`` in a config, of which layers may differ."""
    try:
        value = getattr(config, key, None)
    except RuntimeError:  # raised by transformers for sizes that differ by layer
        value = [getattr(layer, key, None) for layer in config.per_layer_config]
    sizes = value if isinstance(value, list | tuple) else [value]
    return min((size for size in sizes if isinstance(size, int)), default=None)


def of_first_layers(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """Return the config of the same model with its first ``count`` layers; rotary embeddings still need their types."""
    shorter = copy(config)
    shorter.num_hidden_layers = count
    return shorter


@contextmanager
def capture_hidden_states(model: Any, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Yield a dict that gets the outputs [B, T, D] of ``layers`` (0: embedding, 1: first layer) in this thread's
    passes."""
    states: dict[int, Tensor] = {}
    thread = get_ident()

    def store(number: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if get_ident() != thread:
            return
        states[number] = output[0] if isinstance(output, tuple) else output
        if states[number].ndim != 3:
            what = f"the layers of {model.config.model_type} return several streams per token, which heads cannot use"
            raise UserError(f"{what}; choose a head that uses only the final state (medusa, hydra, mlp_speculator)")

    modules = {n: model.model.layers[n - 1] if n else model.get_input_embeddings() for n in layers}
    hooks = [module.register_forward_hook(partial(store, number)) for number, module in modules.items()]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def last_layers(model: Any, cache_shape: CacheShape, skipped: int) -> Any:
    """Return the decoder without its first ``skipped`` layers, whose output it reads as ``inputs_embeds``. The layers
    keep their ``layer_idx``, so they write into the model's own cache."""
    layers = list(model.model.layers)
    return without_embedding(
        decoder_over(model, cache_shape, nn.ModuleList(layers[skipped:]), None, range(skipped, len(layers)))
    )


def without_embedding(decoder: Any) -> Any:
    """Change ``decoder`` to read the output of a layer as ``inputs_embeds``."""
    # The input has passed the embedding already, so what the decoder adds to an embedding is switched off.
    if hasattr(decoder, "embedding_multiplier"):  # Granite scales its input
        decoder.embedding_multiplier = 1.0
    if hasattr(decoder, "wpe"):  # GPT-BigCode adds position embeddings to its input
        decoder.wpe = _NoPositions()
    return decoder


def decoder_over(
    model: Any, cache_shape: CacheShape, layers: nn.ModuleList, norm: nn.Module | None, sources: Sequence[int]
) -> Any:
    """Return a shallow copy of the model's decoder with these ``layers``; ``norm`` replaces the final norm.
    ``layers[i]`` has the config of the model's layer ``sources[i]`` (from 0). Families whose layers cannot run alone
    are refused."""
    config, count = copy(model.config), len(model.model.layers)
    inputs = {"hidden_size_per_layer_input": "a separate embedding", "num_kv_shared_layers": "another layer's keys"}
    for key, what in inputs.items():
        if getattr(config, key, None) and list(sources) != list(range(count)):
            given = f"a layer of {config.model_type} reads {what} ({key}={getattr(config, key)})"
            raise UserError(f"{given}, so some of its layers cannot be run alone; {OTHER_HEAD}")
    if len(cache_shape.layers) != count:
        what = f"a layer of {config.model_type} has several attentions"
        raise UserError(f"{what}, so some layers cannot be run alone; {OTHER_HEAD}")
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = len(sources)
    if kinds:
        _set_layer_types(config, [kinds[source] for source in sources])
    decoder = shallow_copy(model.model)
    set_part(decoder, "layers", layers)
    decoder.config = config
    if norm is not None:
        set_part(decoder, "norm", norm)
    return decoder


def _set_layer_types(config: Any, kinds: list[str]) -> None:
    name = config.attribute_map.get("layer_types", "layer_types")
    if isinstance(getattr(type(config), name, None), property):  # Bamba and Jamba compute them from other settings
        config.__class__ = type(type(config).__name__, (type(config),), {name: kinds})
    else:
        config.layer_types = kinds


class _NoPositions(nn.Module):
    """Replacement for a table of learned position embeddings."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


def shallow_copy(module: Any) -> Any:
    """Return a module that shares children and weights with ``module``, but not hooks added later."""
    view = copy(module)
    view.__dict__["_modules"] = dict(module._modules)
    view.__dict__ |= {name: copy(hooks) for name, hooks in module.__dict__.items() if "_hooks" in name}
    return view
