"""Preallocated key/value caches for stock transformers modules, without reallocation per token.

transformers' attention modules only call ``update(key, value, layer_idx)``. These classes also serve tree verification:
several passes over one growing tree, commits of the accepted path, and rollbacks. ``KVCache`` holds one row and uses
slices. ``RaggedCache`` holds rows of different lengths. A cache for trees of a known size can be ``trimmed``: between
steps, its sliding-window layers drop the positions that no later query sees.

A commit in numbers: 10 committed positions and a pending tree of 4 nodes occupy positions 0 to 13. If nodes 0, 1 and 3
are accepted, ``commit_path`` copies positions 10, 11, 13 to 10, 11, 12 and the length becomes 13. Position 13 still
holds a rejected node, is never read, and is overwritten by the next pass.

Shape legend: B rows, R rows or 1, H key/value heads, C capacity, T new tokens, P pending and new nodes of a tree,
E head width, L layers.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.token_tree import TokenTree, TreeShape

LayerSizes = tuple[int, int, int, int]
"""Heads and width of a layer's keys, heads and width of its values."""
Place = tuple[int, int, int, int]
"""Stack of a layer's keys and index in it, then stack of its values and index in it."""


@dataclass(frozen=True, kw_only=True)
class Trim:
    """The sliding-window layers of a cache, which hold only the latest positions."""

    layers: tuple[bool, ...]
    """True for each layer that is trimmed."""
    window: int
    """Positions that their queries see. Chunks start within this distance."""
    room: int
    """Most pending positions."""
    held: int
    """Positions that these layers hold. A larger number means fewer drops, each of which copies one window."""
    capacity: int
    """Positions of the whole context."""


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
        layers = tuple(size > 0 for size in windows)
        return replace(self, trim=Trim(layers=layers, window=window, room=room, held=held, capacity=capacity))

    @cached_property
    def places(self) -> tuple[Place | None, ...]:
        return self._layout[0]

    @cached_property
    def _layout(self) -> tuple[tuple[Place | None, ...], tuple[tuple[int, int, int, bool], ...]]:
        """Return the places, and each stack's number of layers, heads, width and True if it is trimmed.

        Layers of equal size share two stacks, one of keys and one of values.
        """
        stacks: dict[tuple[LayerSizes, bool, int], int] = {}
        counts: list[int] = []
        layer_places: list[Place | None] = []
        for layer, sizes in enumerate(self.by_layer or ((self.heads, self.head_dim) * 2,) * self.layers):
            trimmed = self.trim is not None and self.trim.layers[layer]
            if sizes is None:
                layer_places.append(None)
                continue
            at = []
            for side in (0, 1):
                stack = stacks.setdefault((sizes, trimmed, side), len(stacks))
                counts += [0] * (stack == len(counts))
                at += [stack, counts[stack]]
                counts[stack] += 1
            layer_places.append((at[0], at[1], at[2], at[3]))
        widths = [(sizes[2 * side], sizes[2 * side + 1], trimmed) for sizes, trimmed, side in stacks]
        return tuple(layer_places), tuple((n, *width) for n, width in zip(counts, widths, strict=True))

    def zeros(self, rows: int, capacity: int) -> tuple[Tensor, ...]:
        """Return empty stacks [L, B, H, C, E]: one of keys and one of values if all layers are equal."""
        return tuple(
            torch.zeros(
                (layers, rows, heads, self.trim.held if trimmed and self.trim else capacity, width),
                dtype=self.dtype,
                device=self.device,
            )
            for layers, heads, width, trimmed in self._layout[1]
        )

    def of(self, layers: Sequence[int], dtype: torch.dtype) -> "CacheShape":
        """Return the shape of a model made of these layers."""
        by_layer = None if self.by_layer is None else tuple(self.by_layer[n] for n in layers)
        return replace(self, layers=len(layers), dtype=dtype, by_layer=by_layer)


def layer_views(stacks: tuple[Tensor, ...], places: tuple[Place | None, ...]) -> list[tuple[Tensor, ...]]:
    """Return keys and values [B, H, C, E] of every layer; () for a layer without any."""
    parts = [stack.unbind(0) for stack in stacks]
    return [() if at is None else (parts[at[0]][at[1]], parts[at[2]][at[3]]) for at in places]


