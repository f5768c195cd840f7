"""A preallocated cache for stock transformers modules, for one row and for rows of different lengths.

transformers' attention modules only call ``update(key, value, layer_idx)``. ``TreeCache`` also serves tree
verification: several passes over one growing tree, commits of the accepted path, and rollbacks. The host knows all
lengths, so no method waits for the device.

A commit in numbers: 10 committed positions and a pending tree of 4 nodes occupy positions 0 to 13. If nodes 0, 1 and 3
are accepted, ``commit_path`` copies positions 10, 11, 13 to 10, 11, 12 and the length becomes 13. Position 13 still
holds a rejected node, is never read, and is overwritten by the next pass.

Rows of lengths 3 and 5 in numbers: a pass over 2 tokens writes positions 3, 4 of the first row and 5, 6 of the second.
It attends over 7 positions of both, masked by row. Positions past a row's length are never read, so a pass may write
padding there.

Shape legend: B rows, H key/value heads, T new tokens, P pending and new nodes of a tree or nodes of a path, K keys
(positions of the longest row, with pending and new tokens), E head width, L layers, S selected positions.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.cache.layers import CacheShape, FullLayers, Layers, Pass, Row, SlidingLayers
from drafthead.models.cache.recurrent import RecurrentLayers
from drafthead.models.kernels.recurrence import TreeState
from drafthead.models.token_tree import TokenTree, TreeShape
from drafthead.system.devices import on_device


class TreeCache:
    """Cache of a model's layers, for one row or for several rows with different lengths. The last ``pending``
    positions of each row are a token tree whose states are stored but not committed. ``commit_path`` commits one path
    of the tree and moves only the accepted entries. ``crop`` drops the tree."""

    def __init__(
        self, shape: CacheShape, kinds: list[Layers], rows: list[Row], *, capacity: int, skipped: int = 0
    ) -> None:
        """``skipped``: number of committed positions that are not in the memory, for a copy of selected positions."""
        self.shape, self.skipped, self.capacity = shape, skipped, capacity
        self._rows, self.pending = rows, 0
        self._reach, self._is_chain = 0, False
        self._lengths_B = torch.empty(0)
        self._use(kinds)

    def _use(self, kinds: list[Layers]) -> None:
        self.kinds = kinds
        self._sliding = next((kind for kind in kinds if isinstance(kind, SlidingLayers)), None)
        parts = [place and (kinds[place[0]], place[1]) for place in self.shape.places]
        self.layers, self._states = parts[: len(self.shape.layers)], parts[len(self.shape.layers) :]

    @classmethod
    def empty(cls, shape: CacheShape, capacity: int, rows: int = 1) -> "TreeCache":
        new = [Row() for _ in range(rows)]
        return TreeCache(shape, shape.new(new, capacity), new, capacity=capacity)

    @property
    def nbytes(self) -> int:
        return sum(kind.nbytes for kind in self.kinds)

    @property
    def keys(self) -> Tensor:
        """The keys [L, B, H, C, E] of all layers; only for caches whose layers are equal."""
        (kind,) = self.kinds
        assert isinstance(kind, FullLayers)
        return kind.stacks[0]

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> list[int]:  # of committed positions
        return [row.length for row in self._rows]

    @property
    def length(self) -> int:
        return max([row.length for row in self._rows])  # quicker than a generator

    # Passes ----------------------------------------------------------------------------------------------------

    def begin(self, new: int, committed: bool = False, shape: TreeShape | None = None) -> None:
        """Add ``new`` pending positions per row for the next pass. ``committed``: all of them will be committed.
        ``shape``: the tree of all pending nodes, if known. Raise a UserError beyond ``capacity``."""
        self._reach = self.length + self.pending + new
        if self._reach > self.capacity:
            what = f"the cache holds {self.capacity} positions but {self._reach} are needed"
            raise UserError(f"{what}; shorten the prompt or the answer")
        if self.rows > 1:
            self._lengths_B = on_device(self.lengths, self.shape.device)
        coming = Pass(self._lengths_B, self.pending, new, committed, shape)
        for kind in self.kinds:
            kind.begin(coming)
        self._is_chain = shape is not None and shape.is_chain and self.pending == 0
        self.pending += new

    def update(self, key_BHTE: Tensor, value_BHTE: Tensor, layer_idx: int, kwargs: object = None) -> tuple[Tensor, ...]:
        """Write a layer's new keys and values; return all [B, H, K, E] that it holds, up to the longest row's end.
        transformers calls this with ``layer_idx`` from 0, and ``kwargs`` of the attention that are not used here."""
        layer = self.layers[layer_idx]
        assert layer is not None
        kind, number = layer
        return kind.update(number, key_BHTE, value_BHTE)

    @property
    def _before(self) -> int | Tensor:
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
        ``buffers`` stores a buffer per tree: zeros, then the tree's ancestor mask. The view that starts n columns
        before the ancestor mask is the mask after n committed positions, so no step writes a mask."""
        nodes, held = len(shape), self.capacity - self.skipped
        buffer = buffers.get(tree)
        if buffer is None or buffer.shape[1] < held + nodes:
            buffer = torch.zeros(nodes, held + nodes, dtype=self.shape.dtype, device=self.shape.device)
            buffers[tree] = buffer
            buffer[:, -nodes:].masked_fill_(~shape.ancestors[0], -torch.inf)
        return buffer[None, None, :, buffer.shape[1] - nodes - (self.length - self.skipped) :]

    def held(self, mask: Tensor | None, positions: Tensor) -> tuple[Tensor | None, Tensor]:
        """Restrict a mask [B, 1, T, K] and key positions [B, K] to the keys that sliding-window layers hold, if any."""
        return (mask, positions) if self._sliding is None else self._sliding.columns(mask, positions)

    # Commits ---------------------------------------------------------------------------------------------------

    def commit(self, counts: list[int] | None = None) -> None:
        """Commit the first ``counts[b]`` pending positions of row b (None: all), and drop the others."""
        counts = counts or [self.pending] * len(self._rows)
        for row, count in zip(self._rows, counts, strict=True):
            row.length += count
        self.pending = 0
        for kind in self.kinds:
            kind.commit(counts)

    def commit_path(self, nodes: Tensor, counts: list[int]) -> None:
        """Commit row b's pending nodes ``nodes[b, :counts[b]]`` ([B, P] int64 from 0, a path); drop its other nodes."""
        for kind in self.kinds:
            kind.move(nodes, counts, in_place=self._is_chain or self.pending <= 1)
        self.commit(counts)

    def crop(self, lengths: list[int] | None = None) -> None:
        """Drop the pending nodes and, if given, all but the first ``lengths[b]`` positions of row b. Raise a UserError
        if the next pass would read positions that layers have dropped."""
        lengths, self.pending = self.lengths if lengths is None else lengths, 0
        for kind in self.kinds:
            kind.crop(lengths)
        for row, length in zip(self._rows, lengths, strict=True):
            row.length = length

    def append(self, other: "TreeCache") -> None:
        """Append the committed positions of ``other`` that lie beyond this cache's end; both have one row. ``other`` is
        a cache of the same model that stores all positions in every layer (made without ``nodes``)."""
        start = self.length
        self.begin(other.length - start, committed=True)
        pairs = zip((*self.layers, *self._states), (*other.layers, *other._states), strict=True)
        for layer, source in pairs:
            if layer is not None and source is not None:
                layer[0].append(layer[1], *source, start, other.length)
        self.commit()

    # Views and copies -------------------------------------------------------------------------------------------

    def row(self, row: int) -> "TreeCache":
        """Return a cache of row number ``row`` alone that shares memory and committed length with this cache."""
        if self.rows == 1:
            return self
        rows = [self._rows[row]]
        kinds = [kind.take(slice(row, row + 1), rows) for kind in self.kinds]
        return TreeCache(self.shape, kinds, rows, capacity=self.capacity, skipped=self.skipped)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order, and drop pending nodes. A row may be repeated, which copies it."""
        self.crop()
        if self.rows > 1 or len(rows) > 1:
            index = on_device(rows, self.shape.device)
            self._rows = [replace(self._rows[n]) for n in rows]
            self._use([kind.take(index, self._rows) for kind in self.kinds])

    def first_layers(self, count: int) -> "TreeCache":
        """Return a cache of the first ``count`` layers in the memory of this cache, with a copy of its lengths. It
        never drops positions of sliding windows, because a drop would move the other positions in all layers."""
        rows = [replace(row) for row in self._rows]
        shape = replace(self.shape, layers=self.shape.layers[:count], states=self.shape.states[:count])
        layers = [*self.layers[:count], *self._states[:count]]
        numbers = [sum(layer[0] is kind for layer in layers if layer) for kind in self.kinds]
        kinds = [kind.first(number, rows) for kind, number in zip(self.kinds, numbers, strict=True) if number]
        return TreeCache(shape, kinds, rows, capacity=self.capacity, skipped=self.skipped)

    def selected(self, positions_LHS: Tensor, room: int) -> "TreeCache":
        """Return a cache with copies of S selected ascending positions [L, H, S] of one row, and ``room`` free ones.
        The selected positions fill its memory from index 0 on. New tokens still count their positions from ``length``.
        All layers are equal."""
        (kind,), rows = self.kinds, [Row(self.length)]
        assert isinstance(kind, FullLayers)
        index = positions_LHS[:, None, ..., None].expand(-1, -1, -1, -1, self.keys.shape[-1])
        skipped = self.length - positions_LHS.shape[2]
        pad = torch.nn.functional.pad
        copied = kind.over(lambda stack: pad(stack.gather(3, index), (0, 0, 0, room)), rows, skipped)
        return TreeCache(self.shape, [copied], rows, capacity=self.length + room, skipped=skipped)

    def grow(self, capacity: int) -> None:
        self._use([kind.grow(capacity) for kind in self.kinds])
        self.capacity = capacity

    # transformers' names ----------------------------------------------------------------------------------------

    def _recurrent(self, layer_idx: int) -> tuple[RecurrentLayers, int]:
        layer = self._states[layer_idx]
        assert layer is not None and isinstance(layer[0], RecurrentLayers)
        return layer[0], layer[1]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that layers take their code for texts, which leaves the inputs of a convolution to us."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any) -> Any:
        kind, number = self._recurrent(layer_idx)
        return kind.update(number, conv_states)[0]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | TreeState | None:
        kind, number = self._recurrent(layer_idx)
        return kind.state(number)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Tensor:
        kind, number = self._recurrent(layer_idx)
        kind.set_state(number, recurrent_states)
        return recurrent_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0  # number of keys, and position of the first one
