"""Starting a head's decoder layer as one of the base's."""

from typing import Any

import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from drafthead.data.utils.errors import UserError
from drafthead.models.heads.parts.attention_layer import HeadDecoderLayer


@torch.no_grad()
def copy_layer(stock: Any, layer: HeadDecoderLayer) -> None:
    """Copy the weights of a base's decoder layer into ``layer``, in float32 and without biases.

    Query and key norms that the base lacks start with the average size of its queries and keys.

    Raises:
        UserError: the base's layer is not like Llama's.
    """
    if not _is_llama_like(stock):
        raise UserError(
            f"head.copy_layers=true copies layers like Llama's, which {type(stock).__name__} is not; set "
            "head.copy_layers=false"
        )
    attention = layer.self_attn
    for name in ("input_layernorm", "post_attention_layernorm"):
        norm = getattr(stock, name)
        getattr(layer, name).weight.copy_(norm.weight + 1 if isinstance(norm, GemmaRMSNorm) else norm.weight)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(attention, name).weight.copy_(getattr(stock.self_attn, name).weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(layer.mlp, name).weight.copy_(getattr(stock.mlp, name).weight)
    for name in ("q", "k"):
        norm = getattr(attention, f"{name}_norm")
        if hasattr(stock.self_attn, f"{name}_norm"):
            norm.weight.copy_(getattr(stock.self_attn, f"{name}_norm").weight)
        else:
            rows = getattr(attention, f"{name}_proj").weight * layer.input_layernorm.weight
            norm.weight.fill_(rows.square().sum(1).mean().sqrt())


def _is_llama_like(stock: Any) -> bool:
    """Return True if a base's decoder layer has the modules that ``copy_layer`` copies, and no others."""
    modules = {name: {child for child, _ in module.named_children()} for name, module in stock.named_children()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return (
        set(modules) == {*norms, "self_attn", "mlp"}
        and {"q_proj", "k_proj", "v_proj", "o_proj"} <= modules["self_attn"]
        and {"gate_proj", "up_proj", "down_proj"} <= modules["mlp"]
        and not any(getattr(getattr(stock, name), "bias", None) is not None for name in norms)
    )