class _Stacks:
    """The memory of a cache: stacks of equal layers."""

    stacks: tuple[Tensor, ...]
    """[L, B, H, C, E] each."""
    places: tuple[Place | None, ...]
    trim: Trim | None = None

    def _over_memory(self, stacks: tuple[Tensor, ...], places: tuple[Place | None, ...]) -> None:
        self.stacks, self.places = stacks, places
        self._layers = layer_views(stacks, places)

    @property
    def keys(self) -> Tensor:
        """The keys [L, B, H, C, E] of all layers, if layers are equal."""
        return self.stacks[0]

    @property
    def capacity(self) -> int:
        """Positions that fit in a row."""
        return self.stacks[0].shape[3] if self.trim is None else self.trim.capacity

    def _trimmed_stacks(self) -> list[bool]:
        """Return True for each stack of trimmed layers."""
        stack_trimmed = [False] * len(self.stacks)
        if self.trim is not None:
            for layer_place, trimmed in zip(self.places, self.trim.layers, strict=False):
                if layer_place is not None:
                    stack_trimmed[layer_place[0]] = stack_trimmed[layer_place[2]] = trimmed
        return stack_trimmed

    def resize(self, capacity: int) -> Self:
        """Return a copy with a larger ``capacity``."""
        assert self.trim is None, "only caches of drafters grow, and they are not trimmed"
        larger = copy(self)
        more = (0, 0, 0, capacity - self.capacity)
        larger._over_memory(tuple(torch.nn.functional.pad(stack, more) for stack in self.stacks), self.places)
        return larger

    def _first_layers(self, count: int) -> tuple[tuple[Tensor, ...], tuple[Place | None, ...]]:
        """Return views of the stacks for the first ``count`` layers, and the entries of ``places`` for these layers."""
        layer_places = self.places[:count]
        used = [0] * len(self.stacks)
        for layer_place in layer_places:
            if layer_place is not None:
                used[layer_place[0]], used[layer_place[2]] = layer_place[1] + 1, layer_place[3] + 1
        return tuple(stack[:n] for stack, n in zip(self.stacks, used, strict=True)), layer_places


