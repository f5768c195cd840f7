"""Linear layers packed for few input rows on a CPU.

Decoding and verification multiply 1 to 64 rows by every weight of the base, so a product should take only as long as
reading the weight. ``F.linear`` uses a general GEMM and takes about 1.7 times as long from two rows on. On some CPUs,
oneDNN reaches this bound with weights in its blocked layout. The product in ``compiled.py`` comes near it on all CPUs
tried. ``choice.py`` measures at load which product is fastest for each number of rows.
"""

from collections.abc import Callable
from copy import copy
from enum import StrEnum
from functools import partial
from itertools import groupby
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthead.models.kernels.compiled import CompiledWeight, skinny_library
from drafthead.models.kernels.huge_pages import use_huge_pages

T = TypeVar("T")


class PackedCopies(nn.Module):
    """Copies of a module's weights for inference, by key, dropped by ``.train()``, ``.to()``, ``load_state_dict``, ...
    The submodule itself has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[object, Any] = {}

    def get(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._copies:
            self._copies[key] = make()
        made: T = self._copies[key]
        return made

    def inference(self, dtype: torch.dtype | None = None) -> Self:
        """Return self, because an inference copy of the module (``inference_copy``) must share these copies."""
        return self

    def train(self, mode: bool = True) -> Self:
        self._copies.clear()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._copies.clear()
        moved: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return moved

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._copies.clear()
        super()._load_from_state_dict(*args, **kwargs)


ROWS_HINT = 8  # rows for which oneDNN chooses its layout of a weight; all from 2 on give the same layout
DRAFT_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}  # for copies of a head's weights


class Kernel(StrEnum):
    """An implementation of the product of a few rows and a weight."""

    PLAIN = "plain"  # `F.linear` with the weight as it was loaded
    PACKED = "packed"  # oneDNN with a copy of the weight in its blocked layout
    COMPILED = "compiled"  # `skinny.cpp` with a copy of the weight in its layout


MEASURED_ROWS = (1, 2, 3, 4, 8, 16, 32)  # a number in between uses the choice for the next larger one


class KernelTable:
    """The kernel for each small number of rows, shared by the layers of a base."""

    def __init__(self) -> None:
        self.by_rows: dict[int, Kernel] = dict.fromkeys(MEASURED_ROWS, Kernel.PACKED)
        self.bfloat16_reads = False  # products for hidden states to train on, which need not be exact
        # Copies of a head's weights for drafting (`head.draft_dtype=auto`); None: their own.
        self.draft_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        reads = "; hidden states to train on by bfloat16 products" if self.bfloat16_reads else ""
        drafts = f"; {str(self.draft_dtype)[6:]} copies of heads to draft with" if self.draft_dtype else ""
        runs, first = [], 1
        for kernel, group in groupby(self.by_rows, key=self.by_rows.__getitem__):
            last = max(group)
            runs.append(f"{first}-{last} {kernel}" if first < last else f"{last} {kernel}")
            first = last + 1
        missing = "" if skinny_library() else "; a faster one needs a C++ compiler (g++, or what CXX names)"
        return ", ".join(runs) + missing + reads + drafts

    def kernel(self, rows: int) -> Kernel:
        return next((kernel for n, kernel in self.by_rows.items() if rows <= n), Kernel.PACKED)


DEFAULT_TABLE = KernelTable()


class PrepackedLinear(nn.Module):
    """An inference-only CPU linear layer. Gradients do not pass through."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.float32, table: KernelTable | None = None
    ) -> None:
        """Pack a float32 ``weight`` as ``dtype``: float32, or bfloat16, which also rounds inputs and outputs. With a
        ``table``, the weight is stored once for each kernel that is compared, until ``keep`` is called."""
        super().__init__()
        self._dtype = dtype
        self._table = table or DEFAULT_TABLE
        library = None if table is None or dtype != torch.float32 else skinny_library()
        self._compiled = None if library is None else CompiledWeight(weight, bias, library)
        self._weight = None if table is None or library is not None else weight.detach()
        self.out_features, self.in_features = weight.shape
        # Not buffers: an opaque oneDNN tensor cannot be saved, moved or cast.
        self._packed: Tensor | None = _onednn("_reorder_linear_weight")(weight.detach().to(dtype), ROWS_HINT)
        if (address := _onednn("data_ptr")) and (size := _onednn("_nbytes")):
            use_huge_pages(address(self._packed), size(self._packed), self._packed)
        self._bias = None if bias is None else bias.detach().to(dtype)
        self._product = _onednn("_linear_pointwise").default

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``: [..., in] -> [..., out], in the dtype of ``x``."""
        kernel = self.kernel(x.numel() // x.shape[-1])
        if kernel is Kernel.PLAIN:
            return F.linear(x, self._weight, self._bias)  # type: ignore[arg-type]
        if kernel is Kernel.COMPILED:
            return self._compiled(x.float()).to(x.dtype)  # type: ignore[misc]
        product: Tensor = self._product(x.to(self._dtype), self._packed, self._bias, "none", [], "")
        return product.to(x.dtype)

    def kernel(self, rows: int) -> Kernel:
        """Return the table's kernel for ``rows`` input rows, or another one if the weight is not stored for it."""
        kernel = self._table.kernel(rows)
        if self._packed is None or (kernel is Kernel.COMPILED and self._compiled is not None):
            return Kernel.COMPILED
        if kernel is Kernel.PLAIN and self._weight is not None:
            return kernel
        return Kernel.PACKED

    def dense(self) -> Tensor:
        if self._packed is not None:
            return self._packed.to_dense()
        assert self._compiled is not None
        return self._compiled.dense()

    def inference(self, dtype: torch.dtype | None) -> nn.Module:
        return self if dtype in (None, self._dtype) else inference_linear(self.dense(), self._bias, dtype)

    def keep(self, kernels: set[Kernel]) -> None:
        """Release the copies of the weight that none of ``kernels`` uses. The packed copy stays, for more rows than
        were measured, unless ``kernels`` has only the compiled one."""
        if Kernel.PLAIN not in kernels:
            self._weight = None
        if kernels == {Kernel.COMPILED} and self._compiled is not None:
            self._packed = None
        elif Kernel.COMPILED not in kernels:
            self._compiled = None


