"""Skinny products at memory speed: linear layers prepacked for few input rows on a CPU.

Decoding and verifying multiply 1 to 64 rows by every weight of the base, so they should cost one read of the
weights. ``F.linear`` picks a general GEMM there and pays about 1.7 times that from two rows on; oneDNN with
weights reordered once into its blocked layout does not, on some CPUs; a product compiled for the CPU at hand
(``compiled.py``) comes near it on all that were tried. Which is fastest for how many rows a base measures at load
(``choice.py``).
"""

import ctypes
from collections.abc import Callable
from copy import copy
from enum import StrEnum
from itertools import groupby
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthead.models.kernels.compiled import CompiledWeight, skinny_library
from drafthead.models.kernels.huge_pages import use_huge_pages


class InferenceWeights(nn.Module):
    """Drops cached inference weights on ``.train()``, ``.eval()``, ``.to()``, ``.float()`` and ``load_state_dict``."""

    def invalidate(self) -> None:
        """Drop packed copies of weights, and graphs that read weights where they are."""

    def train(self, mode: bool = True) -> Self:
        self.invalidate()
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.invalidate()
        moved: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return moved

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.invalidate()
        super()._load_from_state_dict(*args, **kwargs)


ROWS_HINT = 8
"""Input rows that the packed layout is chosen for; every number from 2 on gives the same layout."""
DRAFT_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}
"""What copies of a head's weights may be in, by name."""


class Kernel(StrEnum):
    """How a few rows are multiplied by a weight."""

    PLAIN = "plain"
    """``F.linear`` over the weight as it was loaded."""
    PACKED = "packed"
    """oneDNN over the blocked copy."""
    COMPILED = "compiled"
    """``skinny.cpp`` over a copy in its layout."""


MEASURED_ROWS = (1, 2, 3, 4, 8, 16, 32)
"""Numbers of rows for which kernels are compared; a number between takes the choice of the next larger one."""


class KernelTable:
    """The kernel for each small number of rows, shared by the layers of a base, and how it was found."""

    def __init__(self) -> None:
        self.by_rows: dict[int, Kernel] = dict.fromkeys(MEASURED_ROWS, Kernel.PACKED)
        self.bfloat16_reads = False
        """Whether hidden states to train on, which need not be exact, are computed by bfloat16 products."""
        self.drafts_in: torch.dtype | None = None
        """Of the copies of their weights that heads draft with (``head.draft_dtype=auto``); None: no copies."""

    def __str__(self) -> str:
        reads = "; hidden states to train on by bfloat16 products" if self.bfloat16_reads else ""
        drafts = f"; {str(self.drafts_in)[6:]} copies of heads to draft with" if self.drafts_in else ""
        runs, first = [], 1
        for kernel, group in groupby(self.by_rows, key=self.by_rows.__getitem__):
            last = max(group)
            runs.append(f"{first}-{last} {kernel}" if first < last else f"{last} {kernel}")
            first = last + 1
        missing = "" if skinny_library() else "; a faster one needs a C++ compiler (g++, or what CXX names)"
        return ", ".join(runs) + missing + reads + drafts

    def kernel(self, rows: int) -> Kernel:
        """The kernel for so many rows; above the measured numbers the packed one, where it is kept."""
        return next((kernel for n, kernel in self.by_rows.items() if rows <= n), Kernel.PACKED)


DEFAULT_TABLE = KernelTable()


