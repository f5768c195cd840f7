"""Skinny products at memory speed: linear layers prepacked for few input rows on a CPU.

Decoding and verifying multiply 1 to 64 rows by every weight of the base, so they should cost one read of the
weights. ``F.linear`` picks a general GEMM there and pays about 1.7 times that from two rows on; oneDNN with
weights reordered once into its blocked layout does not (``benchmarks/decode.py`` measures both).
"""

import ctypes
import mmap
import sys
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

ROWS_HINT = 8
"""Input rows that the packed layout is chosen for; every number from 2 on gives the same layout."""
FULL_ROWS = 4
"""oneDNN multiplies three or four rows faster than one or two."""
PAD_FROM = 2**19
"""Weights from which copying one or two rows up to ``FULL_ROWS`` costs less than it saves."""

HUGE_PAGE = 2**21
"""Bytes of a huge page."""
MADV_COLLAPSE = 25
"""Linux 6.1's advice to gather pages into huge ones now; the mmap module does not name it."""


def pad_rows(x: Tensor) -> Tensor:
    """[..., T, in] of one or two rows in all, repeated along T to ``FULL_ROWS``; the caller drops the copies."""
    return torch.cat((x,) * (FULL_ROWS * x.shape[-1] // x.numel()), -2)


def is_skinny(x: Tensor) -> bool:
    """Whether ``x`` [..., T, in] has one or two rows in all."""
    return x.ndim > 1 and 0 < x.numel() <= 2 * x.shape[-1]


class PrepackedLinear(nn.Module):
    """Inference-only float32 CPU linear layer over oneDNN's blocked weight layout. No gradient passes through."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Not buffers: an opaque oneDNN tensor cannot be saved, moved or cast.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
        _use_huge_pages(torch.ops.mkldnn.data_ptr(self._packed), torch.ops.mkldnn._nbytes(self._packed))
        self._bias = None if bias is None else bias.detach()
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._pads = weight.numel() >= PAD_FROM

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``: [..., in] -> [..., out], float32."""
        if self._pads and is_skinny(x):
            return self.forward(pad_rows(x)).narrow(-2, 0, x.shape[-2])
        product: Tensor = self._product(x, self._packed, self._bias, "none", [], "")
        return product


def _use_huge_pages(address: int, size: int) -> None:
    """Ask Linux to back this memory by huge pages: reading weights in 4 KiB pages costs a twentieth of a pass more.

    Best effort: where the kernel declines, nothing changes. Neighbours on the same huge pages are included.
    """
    if sys.platform != "linux":
        return
    start = address // HUGE_PAGE * HUGE_PAGE
    length = -(-(address + size - start) // HUGE_PAGE) * HUGE_PAGE
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for advice in (mmap.MADV_HUGEPAGE, MADV_COLLAPSE):
        advise(start, length, advice)


def can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN can prepack this weight here: a dense float32 matrix on a CPU built with oneDNN."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.ndim == 2
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    )


def inference_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    """A layer with this weight, packed for few rows where that is possible. No gradient reaches the weight."""
    if can_prepack(weight):
        return PrepackedLinear(weight, bias)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)  # type: ignore[assignment]
    return linear


def joined_linear(linears: list[nn.Linear]) -> nn.Module:
    """``inference_linear`` with the outputs of ``linears`` side by side; they share their input, and bias or none."""
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return inference_linear(torch.cat([linear.weight for linear in linears]), bias)


def prepack_linears(module: nn.Module) -> int:
    """Replace every ``nn.Linear`` below ``module`` by its prepacked form, in place; returns how many.

    The original weights are released unless something else holds them (a tied embedding does).
    """
    replaced = 0
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear and can_prepack(child.weight):
            setattr(module, name, PrepackedLinear(child.weight, child.bias))
            replaced += 1
        else:
            replaced += prepack_linears(child)
    return replaced


def packed_twin(module: Any) -> Any:
    """``module`` for inference on few rows: shares all its weights, but has packed copies of its linear layers' ones.

    It is in evaluation mode, and void once those weights change.
    """
    if type(module) is nn.Linear and can_prepack(module.weight):
        return PrepackedLinear(module.weight, module.bias)
    twin = copy(module)
    twin.__dict__["_modules"] = {name: packed_twin(child) for name, child in module._modules.items()}
    twin.__dict__["training"] = False
    return twin
