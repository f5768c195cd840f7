"""A key/value cache at fixed addresses, and passes of fixed shapes over it, which CUDA graphs can replay.

A forward pass attends over the first S positions of the memory, called its window (no sliding window). The device has a
copy of the committed length and makes the mask from it. One graph therefore serves all trees with the same number of
nodes until the context outgrows the window. Memory and graphs belong to the model, and one cache at a time uses them.

Shape legend: H key/value heads, S positions of a window, N tree nodes, D width, E head width, L layers, V vocabulary.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.cache.layers import CacheShape, FullLayers, Layers, Row
from drafthead.models.kernels.cuda_graphs import GraphBackend, Outputs, StaticCall
from drafthead.models.kernels.private_apis import CACHE
from drafthead.models.token_tree import TokenTree, TreeShape

MIN_WINDOW, WINDOW_STEP = 256, 1024
"""Window sizes double from MIN_WINDOW to WINDOW_STEP, then grow by WINDOW_STEP, so few empty positions are read."""
MAX_STATIC_NODES = 128  # of a pass with fixed shapes; launching kernels takes a small part of larger ones
MAX_CAPTURED_PASSES = 64  # per memory: one per number of nodes, window, and with or without logits
MAX_SPARE_BUFFERS = 2  # unused memories that are kept for later caches; the largest stay


def window_for(positions: int) -> int:
    size = MIN_WINDOW
    while size < min(positions, WINDOW_STEP):
        size *= 2
    return size if positions <= size else -(-positions // WINDOW_STEP) * WINDOW_STEP


@dataclass
class _Pass:
    call: StaticCall
    tree: TokenTree | None  # whose depths and ancestors are in the call's input buffers, if it is static


@dataclass(eq=False)
class _Memory:
    """Layers for one row of ``size`` positions, the committed length ([1] int64), and passes captured over them. A
    window is another ``_Memory`` that shares the first positions of this one."""

    kinds: list[FullLayers]
    size: int
    length: Tensor
    passes: dict[tuple[int, int, bool], _Pass] = field(default_factory=dict)

    def clear(self, size: int) -> None:
        """Zero the length and the first ``size`` positions, because even a masked NaN would make the attention NaN."""
        for kind in self.part(size):
            for stack in kind.stacks:
                stack.zero_()
        self.length.zero_()

    def part(self, size: int, rows: list[Row] | None = None) -> list[FullLayers]:
        return [kind.over(lambda stack: stack[:, :, :, :size], rows) for kind in self.kinds]


class StaticModel:
    """A decoder and its LM head for passes of fixed shapes, with the memory for ``StaticKVCache``."""

    def __init__(
        self,
        shape: CacheShape,
        decoder: Callable[..., Any],
        logits: Callable[[Tensor], Tensor],
        windowed: Callable[[Tensor, Tensor, Tensor, torch.dtype], Any] | None = None,
    ) -> None:
        """``shape`` is that of the model's cache, which has no memory yet.

        ``decoder`` is transformers' decoder without its output head, and ``logits`` maps hidden states [1, N, D] to
        logits [1, N, V]. ``windowed`` is for a base with sliding windows: (full mask, query positions, key positions,
        dtype) -> the decoder's mask argument.
        """
        self.backend = GraphBackend(shape.device)
        self.shape, self._decoder, self._logits, self._windowed = shape, decoder, logits, windowed
        self._spare: list[_Memory] = []

    def take_memory(self, capacity: int) -> _Memory:
        size = window_for(capacity)
        fitting = [memory for memory in self._spare if memory.size >= size]
        if fitting:
            memory = min(fitting, key=lambda m: m.size)
            self._spare.remove(memory)
            memory.clear(size)
            return memory
        self._spare.clear()  # the larger memory replaces them
        # Inference tensors could not be written outside inference mode.
        with torch.inference_mode(False):
            length = torch.zeros(1, dtype=torch.int64, device=self.shape.device)
            kinds = self.shape.new([Row()], size)
        attention = [kind for kind in kinds if isinstance(kind, FullLayers)]
        assert len(attention) == len(kinds), "only keys and values have fixed addresses"
        return _Memory(attention, size, length)

    def take_back(self, memory: _Memory) -> None:
        self._spare.append(memory)
        self._spare.sort(key=lambda m: m.size)
        del self._spare[:-MAX_SPARE_BUFFERS]

    def prepare(self, memory: _Memory, size: int, with_logits: bool, inputs: tuple[Tensor, ...]) -> StaticCall:
        """Return a tree pass over the first ``size`` positions that returns hidden states, and logits if
        ``with_logits``. ``inputs`` are tokens, depths and ancestors; later inputs must have the same shapes."""
        window = _Memory(memory.part(size), size, memory.length)
        logits = self._logits if with_logits else None
        function = partial(_static_pass, self.shape, self._decoder, logits, self._windowed, window)
        return StaticCall(self.backend, function, inputs)


class _Writer:
    """The cache that attention modules see during a pass: layers at fixed addresses, written by index tensors."""

    def __init__(self, shape: CacheShape, window: _Memory, slots: Tensor) -> None:
        self._places, self._window, self._slots = shape.places, window, slots

    def update(self, key: Tensor, value: Tensor, layer_idx: int, kwargs: object = None) -> tuple[Tensor, Tensor]:
        place = self._places[layer_idx]
        assert place is not None
        kind, number = place
        return self._window.kinds[kind].write(number, self._slots, key, value)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:  # transformers calls this
        return self._window.length


def _static_pass(
    shape: CacheShape,
    decoder: Callable[..., Any],
    logits: Callable[[Tensor], Tensor] | None,
    windowed: Callable[[Tensor, Tensor, Tensor, torch.dtype], Any] | None,
    window: _Memory,
    tokens: Tensor,
    depths: Tensor,
    ancestors: Tensor,
) -> Outputs:
    """Run a tree after the committed positions; return hidden states [1, N, D], and with ``logits`` logits [1, N, V].
    ``tokens`` and ``depths`` are [1, N] int64, ``ancestors`` [1, N, N] bool. Other arguments are those of
    ``StaticModel``."""
    nodes, size = tokens.shape[1], window.size
    slots = torch.arange(size, device=tokens.device)
    # [S] positions relative to the root. With length 3 and 2 nodes: -3 -2 -1 (committed), 0 1 (nodes), 2 .. (empty).
    offset = slots - window.length
    inside = (offset >= 0) & (offset < nodes)
    seen = (ancestors[0].index_select(1, offset.clamp(0, nodes - 1)) & inside) | (offset < 0)
    dtype = shape.dtype
    mask = torch.zeros(nodes, size, dtype=dtype, device=tokens.device).masked_fill_(~seen, -torch.inf)[None, None]
    positions = depths + window.length
    if windowed is not None:
        keys = torch.where(offset < 0, slots, positions[0].index_select(0, offset.clamp(0, nodes - 1)))
        mask = windowed(mask, positions, keys[None], dtype)
    out = decoder(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=mask,
        use_cache=True,
        **{CACHE: _Writer(shape, window, torch.arange(nodes, device=tokens.device) + window.length)},
    )
    hidden: Tensor = out.last_hidden_state
    return (hidden,) if logits is None else (hidden, logits(hidden))


class StaticKVCache(TreeCache):
    """A ``TreeCache`` of one row in the memory of a ``StaticModel``. It can also run passes of fixed shapes."""

    def __init__(self, model: StaticModel, capacity: int) -> None:
        self._model, rows = model, [Row()]
        super().__init__(model.shape, self._borrow(capacity, rows), rows, capacity=capacity)

    def _borrow(self, capacity: int, rows: list[Row]) -> list[Layers]:
        self._memory = self._model.take_memory(capacity)
        # The memory returns to the model when this cache is deleted.
        self._give_back = weakref.finalize(self, self._model.take_back, self._memory)
        self._give_back.atexit = False
        return [*self._memory.part(capacity, rows)]

    def fits(self, nodes: int) -> bool:
        return self.pending == 0 and self.length > 0 and nodes <= MAX_STATIC_NODES

    def run(self, tokens: Tensor, shape: TreeShape, with_logits: bool = False) -> Outputs:
        """Run the tree of ``tokens`` [1, N] int64, which stays pending; return (hidden states [1, N, D],), and
        ``with_logits`` also logits [1, N, V]."""
        nodes = tokens.shape[1]
        self.begin(nodes, shape=shape)
        self._memory.length.fill_(self.length)
        key = (nodes, window_for(self.length + nodes), with_logits)
        passes = self._memory.passes
        captured = passes.get(key)
        if captured is None:
            if len(passes) >= MAX_CAPTURED_PASSES:
                del passes[next(iter(passes))]
            inputs = tuple(tensor.to(tokens.device) for tensor in (tokens, shape.depths, shape.ancestors))
            captured = passes[key] = _Pass(self._model.prepare(self._memory, key[1], with_logits, inputs), shape.tree)
        elif shape.tree is None or shape.tree != captured.tree:
            captured.tree = shape.tree
            return captured.call(tokens, shape.depths, shape.ancestors)
        return captured.call(tokens, None, None)

    def grow(self, capacity: int) -> None:
        memory, give_back, held = self._memory, self._give_back, self.capacity
        self._use(self._borrow(capacity, self._rows))
        self.capacity = capacity
        for kind, source in zip(self._memory.part(held), memory.part(held), strict=True):
            for stack, old in zip(kind.stacks, source.stacks, strict=True):
                stack.copy_(old)
        give_back()
