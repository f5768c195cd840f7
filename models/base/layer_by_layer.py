"""Outputs of a base's layers by stock transformers, of which one is in memory at a time.

Shape legend: T tokens, D width.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drafthead.models.base import base_config
from drafthead.models.base.base_config import load_weights
from drafthead.models.base.parts import BaseParts
from drafthead.models.base.structure import decoder_over, llama_like, without_embedding
from drafthead.models.base.text_model import text_config


@torch.inference_mode()
def layers_output(parts: BaseParts, first: int, last: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the output [T, D] of layer ``last`` (from 1) for each of ``inputs``: outputs [T, D] of layer ``first`` (0:
    the embedding). Only the layers between them are read, one after another, unless the base is random, a GGUF file or
    has an adapter."""
    values = [states[None].to(parts.device, parts.dtype) for states in inputs]
    for model, number in _loaded(parts, range(first, last)):
        layers = nn.ModuleList([model.model.layers[number]])
        decoder = without_embedding(decoder_over(model, parts.cache_shape, layers, nn.Identity(), [number]))
        values = [decoder(inputs_embeds=states, use_cache=False).last_hidden_state for states in values]
    return [states[0] for states in values]


def _loaded(parts: BaseParts, numbers: range) -> Iterator[tuple[Any, int]]:
    """Yield the stock model for every layer (from 0), while the weights of this layer are loaded."""
    config, device = parts.config, parts.device
    if not config.has_whole_tensors:
        model = llama_like(load_weights(config, device, stock_attention=True)[0].eval())
        yield from ((model, number) for number in numbers)
        return
    settings = text_config(config.transformers_config())
    model = llama_like(base_config.build_empty(config, settings, dtype=parts.dtype).eval())
    tensors = base_config.checkpoint_tensors(config, model)
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # computed buffers
    names = {id(module): name for name, module in model.named_modules()}
    for number in numbers:
        layer = model.model.layers[number]
        layer._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        for name, tensor in layer.state_dict(keep_vars=True).items():
            tensor.data.copy_(tensors.read(f"{names[id(layer)]}.{name}"))
        yield model, number
        layer._apply(lambda tensor: tensor.to("meta") if isinstance(tensor, nn.Parameter) else tensor)
