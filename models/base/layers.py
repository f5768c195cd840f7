"""Views of a base: its first or last layers, the output of a layer in between, a Llama's names for its parts.

Views share the base's modules and weights; nothing is copied. Shape legend: B rows, T tokens, D width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from drafthead.data.utils.errors import UserError
from drafthead.models.cache.kv_cache import TreeMasks
from drafthead.models.kernels.linear import inference_copy

if TYPE_CHECKING:
    from drafthead.models.base.base_model import BaseModel

OWN_NAMES = {
    "gpt_bigcode": {"model": "transformer", "layers": "h", "norm": "ln_f"},
    "gpt2": {"model": "transformer", "layers": "h", "norm": "ln_f"},
    "gpt_neox": {"model": "gpt_neox", "layers": "layers", "norm": "final_layer_norm"},
    "persimmon": {"model": "model", "layers": "layers", "norm": "final_layernorm"},
}


def llama_like(model: Any) -> Any:
    """``model``, with a Llama's names for its decoder, layers and final norm."""
    if names := OWN_NAMES.get(model.config.model_type):
        set_part(model, "model", getattr(model, names["model"]))
        for name in ("layers", "norm"):
            set_part(model.model, name, getattr(model.model, names[name]))
    if not (hasattr(model, "model") and hasattr(model.model, "norm") and hasattr(model.model, "layers")):
        raise UserError(
            f"{model.config.model_type} is not built like a Llama (model.layers, model.norm); choose another base "
            "(docs/bases.md lists families)"
        )
    return model


def set_part(owner: Any, name: str, part: nn.Module) -> None:
    """Replace the part of ``owner`` that has this name in a Llama, under the name that it has here as well."""
    own = OWN_NAMES.get(owner.config.model_type, {}).get(name)
    if own is None:
        setattr(owner, name, part)
    else:
        setattr(owner, own, part)
        owner.__dict__[name] = part


def attention_sizes(config: PreTrainedConfig) -> tuple[int, int]:
    """Key/value heads and head width of a base; where its layers differ, the smallest."""
    heads: int = config.num_attention_heads
    if hasattr(config, "multi_query"):  # GPT-BigCode: whatever else a config says, these follow from three sizes
        return (1 if config.multi_query else heads), config.hidden_size // heads
    kv_heads = smallest(config, "num_key_value_heads") or heads
    return kv_heads, smallest(config, "head_dim") or config.hidden_size // heads


def sizes(config: PreTrainedConfig, key: str) -> list[int]:
    """The values of a size in a config: several where layers have their own."""
    try:
        found = getattr(config, key, None)
    except RuntimeError:  # transformers' error for sizes that differ by layer
        found = [getattr(layer, key, None) for layer in config.per_layer_config]
    return [value for value in (found if isinstance(found, list | tuple) else [found]) if isinstance(value, int)]


def smallest(config: PreTrainedConfig, key: str) -> int | None:
    """A size of a config; where layers have their own, the smallest of them."""
    return min(sizes(config, key), default=None)


def with_layers(
    base: "BaseModel",
    layers: nn.ModuleList,
    norm: nn.Module | None = None,
    dtype: torch.dtype | None = None,
    sources: Sequence[int] | None = None,
) -> "BaseModel":
    """A view of ``base`` with other decoder layers (``layer_idx`` from 0) between its embedding and output head.

    ``norm`` and ``dtype`` of the layers are the base's by default; embeddings are cast to ``dtype``. ``sources``: which
    of the base's layers they are like; by default its first ones.
    """
    sources = range(len(layers)) if sources is None else sources
    view, decoder = copy(base), _decoder_of(base, layers, norm, sources)
    view.model = _shallow(base.model)
    set_part(view.model, "model", decoder)
    view.num_layers = len(layers)
    if dtype is not None and dtype != base.dtype:
        view.dtype = dtype
        decoder.set_input_embeddings(_CastEmbedding(decoder.get_input_embeddings(), dtype))
    view.cache_shape = base.cache_shape.of(sources, view.dtype)
    if base.windows is not None:
        view.windows = replace(base.windows, by_layer=tuple(base.windows.by_layer[source] for source in sources))
    view._tree_masks, view._static = TreeMasks(), None
    view._last_layers = {}
    view.name = f"{base.name} with {len(layers)} layers"
    return view


