"""A simulated CUDA device, made of host memory, that finds device faults of a program without a GPU.

After ``install()`` a process has one device ``cuda:0``, so it must be called before anything asks torch for CUDA. As a
pytest plugin (``-p accelerator.simulated``) it is installed for the whole run. As a program it runs a
drafthead command::

    python tests/accelerator/simulated.py train recipe=medusa_smollm2 debug=tiny out=outputs/simulated

It detects operations on tensors of two devices, generators of another device, integer matrix products, ``numpy()`` of a
device tensor, every wait of the host (``waits``), and host reads during a graph's capture. It cannot detect missing
kernels, kernels with other rounding, too little memory, or races between streams.

It needs a CPU build of torch and g++. ``device.cpp`` is compiled once per torch version, into ``CACHE``.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("device.cpp")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "drafthead" / "simulated_device"
DRAFTING = ", while drafting"
MEMORY = 16 * 2**30
waited: Counter[tuple[str, str]] = Counter()  # (operation, source line) -> number of waits of the host
_sync_mode = "default"
_library: Any = None


def unavailable() -> str | None:
    if torch.version.cuda or torch.version.hip:
        return "the simulated device needs a CPU build of torch"
    return None if shutil.which("g++") else "the simulated device needs g++"


@contextlib.contextmanager
def waits() -> Iterator[Counter[tuple[str, str]]]:
    before, counted = waited.copy(), Counter[tuple[str, str]]()
    yield counted
    counted.update(waited - before)


def source_line() -> str:
    """Return ``file:line function`` of the innermost frame in the repository, and whether a drafter is drafting."""
    frame: Any = sys._getframe()
    innermost, drafting = "", False
    while frame is not None:
        name = frame.f_code.co_filename
        if not innermost and (line := _in_repository(name)):
            innermost = f"{line}:{frame.f_lineno} {frame.f_code.co_name}"
        drafting |= frame.f_code.co_name == "draft" and "/models/" in name
        frame = frame.f_back
    return (innermost or "a thread of torch") + (DRAFTING if drafting else "")  # the backward pass has its own thread


@cache
def _in_repository(name: str) -> str | None:
    path = Path(name).resolve()
    inside = ROOT in path.parents and path != Path(__file__).resolve() and "site-packages" not in path.parts
    return str(path.relative_to(ROOT)) if inside else None


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)
def _report(kind: bytes, operation: bytes, size: int) -> int:
    """Count a wait; the result is true if the wait is an error."""
    waited[f"{operation.decode()} ({kind.decode()})", source_line()] += 1
    return int(_sync_mode == "error")


def build() -> Path:
    folder = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w"]
    key = hashlib.sha256(repr((SOURCE.read_text(), flags, torch.__version__)).encode()).hexdigest()[:16]
    path = CACHE / f"{key}.so"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        include = [f"-I{folder / 'include'}", f"-I{folder / 'include/torch/csrc/api/include'}"]
        links = [f"-L{folder / 'lib'}", "-ltorch_cpu", "-lc10"]
        subprocess.run(["g++", *flags, *include, str(SOURCE), "-o", str(unfinished), *links], check=True)
        unfinished.replace(path)
    return path


class Stream:
    """A stream or an event. All work is done at once, so nothing is left to wait for."""

    device = torch.device("cuda", 0)
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()


class Graph:
    number = 0

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        self.number = _library.simulated_capture()

    def capture_end(self) -> None:
        _library.simulated_captured()

    def replay(self) -> None:
        if message := _library.simulated_replay(self.number):
            raise RuntimeError(f"a replay failed: {message.decode()}")

    def reset(self) -> None:
        _library.simulated_forget(self.number)

    def pool(self) -> tuple[int, int]:
        return 0, 0


@contextlib.contextmanager
def _capture(graph: Graph, *args: Any, **kwargs: Any) -> Iterator[None]:
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


@contextlib.contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _set_sync_mode(mode: str) -> None:
    global _sync_mode
    _sync_mode = mode


def _synchronize(device: Any = None) -> None:
    waited["synchronize", source_line()] += 1


def operations() -> dict[str, int]:
    counts: dict[str, int] = {}
    each = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64)(lambda n, c: counts.__setitem__(n.decode(), c))
    _library.simulated_operations(each)
    return counts


def install() -> None:
    global _library
    if _library is not None:
        return
    _library = ctypes.CDLL(str(build()))
    _library.simulated_capture.restype = ctypes.c_int64
    _library.simulated_replay.restype = ctypes.c_char_p
    _library.simulated_resize.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    _library.simulated_replay.argtypes = _library.simulated_forget.argtypes = [ctypes.c_int64]
    _library.simulated_callback(_report)
    _library.simulated_install()
    generator = torch.Generator("cuda")
    properties = SimpleNamespace(
        name="simulated", total_memory=MEMORY, major=9, minor=0, multi_processor_count=1, gcnArchName="", warp_size=32
    )
    constants: dict[str, Any] = {
        **{"is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0},
        **{"get_device_name": "simulated", "get_device_capability": (9, 0), "get_device_properties": properties},
        **{"mem_get_info": (MEMORY, MEMORY), "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0},
        **{"max_memory_reserved": 0, "memory_stats": {}, "is_bf16_supported": True, "graph_pool_handle": (0, 1)},
        **{"current_stream": Stream(), "default_stream": Stream(), "is_current_stream_capturing": False},
        **{"get_arch_list": ["sm_90"], "_exchange_device": 0, "_maybe_exchange_device": 0, "_lazy_init": None},
        **{"init": None, "set_device": None, "set_stream": None, "empty_cache": None, "manual_seed": None},
        **{"reset_peak_memory_stats": None, "seed": None, "seed_all": None, "_lazy_call": None, "ipc_collect": None},
    }
    for name, value in constants.items():
        setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)
    functions: dict[str, Any] = {
        **{"synchronize": _synchronize, "stream": _nothing, "Stream": Stream, "Event": Stream, "graph": _capture},
        **{"CUDAGraph": Graph, "set_sync_debug_mode": _set_sync_mode, "get_sync_debug_mode": lambda: _sync_mode},
        **{"get_rng_state": lambda device=None: generator.get_state(), "default_generators": (generator,)},
        **{"set_rng_state": lambda state, device=None: generator.set_state(state)},
        **{"get_rng_state_all": lambda: [generator.get_state()], "manual_seed_all": generator.manual_seed},
        **{"set_rng_state_all": lambda states: generator.set_state(states[0])},
    }
    for name, value in functions.items():
        setattr(torch.cuda, name, value)
    for name in (
        "synchronize",
        "current_stream",
        "memory_allocated",
        "max_memory_allocated",
        "reset_peak_memory_stats",
    ):
        setattr(torch.accelerator, name, getattr(torch.cuda, name))
    to, resize = torch.UntypedStorage.to, torch.UntypedStorage.resize_

    def storage_to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type != "cuda" or self.device.type == "cuda":
            return to(self, device=device, non_blocking=non_blocking)
        return torch.empty(0, dtype=torch.uint8).set_(self).to(device).untyped_storage()

    def storage_resize(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        _library.simulated_resize(self._cdata, size)
        return self

    torch.UntypedStorage.to = storage_to  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = storage_resize  # type: ignore[method-assign]
    _install_collectives()


def _install_collectives() -> None:
    """Let ``backend="nccl"`` create a group whose collectives copy tensors to the host and use gloo there."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import _create_work_from_future

    class Copying(dist.ProcessGroup):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            super().__init__(rank, size)
            self.host = dist.ProcessGroupGloo(store, rank, size, timeout)

        def getBackendName(self) -> str:  # noqa: N802
            return "simulated"

        def __getattribute__(self, name: str) -> Any:
            if name not in COLLECTIVES:
                return super().__getattribute__(name)
            return lambda *args, **options: self.collective(name, [*args, *options.values()])

        def collective(self, name: str, args: Any) -> Any:
            copies: list[tuple[Any, Any]] = []

            def host(value: Any) -> Any:
                if isinstance(value, torch.Tensor):
                    if not value.is_cuda:
                        raise RuntimeError("No backend type associated with device type cpu")
                    copies.append((value, value.cpu()))
                    return copies[-1][1]
                return [host(item) for item in value] if isinstance(value, list) else value

            getattr(self.host, name)(*[host(arg) for arg in args]).wait()
            for device, copied in copies:
                device.copy_(copied)
            future: Any = torch.futures.Future()
            future.set_result([device for device, _ in copies])
            return _create_work_from_future(future)

    dist.Backend.register_backend("simulated", Copying, devices=["cuda"])
    begin = dist.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return begin("simulated" if backend == "nccl" else backend, *args, **kwargs)

    dist.init_process_group = init_process_group


COLLECTIVES = {
    *("allreduce", "broadcast", "allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base", "barrier"),
    *("all_gather_single", "reduce_scatter_single", "allgather_into_tensor_coalesced", "reduce", "gather", "scatter"),
}


def pytest_configure() -> None:
    install()


if __name__ == "__main__":
    install()
    from drafthead.cli import main

    sys.exit(main())
