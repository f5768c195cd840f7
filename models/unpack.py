"""Stock weights of decoder layers, read back from the fused and prepacked modules that a base may run with.

A base keeps no originals beside its packed weights, and a drafter that starts from some of its layers needs them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from drafthead.models.fused import FusedAttention, FusedMLP, FusedRMSNorm
from drafthead.models.linear import PrepackedLinear


def fresh_copy(layer: nn.Module, config: Any, layer_idx: int) -> nn.Module:
    """A stock decoder layer with the weights of ``layer``, float32 and trainable.

    Args:
        layer: of a base, fused or not.
        config: of the base.
        layer_idx: its place in the new stack, by which caches know it.
    """
    device = next((p.device for p in layer.parameters()), torch.device("cpu"))  # packed layers are the CPU's
    with torch.device(device):
        stock: nn.Module = type(layer)(config, layer_idx=layer_idx)
    copy_weights(layer, stock)
    return stock.float().requires_grad_(True)


def copy_weights(source: nn.Module, stock: Any) -> None:
    """Give ``stock`` the weights of ``source``, which may be the fused form of it.

    Raises:
        RuntimeError: they are not of one kind.
    """
    if isinstance(source, PrepackedLinear):
        _fill([stock], source)
    elif isinstance(source, FusedMLP):
        _fill([stock.gate_proj, stock.up_proj], source._gate_up)
        _fill([stock.down_proj], source._down)
    elif isinstance(source, FusedAttention):
        _fill([stock.q_proj, stock.k_proj, stock.v_proj], source._qkv)
        _fill([stock.o_proj], source._out)
        if source._normed:
            copy_weights(source.q_norm, stock.q_norm)
            copy_weights(source.k_norm, stock.k_norm)
    elif isinstance(source, FusedRMSNorm):
        weight = source._weight / source._weight.shape[0] ** 0.5
        _copy(stock.weight, weight - 1 if isinstance(stock, GemmaRMSNorm) else weight)
    else:
        for name, parameter in source.named_parameters(recurse=False):
            _copy(getattr(stock, name), parameter)
        for name, child in source.named_children():
            copy_weights(child, getattr(stock, name))


def _fill(linears: list[Any], packed: nn.Module) -> None:
    """Split a packed layer's outputs over ``linears``, which it took the place of."""
    assert isinstance(packed, PrepackedLinear)
    identity = torch.eye(packed.in_features)
    bias = torch.zeros(packed.out_features) if packed._bias is None else packed._bias
    # The product with the identity is the weight, exactly, as long as no bias is added to it.
    rows = packed._product(identity, packed._packed, None, "none", [], "").t()
    start = 0
    for linear in linears:
        part = slice(start, start + linear.out_features)
        _copy(linear.weight, rows[part])
        if linear.bias is not None:
            _copy(linear.bias, bias[part])
        start = part.stop


def _copy(target: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        target.copy_(value)
