"""What machine and which library versions a measurement was taken on."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from drafthead import __version__


def hardware() -> dict[str, Any]:
    """What the numbers were measured on: cpu, cores (usable), torch_threads, ram_gb, gpu (None without one)."""
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
    """Versions of what the numbers depend on."""
    import transformers  # slow to import, and only its version is needed

    return {
        "drafthead": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
