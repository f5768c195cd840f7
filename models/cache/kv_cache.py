"""A preallocated key/value cache for stock transformers modules, for one row and for rows of different lengths.

transformers' attention modules only call ``update(key, value, layer_idx)``. ``TreeCache`` also serves tree
verification: several passes over one growing tree, commits of the accepted path, and rollbacks. The host knows all
lengths, so no method waits for the device. ``static_cache.py`` has a cache at fixed addresses.

The keys of equal layers are one tensor (a stack), and so are their values, so a commit takes one copy per stack. Layers
either hold every position (``FullLayers``), or have a sliding window and hold the latest ones (``SlidingLayers``). The
kind decides at which index of a stack a position is stored. Several rows are written by index tensors, because their
lengths differ; a single row is written by slices.

A commit in numbers: 10 committed positions and a pending tree of 4 nodes occupy positions 0 to 13. If nodes 0, 1 and 3
are accepted, ``commit_path`` copies positions 10, 11, 13 to 10, 11, 12 and the length becomes 13. Position 13 still
holds a rejected node, is never read, and is overwritten by the next pass.

Rows of lengths 3 and 5 in numbers: a pass over 2 tokens writes positions 3, 4 of the first row and 5, 6 of the second.
It attends over 7 positions of both, masked by row. Positions past a row's length are never read, so a pass may write
padding there.

Shape legend: B rows, H key/value heads, C positions held, T new tokens, P pending and new nodes of a tree or nodes of a
path, K keys (positions of the longest row, with pending and new tokens), E head width, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.cache.cache_shape import CacheShape, Place, Trim
from drafthead.models.token_tree import TokenTree, TreeShape
from drafthead.system.devices import on_device


@dataclass
class Row:
    """Position counts of one row, shared by a cache and its views of that row."""

    length: int = 0
    """Number of committed positions."""
    dropped: int = 0
    """Number of leading positions that sliding-window layers have dropped."""


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

        ``places``: location of each layer's keys and values in ``stacks``; None: a layer without a cache. ``trim``:
        sizes of sliding-window layers, if they are trimmed. ``skipped``: number of committed positions that are not in
        the memory, for a copy of selected positions.
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
        """Add ``new`` pending positions per row, for the next forward pass; refuse more than ``capacity``.

        ``committed``: True if all new tokens will be committed. ``chain``: True if they are tree nodes, each the parent
        of the next.
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

    def update(
        self, key_BHTE: Tensor, value_BHTE: Tensor, layer_idx: int, kwargs: object = None
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values; return all [B, H, K, E] that it holds, up to the longest row's end.

        transformers calls this; ``layer_idx`` counts from 0. ``kwargs`` are the keywords of the attention, which no
        cache of one sequence per row uses.
        """
        layer = self.layers[layer_idx]
        assert layer is not None
        kind, keys, values = layer
        return kind.update(keys, values, key_BHTE, value_BHTE)

    @property
    def _before(self) -> int | Tensor:
        """Number of committed positions: an integer for one row, else a tensor [B, 1]."""
        return self.length if self.rows == 1 else self._lengths_B[:, None]

    def positions(self, depths: Tensor) -> Tensor:
        """Return the positions [B, T] of tree nodes at ``depths`` [B or 1, T]: the committed length plus the depth."""
        return depths + self._before

    def key_positions(self, depths: Tensor) -> Tensor:
        """Return the positions [B, K] of all keys; ``depths`` [B or 1, P] are those of the pending nodes."""
        slots = torch.arange(self._reach, device=depths.device).expand(self.rows, -1)
        node = slots - self._before
        nodes = self.positions(depths).expand(self.rows, -1).gather(1, node.clamp(0, depths.shape[1] - 1))
        return torch.where(node < 0, slots, nodes)

    def mask(self, ancestors: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [B, 1, T, K] of the last T pending nodes, which see prefix, ancestors and self.

        ``ancestors`` [B or 1, T, P] is true where one of all P pending nodes is the node or its ancestor. For 2
        committed positions and a root with two children, with 0 for seen and x for -inf::

            root     0 0 | 0 x x
            child 1  0 0 | 0 0 x
            child 2  0 0 | 0 x 0
        """
        rows, new, nodes = ancestors.shape
        if self.rows == 1:
            before = self.length - self.skipped
            mask = torch.zeros(rows, 1, new, before + nodes, dtype=dtype, device=ancestors.device)
            mask[:, 0, :, before:].masked_fill_(~ancestors, -torch.inf)
            return mask
        offset = torch.arange(self._reach, device=ancestors.device) - self._before  # [B, reach]
        inside = (offset >= 0) & (offset < nodes)
        node = offset.clamp(0, nodes - 1)[:, None].expand(-1, new, -1)
        seen = ancestors.expand(len(self._rows), -1, -1).gather(2, node) & inside[:, None]
        seen |= (offset < 0)[:, None]
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]

    def static_mask(self, tree: TokenTree, shape: TreeShape, buffers: dict[TokenTree, Tensor]) -> Tensor:
        """Return the additive mask [1, 1, N, K] of all nodes of a static ``tree`` for one row, as a view into a buffer.

        ``buffers`` stores a buffer per tree. It has zeros and then the tree's ancestor mask. The view that starts n
        columns before the ancestor mask is the mask after n committed positions, so no step writes a mask.
        """
        nodes, held = len(shape), self.capacity - self.skipped
        buffer = buffers.get(tree)
        if buffer is None or buffer.shape[1] < held + nodes:
            keys = self.stacks[0]
            buffer = buffers[tree] = torch.zeros(nodes, held + nodes, dtype=keys.dtype, device=keys.device)
            buffer[:, -nodes:].masked_fill_(~shape.ancestors[0], -torch.inf)
        return buffer[None, None, :, buffer.shape[1] - nodes - (self.length - self.skipped) :]

    def held(self, mask: Tensor | None, positions: Tensor) -> tuple[Tensor | None, Tensor]:
        """Restrict a mask [B, 1, T, K] and key positions [B, K] to the keys that sliding-window layers hold.

        Without such layers, return both unchanged.
        """
        return (mask, positions) if self._sliding is None else self._sliding.columns(mask, positions)

    # Commits ---------------------------------------------------------------------------------------------------

    def commit(self, counts: list[int] | None = None) -> None:
        """Commit the first ``counts[b]`` pending positions of row b (None: all), and drop the others."""
        for row, count in zip(self._rows, counts or [self.pending] * len(self._rows), strict=True):
            row.length += count
        self.pending = 0
        if self._sliding is not None:
            self._sliding.drop()

    def commit_path(self, nodes: Tensor, counts: list[int]) -> None:
        """Commit row b's pending nodes ``nodes[b, :counts[b]]`` ([B, P] int64 from 0, a path); drop its other nodes."""
        if self.pending > 1 and not self._is_chain:  # else the path is in place
            for kind in self._kinds:
                kind.move(nodes, counts)
        self.commit(counts)

    def crop(self, lengths: list[int] | None = None) -> None:
        """Drop the pending nodes and, if ``lengths`` is given, all but the first ``lengths[b]`` positions of row b.

        Raise a UserError if the next query would see positions that sliding-window layers have dropped.
        """
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
        """Return a cache of row number ``row`` alone that shares memory and committed length with this cache."""
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
        """Return a cache of the first ``count`` layers in the memory of this cache, with a copy of its lengths.

        It never drops positions of sliding windows, because a drop would move the other positions in all layers.
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
        """Return a cache with copies of S selected ascending positions [L, H, S] of one row, and ``room`` free ones.

        The selected positions fill its memory from index 0 on. New tokens still count their positions from ``length``.
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
        """Return the number of keys that ``query_length`` new queries see, and the position of the first key, 0."""
        return self.length + query_length, 0


