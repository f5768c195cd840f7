"""The shape of a cache, and its kinds of layers. Only they know what a layer keeps, and where; ``TreeCache`` counts
positions and asks them.

A cache has one ``Layers`` object for all of its layers of a kind. Attention keeps keys and values: of every position
(``FullLayers``), or of the latest ones (``SlidingLayers``). Recurrent layers (``recurrent.py``) keep one state per row.
Another kind needs a ``LayerShape`` and a ``Layers``.

The keys of layers with equal sizes are one tensor (a stack), and so are their values, so a commit takes one copy per
stack. Several rows are written by index tensors, because their lengths differ; a single row is written by slices.

Shape legend: B rows, H key/value heads, C positions held, T new tokens, P nodes of a path, K keys (positions of the
longest row, with pending and new tokens), E head width, L layers of a stack.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.token_tree import TreeShape
from drafthead.system.devices import on_device


@dataclass
class Row:
    """Position counts of one row, shared by a cache and its views of that row."""

    length: int = 0  # committed positions
    dropped: int = 0  # leading positions that sliding-window layers have dropped


@dataclass(frozen=True)
class Pass:
    """A forward pass over new tokens after the committed and pending ones of every row."""

    lengths: Tensor  # [B] int64 committed positions, on the device; not set for a single row
    pending: int
    new: int
    committed: bool  # True if all new tokens will be committed
    shape: TreeShape | None  # of all pending and new nodes; None if unknown, or if the tokens are not nodes


class Layers(ABC):
    """All layers of one kind in a cache, numbered from 0; ``rows`` are the cache's."""

    rows: list[Row]

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def begin(self, coming: Pass) -> None:
        """Prepare a pass of the model over new tokens."""

    @abstractmethod
    def update(self, number: int, *states: Tensor) -> tuple[Tensor, ...]:
        """Add a layer's states of the new tokens; return all states that they read."""

    @abstractmethod
    def move(self, nodes_BP: Tensor, counts: list[int], in_place: bool) -> None:
        """Make each row b's accepted nodes, ``nodes_BP[b, :counts[b]]``, its first pending positions; a commit follows.
        ``in_place``: they already are, because the nodes are a chain."""

    def commit(self, counts: list[int]) -> None:  # noqa: B027
        """Commit the first ``counts[b]`` pending positions of row b, and drop the others. Its length has grown."""

    def crop(self, lengths: list[int]) -> None:  # noqa: B027
        """Drop pending states and all but the first ``lengths[b]`` positions of row b, whose length is still the old.
        Raise a UserError if the next pass would read states that have been discarded."""

    @abstractmethod
    def append(self, number: int, source: "Layers", other: int, start: int, stop: int) -> None:
        """Take the committed positions ``start`` to ``stop`` of layer number ``other`` of ``source``."""

    @abstractmethod
    def take(self, index: slice | Tensor, rows: list[Row]) -> Self:
        """Return layers of some rows, which are ``rows``: with copies if ``index`` is a tensor [B], else the same."""

    @abstractmethod
    def first(self, count: int, rows: list[Row]) -> Self:
        """Return the first ``count`` layers, in the same memory; they never drop positions. ``rows`` are copies."""

    @abstractmethod
    def grow(self, capacity: int) -> Self:
        """Return layers with the same states and memory for ``capacity`` positions."""


class LayerShape(ABC):
    """Description of what one layer keeps."""

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """Layers of equal kinds are in one ``Layers`` object."""

    @staticmethod
    @abstractmethod
    def new(shapes: Sequence[Any], rows: list[Row], capacity: int, zeros: Callable[..., Tensor]) -> Layers:
        """Return empty layers of one kind, for ``rows`` of up to ``capacity`` positions; ``zeros`` makes memory."""

    def trimmed(self, sliding: "Sliding") -> "LayerShape":
        """Return the shape of a layer that keeps only the latest positions, or self for other kinds."""
        return self


@dataclass(frozen=True)
class Sliding:
    """Memory sizes of sliding-window layers, which hold only the latest positions."""

    window: int  # positions that a query sees at most; with chunked attention, the size of a chunk
    room: int  # largest number of pending positions
    held: int  # positions that fit into the memory; with more, drops are rarer, and each copies a whole window
    spare: int = 0  # committed positions kept before the window, so that ``crop`` can remove as many


