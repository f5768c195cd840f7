"""Bases whose parts have other names than a Llama's, under its names: ``model``, ``layers``, ``norm``.

GPT-BigCode (StarCoder, Granite-20B-code) has one stack of layers behind learned positions, and so does all that a
Llama does here, but heads that borrow the base's rotary embedding. The names are added beside its own, outside of
``nn.Module``'s registers: a part that is registered twice would be saved, adapted and packed twice.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from drafthead.data.errors import UserError

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
