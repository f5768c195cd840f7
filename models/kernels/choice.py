"""Which kernel multiplies one, two, four and eight rows fastest on this CPU: measured at load, kept for later loads."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

from torch import nn

from drafthead.data.embedded.packages import cache_dir
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import exclusive, read_checksummed_json, write_checksummed_json
from drafthead.data.utils.machine import hardware, versions
from drafthead.models.kernels.linear import MEASURED_ROWS, Kernel, KernelTable, PrepackedLinear, can_prepack

WORTH_MEASURING = 2**23
"""Weights below which a base fits into the caches of a CPU, and the fixed choice is as good."""
REPEATS = 5
MARGIN = 0.97
"""Another kernel than the default must be faster by this factor: what is within noise should not change."""
Pass = Callable[[int], object]
"""A pass of the base over so many rows."""


def worth_measuring(model: nn.Module) -> bool:
    """Whether the base has enough weights that can be packed for the choice to matter."""
    return sum(p.numel() for p in model.parameters() if can_prepack(p)) >= WORTH_MEASURING


def choose_kernels(table: KernelTable, module: nn.Module, run: Pass, shape: object) -> None:
    """Fill ``table`` with the fastest kernel for every number of rows, and release weights that none of them needs.

    ``shape`` names what is multiplied: the choice is kept for it on this machine, so that a run that resumes computes
    as it did before.
    """
    key = hashlib.sha256(repr((shape, hardware(), versions())).encode()).hexdigest()[:16]
    path = cache_dir() / "kernels" / f"{key}.json"
    try:
        with exclusive(path.parent):
            found = _kept(path)
            if found is None:
                found = _measure(table, run)
                write_checksummed_json(path, {str(n): kernel.value for n, kernel in found.items()})
    except OSError:  # nowhere to keep it
        found = _measure(table, run)
    table.by_rows = found
    if Kernel.PLAIN not in found.values():
        for layer in module.modules():
            if isinstance(layer, PrepackedLinear):
                layer.drop_plain()


def _kept(path: Path) -> dict[int, Kernel] | None:
    try:
        found = read_checksummed_json(path)
        return {n: Kernel(found[str(n)]) for n in MEASURED_ROWS}
    except (OSError, UserError, KeyError, ValueError, TypeError):
        return None  # measured again


def _measure(table: KernelTable, run: Pass) -> dict[int, Kernel]:
    default = dict(table.by_rows)
    times: dict[tuple[int, Kernel], list[float]] = {}
    for repeat in range(REPEATS + 1):
        for rows in MEASURED_ROWS:
            for kernel in Kernel:
                if kernel is Kernel.PADDED and rows > 2:
                    continue
                table.by_rows = dict.fromkeys(MEASURED_ROWS, kernel)
                started = perf_counter()
                run(rows)
                if repeat:
                    times.setdefault((rows, kernel), []).append(perf_counter() - started)
    table.by_rows = default
    medians = {place: median(seconds) for place, seconds in times.items()}

    def fastest(rows: int) -> Kernel:
        best = min((kernel for n, kernel in medians if n == rows), key=lambda kernel: medians[rows, kernel])
        return best if medians[rows, best] < MARGIN * medians[rows, default[rows]] else default[rows]

    return {rows: fastest(rows) for rows in MEASURED_ROWS}