def first_layers(base: "BaseModel", count: int) -> "BaseModel":
    """The first ``count`` layers, without a final norm: the hidden state is the exit state of layer ``count``."""
    return with_layers(base, nn.ModuleList(list(base.model.model.layers)[:count]), nn.Identity())


def reading_copy(base: "BaseModel") -> "BaseModel":
    """A view of ``base`` for hidden states that heads train on: by bfloat16 products where those are faster here."""
    if base.kernels is None or not base.kernels.bfloat16_reads:
        return base
    layers = [inference_copy(layer, torch.bfloat16) for layer in base.model.model.layers]
    return with_layers(base, nn.ModuleList(layers))


def last_layers(base: "BaseModel", skipped: int) -> Any:
    """The base's decoder without its first ``skipped`` layers, to be called with their output as ``inputs_embeds``.

    The layers keep their ``layer_idx``, so they write into the base's own cache.
    """
    layers = list(base.model.model.layers)[skipped:]
    decoder = _decoder_of(base, nn.ModuleList(layers), None, range(skipped, base.num_layers))
    if hasattr(decoder, "embedding_multiplier"):  # Granite scales whatever it is given
        decoder.embedding_multiplier = 1.0
    if hasattr(decoder, "wpe"):  # and GPT-BigCode adds positions to it
        decoder.wpe = _NoPositions()
    return decoder


@contextmanager
def capture_hidden_states(model: Any, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collects the outputs of these layers (1 is the first, 0 the embedding) while ``model`` runs."""
    states: dict[int, Tensor] = {}

    def keep(number: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        states[number] = output[0] if isinstance(output, tuple) else output
        if states[number].ndim != 3:
            raise UserError(
                f"the layers of {model.config.model_type} put out {states[number].ndim - 2} streams a token, so states "
                "between layers cannot be read; choose a head that reads the last one (medusa, hydra, mlp_speculator)"
            )

    modules = {n: model.model.layers[n - 1] if n else model.get_input_embeddings() for n in layers}
    hooks = [module.register_forward_hook(partial(keep, number)) for number, module in modules.items()]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def drop_views(base: "BaseModel") -> None:
    """Drop captured graphs and views of the base's layers, before their weights move."""
    base._static, base._last_layers = None, {}


def _decoder_of(base: "BaseModel", layers: nn.ModuleList, norm: nn.Module | None, sources: Sequence[int]) -> Any:
    decoder = _shallow(base.model.model)
    set_part(decoder, "layers", layers)
    decoder.config = _config_of(base, sources)
    if norm is not None:
        set_part(decoder, "norm", norm)
    return decoder


def _config_of(base: "BaseModel", sources: Sequence[int]) -> Any:
    """The config of a model made of these layers of ``base``, or of layers like them."""
    config = copy(base.model.config)
    read = {"hidden_size_per_layer_input": "an embedding of its own", "num_kv_shared_layers": "another's"}
    for key, what in read.items():
        if getattr(config, key, None) and list(sources) != list(range(base.num_layers)):
            raise UserError(
                f"a layer of {config.model_type} reads {what} ({key}={getattr(config, key)}), so some of its layers "
                "cannot be run alone; choose a head that needs none of them (medusa, hydra, mlp_speculator)"
            )
    if base.cache_shape.by_layer is not None and len(base.cache_shape.by_layer) != base.num_layers:
        raise UserError(f"a layer of {config.model_type} has several attentions, so some layers cannot be run alone")
    config.num_hidden_layers = len(sources)
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = [kinds[source] for source in sources]
    return config


class _NoPositions(nn.Module):
    """Instead of a table of learned positions, where the input has them already."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


class _CastEmbedding(nn.Module):
    def __init__(self, embedding: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._embedding, self._dtype = embedding, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._embedding(tokens)
        return embedded.to(self._dtype)


def _shallow(module: Any) -> Any:
    """A module that shares all children and weights with another; a hook put on one is not on the other."""
    view = copy(module)
    view.__dict__["_modules"] = dict(module._modules)
    view.__dict__ |= {name: copy(hooks) for name, hooks in module.__dict__.items() if "_hooks" in name}
    return view
