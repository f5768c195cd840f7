"""A preallocated key/value cache for stock transformers modules, for one row and for rows of different lengths.

transformers' attention modules only call ``update(key, value, layer_idx)``. ``TreeCache`` also serves tree
verification: several passes over one growing tree, commits of the accepted path, and rollbacks. The host knows all
lengths, so no method waits for the device. ``cache_layers.py`` has the kinds of layers, and ``static_cache.py`` has a
cache at fixed addresses.

A commit in numbers: 10 committed positions and a pending tree of 4 nodes occupy positions 0 to 13. If nodes 0, 1 and 3
are accepted, ``commit_path`` copies positions 10, 11, 13 to 10, 11, 12 and the length becomes 13. Position 13 still
holds a rejected node, is never read, and is overwritten by the next pass.

Rows of lengths 3 and 5 in numbers: a pass over 2 tokens writes positions 3, 4 of the first row and 5, 6 of the second.
It attends over 7 positions of both, masked by row. Positions past a row's length are never read, so a pass may write
padding there.

Shape legend: B rows, R rows or 1, H key/value heads, C capacity, T new tokens, P pending and new nodes of a tree,
E head width, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from drafthead.data.utils.devices import on_device
from drafthead.data.utils.errors import UserError
from drafthead.models.cache.cache_layers import FullLayers, Row, SlidingLayers
from drafthead.models.token_tree import TokenTree, TreeShape

LayerSizes = tuple[int, int, int, int]
"""Heads and width of a layer's keys, heads and width of its values."""


class Place(NamedTuple):
    """The place of a layer in the memory of a cache."""

    stack: int
    """Index of the stack of its keys. The next stack has its values."""
    number: int
    """Its index in both stacks."""
    sliding: bool


@dataclass(frozen=True, kw_only=True)
class Trim:
    """Sizes of the sliding-window layers of a cache, which hold only the latest positions."""

    layers: tuple[bool, ...]
    """True for each layer that is trimmed."""
    window: int
    """Positions that their queries see. Chunks start within this distance."""
    room: int
    """Most pending positions."""
    held: int
    """Positions that these layers hold. A larger number means fewer drops, each of which copies one window."""


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The layers that a cache of one base must hold."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    by_layer: tuple[LayerSizes | None, ...] | None = None
    """Sizes of each layer if layers or keys and values differ. None for a layer without keys and values."""
    trim: Trim | None = None
    """None: all layers hold the whole context."""

    def trimmed(self, windows: Sequence[int], capacity: int, room: int, surplus: int | None = None) -> "CacheShape":
        """Return this shape with sliding-window layers trimmed, or self if nothing is saved.

        ``windows`` has the positions that each layer sees (0: all). ``surplus`` positions accumulate before any are
        dropped (None: one window).
        """
        window = max(windows)
        held = window + room + (window if surplus is None else surplus)
        if held >= capacity or len(windows) != self.layers:
            return self
        trim = Trim(layers=tuple(size > 0 for size in windows), window=window, room=room, held=held)
        return replace(self, trim=trim)

    @cached_property
    def _groups(self) -> list[tuple[LayerSizes, bool] | None]:
        """The sizes of each layer, and True if it is trimmed. Equal layers share two stacks: keys and values."""
        sizes = self.by_layer or ((self.heads, self.head_dim) * 2,) * self.layers
        trimmed = self.trim.layers if self.trim else (False,) * self.layers
        return [None if size is None else (size, trim) for size, trim in zip(sizes, trimmed, strict=True)]

    @cached_property
    def places(self) -> tuple[Place | None, ...]:
        groups = self._groups
        stacks = {group: 2 * n for n, group in enumerate(dict.fromkeys(g for g in groups if g))}
        return tuple(g and Place(stacks[g], groups[:n].count(g), g[1]) for n, g in enumerate(groups))

    def zeros(self, rows: int, capacity: int) -> tuple[Tensor, ...]:
        """Return empty stacks [L, B, H, C, E]: one of keys and one of values if all layers are equal."""
        return tuple(
            torch.zeros(
                (self._groups.count(group), rows, heads, self.trim.held if group[1] and self.trim else capacity, width),
                dtype=self.dtype,
                device=self.device,
            )
            for group in dict.fromkeys(g for g in self._groups if g)
            for heads, width in (group[0][:2], group[0][2:])
        )

    def of(self, layers: Sequence[int], dtype: torch.dtype) -> "CacheShape":
        """Return the shape of a model made of these layers."""
        by_layer = None if self.by_layer is None else tuple(self.by_layer[n] for n in layers)
        return replace(self, layers=len(layers), dtype=dtype, by_layer=by_layer)