class KVCache(_Stacks):
    """The keys and values of one row.

    The last ``pending`` positions are a tree that was read but not committed. ``commit_path`` commits one path of it
    and moves only the accepted entries. ``crop`` drops the tree.
    """

    dropped: int
    """Leading positions that trimmed layers no longer hold."""

    def __init__(
        self,
        stacks: tuple[Tensor, ...],
        places: tuple[Place | None, ...],
        *,
        length: int = 0,
        trim: Trim | None = None,
        dropped: int = 0,
    ) -> None:
        """Use existing memory, whose first ``length`` positions are committed."""
        self._over_memory(stacks, places)
        self.length, self.trim, self.dropped = length, trim, dropped
        self.pending = self._start = self._end = 0

    @classmethod
    def empty(cls, shape: CacheShape, capacity: int) -> "KVCache":
        """Return an empty cache for ``capacity`` positions, in new memory."""
        return KVCache(shape.zeros(1, capacity), shape.places, trim=shape.trim)

    def reserve(self, new: int, committed: bool = False) -> None:
        """Start a pass over ``new`` tokens after the pending ones; ``committed``: all of them will be committed."""
        self._start = self.length + self.pending
        self._end = self._start + new
        check_capacity(self._end, self.capacity)
        if self.trim is not None and not committed:
            check_room(self._end - self.dropped, self.trim)
        self.pending += new

    def update(self, key_BHTE: Tensor, value_BHTE: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write the states of one layer and return all its states up to the new ones, as views."""
        keys, values = self._layers[layer_idx]
        start, end = self._start, self._end
        if self.trim is not None and self.trim.layers[layer_idx]:
            start, end = start - self.dropped, end - self.dropped
            if end > self.trim.held:
                return _read_through(keys, key_BHTE, start), _read_through(values, value_BHTE, start)
        keys[:, :, start:end] = key_BHTE
        values[:, :, start:end] = value_BHTE
        return keys[:, :, :end], values[:, :, :end]

    def positions(self, depths: Tensor) -> Tensor:
        """Return the absolute positions [R, T] of ``depths`` [R, T] in a tree or chain."""
        return depths + self.length

    def key_positions(self, depths: Tensor) -> Tensor:
        """Return the positions [R, length + P] of all states, with ``depths`` [R, P] of the pending nodes."""
        prefix = torch.arange(self.length, device=depths.device).expand(len(depths), -1)
        return torch.cat([prefix, self.positions(depths)], 1)

    def mask(self, ancestors_RTP: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [R, 1, T, length + P]: a node sees the committed prefix and its ancestors.

        For 2 committed positions and a root with two children, with 0 for seen and x for -inf::

            root     0 0 | 0 x x
            child 1  0 0 | 0 0 x
            child 2  0 0 | 0 x 0
        """
        rows, new, nodes = ancestors_RTP.shape
        mask = torch.zeros(rows, 1, new, self.length + nodes, dtype=dtype, device=ancestors_RTP.device)
        mask[:, 0, :, self.length :].masked_fill_(~ancestors_RTP, -torch.inf)
        return mask

    def held(self, mask: Tensor | None, keys: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the columns of a mask [R, 1, T, length + P] and of key positions that trimmed layers hold."""
        return None if mask is None else mask[..., self.dropped :], keys[:, self.dropped :]

    def commit(self, counts: Tensor | None = None) -> None:
        """Commit the pending chain, or its first ``counts`` ([1]) positions."""
        self.length += self.pending if counts is None else int(counts)
        self.pending = 0
        if self.trim is not None:
            self.dropped = max(self.dropped, self._end - self.trim.held)  # a pass longer than `held` kept only its end
            self._check_behind(self.length)
            self._drop(self.trim)

    def _drop(self, trim: Trim) -> None:
        """Drop the positions that no later query sees from trimmed layers, if a tree no longer fits."""
        first = max(self.dropped, self.length - trim.window + 1)
        if self.length - self.dropped + trim.room <= trim.held or first == self.dropped:
            return
        still_seen = slice(first - self.dropped, self.length - self.dropped)
        for stack, trimmed in zip(self.stacks, self._trimmed_stacks(), strict=True):
            if trimmed:
                stack[:, :, :, : self.length - first] = stack[:, :, :, still_seen].clone()
        self.dropped = first

    def _check_behind(self, length: int) -> None:
        """Reject a length whose next query would see dropped positions."""
        if self.trim is not None and self.dropped > max(0, length - self.trim.window + 1):
            raise UserError(
                f"the cache cannot go back to {length} positions: layers with a window of {self.trim.window} have "
                f"dropped the first {self.dropped}; start again at 0, or create the cache without `nodes`"
            )

    def commit_path(self, nodes: Tensor, counts: Tensor) -> None:
        """Commit the path ``nodes[0, :counts[0]]`` ([1, P] int64, ascending) of the pending nodes; drop the others."""
        path_length = int(counts)
        for stack, trimmed in zip(self.stacks, self._trimmed_stacks(), strict=True):
            start = self.length - self.dropped if trimmed else self.length
            # index_select copies before the write, so overlapping source and destination are safe.
            stack[:, :, :, start : start + path_length] = stack.index_select(3, nodes[0, :path_length] + start)
        self.length += path_length
        self.pending = 0
        if self.trim is not None:
            self._drop(self.trim)

    def crop(self, length: int | Tensor | None = None) -> None:
        """Drop the pending nodes and all positions from ``length`` on."""
        if length is not None:
            self.dropped = self.dropped if int(length) else 0
            self._check_behind(int(length))
            self.length = int(length)
        self.pending = 0

    def begin_with(self, other: "KVCache") -> None:
        """Copy the committed positions of ``other``, an untrimmed cache of the same model, and drop everything else."""
        first = 0 if self.trim is None else max(0, other.length - self.trim.window + 1)
        for layer, (layer_states, source_states) in enumerate(zip(self._layers, other._layers, strict=True)):
            start = first if self.trim is not None and self.trim.layers[layer] else 0
            for states, source in zip(layer_states, source_states, strict=True):
                states[:, :, : other.length - start] = source[:, :, start : other.length]
        self.length, self.pending, self.dropped = other.length, 0, first

    def select(self, rows: list[int]) -> "KVCache":
        """Return self, which has one row."""
        return self

    def first_layers(self, count: int) -> "KVCache":
        """Return a cache of the first ``count`` layers that shares this memory and its committed positions."""
        # Only this cache drops positions, because it also holds the other layers.
        trim = None if self.trim is None else replace(self.trim, room=0)
        return KVCache(*self._first_layers(count), length=self.length, trim=trim, dropped=self.dropped)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the committed positions (transformers' name)."""
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the next query (transformers' name)."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys that new queries see, and their offset (transformers' name)."""
        return self.length + query_length, 0


class TreeMasks:
    """``KVCache.mask`` for whole static trees, without writing a mask in every step."""

    def __init__(self) -> None:
        self._wide: dict[TokenTree, Tensor] = {}

    def mask(self, tree: TokenTree, shape: TreeShape, cache: KVCache) -> Tensor:
        """Return the mask of ``tree``, with this ``shape``, after the committed positions of ``cache``."""
        nodes = len(shape)
        wide = self._wide.get(tree)
        if wide is None or wide.shape[1] < cache.capacity + nodes:
            # One buffer for every prefix length: zeros, then the tree's block. The view that starts `length` columns
            # before the block has a committed prefix of exactly that length.
            keys = cache.stacks[0]
            wide = torch.zeros(nodes, cache.capacity + nodes, dtype=keys.dtype, device=keys.device)
            wide[:, -nodes:].masked_fill_(~shape.ancestors[0], -torch.inf)
            self._wide[tree] = wide
        return wide[None, None, :, wide.shape[1] - nodes - cache.length :]


class RaggedCache(_Stacks):
    """The keys and values of several rows with different lengths.

    The new positions of each row follow its length. With lengths 3 and 5, a pass over 2 tokens writes positions 3, 4 of
    the first row and 5, 6 of the second. It attends over 7 positions of both, masked by row. Positions past a row's
    length are never read, so a pass may write padding there. ``slot`` gives one row as a ``KVCache``.
    """

    def __init__(self, shape: CacheShape, rows: int, capacity: int) -> None:
        self._over_memory(shape.zeros(rows, capacity), shape.places)
        self.trim = shape.trim
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=shape.device)
        self.dropped = torch.zeros_like(self.lengths)  # per row; see ``KVCache.dropped``
        self.pending = 0
        self._reach = self._held = 0
        self._written = torch.empty(0)

    @property
    def rows(self) -> int:
        return self.stacks[0].shape[1]

    def slot(self, row: int, length: int = 0) -> KVCache:
        """Return row ``row`` as a ``KVCache`` in shared memory, with ``length`` committed positions."""
        stacks = tuple(stack[:, row : row + 1] for stack in self.stacks)
        dropped = int(self.dropped[row]) if length else 0
        return KVCache(stacks, self.places, length=length, trim=self.trim, dropped=dropped)

    def put_back(self, row: int, slot: KVCache) -> None:
        """Take over the length of a ``slot`` after a pass."""
        self.lengths[row], self.dropped[row] = slot.length, slot.dropped

    def clear(self, rows: list[int]) -> None:
        self.lengths[rows] = self.dropped[rows] = 0

    def select(self, rows: list[int]) -> "RaggedCache":
        """Return a copy of these rows, without pending nodes."""
        chosen = self._over(tuple(stack[:, rows] for stack in self.stacks), self.places)
        chosen.lengths, chosen.dropped = self.lengths[rows], self.dropped[rows]
        return chosen

    def first_layers(self, count: int) -> "RaggedCache":
        """Return ``KVCache.first_layers`` for all rows."""
        view = self._over(*self._first_layers(count))
        view.trim = None if self.trim is None else replace(self.trim, room=0)
        return view

    def _over(self, stacks: tuple[Tensor, ...], places: tuple[Place | None, ...]) -> "RaggedCache":
        other = copy(self)
        other._over_memory(stacks, places)
        other.crop()
        return other

    def reserve(self, new: int, committed: bool = False) -> None:
        """Start a pass over ``new`` tokens per row after the pending ones."""
        self._reach = int(self.lengths.max()) + self.pending + new
        check_capacity(self._reach, self.capacity)
        self._written = self.lengths[:, None] + torch.arange(
            self.pending, self.pending + new, device=self.lengths.device
        )
        self.pending += new
        if self.trim is not None:
            self._held = int((self.lengths - self.dropped).max()) + self.pending
            check_room(self._held, self.trim)

    def update(self, key_BHTE: Tensor, value_BHTE: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write the new states of every row and return the states up to the longest row."""
        rows = torch.arange(self.rows, device=self._written.device)[:, None]
        keys, values = self._layers[layer_idx]
        written, reach = self._written, self._reach
        if self.trim is not None and self.trim.layers[layer_idx]:
            written, reach = written - self.dropped[:, None], self._held
        keys[rows, :, written] = key_BHTE.transpose(1, 2)
        values[rows, :, written] = value_BHTE.transpose(1, 2)
        return keys[:, :, :reach], values[:, :, :reach]

    def positions(self, depths: Tensor) -> Tensor:
        """Return the absolute positions [B, T] of ``depths`` [R, T] in a tree or chain."""
        return depths + self.lengths[:, None]

    def key_positions(self, depths: Tensor) -> Tensor:
        """Return ``KVCache.key_positions`` for all rows, [B, reach]."""
        slots = torch.arange(self._reach, device=self.lengths.device).expand(self.rows, -1)
        node = slots - self.lengths[:, None]
        nodes = self.positions(depths).gather(1, node.clamp(0, depths.shape[1] - 1))
        return torch.where(node < 0, slots, nodes)

    def mask(self, ancestors_RTP: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [B, 1, T, reach]: a node sees its row's committed prefix and its ancestors."""
        new, nodes = ancestors_RTP.shape[1:]
        offset = torch.arange(self._reach, device=self.lengths.device) - self.lengths[:, None]  # [B, reach]
        inside = (offset >= 0) & (offset < nodes)
        node = offset.clamp(0, nodes - 1)[:, None].expand(-1, new, -1)
        seen = ancestors_RTP.expand(self.rows, -1, -1).gather(2, node) & inside[:, None]
        seen |= (offset < 0)[:, None]
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return mask.masked_fill_(~seen, -torch.inf)[:, None]

    def held(self, mask: Tensor | None, keys: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return ``KVCache.held`` for all rows."""
        if self.trim is None:
            return mask, keys
        assert mask is not None
        positions = self.dropped[:, None] + torch.arange(self._held, device=keys.device)  # of a row in the whole text
        inside = positions.clamp(max=self._reach - 1)
        columns = mask.gather(3, inside[:, None, None].expand(-1, -1, mask.shape[2], -1))
        return columns.masked_fill_((positions >= self._reach)[:, None, None], -torch.inf), keys.gather(1, inside)

    def commit(self, counts: Tensor | None = None) -> None:
        """Commit the pending chain of every row, or its first ``counts`` ([B]) positions."""
        self.lengths = self.lengths + (self.pending if counts is None else counts)
        self.pending = 0
        if self.trim is not None and int((self.lengths - self.dropped).max()) + self.trim.room > self.trim.held:
            self._drop(self.trim)

    def _drop(self, trim: Trim) -> None:
        """Run ``KVCache._drop`` for every row."""
        first = torch.maximum(self.dropped, self.lengths - trim.window + 1)
        rows = torch.arange(self.rows, device=first.device)[:, None]
        target = torch.arange(trim.window - 1, device=first.device)
        source = target + (first - self.dropped)[:, None]
        for stack, trimmed in zip(self.stacks, self._trimmed_stacks(), strict=True):
            if trimmed:
                # Indexing copies the right side first. Copies past a row's length are never read.
                stack[:, rows, :, target.expand_as(source)] = stack[:, rows, :, source]
        self.dropped = first

    def commit_path(self, nodes: Tensor, counts: Tensor) -> None:
        """Commit the path ``nodes[b, :counts[b]]`` ([B, P] int64, ascending) of each row's pending nodes."""
        if self.pending == 1:  # a root alone is in place already
            return self.commit(counts)
        rows = torch.arange(self.rows, device=nodes.device)[:, None]
        target = torch.arange(nodes.shape[1], device=nodes.device)
        for stack, trimmed in zip(self.stacks, self._trimmed_stacks(), strict=True):
            start = (self.lengths - self.dropped if trimmed else self.lengths)[:, None]
            stack[:, rows, :, start + target] = stack[:, rows, :, start + nodes]  # the right side is a copy
        return self.commit(counts)

    def crop(self, lengths: Tensor | None = None) -> None:
        """Drop the pending nodes, and all but the first ``lengths`` ([B] int64) positions of each row."""
        assert lengths is None or self.trim is None, "rows of a trimmed cache cannot go back"
        self.lengths = self.lengths if lengths is None else lengths
        self.pending = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the committed positions of the longest row (transformers' name)."""
        return int(self.lengths.max())


def check_capacity(needed: int, capacity: int) -> None:
    """Reject a pass past the end of the memory."""
    if needed > capacity:
        raise UserError(
            f"the cache holds {capacity} positions but {needed} are needed; shorten the prompt or the answer"
        )


def check_room(needed: int, trim: Trim) -> None:
    """Reject more pending nodes than a cache with trimmed layers was made for."""
    if needed > trim.held:
        raise UserError(
            f"layers with a window hold {trim.held} positions but {needed} are needed: the cache was made for trees of "
            f"{trim.room} nodes; make it for larger ones"
        )


def _read_through(states: Tensor, new: Tensor, start: int) -> Tensor:
    """Return old and new states, which exceed the memory; ``states`` keeps the latest ones."""
    whole = torch.cat([states[:, :, :start], new], 2)
    states.copy_(whole[:, :, -states.shape[2] :])
    return whole
