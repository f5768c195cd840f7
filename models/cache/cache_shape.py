"""Number and shapes of the layers of a cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from drafthead.models.cache.layers import Layers, LayerShape, Row, Sliding


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Number, shapes, dtype and device of the layers that a cache holds."""

    layers: tuple[LayerShape | None, ...]  # None: a layer without a cache
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
        for shape in filter(None, self.layers):
            kinds.setdefault(shape.kind, []).append(shape)
        return kinds

    @cached_property
    def places(self) -> tuple[tuple[int, int] | None, ...]:
        """For each layer, the index of its kind's ``Layers`` object in ``new``, and the layer's number in it."""
        kinds, numbers = list(self._kinds), [iter(range(len(shapes))) for shapes in self._kinds.values()]
        indices = (None if shape is None else kinds.index(shape.kind) for shape in self.layers)
        return tuple(None if kind is None else (kind, next(numbers[kind])) for kind in indices)

    def new(self, rows: list[Row], capacity: int) -> list[Layers]:
        """Return empty layers, one object per kind, for ``rows`` of up to ``capacity`` positions."""
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        return [shapes[0].new(shapes, rows, capacity, zeros) for shapes in self._kinds.values()]

    def nbytes(self, capacity: int) -> int:  # of one row
        return sum(kind.nbytes for kind in replace(self, device=torch.device("meta")).new([Row()], capacity))

    def of(self, layers: Sequence[int], dtype: torch.dtype) -> "CacheShape":
        return replace(self, layers=tuple(self.layers[n] for n in layers), dtype=dtype)
