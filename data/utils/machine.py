"""Machine and library versions of a measurement."""

import os
import platform
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import psutil
import torch

from drafthead.data.utils.devices import accelerator_name
from drafthead.version import __version__

BUSY_CORES = 0.2
"""Cores used by other processes above which times are reported as not comparable. A single busy process halves the
speed of decoding or worse, because threads that wait for a disturbed one spin."""


def hardware() -> dict[str, Any]:
    """Return cpu, cores (usable), torch_threads, ram_gb and gpu (None without one) of this machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": usable,
        "torch_threads": torch.get_num_threads(),
        "ram_gb": round(ram / 1e9, 1),
        "gpu": accelerator_name(),
    }


def versions() -> dict[str, str]:
    """Return the versions that measurements depend on."""
    import transformers  # slow to import, and only its version is needed

    return {
        "drafthead": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


class OtherProcesses:
    """CPU time that other processes use while one or more ``with`` blocks run.

    It is the busy time of the machine, minus that of this process and its descendants. In a container the machine is
    the whole host. Ticks of 10 ms limit the resolution.
    """

    wall_s = 0.0
    """Seconds that the blocks took."""
    cpu_s = 0.0
    """CPU seconds of other processes meanwhile."""

    def __enter__(self) -> Self:
        self._cpu_before, self._started = _cpu_of_others(), perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s += perf_counter() - self._started
        self.cpu_s += _cpu_of_others() - self._cpu_before

    @property
    def cores(self) -> float | None:
        """Cores that other processes used on average; None if no time passed."""
        return cores_used(self.cpu_s, self.wall_s)


def cores_used(cpu_s: float, wall_s: float) -> float | None:
    """Return the average number of cores behind ``cpu_s`` CPU seconds in ``wall_s``; None when no time passed."""
    # Ticks round, so a quiet machine may come out slightly below zero.
    return max(0.0, cpu_s / wall_s) if wall_s > 0 else None


def other_processes_line(cores: float | None) -> str:
    """Return a line that reports the ``cores`` used by other processes, with a warning above ``BUSY_CORES``."""
    if cores is None:
        return "CPU use of other processes: unknown"
    warning = "; times are not comparable" if cores > BUSY_CORES else ""
    return f"other processes used {cores:.1f} of {os.cpu_count()} cores while this was measured{warning}"


def _cpu_of_others() -> float:
    """Return CPU seconds since boot of all processes but this one and its descendants."""
    times = psutil.cpu_times()._asdict()
    # The rest is idle time, and that of guests, which Linux counts as user time too.
    others = sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # the process has ended meanwhile
            others -= sum(process.cpu_times()[:4])  # user and system: its own, and of children that it has waited for
    return float(others)
