"""Outputs of a base's first and last layers by stock transformers, for which no other layers are loaded.

Shape legend: T tokens, D width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drafthead.models.base import base_config
from drafthead.models.base.base_config import BaseConfig, load_weights
from drafthead.models.base.parts import BaseParts
from drafthead.models.base.structure import capture_hidden_states, decoder_over, llama_like, without_embedding
from drafthead.models.base.text_model import text_config


@torch.inference_mode()
def first_layers_output(
    config: BaseConfig, layer: int, texts: Sequence[Sequence[int]], device: torch.device
) -> list[Tensor]:
    """Return the output [T, D] of ``layer`` (1: the first) for the token ids of each text. Only the layers up to it are
    loaded, unless the base is random, a GGUF file or has an adapter."""
    model = llama_like(load_weights(config, device, stock_attention=True, layers=layer)[0].eval())
    outputs = []
    for ids in texts:
        with capture_hidden_states(model, [layer]) as states:
            model.model(input_ids=torch.tensor([ids], device=device), use_cache=False)
        outputs.append(states[layer][0])
    return outputs


@torch.inference_mode()
def last_layers_output(parts: BaseParts, layer: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the last layer's output [T, D], before the final norm, for each of ``inputs``: outputs [T, D] of
    ``layer``. Only the layers after it are loaded, unless the base is random, a GGUF file or has an adapter."""
    config, device = parts.config, parts.device
    if config.has_whole_tensors:
        model = _with_last_layers(parts, layer)
    else:
        model = llama_like(load_weights(config, device, stock_attention=True)[0].eval())
    layers = nn.ModuleList(list(model.model.layers)[layer:])
    decoder = decoder_over(model, parts.cache_shape, layers, nn.Identity(), range(layer, parts.num_layers))
    decoder = without_embedding(decoder)
    given = (states[None].to(device, parts.dtype) for states in inputs)
    return [decoder(inputs_embeds=states, use_cache=False).last_hidden_state[0] for states in given]


def _with_last_layers(parts: BaseParts, layer: int) -> Any:
    """Return the stock model, in which all weights but those of the layers after ``layer`` are on the meta device."""
    config = parts.config
    settings = text_config(config.transformers_config())
    model = llama_like(base_config.build_empty(config, settings, dtype=parts.dtype).eval())
    tensors, device = base_config.checkpoint_tensors(config, model), parts.device
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # computed buffers
    names = {id(module): name for name, module in model.named_modules()}
    for module in list(model.model.layers)[layer:]:
        module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        for name, tensor in module.state_dict(keep_vars=True).items():
            tensor.data.copy_(tensors.read(f"{names[id(module)]}.{name}"))
    return model
