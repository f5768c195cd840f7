"""A base without weights, to count parameters and memory. Its tensors are on the meta device."""

from typing import Any

import torch
from transformers import PreTrainedConfig

from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.text_model import build
from drafthead.models.kernels import attention

COUNTING = BaseConfig(max_context=16, prepack=False)
"""Settings of a base that only counts parameters."""


def meta_base(
    settings: PreTrainedConfig, config: BaseConfig = COUNTING, dtype: torch.dtype = torch.float32
) -> BaseModel:
    """Return a base of transformers' ``settings`` without weights; composite models are cut to the language model."""
    with torch.device("meta"):
        model: Any = build(settings)
    model.set_attn_implementation(attention.register())
    return BaseModel(model.to(dtype), None, config)
