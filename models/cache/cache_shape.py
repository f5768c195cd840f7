"""Number and sizes of the layers of a cache, and the location of each layer in the cache's memory.

Shape legend: B rows, H key/value heads, C positions held, E head width, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

LayerSizes = tuple[tuple[int, int], tuple[int, int]]
"""Number and width of a layer's key heads, and of its value heads."""


class Place(NamedTuple):
    """Location of a layer's keys and values in the memory of a cache."""

    stack: int
    """Index of the stack (tensor of several layers) that holds the keys. The next stack holds the values."""
    number: int
    """Index of the layer in both stacks."""
    sliding: bool
    """True if the layer holds only the latest positions."""


@dataclass(frozen=True, kw_only=True)
class Trim:
    """Memory sizes of a cache's sliding-window layers, which hold only the latest positions."""

    layers: tuple[bool, ...]
    """True for each layer that is trimmed, which means that it holds only the latest positions."""
    window: int
    """Largest number of positions that a query sees in a trimmed layer; with chunked attention, the size of a chunk."""
    room: int
    """Largest number of pending (not yet committed) positions."""
    held: int
    """Number of positions that fit into the memory. If it is larger, positions are dropped less often; each drop copies
    a whole window."""


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Number, sizes, dtype and device of the layers that a cache holds."""

    layers: tuple[LayerSizes | None, ...]
    """Sizes of each layer; None: a layer without a cache."""
    dtype: torch.dtype
    device: torch.device
    trim: Trim | None = None
    """Sizes of sliding-window layers. None: all layers hold the whole context."""

    def trimmed(self, windows: Sequence[int], capacity: int, room: int, surplus: int | None = None) -> "CacheShape":
        """Return this shape, but with only the latest positions in sliding-window layers; self if that saves nothing.

        Args:
            windows: number of positions that a query sees in each layer; 0: all.
            capacity: number of positions in layers without a window.
            room: largest number of pending (not yet committed) nodes.
            surplus: number of positions that accumulate before a drop; None: as many as the largest window.
        """
        window = max(windows)
        held = window + room + (window if surplus is None else surplus)
        if held >= capacity or len(windows) != len(self.layers):
            return self
        trim = Trim(layers=tuple(size > 0 for size in windows), window=window, room=room, held=held)
        return replace(self, trim=trim)

    @cached_property
    def _groups(self) -> list[tuple[LayerSizes, bool] | None]:
        """Each layer's sizes, and True if it holds only the latest positions; None: a layer without a cache."""
        trimmed = self.trim.layers if self.trim else (False,) * len(self.layers)
        return [None if sizes is None else (sizes, trim) for sizes, trim in zip(self.layers, trimmed, strict=True)]

    @cached_property
    def places(self) -> tuple[Place | None, ...]:
        groups = self._groups
        stacks = {group: 2 * n for n, group in enumerate(dict.fromkeys(g for g in groups if g))}
        return tuple(g and Place(stacks[g], groups[:n].count(g), g[1]) for n, g in enumerate(groups))

    def zeros(self, rows: int, capacity: int) -> tuple[Tensor, ...]:
        """Return new zeros: for each group of equal layers, a tensor [L, B, H, C, E] of keys and one of values."""
        return tuple(
            torch.zeros(
                (self._groups.count(group), rows, heads, self.trim.held if group[1] and self.trim else capacity, width),
                dtype=self.dtype,
                device=self.device,
            )
            for group in dict.fromkeys(g for g in self._groups if g)
            for heads, width in group[0]
        )

    def of(self, layers: Sequence[int], dtype: torch.dtype) -> "CacheShape":
        """Return the cache shape of a model that consists of ``layers`` (indices from 0) and computes in ``dtype``."""
        return replace(self, layers=tuple(self.layers[n] for n in layers), dtype=dtype)
