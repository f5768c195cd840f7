"""Parts of a base: its first layers, its last ones, and what leaves a layer in between. Nothing here is copied.

Shape legend: B rows, T tokens, D width.
"""
# Bases whose parts have other names than a Llama's, under its names: ``model``, ``layers``, ``norm``.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from drafthead.data.utils.errors import UserError
from drafthead.models.cache.kv_cache import TreeMasks

if TYPE_CHECKING:
    from drafthead.models.base.base_model import BaseModel

OWN_NAMES = {"gpt_bigcode": {"model": "transformer", "layers": "h", "norm": "ln_f"}}


def llama_like(model: Any) -> Any:
    """``model``, with a Llama's names for its decoder, layers and final norm.

    Raises:
        UserError: it has no such parts.
    """
    if model.config.model_type in OWN_NAMES:
        rename(model, "model", getattr(model, OWN_NAMES[model.config.model_type]["model"]))
        for name in ("layers", "norm"):
            rename(model.model, name, getattr(model.model, OWN_NAMES[model.config.model_type][name]))
    if not (hasattr(model, "model") and hasattr(model.model, "norm") and hasattr(model.model, "layers")):
        raise UserError(
            f"{model.config.model_type} is not built like a Llama (model.layers, model.norm); use a base of the Llama, "
            "Mistral, Qwen2, Qwen3, Gemma, SmolLM or GPT-BigCode families"
        )
    return model


def rename(owner: Any, name: str, part: nn.Module) -> None:
    """Give ``owner`` another part of that (Llama's) name, under its own name, too, where it has one."""
    own = OWN_NAMES.get(owner.config.model_type, {}).get(name)
    if own is None:
        setattr(owner, name, part)
    else:
        setattr(owner, own, part)
        owner.__dict__[name] = part


def attention_sizes(config: PreTrainedConfig) -> tuple[int, int]:
    """Key/value heads and head width of a base."""
    heads: int = config.num_attention_heads
    if config.model_type in OWN_NAMES:  # whatever else a config says, these follow from three sizes
        return (1 if config.multi_query else heads), config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


class NoPositions(nn.Module):
    """In the place of a table of learned positions: its input has them already."""

    def forward(self, positions: Tensor) -> Tensor:
        """Zero, of any shape."""
        return torch.zeros((), device=positions.device)


def with_layers(
    base: "BaseModel", layers: nn.ModuleList, norm: nn.Module | None = None, dtype: torch.dtype | None = None
) -> "BaseModel":
    """``base`` with other decoder layers (and final norm) between its own embedding and output head.

    Args:
        base: is left as it is.
        layers: modules as in ``base``, whose ``layer_idx`` count from 0.
        norm: by default the base's own.
        dtype: of the layers; by default the base's. Embeddings are cast to it.
    """
    view, decoder = copy(base), _decoder_of(base, layers, norm)
    view.model = _shallow(base.model)
    rename(view.model, "model", decoder)
    view.num_layers = len(layers)
    if dtype is not None and dtype != base.dtype:
        view.dtype = dtype
        decoder.set_input_embeddings(_CastEmbedding(decoder.get_input_embeddings(), dtype))
    view.cache_shape = replace(base.cache_shape, layers=len(layers), dtype=view.dtype)
    view._tree_masks, view._static = TreeMasks(), None
    view._last_layers = {}
    view.name = f"{base.name} with {len(layers)} layers"
    return view


def first_layers(base: "BaseModel", count: int) -> "BaseModel":
    """The first ``count`` layers, without a final norm: the hidden state is the exit state of layer ``count``."""
    return with_layers(base, nn.ModuleList(list(base.model.model.layers)[:count]), nn.Identity())


def last_layers(base: "BaseModel", skipped: int) -> Any:
    """The base's decoder without its first ``skipped`` layers, to be called with their output as ``inputs_embeds``.

    The layers keep their ``layer_idx``, so they write into the base's own cache.
    """
    decoder = _decoder_of(base, nn.ModuleList(list(base.model.model.layers)[skipped:]), None)
    if hasattr(decoder, "embedding_multiplier"):  # Granite scales whatever it is given
        decoder.embedding_multiplier = 1.0
    if hasattr(decoder, "wpe"):  # and GPT-BigCode adds positions to it
        decoder.wpe = NoPositions()
    return decoder


@contextmanager
def capture_hidden_states(model: Any, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collects what leaves these layers (1 is the first, 0 the embedding) while ``model`` runs."""
    states: dict[int, Tensor] = {}

    def tap(number: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            states[number] = output[0] if isinstance(output, tuple) else output

        return keep

    stack = model.model.layers
    modules = [stack[number - 1] if number else model.get_input_embeddings() for number in layers]
    hooks = [module.register_forward_hook(tap(number)) for module, number in zip(modules, layers, strict=True)]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def forget_views(base: "BaseModel") -> None:
    """Drop what ``base`` has captured of its weights and layers: they are about to move."""
    base._static, base._last_layers = None, {}


def _decoder_of(base: "BaseModel", layers: nn.ModuleList, norm: nn.Module | None) -> Any:
    decoder = _shallow(base.model.model)
    rename(decoder, "layers", layers)
    decoder.config = copy(base.model.config)
    decoder.config.num_hidden_layers = len(layers)
    if norm is not None:
        rename(decoder, "norm", norm)
    return decoder


class _CastEmbedding(nn.Module):
    def __init__(self, embedding: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._embedding, self._dtype = embedding, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._embedding(tokens)
        return embedded.to(self._dtype)


def _shallow(module: Any) -> Any:
    """A module of its own that shares all children and weights; a hook put on one is not on the other."""
    twin = copy(module)
    twin.__dict__["_modules"] = dict(module._modules)
    twin.__dict__ |= {name: copy(hooks) for name, hooks in module.__dict__.items() if "_hooks" in name}
    return twin
