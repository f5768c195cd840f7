"""Functions of fixed shapes as CUDA graphs: one launch in place of hundreds.

A graph replays kernels on the addresses that they were captured with. So a function is captured once per combination of
shapes, reads its inputs from buffers of its own, and may touch other memory only where that stays in place; and it may
not read a value back to the host. Where there is no CUDA, or a capture fails, the very same function runs eagerly, so
that tokens do not depend on it.
"""

import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]
WARM_UP = 3
"""Runs on the capture's stream before it, for libraries that set themselves up when first used."""
EAGER_CALLS_BEFORE_GRAPH = 1
"""Calls that run eagerly first: a shape that is seen once is not worth a capture."""


class GraphBackend:
    """Captures functions on one device: one memory pool and one stream for all of them, and whether it still works.

    The graphs share the pool's memory, so they must not run at the same time, as from two threads.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.enabled = device.type == "cuda"
        """False where graphs are not to be had; then calls stay eager."""
        self._pool: Any = None
        self._stream: Any = None

    def try_record(self, run: Callable[[], Outputs]) -> "tuple[Callable[[], None], Outputs] | None":
        """Capture ``run``: what replays it, and the outputs that a replay writes; after a failure warn and give up."""
        try:
            return self._record(run)
        except Exception as error:  # of many kinds: a host read, an operation that cannot be captured, out of memory
            self.enabled = False
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"CUDA graphs are off for this model: {reason}", RuntimeWarning, stacklevel=2)
            return None

    def _record(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream, current = self._stream, torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    run()
                # A host read in the middle of a capture leaves the allocator and the generators in a bad state.
                with _host_reads_refused():
                    run()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads, such as a data loader's, may go on allocating.
                mode = "thread_local"
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode=mode):
                    outputs = run()
            except Exception:
                graph.reset()
                raise
        return graph.replay, outputs


class StaticCall:
    """A function for inputs of one combination of shapes."""

    def __init__(self, backend: GraphBackend, function: Callable[..., Outputs], inputs: tuple[Tensor, ...]) -> None:
        """``function`` for inputs of the shapes, dtypes and device of ``inputs``."""
        self._backend, self._function = backend, function
        # Inference tensors could not be written outside inference mode.
        with torch.inference_mode(False):
            self._inputs = tuple(torch.empty(i.shape, dtype=i.dtype, device=i.device) for i in inputs)
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given)
        self._calls = 0
        self._recording: tuple[Callable[[], None], Outputs] | None = None

    def __call__(self, *inputs: Tensor | None) -> Outputs:
        """The function's outputs, which are the caller's to keep; None leaves an input as it was."""
        for kept, given in zip(self._inputs, inputs, strict=True):
            if given is not None:
                kept.copy_(given)
        if self._recording is None and self._backend.enabled and self._calls >= EAGER_CALLS_BEFORE_GRAPH:
            self._recording = self._backend.try_record(self._run)
        self._calls += 1
        if self._recording is None:
            return self._run()
        replay, outputs = self._recording
        replay()
        # The next replay of any graph of the pool may write there.
        return tuple(output.clone() for output in outputs)

    def _run(self) -> Outputs:
        return self._function(*self._inputs)


class StaticCalls:
    """The calls of one module, by key; a copy of the module begins without any."""

    def __init__(self, device: torch.device) -> None:
        self._backend = GraphBackend(device)
        self._calls: dict[object, StaticCall] = {}

    def __call__(self, key: object, function: Callable[..., Outputs], *inputs: Tensor) -> Outputs:
        """``function(*inputs)``; what else it depends on is in ``key``, or fixed until :meth:`clear`."""
        key = (key, *(i.shape for i in inputs))
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = StaticCall(self._backend, function, inputs)
        return call(*inputs)

    def clear(self) -> None:
        """Forget all calls: weights have moved, or may."""
        self._calls.clear()

    def __deepcopy__(self, memo: object) -> "StaticCalls":
        return StaticCalls(self._backend.device)


@contextmanager
def _host_reads_refused() -> Any:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