def can_prepack(weight: Tensor) -> bool:
    """Return True if ``weight`` is a plain dense float32 matrix on a CPU, and this torch has oneDNN's packing."""
    return (
        weight.device.type == "cpu"
        and type(weight) in (Tensor, nn.Parameter)  # quantised weights of torchao report float32, too
        and type(weight.data) is Tensor
        and weight.dtype == torch.float32
        and weight.ndim == 2
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and _onednn("_reorder_linear_weight") is not None
        and _onednn("_linear_pointwise") is not None
    )


def _onednn(operator: str) -> Any:
    return getattr(torch.ops.mkldnn, operator, None)


class DtypeLinear(nn.Module):
    """An inference-only linear layer that casts inputs to ``dtype``, applies ``product``, and casts outputs back."""

    def __init__(self, product: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.product, self._dtype = product, dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.to(self._dtype)).to(x.dtype)


def inference_linear(
    weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None, table: KernelTable | None = None
) -> nn.Module:
    """Return an inference-only layer with this weight [out, in], packed for few rows if possible.

    It computes in ``dtype``, by default the weight's. int8 has one scale per output and errors of about one percent;
    inputs are not rounded, so a row's result does not depend on its batch. Without int8 for this weight, its own dtype
    is used.
    """
    if dtype == torch.int8:
        if can_prepack(weight) and (library := skinny_library()):
            return DtypeLinear(CompiledWeight(weight, bias, library, dtype), torch.float32)
        dtype = None
    dtype = dtype or weight.dtype
    if can_prepack(weight) and (dtype == torch.float32 or packs_bfloat16()):
        return PrepackedLinear(weight, bias, dtype, table)
    bias = None if bias is None else bias.detach().to(dtype)
    return DtypeLinear(partial(F.linear, weight=weight.detach().to(dtype), bias=bias), dtype)


def packs_bfloat16() -> bool:
    supported = _onednn("_is_mkldnn_bf16_supported")
    return supported is not None and bool(supported())


def reads_in(layer: nn.Module) -> torch.dtype:
    """Return the input dtype of a linear layer: the weight's; float32 for inference-only layers, which cast inputs."""
    return layer.weight.dtype if isinstance(layer, nn.Linear) else torch.float32


def joined_linear(
    linears: list[nn.Linear], dtype: torch.dtype | None = None, table: KernelTable | None = None
) -> nn.Module:
    """Join ``linears`` into one inference-only layer with concatenated outputs; all must have a bias, or none."""
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return inference_linear(torch.cat([linear.weight for linear in linears]), bias, dtype, table)


def prepack_linears(module: nn.Module, dtype: torch.dtype | None = None, table: KernelTable | None = None) -> int:
    """Prepack each ``nn.Linear`` below ``module`` that can be, in place, and return the number of packed layers.
    Original weights are released unless something else holds them, such as a tied embedding."""
    replaced = 0
    if type(module).__name__.endswith(("Router", "Gate")):
        return 0  # stay unpacked: some read the attribute `weight`, and none is large
    for name, child in list(module.named_children()):
        if name == "dt_proj":
            continue  # of Mamba-1, which reads the attribute `weight`
        if type(child) is nn.Linear and can_prepack(child.weight):
            setattr(module, name, inference_linear(child.weight, child.bias, dtype, table))
            replaced += 1
        else:
            replaced += prepack_linears(child, dtype, table)
    return replaced


def inference_copy(module: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a copy of ``module`` in evaluation mode, with linear layers packed for few rows. A submodule with a method
    ``inference(dtype)`` is replaced by its result. Packed weights are copies in ``dtype`` (None: their own), other
    weights are shared. Make a new copy after a packed weight has changed."""
    if type(module) is nn.Linear:
        return inference_linear(module.weight, module.bias, dtype)
    twin = copy(module)
    twin.__dict__["_modules"] = {
        name: child.inference(dtype) if hasattr(child, "inference") else inference_copy(child, dtype)
        for name, child in module._modules.items()
    }
    twin.__dict__["training"] = False
    return twin