@dataclass(frozen=True)
class KeyValueShape(LayerShape):
    """Numbers of heads, and widths, of an attention layer's keys and values."""

    keys: tuple[int, int]
    values: tuple[int, int]
    sliding: Sliding | None = None

    @property
    def kind(self) -> Hashable:
        return KeyValueShape, self.sliding

    @staticmethod
    def new(
        shapes: Sequence["KeyValueShape"], rows: list[Row], capacity: int, zeros: Callable[..., Tensor]
    ) -> "FullLayers":
        sliding = shapes[0].sliding
        held = min(sliding.held, capacity) if sliding else capacity
        stacks = [
            zeros((shapes.count(shape), len(rows), heads, held, width))
            for shape in dict.fromkeys(shapes)
            for heads, width in (shape.keys, shape.values)
        ]
        return (SlidingLayers if sliding else FullLayers)(shapes, stacks, rows)

    def trimmed(self, sliding: Sliding) -> "KeyValueShape":
        return replace(self, sliding=sliding)


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Number, shapes, dtype and device of the layers that a cache holds."""

    layers: tuple[LayerShape | None, ...]  # keys and values by layer; None: a layer without
    states: tuple[LayerShape | None, ...] = ()
    """Recurrent states by layer, in addition to keys and values; empty if no layer has one."""
    dtype: torch.dtype
    device: torch.device

    def trimmed(self, windows: Sequence[int], capacity: int, room: int, surplus: int | None = None) -> "CacheShape":
        """Return this shape, but with only the latest positions in sliding-window layers; self if that saves nothing.

        ``windows`` has the number of positions that a query sees in each layer (0: all), and ``capacity`` is the number
        of positions in other layers. ``room`` is the largest number of pending nodes. ``surplus`` positions accumulate
        before a drop (None: as many as the largest window).
        """
        window = max(windows)
        held = window + room + (window if surplus is None else surplus)
        if held >= capacity or len(windows) != len(self.layers):
            return self
        sliding = Sliding(window, room, held)
        pairs = zip(self.layers, windows, strict=True)
        return replace(self, layers=tuple(shape.trimmed(sliding) if shape and size else shape for shape, size in pairs))

    @cached_property
    def _kinds(self) -> dict[object, list[LayerShape]]:
        kinds: dict[object, list[LayerShape]] = {}
        for shape in filter(None, (*self.layers, *self.states)):
            kinds.setdefault(shape.kind, []).append(shape)
        return kinds

    @cached_property
    def places(self) -> tuple[tuple[int, int] | None, ...]:
        """For each of ``layers``, then of ``states``, the index of its kind's ``Layers`` object in ``new``, and the
        number in it."""
        kinds, numbers = list(self._kinds), [iter(range(len(shapes))) for shapes in self._kinds.values()]
        indices = (None if shape is None else kinds.index(shape.kind) for shape in (*self.layers, *self.states))
        return tuple(None if kind is None else (kind, next(numbers[kind])) for kind in indices)

    def new(self, rows: list[Row], capacity: int) -> list[Layers]:
        """Return empty layers, one object per kind, for ``rows`` of up to ``capacity`` positions."""
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        return [shapes[0].new(shapes, rows, capacity, zeros) for shapes in self._kinds.values()]

    def nbytes(self, capacity: int) -> int:  # of one row
        return sum(kind.nbytes for kind in replace(self, device=torch.device("meta")).new([Row()], capacity))

    def of(self, layers: Sequence[int], dtype: torch.dtype) -> "CacheShape":
        states = tuple(self.states[n] for n in layers) if self.states else ()
        chosen = tuple(self.layers[n] for n in layers)
        return replace(self, layers=chosen, states=states if any(states) else (), dtype=dtype)


def shape_of(stock: Any) -> LayerShape | None:
    """Return the shape of a layer of transformers' cache after a pass; None: the model does not use it."""
    if getattr(stock, "keys", None) is None:
        return None
    keys, values = ((states.shape[1], states.shape[3]) for states in (stock.keys, stock.values))
    return KeyValueShape(keys, values)


