"""``skinny.cpp``, compiled for this CPU at first use: the product of a few rows in the time of reading the weight.

On Linux with a C++ compiler (``CXX``, else ``g++``); elsewhere there is none, and torch's products are used.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor

from drafthead.data.utils.files import cache_dir
from drafthead.models.kernels.huge_pages import use_huge_pages

SOURCE = Path(__file__).with_name("skinny.cpp")
FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp")
TOLERANCE = 1e-4
"""Largest relative error of a build that is used."""


class CompiledWeight:
    """A weight [N, K] in the layout of ``skinny.cpp``, with a bias. No gradient passes through."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, library: ctypes.CDLL, dtype: torch.dtype = torch.float32
    ) -> None:
        """Of float32 weights, kept as ``dtype``: float32, or int8 with a scale for every output."""
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
        use_huge_pages(self._packed.data_ptr(), self._packed.nbytes)
        self._addresses = self._packed.data_ptr(), self._scale.data_ptr(), self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``: [..., K] -> [..., N], float32."""
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self._outputs)
        rows = x.numel() // self._inputs
        self._product(x.data_ptr(), *self._addresses, out.data_ptr(), rows, self._inputs, self._outputs)
        return out

    def dense(self) -> Tensor:
        """[N, K] the weight, float32."""
        dense = self._packed.transpose(1, 2).reshape(-1, self._inputs) * self._scale[:, None]
        return dense[: self._outputs]


@cache
def skinny_library() -> ctypes.CDLL | None:
    """The compiled library, kept for later processes on the same CPU; None where there is no compiler, or it fails."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if sys.platform != "linux" or shutil.which(compiler[0]) is None:
        return None
    parts = (SOURCE.read_text(), compiler, FLAGS, _cpu_features(), torch.__version__)
    path = cache_dir() / "kernels" / f"skinny-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so"
    try:
        if not path.exists():
            _build(compiler, path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None
    library.width.restype = ctypes.c_int64
    for product in (library.product, library.product_int8):
        product.argtypes, product.restype = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3, None
    return library if _is_right(library) else None


def _build(compiler: list[str], path: Path) -> None:
    """Compile into a folder beside ``path``, then move: another process never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as folder:
        compiled, linked = Path(folder, "skinny.o"), Path(folder, "skinny.so")
        for command in (
            [*compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled)],
            [*compiler, "-shared", str(compiled), _openmp(), "-o", str(linked)],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        linked.replace(path)


def _openmp() -> str:
    """torch's own OpenMP, so that one pool of threads serves both."""
    package = Path(torch.__file__).parent
    bundled = sorted([*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")])
    return str(bundled[0]) if bundled else "-fopenmp"


def _cpu_features() -> str:
    """CPUs of one name differ in what they compute."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _is_right(library: ctypes.CDLL) -> bool:
    """Whether both products agree with torch's."""
    generator = torch.Generator().manual_seed(0)  # a run's own random numbers do not depend on this
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((200, 96), (200,), (7, 96)))
    for compiled in (CompiledWeight(weight, bias, library, dtype) for dtype in (torch.float32, torch.int8)):
        wanted = F.linear(x, compiled.dense(), bias)
        if not (compiled(x) - wanted).abs().max() <= TOLERANCE * wanted.abs().max():
            return False
    return True
