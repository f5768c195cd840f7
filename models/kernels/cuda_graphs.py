"""Graphs (CUDA, XPU) of functions with fixed shapes: one launch instead of hundreds.

A graph replays kernels on the addresses that they were captured with. A function is therefore captured once per
combination of shapes and reads its inputs from private buffers. Other memory that it uses must stay at the same
address, and it must not copy a value to the host. Without CUDA or XPU, or after a failed capture, the function
runs eagerly, so tokens do not depend on graphs. XPU's graphs follow torch's documentation and are untested.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drafthead.system.devices import graphs_of, new_graph

Outputs = tuple[Tensor, ...]
WARM_UP = 3  # runs on the capture's stream before a capture, because some libraries initialise themselves first
EAGER_CALLS_BEFORE_GRAPH = 1  # a shape that occurs once is not worth a capture


class GraphBackend:
    """Graph captures on one device. They share a memory pool, so two graphs must not run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = graphs_of(device)
        self.enabled = self._module is not None  # false also after a failed capture: calls then run eagerly
        self._pool: Any = None
        self._stream: Any = None

    def try_record(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs] | None:
        """Capture ``run``; return (replay, outputs that it writes). If it fails, warn, disable graphs, return None."""
        try:
            return self._record(run)
        except Exception as error:  # a host read, an operation that cannot be captured, out of memory, ...
            self.enabled = False
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            message = f"CUDA graphs are off for this model, so it runs more slowly: {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return None

    def _record(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        backend, options = self._module, {}
        with backend.device(self.device):
            if self._stream is None:
                self._pool, self._stream = backend.graph_pool_handle(), backend.Stream()
            stream, current = self._stream, backend.current_stream()
            stream.wait_stream(current)
            with backend.stream(stream):
                for _ in range(WARM_UP):
                    run()
                if hasattr(backend, "set_sync_debug_mode"):  # CUDA
                    # A host read during the capture itself would leave allocator and generators in a bad state.
                    sync_mode = backend.get_sync_debug_mode()
                    backend.set_sync_debug_mode("error")
                    try:
                        run()
                    finally:
                        backend.set_sync_debug_mode(sync_mode)
                    # Other threads, such as those of a data loader, may continue to allocate.
                    options["capture_error_mode"] = "thread_local"
            current.wait_stream(stream)
            graph = new_graph(backend)
            try:
                with backend.graph(graph, pool=self._pool, stream=stream, **options):
                    outputs = run()
            except Exception:
                graph.reset()
                raise
        return graph.replay, outputs


class StaticCall:
    """A function with fixed input shapes, captured after its first calls."""

    def __init__(self, backend: GraphBackend, function: Callable[..., Outputs], inputs: tuple[Tensor, ...]) -> None:
        self._backend, self._function = backend, function
        # Inference tensors cannot be written outside inference mode.
        with torch.inference_mode(False):
            self._inputs = tuple(torch.empty(i.shape, dtype=i.dtype, device=i.device) for i in inputs)
        for buffer, given in zip(self._inputs, inputs, strict=True):
            buffer.copy_(given)
        self._calls = 0
        self._recording: tuple[Callable[[], None], Outputs] | None = None

    def __call__(self, *inputs: Tensor | None) -> Outputs:
        """Return the function's outputs in new memory; an input of None keeps its last value."""
        for buffer, given in zip(self._inputs, inputs, strict=True):
            if given is not None:
                buffer.copy_(given)
        if self._recording is None and self._backend.enabled and self._calls >= EAGER_CALLS_BEFORE_GRAPH:
            self._recording = self._backend.try_record(self._run)
        self._calls += 1
        if self._recording is None:
            return self._run()
        replay, outputs = self._recording
        replay()
        # The next replay of any graph may overwrite the shared pool.
        return tuple(output.clone() for output in outputs)

    def _run(self) -> Outputs:
        return self._function(*self._inputs)


class StaticCalls:
    """The captured calls of one module, by key."""

    def __init__(self, device: torch.device) -> None:
        self._backend = GraphBackend(device)
        self._calls: dict[object, StaticCall] = {}

    def __call__(self, key: object, function: Callable[..., Outputs], *inputs: Tensor) -> Outputs:
        """Return ``function(*inputs)``, captured once per ``key`` (what else the result depends on) and shapes."""
        key = (key, *(i.shape for i in inputs))
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = StaticCall(self._backend, function, inputs)
        return call(*inputs)
