"""Choice of the fastest kernel for products of 1 to 32 rows on this CPU, and of smaller dtypes for some of them.

Everything is measured at the first load of a base and stored for later loads.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafthead.errors import UserError
from drafthead.files.local import cache_dir, exclusive, read_checksummed_json, write_checksummed_json
from drafthead.models.kernels import linear
from drafthead.models.kernels.compiled import skinny_library
from drafthead.models.kernels.huge_pages import wait_for_huge_pages
from drafthead.models.kernels.linear import DRAFT_DTYPES, MEASURED_ROWS, Kernel, KernelTable, PrepackedLinear
from drafthead.system.machine import hardware, versions

WORTH_MEASURING = 2**23  # weights of the smallest base for which kernels are measured; others fit into the CPU's caches
REPEATS, LONG_SECONDS = 3, 20.0
"""Times that each combination of kernel and rows is timed, after a warm-up; 2 after ``LONG_SECONDS`` in all."""
COPY_SHARE = 1 / 8
"""If only compiled kernels were chosen, packed copies of the weights are kept if they take less than this share of the
memory. For hundreds of rows, the packed product is up to a tenth faster."""
PLAIN_ROWS = 4  # up to which ``F.linear`` is timed, if no kernel is compiled: it is slower
MARGIN = 0.97  # another kernel must take less than this share of the default's time (the compiled one, if any)
READ_ROWS, DRAFT_ROWS = 256, 4  # with which smaller dtypes are timed: for hidden states to train on, for drafting
ROUNDING_MARGIN = 0.8  # a product in a smaller dtype must take less than this share of the time of the one it replaces
MLP_WIDTHS = 4  # size of a head's usual MLP, in widths of the base, whose product is timed without the base's layers
Pass = Callable[[int], object]  # runs the base on this number of tokens (rows of its matrix products)


def worth_measuring(model: nn.Module) -> bool:
    return sum(p.numel() for p in model.parameters() if linear.can_prepack(p)) >= WORTH_MEASURING


def choose_kernels(table: KernelTable, module: nn.Module, run: Pass, shape: object) -> None:
    """Fill ``table`` with the fastest kernel by number of rows, and free the copies of weights for other kernels.

    Also choose a smaller dtype, if clearly faster: bfloat16 for hidden states to train on, bfloat16 or int8 for copies
    of a head's weights. ``shape`` identifies the sizes of the matrices of ``module``, which ``run`` runs. The choice is
    stored on this machine, so that a resumed run computes what it did before.
    """
    path = _path(shape)
    try:
        with exclusive(path.parent):
            if not restore(table, shape):
                _measure(table, module, run)
                kernels = {str(n): kernel.value for n, kernel in table.by_rows.items()}
                draft_dtype = next((name for name, dtype in DRAFT_DTYPES.items() if dtype == table.draft_dtype), None)
                choice = {**kernels, "bfloat16_reads": table.bfloat16_reads, "drafts_in": draft_dtype}
                write_checksummed_json(path, choice)
    except OSError:  # the cache folder cannot be written
        _measure(table, module, run)
    layers = [layer for layer in module.modules() if isinstance(layer, PrepackedLinear)]
    size = sum(4 * layer.in_features * layer.out_features for layer in layers)
    spare = size < COPY_SHARE * 1e9 * hardware()["ram_gb"]
    for layer in layers:
        layer.keep({*table.by_rows.values(), *([Kernel.PACKED] if spare else [])})


def _path(shape: object) -> Path:
    compiles = skinny_library() is not None
    key = hashlib.sha256(repr((shape, compiles, hardware(), versions())).encode()).hexdigest()[:16]
    return cache_dir() / "kernels" / f"{key}.json"


def restore(table: KernelTable, shape: object) -> bool:
    """Fill ``table`` with the choice stored for ``shape``; return False if its file is missing or damaged."""
    try:
        stored = read_checksummed_json(_path(shape))
        kernels, draft_dtype = {n: Kernel(stored[str(n)]) for n in MEASURED_ROWS}, stored["drafts_in"]
        table.draft_dtype = None if draft_dtype is None else DRAFT_DTYPES[draft_dtype]
        table.by_rows, table.bfloat16_reads = kernels, bool(stored["bfloat16_reads"])
    except (OSError, UserError, KeyError, ValueError, TypeError):
        return False
    return True


def _measure(table: KernelTable, module: nn.Module, run: Pass) -> None:
    """Fill ``table`` by timing passes of the base (``run``) and matrix products of one layer of ``module``."""
    wait_for_huge_pages()
    before, compiles = table.by_rows, skinny_library() is not None
    default = dict.fromkeys(MEASURED_ROWS, Kernel.COMPILED) if compiles else before
    kernels = [kernel for kernel in Kernel if kernel is not (Kernel.PLAIN if compiles else Kernel.COMPILED)]
    times: dict[tuple[int, Kernel], list[float]] = {}
    begun = perf_counter()
    for repeat in range(REPEATS + 1):
        if repeat > 2 and perf_counter() - begun > LONG_SECONDS:
            break
        for rows in MEASURED_ROWS:
            for kernel in kernels:
                if kernel is Kernel.PLAIN and rows > PLAIN_ROWS:
                    continue
                table.by_rows = dict.fromkeys(MEASURED_ROWS, kernel)
                started = perf_counter()
                run(rows)
                if repeat:
                    times.setdefault((rows, kernel), []).append(perf_counter() - started)
    table.by_rows = before
    medians = {measured: median(seconds) for measured, seconds in times.items()}

    def fastest(rows: int) -> Kernel:
        best = min((kernel for n, kernel in medians if n == rows), key=lambda kernel: medians[rows, kernel])
        return best if medians[rows, best] < MARGIN * medians[rows, default[rows]] else default[rows]

    table.by_rows = {rows: fastest(rows) for rows in MEASURED_ROWS}
    table.bfloat16_reads = _fastest(module, READ_ROWS, [torch.bfloat16]) == torch.bfloat16
    # Heads draft between two passes of the base, which evict the head's weights from the CPU's caches.
    table.draft_dtype = _fastest(module, DRAFT_ROWS, DRAFT_DTYPES.values(), before=lambda: run(1))


def choose_draft_dtype(table: KernelTable, weight: Tensor) -> None:
    """Choose only the dtype of copies of a head's weights, for a base whose layers an engine runs. A product with the
    base's output head ``weight`` [V, D] stands for a pass of the base, which evicts the head's weights from the caches.
    """
    if linear.can_prepack(weight) and weight.numel() >= WORTH_MEASURING:
        width = weight.shape[1]
        layer = PrepackedLinear(torch.zeros(MLP_WIDTHS * width, width), None)
        x = torch.ones(1, width)
        table.draft_dtype = _fastest(layer, DRAFT_ROWS, DRAFT_DTYPES.values(), before=lambda: F.linear(x, weight))


def _fastest(
    module: nn.Module, rows: int, dtypes: Iterable[torch.dtype], before: Callable[[], object] = lambda: None
) -> torch.dtype | None:
    """Return the fastest of ``dtypes`` for products with the largest layer of ``module``, except the LM head. A dtype
    is chosen if it takes less than ``ROUNDING_MARGIN`` of the time of the choice so far; None is float32."""
    layers = [layer for layer in module.modules() if isinstance(layer, PrepackedLinear)]
    if not layers:
        return None
    inner = [layer for layer in layers if layer.out_features <= 16 * layer.in_features]
    layer = max(inner or layers, key=lambda layer: layer.in_features * layer.out_features)
    possible = {None: True, torch.bfloat16: linear.packs_bfloat16(), torch.int8: skinny_library() is not None}
    kernels = {dtype: layer.inference(dtype) for dtype in (None, *dtypes) if possible[dtype]}
    times: dict[torch.dtype | None, list[float]] = {dtype: [] for dtype in kernels}
    x = torch.ones(rows, layer.in_features)
    with torch.inference_mode():
        for _ in range(5 * REPEATS):
            before()
            for dtype, kernel in kernels.items():
                started = perf_counter()
                kernel(x)
                times[dtype].append(perf_counter() - started)
    best: torch.dtype | None = None
    for dtype, seconds in times.items():
        if median(seconds) < ROUNDING_MARGIN * median(times[best]):
            best = dtype
    return best
