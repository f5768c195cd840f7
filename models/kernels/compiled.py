"""Matrix products and attention for a few rows, and causal attention: ``skinny.cpp``, compiled for this CPU at first
use.

It needs Linux and a C++ compiler (``CXX``, else ``g++``); otherwise torch's products and attention are used.

Shape legend: N outputs, K inputs, B batch, H query heads, G key/value heads, T queries, S keys, E head width.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor

from drafthead.files.local import cache_dir
from drafthead.models.kernels.huge_pages import use_huge_pages
from drafthead.system.machine import cpu_info

SOURCE = Path(__file__).with_name("skinny.cpp")
FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp")
BUILD_SECONDS = 60  # of one compiler call
TOLERANCE = 1e-4  # relative error
MOST_QUERIES = 32  # with a mask: torch's attention is faster with many more


class CompiledWeight:
    """A weight [N, K] in the layout of ``skinny.cpp``, with a bias. Gradients do not pass through."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, library: ctypes.CDLL, dtype: torch.dtype = torch.float32
    ) -> None:
        """Copy a float32 ``weight`` on the CPU as ``dtype``: float32, or int8 with one scale per output."""
        if not weight.is_cpu or weight.dtype != torch.float32 or weight.ndim != 2 or weight.numel() == 0:
            given = f"{weight.dtype} {list(weight.shape)} on {weight.device}"
            raise RuntimeError(f"a compiled weight must be a non-empty float32 matrix on the CPU, got {given}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise RuntimeError(f"a bias {list(bias.shape)} does not fit a weight {list(weight.shape)}")
        width = library.width()
        self._outputs, self._inputs = weight.shape
        blocks = -(-self._outputs // width)
        padded = weight.new_zeros(blocks * width, self._inputs)
        padded[: self._outputs] = weight.detach()
        self._scale, self._bias = weight.new_ones(blocks * width), weight.new_zeros(blocks * width)
        self._product = library.product
        if dtype == torch.int8:
            self._product = library.product_int8
            self._scale = padded.abs().amax(1).clamp(min=torch.finfo(padded.dtype).tiny) / 127
            padded = (padded / self._scale[:, None]).round().to(dtype)
        if bias is not None:
            self._bias[: self._outputs] = bias.detach()
        self._packed = padded.view(blocks, width, self._inputs).transpose(1, 2).contiguous()
        use_huge_pages(self._packed.data_ptr(), self._packed.nbytes, self._packed)
        self._addresses = self._packed.data_ptr(), self._scale.data_ptr(), self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``, float32: [..., K] -> [..., N]; errors have the type of ``F.linear``'s."""
        # The library receives bare addresses, so it would read and write past the end of a tensor of another size.
        if not x.is_cpu or x.dtype != torch.float32 or x.ndim == 0 or x.shape[-1] != self._inputs:
            given = f"{x.dtype} {list(x.shape)} on {x.device}"
            expected = f"an input of dtype float32 [..., {self._inputs}] on the device cpu"
            raise RuntimeError(f"expected {expected}, got {given}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self._outputs)
        rows = x.numel() // self._inputs
        self._product(x.data_ptr(), *self._addresses, out.data_ptr(), rows, self._inputs, self._outputs)
        return out

    def dense(self) -> Tensor:  # float32 [N, K]; if stored as int8, as it was rounded
        dense = self._packed.transpose(1, 2).reshape(-1, self._inputs) * self._scale[:, None]
        return dense[: self._outputs]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor | None:
    """Return the attention [B, T, H, E] of ``query`` [B, H, T, E] to ``key`` and ``value`` [B, G, S, E] with an
    additive ``mask`` [B or 1, 1, T, S], all float32. Without a mask, it is causal if T = S. Return None without a
    compiler, and where torch's attention is needed (for gradients) or not slower."""
    library, given = skinny_library(), [query, key, value, *([] if mask is None else [mask])]
    causal = mask is None and query.shape[2] > 1
    if (
        library is None
        or (query.shape[2] != key.shape[2] if causal else query.shape[2] > MOST_QUERIES)
        or value.shape != key.shape
        or (torch.is_grad_enabled() and any(each.requires_grad for each in given))
        or not all(each.is_cpu and each.dtype == torch.float32 and each.stride(-1) == 1 for each in given)
    ):
        return None
    return _attend(library, given, scale, causal)


def _attend(library: ctypes.CDLL, given: Sequence[Tensor], scale: float, causal: bool = False) -> Tensor | None:
    """Return ``attend`` of (query, key, value, mask); None if the library does not have it for their width."""
    (batch, heads, queries, width), (_, groups, keys, _) = given[0].shape, given[1].shape
    # A mask for all rows of the batch has a stride of 0.
    strides = [each.stride()[:3] if len(each) == batch else (0, *each.stride()[1:3]) for each in given]
    numbers = (ctypes.c_int64 * 12)(*chain(*strides))
    out = given[0].new_empty(batch, queries, heads, width)
    addresses = [each.data_ptr() for each in given] + [None] * (4 - len(given)) + [out.data_ptr()]
    known = library.attend(*addresses, numbers, batch, heads, groups, queries, keys, width, scale, causal)
    return out if known else None


@cache
def skinny_library() -> ctypes.CDLL | None:
    """Return the library of ``skinny.cpp``, compiled or from disk; None if it cannot be built or is wrong."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if sys.platform != "linux" or shutil.which(compiler[0]) is None:
        return None
    # The file's name depends on everything that decides its content.
    features = cpu_info("flags") or cpu_info("Features") or platform.machine()  # CPUs of one name may differ in these
    inputs = (SOURCE.read_text(), compiler, FLAGS, features, torch.__version__)
    path = cache_dir() / "kernels" / f"skinny-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}.so"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # torch's own OpenMP library, so that both use one pool of threads.
            package = Path(torch.__file__).parent
            bundled = sorted([*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")])
            # Built in a folder next to ``path`` and moved, so that no other process reads half of a file.
            with TemporaryDirectory(dir=path.parent) as folder:
                compiled, linked = Path(folder, "skinny.o"), Path(folder, "skinny.so")
                openmp = str(bundled[0]) if bundled else "-fopenmp"
                for command in (
                    [*compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled)],
                    [*compiler, "-shared", str(compiled), openmp, "-o", str(linked)],
                ):
                    subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS)
                linked.replace(path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None
    library.width.restype = ctypes.c_int64
    for product in (library.product, library.product_int8):
        product.argtypes, product.restype = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3, None
    library.attend.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 6 + [ctypes.c_float, ctypes.c_int64]
    library.attend.restype = ctypes.c_int64
    # All must agree with torch; the products with one tile and with several.
    generator = torch.Generator().manual_seed(0)  # leaves the program's own random numbers alone
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((200, 300), (200,), (30, 300)))
    for dtype in (torch.float32, torch.int8):
        packed = CompiledWeight(weight, bias, library, dtype)
        for rows in (x[:7], x):
            expected = F.linear(rows, packed.dense(), bias)
            if not (packed(rows) - expected).abs().max() <= TOLERANCE * expected.abs().max():
                return None
    query, key = x.view(1, 6, 5, 300)[..., :128], weight.view(1, 2, 100, 300)[..., :128]
    mask = weight.new_zeros(1, 1, 5, 100).masked_fill_(torch.ones(5, 100).tril(40) == 0, -torch.inf)
    text = weight.view(1, 4, 50, 300)[..., :128]
    for given, is_causal in (((query, key, key, mask), False), ((text, text[:, :2], text[:, 2:]), True)):
        attended = _attend(library, given, 0.1, is_causal)
        seen = None if is_causal else mask
        expected = F.scaled_dot_product_attention(*given[:3], seen, 0.0, is_causal, scale=0.1, enable_gqa=True)
        if attended is None or not (attended - expected.transpose(1, 2)).abs().max() <= TOLERANCE:
            return None
    return library