class FullLayers:
    """Layers that hold every position, or, in a cache from ``TreeCache.selected``, selected and later positions."""

    def __init__(self, stacks: Sequence[Tensor], rows: list[Row], first: int = 0) -> None:
        """Use the memory ``stacks`` [L, B, H, C, E] for ``rows``.

        ``first``: number of committed positions without memory; a new position p is written at index p - ``first``.
        """
        self.stacks, self.rows = stacks, rows
        self._first: int | Tensor = first  # of several sliding rows [B]
        self._span = slice(0, 0)
        self._index = self._rows = torch.empty(0)  # for several rows: [B, T] and [B, 1]

    def first(self, row: Row) -> int:
        """Return the number of positions of ``row`` without memory: a new position p is at p minus this number."""
        return int(self._first)

    @property
    def ends(self) -> list[int]:
        """The index in the memory of each row's first pending (not yet committed) position."""
        return [row.length - self.first(row) for row in self.rows]

    def begin(self, lengths_B: Tensor, pending: int, new: int, committed: bool) -> None:
        """Compute the indices in the memory of ``new`` tokens after ``lengths_B`` committed and ``pending`` ones.

        ``committed``: True if all new tokens will be committed.
        """
        start = max(self.ends) + pending
        self._span = slice(start, start + new)
        if len(self.rows) > 1:
            offsets = torch.arange(pending, pending + new, device=lengths_B.device)
            self._index = (lengths_B - self._first)[:, None] + offsets
            self._rows = torch.arange(len(self.rows), device=lengths_B.device)[:, None]

    def update(self, keys: Tensor, values: Tensor, key_BHTE: Tensor, value_BHTE: Tensor) -> tuple[Tensor, Tensor]:
        """Write new states into a layer's ``keys`` and ``values`` [B, H, C, E]; return the used part of both."""
        span, end = self._span, self._span.stop
        if len(self.rows) == 1:
            keys[:, :, span] = key_BHTE
            values[:, :, span] = value_BHTE
        else:
            keys[self._rows, :, self._index] = key_BHTE.transpose(1, 2)
            values[self._rows, :, self._index] = value_BHTE.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def move(self, nodes_BP: Tensor, counts: list[int]) -> None:
        """Copy each row b's accepted nodes, ``nodes_BP[b, :counts[b]]``, to the first pending positions."""
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


