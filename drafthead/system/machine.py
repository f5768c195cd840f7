"""The machine and library versions of a measurement, and the load by other processes."""

import os
import platform
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import psutil
import torch

from drafthead.system.devices import accelerator_name
from drafthead.version import __version__

BUSY_CORES = 0.2
"""Cores used by other processes above which times are not comparable. A single busy process can halve the speed of
decoding, because all threads wait for the thread that it disturbs."""


def cpu_info(key: str) -> str:
    """Return the value of ``key`` for the first processor in Linux's ``/proc/cpuinfo``; "" if it is not there."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return ""


def hardware() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_info("model name") or platform.processor() or platform.machine(),
        "cores": usable,
        "torch_threads": torch.get_num_threads(),
        "ram_gb": round(ram / 1e9, 1),
        "gpu": accelerator_name(),
    }


def versions() -> dict[str, str]:
    import transformers  # slow to import, and only its version is needed

    return {
        "drafthead": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


class OtherProcesses:
    """CPU time that other processes use while one or more ``with`` blocks run. It is the machine's busy time minus that
    of this process and its descendants. In a container the machine is the whole host. The resolution is 10 ms."""

    wall_s = 0.0
    cpu_s = 0.0

    def __enter__(self) -> Self:
        self._cpu_before, self._started = _cpu_of_others(), perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s += perf_counter() - self._started
        self.cpu_s += _cpu_of_others() - self._cpu_before

    @property
    def cores(self) -> float | None:
        return cores_used(self.cpu_s, self.wall_s)


def cores_used(cpu_s: float, wall_s: float) -> float | None:
    # Ticks round, so a quiet machine may come out slightly below zero.
    return max(0.0, cpu_s / wall_s) if wall_s > 0 else None


def other_processes_line(cores: float | None) -> str:
    if cores is None:
        return "CPU use of other processes: unknown"
    warning = "; times are not comparable" if cores > BUSY_CORES else ""
    return f"other processes used {cores:.1f} of {os.cpu_count()} cores while this was measured{warning}"


def _cpu_of_others() -> float:
    """Return the CPU seconds since boot of all processes except this one and its descendants."""
    times = psutil.cpu_times()._asdict()
    # The rest is idle time, and that of guests, which Linux counts as user time too.
    others = sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # the process has ended meanwhile
            others -= sum(process.cpu_times()[:4])  # user and system: its own, and of children that it has waited for
    return float(others)
