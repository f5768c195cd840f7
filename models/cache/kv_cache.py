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
E head width, L layers, reach: end of the longest row, with its pending and new tokens.
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
"""A layer's (number of key heads, width of a key head, number of value heads, width of a value head)."""


class Place(NamedTuple):
    """Location of a layer's keys and values in the memory of a cache."""

    stack: int
    """Index of the stack (tensor of several layers) that holds the keys. The next stack holds the values."""
    number: int
    """Index of the layer in both stacks."""
    sliding: bool


@dataclass(frozen=True, kw_only=True)
class Trim:
    """Memory sizes of a cache's sliding-window layers, which hold only the latest positions."""

    layers: tuple[bool, ...]
    """True for each layer that is trimmed, which means that it holds only the latest positions."""
    window: int
    """Largest number of positions that a query sees; with chunked attention, the size of a chunk."""
    room: int
    """Largest number of pending (not yet committed) positions."""
    held: int
    """Number of positions that fit into the memory. If it is larger, positions are dropped less often; each drop copies
    a whole window."""


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Number, sizes, dtype and device of the layers that a cache holds."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    by_layer: tuple[LayerSizes | None, ...] | None = None
    """Each layer's sizes, if layers or keys and values differ; None in it stands for a layer without a cache."""
    trim: Trim | None = None
    """Sizes of sliding-window layers. None: all layers hold the whole context."""

    def trimmed(self, windows: Sequence[int], capacity: int, room: int, surplus: int | None = None) -> "CacheShape":
        """Return this shape with only the latest positions in sliding-window layers, or self if that saves nothing.

        Args:
            windows: number of positions that each layer sees; 0: all.
            capacity: positions of the whole cache.
            room: largest number of pending nodes.
            surplus: positions that accumulate before any are dropped; None: as many as the largest window.
        """
        window = max(windows)
        held = window + room + (window if surplus is None else surplus)
        if held >= capacity or len(windows) != self.layers:
            return self
        trim = Trim(layers=tuple(size > 0 for size in windows), window=window, room=room, held=held)
        return replace(self, trim=trim)

    @cached_property
    def _groups(self) -> list[tuple[LayerSizes, bool] | None]:
        """Each layer's sizes, and True if it is trimmed. Equal layers share one stack of keys and one of values."""
        sizes = self.by_layer or ((self.heads, self.head_dim) * 2,) * self.layers
        trimmed = self.trim.layers if self.trim else (False,) * self.layers
        return [None if size is None else (size, trim) for size, trim in zip(sizes, trimmed, strict=True)]

    @cached_property
    def places(self) -> tuple[Place | None, ...]:
        groups = self._groups
        stacks = {group: 2 * n for n, group in enumerate(dict.fromkeys(g for g in groups if g))}
        return tuple(g and Place(stacks[g], groups[:n].count(g), g[1]) for n, g in enumerate(groups))

    def zeros(self, rows: int, capacity: int) -> tuple[Tensor, ...]:
        """Return new stacks of zeros [L, B, H, C, E]: for each kind of layer, one of keys and one of values."""
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
        """Return the cache shape of a model that consists of ``layers`` (indices from 0) and computes in ``dtype``."""
        by_layer = None if self.by_layer is None else tuple(self.by_layer[n] for n in layers)
        return replace(self, layers=len(layers), dtype=dtype, by_layer=by_layer)