class SlidingLayers(FullLayers):
    """Sliding-window layers, which drop the positions that no later query sees.

    Positions are dropped at a commit, if a tree of ``room`` nodes would not fit any more. Until then they accumulate,
    because each drop copies a whole window.
    """

    def __init__(self, stacks: Sequence[Tensor], rows: list[Row], window: int, room: int) -> None:
        """Keep the last ``window`` positions of ``rows`` in ``stacks`` [L, B, H, C, E], and up to ``room`` nodes."""
        super().__init__(stacks, rows)
        self._window, self._room = window, room
        self.held = stacks[0].shape[3]
        """Number of positions that fit into the memory."""

    def first(self, row: Row) -> int:
        return row.dropped

    def begin(self, lengths_B: Tensor, pending: int, new: int, committed: bool) -> None:
        if len(self.rows) > 1:
            self._first = on_device([row.dropped for row in self.rows], lengths_B.device)
        super().begin(lengths_B, pending, new, committed)
        # Committed tokens of one row may exceed the memory, because `update` then keeps the latest ones.
        if self._span.stop > self.held and not (committed and len(self.rows) == 1):
            raise UserError(
                f"layers with a window hold {self.held} positions but {self._span.stop} are needed: the cache was made "
                f"for trees of up to {self._room} nodes; create it with larger `nodes`"
            )

    def update(self, keys: Tensor, values: Tensor, key_BHTE: Tensor, value_BHTE: Tensor) -> tuple[Tensor, Tensor]:
        if self._span.stop <= self.held:
            return super().update(keys, values, key_BHTE, value_BHTE)
        start = self._span.start
        whole = torch.cat([keys[:, :, :start], key_BHTE], 2), torch.cat([values[:, :, :start], value_BHTE], 2)
        for states, latest in zip((keys, values), whole, strict=True):
            states.copy_(latest[:, :, -self.held :])
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

    def drop(self) -> None:
        """In every row without space for another tree, drop the positions that no later query sees."""
        for n, row in enumerate(self.rows):
            row.dropped += max(0, self._span.stop - self.held)  # of a pass longer than the memory
            self.check_behind(row, row.length)
            first = max(row.dropped, row.length - self._window + 1)
            if row.length - row.dropped + self._room > self.held and first > row.dropped:
                seen = slice(first - row.dropped, row.length - row.dropped)
                for stack in self.stacks:
                    stack[:, n, :, : row.length - first] = stack[:, n, :, seen].clone()
                row.dropped = first
        self._span = slice(0, 0)

    def check_behind(self, row: Row, length: int) -> None:
        """Reject cutting ``row`` to ``length`` positions if its next query would see dropped positions."""
        if row.dropped > max(0, length - self._window + 1):
            raise UserError(
                f"the cache cannot go back to {length} positions: layers with a window of {self._window} have "
                f"dropped the first {row.dropped}; start again at 0, or create the cache without `nodes`"
            )