class FullLayers(Layers):
    """Layers that hold every position, or, in a cache from ``TreeCache.selected``, selected and later positions."""

    def __init__(
        self, shapes: Sequence[KeyValueShape], stacks: Sequence[Tensor], rows: list[Row], skipped: int = 0
    ) -> None:
        """Use ``stacks`` [L, B, H, C, E] for ``rows``: keys and values of each size, by its first layer. ``skipped``
        committed positions have no memory: position p is at index p - ``skipped``."""
        self.shapes, self.stacks, self.rows, self.skipped = list(shapes), list(stacks), rows, skipped
        self._sizes: Any = shapes[0].sliding  # None unless these are ``SlidingLayers``
        sizes = list(dict.fromkeys(self.shapes))
        parts = [iter(zip(*(s.unbind(0) for s in stacks[2 * n : 2 * n + 2]), strict=True)) for n in range(len(sizes))]
        self._parts: list[tuple[Tensor, Tensor]] = [next(parts[sizes.index(shape)]) for shape in self.shapes]
        self._first: int | Tensor = skipped  # index of the memory's first position; of several sliding rows [B]
        self._span = slice(0, 0)
        self._index = self._rows = torch.empty(0)  # for several rows: [B, T] and [B, 1]

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)

    def over(
        self, change: Callable[[Tensor], Tensor], rows: list[Row] | None = None, skipped: int | None = None
    ) -> Self:
        """Return these layers over other memory, the result of ``change`` for each stack; None: as here."""
        stacks, skipped = [change(stack) for stack in self.stacks], self.skipped if skipped is None else skipped
        return type(self)(self.shapes, stacks, self.rows if rows is None else rows, skipped)

    def start(self, row: Row) -> int:
        """Return the number of positions of ``row`` without memory: a new position p is at p minus this number."""
        return self.skipped

    @property
    def ends(self) -> list[int]:
        """Index in the memory of each row's first pending position."""
        return [row.length - self.start(row) for row in self.rows]

    def begin(self, coming: Pass) -> None:
        start = max(self.ends) + coming.pending
        self._span = slice(start, start + coming.new)
        if len(self.rows) > 1:
            device = coming.lengths.device
            offsets = torch.arange(coming.pending, coming.pending + coming.new, device=device)
            self._index = (coming.lengths - self._first)[:, None] + offsets
            self._rows = torch.arange(len(self.rows), device=device)[:, None]

    def update(self, number: int, *states: Tensor) -> tuple[Tensor, ...]:
        (keys, values), (key, value), span, end = self._parts[number], states, self._span, self._span.stop
        if len(self.rows) == 1:
            keys[:, :, span] = key
            values[:, :, span] = value
        else:
            keys[self._rows, :, self._index] = key.transpose(1, 2)
            values[self._rows, :, self._index] = value.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def move(self, nodes_BP: Tensor, counts: list[int], in_place: bool) -> None:
        if in_place:
            return
        most = max(counts)
        nodes_BP = nodes_BP[:, :most]
        if len(self.rows) == 1:
            (start,) = self.ends
            for stack in self.stacks:
                # index_select copies before the write, so overlapping source and destination are safe.
                stack[:, :, :, start : start + most] = stack.index_select(3, nodes_BP[0] + start)
            return
        rows = torch.arange(len(self.rows), device=nodes_BP.device)[:, None]
        starts = on_device(self.ends, nodes_BP.device)[:, None]
        target, source = starts + torch.arange(most, device=nodes_BP.device), starts + nodes_BP
        for stack in self.stacks:
            # The right side is a copy. What lands past a row's count is never read.
            stack[:, rows, :, target] = stack[:, rows, :, source]

    def append(self, number: int, source: Layers, other: int, start: int, stop: int) -> None:
        assert isinstance(source, FullLayers)
        self.update(number, *(states[:, :, start:stop] for states in source._parts[other]))

    def write(self, number: int, slots: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values at ``slots`` [T] on the device; return the layer's whole memory."""
        for memory, new in zip(self._parts[number], states, strict=True):
            memory.index_copy_(2, slots, new)
        return self._parts[number]

    def take(self, index: slice | Tensor, rows: list[Row]) -> Self:
        return self.over(lambda stack: stack[:, index], rows)

    def first(self, count: int, rows: list[Row]) -> Self:
        shapes = self.shapes[:count]
        used = [shapes.count(shape) for shape in dict.fromkeys(shapes) for _ in range(2)]
        return type(self)(shapes, [stack[:n] for stack, n in zip(self.stacks, used, strict=False)], rows, self.skipped)

    def grow(self, capacity: int) -> Self:
        return self.over(lambda stack: torch.nn.functional.pad(stack, (0, 0, 0, capacity - stack.shape[3])))


class SlidingLayers(FullLayers):
    """Sliding-window layers, which drop the positions that no later query sees. They drop at a commit, if a tree of
    ``room`` nodes would not fit any more. Until then, positions accumulate, because each drop copies a whole window."""

    def start(self, row: Row) -> int:
        return row.dropped

    def begin(self, coming: Pass) -> None:
        if len(self.rows) > 1:
            self._first = on_device([row.dropped for row in self.rows], coming.lengths.device)
        super().begin(coming)
        # Committed tokens of one row may exceed the memory, because `update` then keeps the latest ones.
        if self._span.stop > self._sizes.held and not (coming.committed and len(self.rows) == 1):
            what = f"layers with a window hold {self._sizes.held} positions but {self._span.stop} are needed"
            why = f"the cache was made for trees of up to {self._sizes.room} nodes"
            raise UserError(f"{what}: {why}; create it with larger `nodes`")

    def update(self, number: int, *states: Tensor) -> tuple[Tensor, ...]:
        if self._span.stop <= self._sizes.held:
            return super().update(number, *states)
        start, memory = self._span.start, self._parts[number]
        whole = tuple(torch.cat([held[:, :, :start], new], 2) for held, new in zip(memory, states, strict=True))
        for held, latest in zip(memory, whole, strict=True):
            held.copy_(latest[:, :, -self._sizes.held :])
        return whole

    def columns(self, mask: Tensor | None, positions: Tensor) -> tuple[Tensor | None, Tensor]:
        """Restrict a mask [B, 1, T, K] and key positions [B, K] to the keys that these layers hold."""
        if len(self.rows) == 1:
            dropped = self.rows[0].dropped
            return None if mask is None else mask[..., dropped:], positions[:, dropped:]
        assert mask is not None and isinstance(self._first, Tensor)
        last = positions.shape[1] - 1
        columns = self._first[:, None] + torch.arange(self._span.stop, device=positions.device)  # in the whole text
        inside = columns.clamp(max=last)
        held_mask = mask.gather(3, inside[:, None, None].expand(-1, -1, mask.shape[2], -1))
        return held_mask.masked_fill_((columns > last)[:, None, None], -torch.inf), positions.gather(1, inside)

    def commit(self, counts: list[int]) -> None:
        """In every row without space for another tree, drop the positions that no later query sees."""
        window, room, held = self._sizes.window, self._sizes.room, self._sizes.held
        for n, row in enumerate(self.rows):
            row.dropped += max(0, self._span.stop - held)  # of a pass longer than the memory
            self._check(row, row.length)
            first = max(row.dropped, row.length - window - self._sizes.spare + 1)
            if row.length - row.dropped + room > held and first > row.dropped:
                seen = slice(first - row.dropped, row.length - row.dropped)
                for stack in self.stacks:
                    stack[:, n, :, : row.length - first] = stack[:, n, :, seen].clone()
                row.dropped = first
        self._span = slice(0, 0)

    def crop(self, lengths: list[int]) -> None:
        for row, length in zip(self.rows, lengths, strict=True):
            row.dropped = row.dropped if length else 0
            self._check(row, length)

    def _check(self, row: Row, length: int) -> None:
        if row.dropped > max(0, length - self._sizes.window + 1):
            what = f"the cache cannot go back to {length} positions"
            why = f"layers with a window of {self._sizes.window} have dropped the first {row.dropped}"
            raise UserError(f"{what}: {why}; start again at 0, or create the cache without `nodes`")

    def first(self, count: int, rows: list[Row]) -> Self:
        view = super().first(count, rows)
        view._sizes = replace(self._sizes, room=0)
        return view

    def grow(self, capacity: int) -> Self:
        held = min(capacity, self._sizes.held)
        return self if held == self.stacks[0].shape[3] else super().grow(held)