class TreeCache:
    """The keys and values of one row or of several rows with different lengths.

    The last ``pending`` positions of each row are a tree that was read but not committed. ``commit_path`` commits one
    path of it and moves only the accepted entries. ``crop`` drops the tree.
    """

    def __init__(
        self,
        stacks: tuple[Tensor, ...],
        places: tuple[Place | None, ...],
        rows: list[Row],
        *,
        capacity: int,
        trim: Trim | None = None,
        skipped: int = 0,
    ) -> None:
        """Use existing memory, [L, B, H, C, E] each, for ``rows`` of up to ``capacity`` positions.

        ``skipped``: the first positions of which only selected ones are held, below all others.
        """
        self.stacks, self.places, self.trim, self.skipped, self.capacity = stacks, places, trim, skipped, capacity
        self._rows, self.pending = rows, 0
        self._reach, self._is_chain = 0, False
        self._lengths_B = torch.empty(0)
        self._bind()

    def _bind(self) -> None:
        """Make the layers over the stacks."""
        slides = {place.stack: place.sliding for place in self.places if place}
        full = [n for n in range(len(self.stacks)) if not slides.get(n // 2 * 2)]
        parts = [stack.unbind(0) for stack in self.stacks]
        whole = FullLayers([self.stacks[n] for n in full], self._rows, self.skipped)
        self._kinds: list[FullLayers] = [whole]
        self._sliding: SlidingLayers | None = None
        if self.trim is not None:
            trimmed = [stack for n, stack in enumerate(self.stacks) if n not in full]
            self._sliding = SlidingLayers(trimmed, self._rows, self.trim.window, self.trim.room)
            self._kinds.append(self._sliding)
        self.layers = [
            p and (self._kinds[p.sliding], parts[p.stack][p.number], parts[p.stack + 1][p.number]) for p in self.places
        ]

    @classmethod
    def empty(cls, shape: CacheShape, capacity: int, rows: int = 1) -> "TreeCache":
        """Return an empty cache for ``rows`` rows of ``capacity`` positions, in new memory."""
        new = [Row() for _ in range(rows)]
        return TreeCache(shape.zeros(rows, capacity), shape.places, new, capacity=capacity, trim=shape.trim)

    @property
    def keys(self) -> Tensor:
        """The keys [L, B, H, C, E] of all layers, if layers are equal."""
        return self.stacks[0]

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> list[int]:
        """The committed positions of each row."""
        return [row.length for row in self._rows]

    @property
    def length(self) -> int:
        """The committed positions of the longest row."""
        return max([row.length for row in self._rows])  # quicker than a generator

    # Passes ----------------------------------------------------------------------------------------------------

    def begin(self, new: int, committed: bool = False, chain: bool = False) -> None:
        """Start a pass over ``new`` tokens per row after the pending ones.

        ``committed``: all of them will be committed. ``chain``: each token follows the one before.
        """
        self._reach = self.length + self.pending + new
        if self._reach > self.capacity:
            raise UserError(
                f"the cache holds {self.capacity} positions but {self._reach} are needed; shorten the prompt or the "
                "answer"
            )
        if self.rows > 1:
            self._lengths_B = on_device(self.lengths, self.stacks[0].device)
        for kind in self._kinds:
            kind.begin(self._lengths_B, self.pending, new, committed)
        self._is_chain = chain and self.pending == 0
        self.pending += new

    def update(self, key_BHTE: Tensor, value_BHTE: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write the states of one layer and return all its states up to the longest row's new ones, as views."""
        layer = self.layers[layer_idx]
        assert layer is not None
        kind, keys, values = layer
        return kind.update(keys, values, key_BHTE, value_BHTE)

    @property
    def _before(self) -> int | Tensor:
        """The committed positions: of one row as an integer, of several rows as a tensor [B, 1] made by ``begin``."""
        return self.length if self.rows == 1 else self._lengths_B[:, None]

    def positions(self, depths: Tensor) -> Tensor:
        """Return the absolute positions [R, T] of ``depths`` [R, T] in a tree or chain; with several rows [B, T]."""
        return depths + self._before

    def key_positions(self, depths: Tensor) -> Tensor:
        """Return the positions [B, reach] of all states, with ``depths`` [R, P] of the pending nodes."""
        slots = torch.arange(self._reach, device=depths.device).expand(self.rows, -1)
        node = slots - self._before
        nodes = self.positions(depths).expand(self.rows, -1).gather(1, node.clamp(0, depths.shape[1] - 1))
        return torch.where(node < 0, slots, nodes)

    def mask(self, ancestors_RTP: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [R, 1, T, reach]: a node sees its row's committed positions and its ancestors.

        For 2 committed positions and a root with two children, with 0 for seen and x for -inf::

            root     0 0 | 0 x x
            child 1  0 0 | 0 0 x
            child 2  0 0 | 0 x 0
        """
        rows, new, nodes = ancestors_RTP.shape
        if self.rows == 1:
            before = self.length - self.skipped
            mask = torch.zeros(rows, 1, new, before + nodes, dtype=dtype, device=ancestors_RTP.device)
            mask[:, 0, :, before:].masked_fill_(~ancestors_RTP, -torch.inf)
            return mask
        offset = torch.arange(self._reach, device=ancestors_RTP.device) - self._before  # [B, reach]
        inside = (offset >= 0) & (offset < nodes)
        node = offset.clamp(0, nodes - 1)[:, None].expand(-1, new, -1)
        seen = ancestors_RTP.expand(len(self._rows), -1, -1).gather(2, node) & inside[:, None]
        seen |= (offset < 0)[:, None]
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]

    def static_mask(self, tree: TokenTree, shape: TreeShape, buffers: dict[TokenTree, Tensor]) -> Tensor:
        """Return ``mask`` of a whole static ``tree`` for one row, as a view of its buffer in ``buffers``.

        One buffer serves every prefix length: zeros, then the tree's block. The view that starts n columns before the
        block has a committed prefix of exactly n positions, so no step writes a mask.
        """
        nodes, held = len(shape), self.capacity - self.skipped
        buffer = buffers.get(tree)
        if buffer is None or buffer.shape[1] < held + nodes:
            keys = self.stacks[0]
            buffer = buffers[tree] = torch.zeros(nodes, held + nodes, dtype=keys.dtype, device=keys.device)
            buffer[:, -nodes:].masked_fill_(~shape.ancestors[0], -torch.inf)
        return buffer[None, None, :, buffer.shape[1] - nodes - (self.length - self.skipped) :]

    def held(self, mask: Tensor | None, positions: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the columns of a mask [R, 1, T, reach] and of key positions that sliding layers hold."""
        return (mask, positions) if self._sliding is None else self._sliding.columns(mask, positions)

    # Commits ---------------------------------------------------------------------------------------------------

    def commit(self, counts: list[int] | None = None) -> None:
        """Commit the pending chain of every row, or its first ``counts`` positions."""
        for row, count in zip(self._rows, counts or [self.pending] * len(self._rows), strict=True):
            row.length += count
        self.pending = 0
        if self._sliding is not None:
            self._sliding.drop()

    def commit_path(self, nodes: Tensor, counts: list[int]) -> None:
        """Commit the path ``nodes[b, :counts[b]]`` ([B, P] int64) of each row's pending nodes; drop the others."""
        if self.pending > 1 and not self._is_chain:  # else the path is in place
            for kind in self._kinds:
                kind.move(nodes, counts)
        self.commit(counts)

    def crop(self, lengths: list[int] | None = None) -> None:
        """Drop the pending nodes, and all but the first ``lengths`` positions of each row."""
        self.pending = 0
        for row, length in zip(self._rows, self.lengths if lengths is None else lengths, strict=True):
            row.dropped = row.dropped if length else 0
            if self._sliding is not None:
                self._sliding.check_behind(row, length)
            row.length = length

    def append(self, other: "TreeCache") -> None:
        """Append the committed positions of ``other`` that lie beyond this cache's end; both have one row.

        ``other`` is a cache of the same model that stores all positions in every layer (made without ``nodes``).
        """
        start = self.length
        self.begin(other.length - start, committed=True)
        for n, layer in enumerate(other.layers):
            if layer is not None:
                self.update(layer[1][:, :, start : other.length], layer[2][:, :, start : other.length], n)
        self.commit()

    # Views and copies -------------------------------------------------------------------------------------------

    def row(self, row: int) -> "TreeCache":
        """Return one row as a cache in shared memory. Both caches see what the other commits."""
        if self.rows == 1:
            return self
        stacks = tuple(stack[:, row : row + 1] for stack in self.stacks)
        rows = [self._rows[row]]
        return TreeCache(stacks, self.places, rows, capacity=self.capacity, trim=self.trim, skipped=self.skipped)

    def select(self, rows: list[int]) -> None:
        """Keep these rows only, without pending nodes."""
        self.crop()
        if self.rows > 1:
            index = on_device(rows, self.stacks[0].device)
            self.stacks = tuple(stack.index_select(1, index) for stack in self.stacks)
            self._rows = [self._rows[n] for n in rows]
            self._bind()

    def first_layers(self, count: int) -> "TreeCache":
        """Return a cache of the first ``count`` layers that shares this memory and begins with its committed positions.

        Only this cache drops positions, because it also holds the other layers.
        """
        places = self.places[:count]
        used = [0] * len(self.stacks)
        for place in places:
            if place:
                used[place.stack] = used[place.stack + 1] = place.number + 1
        stacks = tuple(stack[:n] for stack, n in zip(self.stacks, used, strict=True))
        trim = None if self.trim is None else replace(self.trim, room=0)
        rows = [replace(row) for row in self._rows]
        return TreeCache(stacks, places, rows, capacity=self.capacity, trim=trim, skipped=self.skipped)

    def selected(self, positions_LHS: Tensor, room: int) -> "TreeCache":
        """Return a copy of these ascending positions of a row, with room for ``room`` more after the committed ones."""
        index = positions_LHS[:, None, ..., None].expand(-1, -1, -1, -1, self.keys.shape[-1])
        budget, length = positions_LHS.shape[2], self.length
        stacks = tuple(torch.nn.functional.pad(stack.gather(3, index), (0, 0, 0, room)) for stack in self.stacks)
        return TreeCache(stacks, self.places, [Row(length)], capacity=length + room, skipped=length - budget)

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` positions."""
        assert self.trim is None, "only caches of drafters grow, and they are not trimmed"
        more = (0, 0, 0, capacity - self.capacity)
        self.stacks = tuple(torch.nn.functional.pad(stack, more) for stack in self.stacks)
        self.capacity = capacity
        self._bind()

    # transformers' names ----------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the committed positions of the longest row."""
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the longest row's next query."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys that new queries see, and their offset."""
        return self.length + query_length, 0
