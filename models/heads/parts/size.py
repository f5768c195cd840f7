"""What a head costs, counted on the head itself: built on the meta device, where weights take no memory."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.text_model import build

if TYPE_CHECKING:
    from drafthead.models.heads.parts.draft_head import DraftHeadConfig


@dataclass(frozen=True, kw_only=True)
class HeadSize:
    """Sizes of a head, known from its settings alone: what ``mode=estimate`` adds up."""

    parameters: int
    """All parameters the head keeps; what it shares with the base is not counted."""
    trainable: int
    positions: int
    """Draft positions K."""
    draft_vocab_size: int
    projections: int = 0
    """Trainable parameters of the vocabulary projections, whose gradients the chunked loss makes itself."""
    feature_layers: int = 0
    """Hidden states of the base that it reads besides the final one."""
    activations_per_token: int = 0
    """Values a token keeps for the backward pass: see :func:`head_size`."""
    recomputable_per_token: int = 0
    """Of these, what activation checkpointing computes again."""


def head_size(config: "DraftHeadConfig", settings: PreTrainedConfig) -> HeadSize:
    """Sizes of a head on a base of transformers' ``settings``.

    Activations are counted one way for all heads: every linear layer keeps its input and its output, a norm and an
    embedding what they put out, each as often as it is called for a token; and every trained draft position keeps four
    vectors of the base's width (what it starts from, what its projection reads, and their gradients). That is more
    than autograd keeps between forward and backward pass, by up to 2.4 times; the loss's own matrices come on top.
    """
    with torch.device("meta"):
        model: Any = build(settings)
    base = BaseModel(model, None, BaseConfig(max_context=16, prepack=False))
    draft_vocab = config.drafted_ids(base.vocab_size)
    d2t = None if config.draft_vocab_size is None else torch.arange(draft_vocab)
    with torch.device("meta"):
        head = config.build(base, d2t)
    weights = [head.output_head(k).trained for k in range(head.depth)]
    projections = {id(weight): weight.numel() for weight in weights if weight.requires_grad}
    kept = {
        name: head.num_calls(name) * _values(module, head, name)
        for name, module in head.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter) and id(module.weight) not in projections
    }
    recomputed = 0
    names = {module: name for name, module in head.named_modules()}
    checkpointed = [names[module] for module, _ in head.checkpointable()]
    for part in set(checkpointed):
        inner = sum(values for name, values in kept.items() if name.startswith(f"{part}."))
        # What a call keeps: its input, and queries, keys and values of the attention it is around.
        recomputed += max(0, inner - checkpointed.count(part) * 4 * base.hidden_size * head.num_calls(f"{part}."))
    return HeadSize(
        parameters=sum(parameter.numel() for parameter in head.parameters()),
        trainable=sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad),
        positions=head.depth,
        draft_vocab_size=draft_vocab,
        projections=sum(projections.values()),
        feature_layers=len(head.spec.layers),
        activations_per_token=4 * base.hidden_size * config.trained_positions + sum(kept.values()),
        recomputable_per_token=recomputed,
    )


def _values(module: nn.Module, head: nn.Module, name: str) -> int:
    """What one call of the head's module of that name, which has a weight, keeps for a token."""
    if isinstance(module, nn.Linear):
        return module.in_features + module.out_features
    if name.endswith(("q_norm", "k_norm")):  # every attention head calls it, and what it puts out is rotated
        projection = head.get_submodule(name.removesuffix("norm") + "proj")
        assert isinstance(projection, nn.Linear)
        return 2 * projection.out_features
    shape: torch.Size = module.weight.shape  # type: ignore[assignment]
    return shape[-1]
