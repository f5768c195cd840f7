"""Outputs of a base's first layers by stock transformers, which loads no other layer.

Shape legend: T tokens, D width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafthead.models.base.base_config import BaseConfig, load_weights
from drafthead.models.base.structure import capture_hidden_states, llama_like


@torch.inference_mode()
def lowest_states(config: BaseConfig, layer: int, texts: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Return the output [T, D] of ``layer`` (1: the first) for the token ids of each text. Only the layers up to it are
    loaded, unless the base is random, a GGUF file or has an adapter."""
    model = llama_like(load_weights(config, device, stock_attention=True, layers=layer)[0].eval())
    outputs = []
    for ids in texts:
        with capture_hidden_states(model, [layer]) as states:
            model.model(input_ids=torch.tensor([ids], device=device), use_cache=False)
        outputs.append(states[layer][0])
    return outputs