class TreeCache:
    """The keys and values of one row or of several rows with different lengths.

    The last ``pending`` positions of each row are a token tree whose states are stored but not committed.
    ``commit_path`` commits one path of the tree and moves only the accepted entries. ``crop`` drops the tree.
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
        """Use the memory ``stacks`` [L, B, H, C, E] for ``rows`` of up to ``capacity`` positions.

        ``skipped``: number of committed positions that a copy made by ``selected`` leaves out.
        """
        self.stacks, self.places, self.trim, self.skipped, self.capacity = stacks, places, trim, skipped, capacity
        self._rows, self.pending = rows, 0
        self._reach, self._is_chain = 0, False
        self._lengths_B = torch.empty(0)
        self._bind()

    def _bind(self) -> None:
        """Build the layer objects that write into ``stacks``."""
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
        """The keys [L, B, H, C, E] of all layers; only for caches whose layers are equal."""
        return self.stacks[0]

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> list[int]:
        """Number of committed positions of each row."""
        return [row.length for row in self._rows]

    @property
    def length(self) -> int:
        """Number of committed positions of the longest row."""
        return max([row.length for row in self._rows])  # quicker than a generator

    # Passes ----------------------------------------------------------------------------------------------------

    def begin(self, new: int, committed: bool = False, chain: bool = False) -> None:
        """Prepare for a forward pass over ``new`` tokens per row, which follow the pending ones.

        ``committed``: True if all new tokens will be committed. ``chain``: True if each follows the one before.
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
        """Write one layer's new states, and return all its keys and values up to the longest row's end."""
        layer = self.layers[layer_idx]
        assert layer is not None
        kind, keys, values = layer
        return kind.update(keys, values, key_BHTE, value_BHTE)

    @property
    def _before(self) -> int | Tensor:
        """Number of committed positions: an integer for one row, a tensor [B, 1] for several (from ``begin``)."""
        return self.length if self.rows == 1 else self._lengths_B[:, None]

    def positions(self, depths: Tensor) -> Tensor:
        """Return the absolute positions of tree nodes at ``depths`` [R, T]: [R, T] for one row, [B, T] for several."""
        return depths + self._before

    def key_positions(self, depths: Tensor) -> Tensor:
        """Return the absolute positions [B, reach] of all keys, given the ``depths`` [R, P] of the pending nodes."""
        slots = torch.arange(self._reach, device=depths.device).expand(self.rows, -1)
        node = slots - self._before
        nodes = self.positions(depths).expand(self.rows, -1).gather(1, node.clamp(0, depths.shape[1] - 1))
        return torch.where(node < 0, slots, nodes)

    def mask(self, ancestors_RTP: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [R, 1, T, reach]: a node sees committed positions, its ancestors and itself.

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
        """Return the ``mask`` of a whole static ``tree`` for one row, as a view into the tree's buffer in ``buffers``.

        The buffer holds zeros, followed by the tree's ancestor mask. The view that starts n columns before the ancestor
        mask is the mask after n committed positions, so one buffer serves every length and no step writes a mask.
        """
        nodes, held = len(shape), self.capacity - self.skipped
        buffer = buffers.get(tree)
        if buffer is None or buffer.shape[1] < held + nodes:
            keys = self.stacks[0]
            buffer = buffers[tree] = torch.zeros(nodes, held + nodes, dtype=keys.dtype, device=keys.device)
            buffer[:, -nodes:].masked_fill_(~shape.ancestors[0], -torch.inf)
        return buffer[None, None, :, buffer.shape[1] - nodes - (self.length - self.skipped) :]

    def held(self, mask: Tensor | None, positions: Tensor) -> tuple[Tensor | None, Tensor]:
        """Restrict a mask [R, 1, T, reach] and key positions [R, reach] to those that sliding-window layers hold."""
        return (mask, positions) if self._sliding is None else self._sliding.columns(mask, positions)

    # Commits ---------------------------------------------------------------------------------------------------

    def commit(self, counts: list[int] | None = None) -> None:
        """Commit every row's pending positions, or only the first ``counts[b]`` of row b."""
        for row, count in zip(self._rows, counts or [self.pending] * len(self._rows), strict=True):
            row.length += count
        self.pending = 0
        if self._sliding is not None:
            self._sliding.drop()

    def commit_path(self, nodes: Tensor, counts: list[int]) -> None:
        """Commit the path ``nodes[b, :counts[b]]`` ([B, P] int64) of row b's pending nodes, and drop the rest."""
        if self.pending > 1 and not self._is_chain:  # else the path is in place
            for kind in self._kinds:
                kind.move(nodes, counts)
        self.commit(counts)

    def crop(self, lengths: list[int] | None = None) -> None:
        """Drop the pending nodes and, if ``lengths`` is given, all but the first ``lengths[b]`` positions of row b."""
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
        """Return a cache of one row that shares memory and committed length with this cache."""
        if self.rows == 1:
            return self
        stacks = tuple(stack[:, row : row + 1] for stack in self.stacks)
        rows = [self._rows[row]]
        return TreeCache(stacks, self.places, rows, capacity=self.capacity, trim=self.trim, skipped=self.skipped)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order, and drop pending nodes."""
        self.crop()
        if self.rows > 1:
            index = on_device(rows, self.stacks[0].device)
            self.stacks = tuple(stack.index_select(1, index) for stack in self.stacks)
            self._rows = [self._rows[n] for n in rows]
            self._bind()

    def first_layers(self, count: int) -> "TreeCache":
        """Return a cache of the first ``count`` layers, with the memory and the committed positions of this cache.

        Only this cache drops positions of sliding windows, because a drop must move the rest in all layers.
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
        """Return a copy of selected ascending positions [L, H, S] of one row, with ``room`` free positions.

        Index 0 onwards holds the selected positions. New tokens keep their absolute positions, from ``length`` on.
        """
        index = positions_LHS[:, None, ..., None].expand(-1, -1, -1, -1, self.keys.shape[-1])
        budget, length = positions_LHS.shape[2], self.length
        stacks = tuple(torch.nn.functional.pad(stack.gather(3, index), (0, 0, 0, room)) for stack in self.stacks)
        return TreeCache(stacks, self.places, [Row(length)], capacity=length + room, skipped=length - budget)

    def grow(self, capacity: int) -> None:
        """Enlarge the memory to ``capacity`` positions."""
        assert self.trim is None, "only caches of drafters grow, and they are not trimmed"
        more = (0, 0, 0, capacity - self.capacity)
        self.stacks = tuple(torch.nn.functional.pad(stack, more) for stack in self.stacks)
        self.capacity = capacity
        self._bind()

    # transformers' names ----------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of committed positions of the longest row."""
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the longest row's next query."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys that new queries see, and their offset."""
        return self.length + query_length, 0
