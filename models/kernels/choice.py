"""Which kernel multiplies 1 to 32 rows fastest on this CPU, and whether fewer bits are faster.

All is measured at load and kept for later loads.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import nn

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import cache_dir, exclusive, read_checksummed_json, write_checksummed_json
from drafthead.data.utils.machine import hardware, versions
from drafthead.models.kernels.compiled import skinny_library
from drafthead.models.kernels.linear import (
    DRAFT_DTYPES,
    MEASURED_ROWS,
    Kernel,
    KernelTable,
    PrepackedLinear,
    can_prepack,
    packs_bfloat16,
)

WORTH_MEASURING = 2**23
"""Weights below which a base fits into the caches of a CPU, and the fixed choice is as good."""
REPEATS, LONG_SECONDS = 3, 20.0
"""Of every pass; a large base has had enough after two, once that long has passed."""
COPY_SHARE = 1 / 8
"""Of the machine's memory that the packed copy may take where the compiled one serves few rows: it is up to a tenth
faster for hundreds of rows."""
PLAIN_ROWS = 4
"""Above so many the plain product is not tried: it is never the fastest there."""
MARGIN = 0.97
"""Another kernel than the default must be faster by this factor: what is within noise should not change.

The default is the compiled one where there is one.
"""
READ_ROWS, DRAFT_ROWS = 256, 4
"""Rows of products that may be in bfloat16: hidden states to train on, and drafting."""
ROUNDING_MARGIN = 0.8
"""Products that round by about a percent must take at most this share of the time of the others."""
Pass = Callable[[int], object]
"""A pass of the base over so many rows."""


def worth_measuring(model: nn.Module) -> bool:
    """Whether the base has enough weights that can be packed for the choice to matter."""
    return sum(p.numel() for p in model.parameters() if can_prepack(p)) >= WORTH_MEASURING


def choose_kernels(table: KernelTable, module: nn.Module, run: Pass, shape: object) -> None:
    """Fill ``table`` with the fastest kernel for every number of rows, and release the copies that none of them reads.

    ``shape`` names what is multiplied: the choice is kept for it on this machine, so that a run that resumes computes
    as it did before.
    """
    compiles = skinny_library() is not None
    key = hashlib.sha256(repr((shape, compiles, hardware(), versions())).encode()).hexdigest()[:16]
    path = cache_dir() / "kernels" / f"{key}.json"
    try:
        with exclusive(path.parent):
            found = _kept(path)
            if found is None:
                found = _found(table, module, run)
                kernels = {str(n): kernel.value for n, kernel in found[0].items()}
                drafts_in = next((name for name, dtype in DRAFT_DTYPES.items() if dtype == found[2]), None)
                write_checksummed_json(path, {**kernels, "bfloat16_reads": found[1], "drafts_in": drafts_in})
    except OSError:  # nowhere to keep it
        found = _found(table, module, run)
    table.by_rows, table.bfloat16_reads, table.drafts_in = found
    layers = [layer for layer in module.modules() if isinstance(layer, PrepackedLinear)]
    size = sum(4 * layer.in_features * layer.out_features for layer in layers)
    spare = size < COPY_SHARE * 1e9 * hardware()["ram_gb"]
    for layer in layers:
        layer.keep({*table.by_rows.values(), *([Kernel.PACKED] if spare else [])})


Found = tuple[dict[int, Kernel], bool, torch.dtype | None]
"""A kernel for each number of rows; whether bfloat16 is faster for reading; what to draft in, None for float32."""


def _found(table: KernelTable, module: nn.Module, run: Pass) -> Found:
    kernels = _measure(table, run)
    reads = _fastest(module, READ_ROWS, [torch.bfloat16]) == torch.bfloat16
    # Heads draft between two passes of the base, which have taken their weights out of the CPU's caches.
    return kernels, reads, _fastest(module, DRAFT_ROWS, DRAFT_DTYPES.values(), before=lambda: run(1))


def _kept(path: Path) -> Found | None:
    try:
        found = read_checksummed_json(path)
        kernels = {n: Kernel(found[str(n)]) for n in MEASURED_ROWS}
        drafts_in = found["drafts_in"]
        return kernels, bool(found["bfloat16_reads"]), None if drafts_in is None else DRAFT_DTYPES[drafts_in]
    except (OSError, UserError, KeyError, ValueError, TypeError):
        return None  # measured again


def _measure(table: KernelTable, run: Pass) -> dict[int, Kernel]:
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
    medians = {place: median(seconds) for place, seconds in times.items()}

    def fastest(rows: int) -> Kernel:
        best = min((kernel for n, kernel in medians if n == rows), key=lambda kernel: medians[rows, kernel])
        return best if medians[rows, best] < MARGIN * medians[rows, default[rows]] else default[rows]

    return {rows: fastest(rows) for rows in MEASURED_ROWS}


def _fastest(
    module: nn.Module, rows: int, dtypes: Iterable[torch.dtype], before: Callable[[], object] = lambda: None
) -> torch.dtype | None:
    """Which of ``dtypes``, in order, is faster than float32 and those before it; by the largest layer. None: none.

    ``before`` is run before every comparison.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, PrepackedLinear)]
    if not layers:
        return None
    inner = [layer for layer in layers if layer.out_features <= 16 * layer.in_features]  # the output head is too large
    layer = max(inner or layers, key=lambda layer: layer.in_features * layer.out_features)
    possible = {None: True, torch.bfloat16: packs_bfloat16(), torch.int8: skinny_library() is not None}
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
