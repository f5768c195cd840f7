"""Machine and library versions of a measurement."""

import os
import platform
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import torch

from drafthead.version import __version__

BUSY_CORES = 0.2
"""Cores used by other processes above which times are reported as not comparable. A single busy process halves the
speed of decoding or worse, because threads that wait for a disturbed one spin."""


def hardware() -> dict[str, Any]:
    """Return cpu, cores (usable), torch_threads, ram_gb and gpu (None without one) of this machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": usable,
        "torch_threads": torch.get_num_threads(),
        "ram_gb": round(ram / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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
    """CPU time that other processes use while one or more ``with`` blocks run, from ``/proc``.

    It is the busy time of the machine, minus that of this process and its descendants. In a container ``/proc/stat``
    counts the whole host, and so does this class. Ticks of 10 ms limit its resolution.
    """

    wall_s = 0.0
    """Seconds that the blocks took."""
    cpu_s: float | None = 0.0
    """CPU seconds of other processes meanwhile; None without ``/proc`` (macOS)."""

    def __enter__(self) -> Self:
        self._cpu_before, self._started = _cpu_of_others(), perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s += perf_counter() - self._started
        cpu_after = _cpu_of_others()
        if self.cpu_s is None or self._cpu_before is None or cpu_after is None:
            self.cpu_s = None
        else:
            self.cpu_s += cpu_after - self._cpu_before

    @property
    def cores(self) -> float | None:
        """Cores that other processes used on average; None without ``/proc``."""
        return None if self.cpu_s is None else cores_used(self.cpu_s, self.wall_s)


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


def _cpu_of_others() -> float | None:
    """Return CPU seconds since boot of all processes but this one and its descendants; None without ``/proc``."""
    try:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return None
    parents, times = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command's name, in parentheses, may hold spaces: fields are counted from the last parenthesis.
            fields = stat.read_bytes().rpartition(b")")[2].split()
        except OSError:  # the process has ended meanwhile
            continue
        pid = int(stat.parent.name)
        # Times in user and kernel mode, its own and those of children that it has waited for.
        parents[pid], times[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    own_ticks = 0
    for pid, ticks in times.items():
        ancestor = pid
        while ancestor and ancestor != os.getpid():
            ancestor = parents.get(ancestor, 0)
        own_ticks += ticks if ancestor else 0
    return float(user + nice + system + irq + softirq + steal - own_ticks) / os.sysconf("SC_CLK_TCK")
