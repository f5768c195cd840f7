"""The device of a process, and the features of its backend. Only this module knows backends by name.
``torch.accelerator`` finds the device: CUDA (ROCm's devices have the same name), XPU, MPS, NPU, else the CPU. CUDA's
rules are tested on a simulated device (``tests/accelerator``). ROCm, XPU, MPS and NPU follow torch's documentation and
are untested."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from drafthead.errors import UserError

STATUS = Path("/proc/self/status")
_chosen: list[torch.device] = []


def choose_device(name: str) -> None:
    """Compute on ``name`` ("cpu", "cuda:1", "mps") in this process, instead of the accelerator that torch finds."""
    _chosen[:] = [device_of(name)]
    if _chosen[0].index is not None:  # accelerate, which places each process's work, follows it too
        os.environ["ACCELERATE_TORCH_DEVICE"] = name


def chosen_device() -> torch.device | None:
    return _chosen[0] if _chosen else None


def device_of(device: torch.device | str | None) -> torch.device:
    """Return ``device``; for None ``choose_device``'s, else the accelerator that torch finds, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return _chosen[0] if _chosen else accelerator or torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    present = None if accelerator is None else accelerator.type
    number = torch.accelerator.device_count()
    beyond = chosen is not None and chosen.type == present and (chosen.index or 0) >= number
    if chosen is None or beyond or chosen.type not in ("cpu", "meta", present):
        devices = f"{number} of type {present}" if present else "no accelerator"
        raise UserError(f"device={device} cannot be used; torch finds {devices} here, and cpu; choose one of them")
    return chosen


def is_host(device: torch.device) -> bool:
    """Return True if the host can read a tensor of ``device`` without waiting. On other devices drafting never stops
    early and keeps unused tree nodes as padding, because waiting for the values that decide this would cost more."""
    return device.type == "cpu"


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Return ``values`` as an int64 tensor on ``device``, without waiting for the copy."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """Return host ``values`` in pinned memory if ``device`` needs it, so that copies do not block the host."""
    return values.pin_memory() if can_pin(device) else values


def can_pin(device: torch.device) -> bool:
    """Return True if copies to ``device`` need pinned memory to run in the background; MPS shares the host's memory."""
    return device.type not in ("cpu", "meta", "mps")


def synchronise(device: torch.device) -> None:
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest float type of ``device``: float64, or float32 on MPS. Token ids are exact in both."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide(values: Tensor) -> Tensor:
    return values.to(wide_dtype(values.device))


def automatic_dtype(device: torch.device) -> str:
    return "float32" if device.type == "cpu" else "bfloat16"


def collective_backend(device: torch.device) -> str:
    return "gloo" if device.type == "mps" else dist.get_default_backend_for_device(device)


def accelerator_name() -> str | None:
    """Return the accelerator's model name, or its type if torch has no name; None without an accelerator."""
    if (device := device_of(None)).type == "cpu":
        return None
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name_of()) if name_of else device.type


def peak_allocated() -> int | None:
    """Return the peak of allocated bytes on the accelerator; None without one, or if its backend does not count."""
    if (device := device_of(None)).type in ("cpu", "mps"):
        return None
    return int(torch.accelerator.max_memory_allocated(device))


def peak_memory() -> int:
    """Return ``peak_allocated`` or, if it is None, the peak of the process's resident memory, in bytes."""
    if (peak := peak_allocated()) is not None:
        return peak
    # Linux; `ru_maxrss` would start at the memory of the process that started this one.
    status = STATUS.read_text() if STATUS.exists() else ""
    if kibibytes := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
        return 1024 * int(kibibytes[1])
    import resource  # absent on Windows, where decoding should work nevertheless

    # macOS counts in bytes, others in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory() -> tuple[int, int]:
    """Return the free and the total memory of the device ``device_of(None)``, in bytes."""
    if (device := device_of(None)).type in ("cpu", "mps"):  # MPS shares the host's memory
        host = psutil.virtual_memory()
        return host.available, host.total
    free, total = torch.get_device_module(device).mem_get_info()
    return int(free), int(total)


def rng_states() -> list[Tensor]:
    """Return the random states of all accelerators visible to this process, on the host; [] on the CPU."""
    if (device := device_of(None)).type == "cpu":
        return []
    module = torch.get_device_module(device)
    return module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]


def set_rng_states(states: Sequence[Tensor]) -> None:
    """Set the random states that ``rng_states`` returned; do nothing if the number of accelerators has changed."""
    if not states or len(states) != len(rng_states()):
        return
    module = torch.get_device_module(device_of(None))
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(states)
    else:
        module.set_rng_state(states[0])


@contextmanager
def unchanged_rng() -> Iterator[None]:
    host, states = torch.get_rng_state(), rng_states()
    try:
        yield
    finally:
        torch.set_rng_state(host)
        set_rng_states(states)


def graphs_of(device: torch.device) -> Any:
    """Return torch's module that captures graphs on ``device``, such as ``torch.cuda``; None if it has no graphs."""
    if device.type == "xpu" and hasattr(torch.xpu, "XPUGraph"):
        return torch.xpu
    return torch.cuda if device.type == "cuda" else None


def new_graph(module: Any) -> Any:
    return module.XPUGraph() if hasattr(module, "XPUGraph") else module.CUDAGraph()
