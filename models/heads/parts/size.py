"""Sizes of a head, counted on the head itself: built on the meta device, where weights take no memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.text_model import build


@dataclass(frozen=True, kw_only=True)
class HeadSize:
    """Sizes of a head, known from its settings alone; ``mode=estimate`` adds them up."""

    parameters: int
    """All parameters of the head; those shared with the base are not counted."""
    trainable: int
    positions: int
    """Draft positions K."""
    draft_vocab_size: int
    projections: int = 0
    """Trainable parameters of the vocabulary projections, whose gradients the chunked loss computes itself."""
    feature_layers: int = 0
    """Number of the base's hidden states that the head reads in addition to the final one."""
    activations_per_token: int = 0
    """Values stored per token for the backward pass; see :func:`stored_activations`."""
    recomputable_per_token: int = 0
    """Part of ``activations_per_token`` that activation checkpointing computes again instead."""


def meta_base(settings: PreTrainedConfig) -> BaseModel:
    """Return a base of transformers' ``settings`` without weights."""
    with torch.device("meta"):
        model: Any = build(settings)
    return BaseModel(model, None, BaseConfig(max_context=16, prepack=False))


def stored_activations(head: nn.Module, projections: set[int], num_calls: Callable[[str], int]) -> dict[str, int]:
    """Return how many values per token each module of ``head`` stores for the backward pass, by module name.

    All heads are counted alike: a linear layer stores its input and output, a norm or an embedding its output, each
    once per call and token. The sum is more than autograd stores, by up to a factor of 2.4.

    Args:
        head: the head, possibly on the meta device.
        projections: ids of vocabulary projections' weights, which are left out.
        num_calls: module name -> calls per token.
    """
    return {
        name: num_calls(name) * _values_per_call(module, head, name)
        for name, module in head.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter) and id(module.weight) not in projections
    }


def recomputed_activations(
    stored: dict[str, int], checkpointed: list[str], num_calls: Callable[[str], int], width: int
) -> int:
    """Return how many of the ``stored`` values per token checkpointing of the named modules saves.

    A checkpointed call still stores its input and the queries, keys and values of the attention around it: at most
    four vectors of the base's ``width``. A name occurs in ``checkpointed`` once per checkpointed method.
    """
    saved = 0
    for name in set(checkpointed):
        inner = sum(values for child, values in stored.items() if child.startswith(f"{name}."))
        saved += max(0, inner - checkpointed.count(name) * 4 * width * num_calls(f"{name}."))
    return saved


def _values_per_call(module: nn.Module, head: nn.Module, name: str) -> int:
    """Return the values per token that one call of a module with a weight stores."""
    if isinstance(module, nn.Linear):
        return module.in_features + module.out_features
    if name.endswith(("q_norm", "k_norm")):  # called for every attention head; the output is also rotated
        projection = head.get_submodule(name.removesuffix("norm") + "proj")
        assert isinstance(projection, nn.Linear)
        return 2 * projection.out_features
    shape: torch.Size = module.weight.shape  # type: ignore[assignment]
    return shape[-1]