class PrepackedLinear(nn.Module):
    """Inference-only CPU linear layer over oneDNN's blocked weight layout. No gradient passes through."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype = torch.float32,
        table: KernelTable | None = None,
    ) -> None:
        """Pack float32 weights as ``dtype``: float32, or bfloat16, which rounds inputs and outputs too.

        With a ``table`` the weight is kept in every form that is to be compared, until ``keep``.
        """
        super().__init__()
        self._dtype = dtype
        self._table = table or DEFAULT_TABLE
        library = None if table is None or dtype != torch.float32 else skinny_library()
        self._compiled = None if library is None else CompiledWeight(weight, bias, library)
        self._weight = None if table is None or library is not None else weight.detach()
        self.out_features, self.in_features = weight.shape
        # Not buffers: an opaque oneDNN tensor cannot be saved, moved or cast.
        self._packed: Tensor | None = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), ROWS_HINT)
        use_huge_pages(torch.ops.mkldnn.data_ptr(self._packed), torch.ops.mkldnn._nbytes(self._packed))
        self._bias = None if bias is None else bias.detach().to(dtype)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``: [..., in] -> [..., out], float32."""
        kernel = self.kernel(x.numel() // x.shape[-1])
        if kernel is Kernel.PLAIN:
            return F.linear(x, self._weight, self._bias)  # type: ignore[arg-type]
        if kernel is Kernel.COMPILED:
            return self._compiled(x.float()).to(x.dtype)  # type: ignore[misc]
        product: Tensor = self._product(x.to(self._dtype), self._packed, self._bias, "none", [], "")
        return product.to(x.dtype)

    def kernel(self, rows: int) -> Kernel:
        """How so many rows are multiplied."""
        kernel = self._table.kernel(rows)
        if self._packed is None or (kernel is Kernel.COMPILED and self._compiled is not None):
            return Kernel.COMPILED
        if kernel is Kernel.PLAIN and self._weight is not None:
            return kernel
        return Kernel.PACKED

    def dense(self) -> Tensor:
        """[out, in] the weight."""
        if self._packed is not None:
            dense: Tensor = self._packed.to_dense()
            return dense
        assert self._compiled is not None
        return self._compiled.dense()

    def inference(self, dtype: torch.dtype | None) -> nn.Module:
        """The layer computed in ``dtype``."""
        return self if dtype in (None, self._dtype) else inference_linear(self.dense(), self._bias, dtype)

    def keep(self, kernels: set[Kernel]) -> None:
        """Release the forms of the weight that none of ``kernels`` reads.

        The packed one serves every number of rows above the measured ones, unless the compiled one serves all.
        """
        if Kernel.PLAIN not in kernels:
            self._weight = None
        if kernels == {Kernel.COMPILED} and self._compiled is not None:
            self._packed = None
        elif Kernel.COMPILED not in kernels:
            self._compiled = None


def can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN can prepack this weight here: a plain dense float32 matrix on a CPU built with oneDNN."""
    return (
        weight.device.type == "cpu"
        and type(weight) in (Tensor, nn.Parameter)  # not torchao's, which say that they are float32
        and type(weight.data) is Tensor
        and weight.dtype == torch.float32
        and weight.ndim == 2
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    )


class Int8Linear(nn.Module):
    """Inference-only CPU linear layer with weights in 8 bits, for drafts alone: a product is off by about a percent.

    Weights have a scale for every output. Inputs are not rounded, so a row's result does not depend on its batch.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, library: ctypes.CDLL) -> None:
        super().__init__()
        self._product = CompiledWeight(weight, bias, library, torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of ``x``."""
        return self._product(x.float()).to(x.dtype)


class PlainLinear(nn.Module):
    """Inference-only ``F.linear``, computed in the dtype of its weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._weight, self._bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of ``x``."""
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias).to(x.dtype)


def inference_linear(
    weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None, table: KernelTable | None = None
) -> nn.Module:
    """A layer with this weight ([out, in]), packed for few rows where that is possible; it gets no gradient.

    ``dtype``: to compute in; by default the weight's own, and in place of int8 where nothing was compiled for that.
    ``table``: which kernel for how many rows.
    """
    if dtype == torch.int8:
        library = skinny_library() if can_prepack(weight) else None
        return inference_linear(weight, bias) if library is None else Int8Linear(weight, bias, library)
    dtype = dtype or weight.dtype
    if can_prepack(weight) and (dtype == torch.float32 or packs_bfloat16()):
        return PrepackedLinear(weight, bias, dtype, table)
    return PlainLinear(weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype))


def packs_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def reads_in(layer: nn.Module) -> torch.dtype:
    """The dtype to give a linear layer or its inference form, which has no weight of its own and takes float32."""
    return layer.weight.dtype if isinstance(layer, nn.Linear) else torch.float32


def joined_linear(
    linears: list[nn.Linear], dtype: torch.dtype | None = None, table: KernelTable | None = None
) -> nn.Module:
    """``inference_linear`` with the outputs of ``linears`` side by side; they share their input, and bias or none."""
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return inference_linear(torch.cat([linear.weight for linear in linears]), bias, dtype, table)


def prepack_linears(module: nn.Module, dtype: torch.dtype | None = None, table: KernelTable | None = None) -> int:
    """Replace every ``nn.Linear`` below ``module`` by its prepacked form, in place; returns how many.

    ``dtype``: to compute in; by default float32, as the weights are. The original weights are released unless something
    else holds them (a tied embedding does).
    """
    replaced = 0
    if type(module).__name__.endswith(("Router", "Gate")):
        return 0  # some read the weight itself, and none is large
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear and can_prepack(child.weight):
            setattr(module, name, inference_linear(child.weight, child.bias, dtype, table))
            replaced += 1
        else:
            replaced += prepack_linears(child, dtype, table)
    return replaced


def inference_copy(module: Any, dtype: torch.dtype | None = None) -> Any:
    """``module`` for inference on few rows, with packed copies of its linear layers' weights; all others are shared.

    Modules with a method ``inference(dtype)`` say themselves what takes their place. The copies are of ``dtype``, by
    default of their own. The result is in evaluation mode, and void once those weights change.
    """
    if type(module) is nn.Linear:
        return inference_linear(module.weight, module.bias, dtype)
    twin = copy(module)
    twin.__dict__["_modules"] = {
        name: child.inference(dtype) if hasattr(child, "inference") else inference_copy(child, dtype)
        for name, child in module._modules.items()
    }
    twin.__dict__["training"] = False
    return twin
