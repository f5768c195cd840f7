"""Views of a base with other decoder layers, which share all other modules and weights with the base."""

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.structure import decoder_over, set_part, shallow_copy
from drafthead.models.kernels.fused import fuse_modules
from drafthead.models.kernels.linear import inference_copy, prepack_linears


def with_layers(
    base: BaseModel,
    layers: nn.ModuleList,
    norm: nn.Module | None = None,
    dtype: torch.dtype | None = None,
    sources: Sequence[int] | None = None,
) -> BaseModel:
    """Return a view of ``base`` with other decoder ``layers`` (``layer_idx`` from 0). ``norm`` replaces the final norm.
    ``dtype`` is that of ``layers``, to which embeddings are cast; None: the base's. ``sources``: for each of
    ``layers``, the index of the base's layer with equal config; None: 0, 1, 2, ..."""
    sources = range(len(layers)) if sources is None else sources
    view, decoder = copy(base), decoder_over(base.model, base.cache_shape, layers, norm, sources)
    view.model = shallow_copy(base.model)
    set_part(view.model, "model", decoder)
    view.num_layers = len(layers)
    if dtype is not None and dtype != base.dtype:
        view.dtype = dtype
        decoder.set_input_embeddings(_CastEmbedding(decoder.get_input_embeddings(), dtype))
    view.cache_shape = base.cache_shape.of(sources, view.dtype)
    if base.windows is not None:
        view.windows = replace(base.windows, by_layer=tuple(base.windows.by_layer[source] for source in sources))
    # Masks, graphs and decoders that the base has stored belong to its own layers.
    view._tree_masks, view._static, view._last_layers = {}, None, {}
    view.name = f"{base.name} with {len(layers)} layers"
    return view


def drafting_layers(base: BaseModel, layers: nn.ModuleList, dtype: torch.dtype | None) -> nn.ModuleList:
    """Return trained stock ``layers``, or if ``base`` is prepacked, copies with fused and packed weights in ``dtype``
    (None: their own)."""
    if not base.prepacked:
        return layers
    layers = deepcopy(layers).requires_grad_(False)
    fuse_modules(layers, dtype)
    prepack_linears(layers, dtype)
    return layers


def first_layers(base: BaseModel, count: int) -> BaseModel:
    """Return a view of the first ``count`` layers, without a norm after the last one."""
    return with_layers(base, nn.ModuleList(list(base.model.model.layers)[:count]), nn.Identity())


def reading_copy(base: BaseModel) -> BaseModel:
    """Return ``base``, or a view with bfloat16 copies of its layers if they are measured to be faster on this CPU. The
    weights of recurrences must stay float32."""
    if base.kernels is None or not base.kernels.bfloat16_reads or base.recurrent:
        return base
    layers = [inference_copy(layer, torch.bfloat16) for layer in base.model.model.layers]
    return with_layers(base, nn.ModuleList(layers))


def drop_views(base: BaseModel) -> None:
    """Drop the CUDA graphs and partial decoders that ``base`` has stored, because its weights are about to move."""
    base._static, base._last_layers = None, {}


class _CastEmbedding(nn.Module):
    def __init__(self, embedding: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._embedding, self._dtype = embedding, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._embedding(tokens)
        return embedded.to(self._dtype)
