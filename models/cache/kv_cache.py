"""Preallocated key/value caches under stock transformers modules: no reallocation per token.

transformers' attention modules call ``update(key, value, layer_idx)`` and nothing else of a cache, so these
classes offer that and what tree verification needs besides: several passes over one growing tree, keeping an accepted
path, rolling back. ``KVCache`` is one row, written and read as slices; ``RaggedCache`` is rows of lengths of their own.
A cache made for trees of a known size can be ``trimmed``: layers with a window then drop, between steps, what no later
query sees.

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
"""Stack and place in it of a layer's keys, stack and place in it of its values."""


@dataclass(frozen=True, kw_only=True)
class Trim:
    """Layers that hold the latest positions only."""

    layers: tuple[bool, ...]
    """Which these are."""
    window: int
    """Positions that they see; chunks begin within as many."""
    room: int
    """Positions that may be pending at once."""
    held: int
    """Positions that they hold. Dropping copies those of the window: the more fit besides, the rarer."""
    capacity: int
    """Positions of a whole text."""


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """What a cache of one base must hold."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    by_layer: tuple[LayerSizes | None, ...] | None = None
    """Where layers differ, or keys from values: the sizes of each. None for a layer that keeps nothing of its own."""
    trim: Trim | None = None
    """None: all layers hold the whole text."""

    def trimmed(self, windows: Sequence[int], capacity: int, room: int, surplus: int | None = None) -> "CacheShape":
        """The same where layers with a window drop what it has passed; itself where that would save nothing.

        ``windows``: positions that every layer sees, 0: all; ``surplus``: those that gather before they are dropped.
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
        """Places, and of every stack its number of layers, heads, width and whether it is trimmed.

        Layers of one size share two stacks.
        """
        stacks: dict[tuple[LayerSizes, bool, int], int] = {}
        counts: list[int] = []
        places: list[Place | None] = []
        for layer, sizes in enumerate(self.by_layer or ((self.heads, self.head_dim) * 2,) * self.layers):
            trimmed = self.trim is not None and self.trim.layers[layer]
            if sizes is None:
                places.append(None)
                continue
            at = []
            for part in (0, 1):
                stack = stacks.setdefault((sizes, trimmed, part), len(stacks))
                counts += [0] * (stack == len(counts))
                at += [stack, counts[stack]]
                counts[stack] += 1
            places.append((at[0], at[1], at[2], at[3]))
        widths = [(sizes[2 * part], sizes[2 * part + 1], trimmed) for sizes, trimmed, part in stacks]
        return tuple(places), tuple((n, *width) for n, width in zip(counts, widths, strict=True))

    def zeros(self, rows: int, capacity: int) -> tuple[Tensor, ...]:
        """Empty stacks [L, B, H, C, E]: keys and values, where all layers are alike."""
        return tuple(
            torch.zeros(
                (layers, rows, heads, self.trim.held if trimmed and self.trim else capacity, width),
                dtype=self.dtype,
                device=self.device,
            )
            for layers, heads, width, trimmed in self._layout[1]
        )

    def of(self, layers: Sequence[int], dtype: torch.dtype) -> "CacheShape":
        """The shape of a model made of these layers."""
        by_layer = None if self.by_layer is None else tuple(self.by_layer[n] for n in layers)
        return replace(self, layers=len(layers), dtype=dtype, by_layer=by_layer)


def layer_views(stacks: tuple[Tensor, ...], places: tuple[Place | None, ...]) -> list[tuple[Tensor, ...]]:
    """Keys and values [B, H, C, E] of every layer; nothing for a layer that keeps none."""
    parts = [stack.unbind(0) for stack in stacks]
    return [() if at is None else (parts[at[0]][at[1]], parts[at[2]][at[3]]) for at in places]


class _Stacks:
    """Memory of a cache, by stacks of layers of one size."""

    stacks: tuple[Tensor, ...]
    """[L, B, H, C, E] each."""
    places: tuple[Place | None, ...]
    trim: Trim | None = None

    def _over_memory(self, stacks: tuple[Tensor, ...], places: tuple[Place | None, ...]) -> None:
        self.stacks, self.places = stacks, places
        self._layers = layer_views(stacks, places)

    @property
    def keys(self) -> Tensor:
        """[L, B, H, C, E] of all layers, where they are alike; the other stack is then the values."""
        return self.stacks[0]

    @property
    def capacity(self) -> int:
        """Positions that fit in a row."""
        return self.stacks[0].shape[3] if self.trim is None else self.trim.capacity

    def _trimmed_stacks(self) -> list[bool]:
        """Whether the layers of a stack hold the latest positions only."""
        found = [False] * len(self.stacks)
        if self.trim is not None:
            for place, trimmed in zip(self.places, self.trim.layers, strict=False):
                if place is not None:
                    found[place[0]] = found[place[2]] = trimmed
        return found

    def resize(self, capacity: int) -> Self:
        """A copy of another, larger capacity."""
        assert self.trim is None, "only caches of drafters grow, and those are whole"
        larger = copy(self)
        more = (0, 0, 0, capacity - self.capacity)
        larger._over_memory(tuple(torch.nn.functional.pad(stack, more) for stack in self.stacks), self.places)
        return larger

    def _first_layers(self, count: int) -> tuple[tuple[Tensor, ...], tuple[Place | None, ...]]:
        """Views of the stacks as far as these layers use them, and the layers' places."""
        places = self.places[:count]
        used = [0] * len(self.stacks)
        for place in places:
            if place is not None:
                used[place[0]], used[place[2]] = place[1] + 1, place[3] + 1
        return tuple(stack[:n] for stack, n in zip(self.stacks, used, strict=True)), places


class KVCache(_Stacks):
    """One row.

    The last ``pending`` positions are a tree that is read but not committed: ``commit_path`` commits a path of it,
    ``crop`` drops all of it, and both only move the accepted entries.
    """

    dropped = 0
    """Positions that trimmed layers hold no more."""

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self._over_memory(shape.zeros(1, capacity), shape.places)
        self.trim = shape.trim
        self.length = 0
        self.pending = 0
        self._start = self._end = 0

    @classmethod
    def view(
        cls,
        stacks: tuple[Tensor, ...],
        places: tuple[Place | None, ...],
        length: int,
        trim: Trim | None = None,
        dropped: int = 0,
    ) -> "KVCache":
        """A cache over existing memory with ``length`` committed positions."""
        cache = KVCache.__new__(KVCache)
        cache._over_memory(stacks, places)
        cache.length, cache.trim, cache.dropped = length, trim, dropped
        cache.pending = cache._start = cache._end = 0
        return cache

    def reserve(self, new: int, committed: bool = False) -> None:
        """Begin a pass over ``new`` tokens, which follow those pending; ``committed``: all of them will be kept."""
        self._start = self.length + self.pending
        self._end = self._start + new
        check_capacity(self._end, self.capacity)
        if self.trim is not None and not committed:
            check_room(self._end - self.dropped, self.trim)
        self.pending += new

    def update(self, key_BHTE: Tensor, value_BHTE: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write the states of one layer; returns all states of the layer up to and with them (views)."""
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
        """[R, T] depths in a tree or chain -> absolute positions [R, T]."""
        return depths + self.length

    def key_positions(self, depths: Tensor) -> Tensor:
        """Positions [R, length + P] of all states up to the pending nodes, which have these depths ([R, P])."""
        prefix = torch.arange(self.length, device=depths.device).expand(len(depths), -1)
        return torch.cat([prefix, self.positions(depths)], 1)

    def mask(self, ancestors_RTP: Tensor, dtype: torch.dtype) -> Tensor:
        """Additive mask [R, 1, T, length + P]: the committed prefix, and of the pending and new nodes the ancestors."""
        rows, new, nodes = ancestors_RTP.shape
        mask = torch.zeros(rows, 1, new, self.length + nodes, dtype=dtype, device=ancestors_RTP.device)
        mask[:, 0, :, self.length :].masked_fill_(~ancestors_RTP, -torch.inf)
        return mask

    def held(self, mask: Tensor | None, keys: Tensor) -> tuple[Tensor | None, Tensor]:
        """Of a mask [R, 1, T, length + P] and of key positions [R, length + P] those that trimmed layers hold."""
        return None if mask is None else mask[..., self.dropped :], keys[:, self.dropped :]

    def commit(self, counts: Tensor | None = None) -> None:
        """Keep the pending chain, or its first ``counts`` ([1]) positions."""
        self.length += self.pending if counts is None else int(counts)
        self.pending = 0
        if self.trim is not None:
            self.dropped = max(self.dropped, self._end - self.trim.held)  # what a longer pass has left out
            self._check_behind(self.length)
            self._drop(self.trim)

    def _drop(self, trim: Trim) -> None:
        """Let trimmed layers drop what no later query sees, if there is no room for a tree any more."""
        first = max(self.dropped, self.length - trim.window + 1)
        if self.length - self.dropped + trim.room <= trim.held or first == self.dropped:
            return
        kept = slice(first - self.dropped, self.length - self.dropped)
        for stack, trimmed in zip(self.stacks, self._trimmed_stacks(), strict=True):
            if trimmed:
                stack[:, :, :, : self.length - first] = stack[:, :, :, kept].clone()
        self.dropped = first

    def _check_behind(self, length: int) -> None:
        """Refuse to go back behind what a window of the next position needs."""
        if self.trim is not None and self.dropped > max(0, length - self.trim.window + 1):
            raise UserError(
                f"the cache cannot go back to {length} positions: layers with a window of {self.trim.window} have "
                f"dropped the first {self.dropped}; start again at 0, or make the cache without `nodes` to keep all"
            )

    def commit_path(self, nodes: Tensor, counts: Tensor) -> None:
        """Commit of the pending nodes the path ``nodes[0, :counts[0]]`` ([1, P] int64, ascending); drop the others."""
        kept = int(counts)
        for stack, trimmed in zip(self.stacks, self._trimmed_stacks(), strict=True):
            start = self.length - self.dropped if trimmed else self.length
            # index_select copies before the write, so overlapping source and destination are safe.
            stack[:, :, :, start : start + kept] = stack.index_select(3, nodes[0, :kept] + start)
        self.length += kept
        self.pending = 0
        if self.trim is not None:
            self._drop(self.trim)

    def crop(self, length: int | Tensor | None = None) -> None:
        """Forget what is pending, and everything from position ``length`` on."""
        if length is not None:
            self.dropped = self.dropped if int(length) else 0
            self._check_behind(int(length))
            self.length = int(length)
        self.pending = 0

    def begin_with(self, other: "KVCache") -> None:
        """Hold what ``other``, a whole cache of the same model, has committed, and nothing else."""
        first = 0 if self.trim is None else max(0, other.length - self.trim.window + 1)
        for layer, (own, others) in enumerate(zip(self._layers, other._layers, strict=True)):
            start = first if self.trim is not None and self.trim.layers[layer] else 0
            for states, source in zip(own, others, strict=True):
                states[:, :, : other.length - start] = source[:, :, start : other.length]
        self.length, self.pending, self.dropped = other.length, 0, first

    def select(self, rows: list[int]) -> "KVCache":
        """Itself: there is one row."""
        return self

    def first_layers(self, count: int) -> "KVCache":
        """The first ``count`` layers as a cache of its own after the same committed positions; shares memory."""
        # Dropping is up to this cache, which holds the other layers too.
        trim = None if self.trim is None else replace(self.trim, room=0)
        return KVCache.view(*self._first_layers(count), self.length, trim, self.dropped)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed positions (transformers' name)."""
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next query (transformers' name)."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that ``query_length`` new queries see, and their offset (transformers' name)."""
        return self.length + query_length, 0


class TreeMasks:
    """``KVCache.mask`` of whole static trees, without writing a mask in every step."""

    def __init__(self) -> None:
        self._wide: dict[TokenTree, Tensor] = {}

    def mask(self, tree: TokenTree, shape: TreeShape, cache: KVCache) -> Tensor:
        """The mask of ``tree``, whose shape is ``shape``, after what is committed in ``cache``."""
        nodes = len(shape)
        wide = self._wide.get(tree)
        if wide is None or wide.shape[1] < cache.capacity + nodes:
            # One buffer for every prefix length: the tree's block stands at the right end of a row of zeros, and a
            # view from the right place has exactly `length` zeros before it.
            keys = cache.stacks[0]
            wide = torch.zeros(nodes, cache.capacity + nodes, dtype=keys.dtype, device=keys.device)
            wide[:, -nodes:].masked_fill_(~shape.ancestors[0], -torch.inf)
            self._wide[tree] = wide
        return wide[None, None, :, wide.shape[1] - nodes - cache.length :]


class RaggedCache(_Stacks):
    """Rows of lengths of their own: batched generation and batched speculative decoding.

    Every row's new positions follow that row's own; ``slot`` lends one row as a ``KVCache`` to read a prompt into.
    What a row holds past its length is never read, so a pass may write padding there.
    """

    def __init__(self, shape: CacheShape, rows: int, capacity: int) -> None:
        self._over_memory(shape.zeros(rows, capacity), shape.places)
        self.trim = shape.trim
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=shape.device)
        self.dropped = torch.zeros_like(self.lengths)  # as of a KVCache, for every row
        self.pending = 0
        self._reach = self._held = 0
        self._written = torch.empty(0)

    @property
    def rows(self) -> int:
        return self.stacks[0].shape[1]

    def slot(self, row: int, length: int = 0) -> KVCache:
        """Row ``row`` as a cache of its own with ``length`` positions already read; shares memory with this one."""
        stacks = tuple(stack[:, row : row + 1] for stack in self.stacks)
        return KVCache.view(stacks, self.places, length, self.trim, int(self.dropped[row]) if length else 0)

    def put_back(self, row: int, slot: KVCache) -> None:
        """Count what was read into a row that was lent."""
        self.lengths[row], self.dropped[row] = slot.length, slot.dropped

    def clear(self, rows: list[int]) -> None:
        self.lengths[rows] = self.dropped[rows] = 0

    def select(self, rows: list[int]) -> "RaggedCache":
        """A copy with these rows only, nothing pending."""
        chosen = self._over(tuple(stack[:, rows] for stack in self.stacks), self.places)
        chosen.lengths, chosen.dropped = self.lengths[rows], self.dropped[rows]
        return chosen

    def first_layers(self, count: int) -> "RaggedCache":
        """As ``KVCache.first_layers``."""
        view = self._over(*self._first_layers(count))
        view.trim = None if self.trim is None else replace(self.trim, room=0)
        return view

    def _over(self, stacks: tuple[Tensor, ...], places: tuple[Place | None, ...]) -> "RaggedCache":
        other = copy(self)
        other._over_memory(stacks, places)
        other.crop()
        return other

    def reserve(self, new: int, committed: bool = False) -> None:
        """Begin a pass over ``new`` tokens a row, which follow those pending."""
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
        """Write every row's new states; returns the states up to the longest row."""
        rows = torch.arange(self.rows, device=self._written.device)[:, None]
        keys, values = self._layers[layer_idx]
        written, reach = self._written, self._reach
        if self.trim is not None and self.trim.layers[layer_idx]:
            written, reach = written - self.dropped[:, None], self._held
        keys[rows, :, written] = key_BHTE.transpose(1, 2)
        values[rows, :, written] = value_BHTE.transpose(1, 2)
        return keys[:, :, :reach], values[:, :, :reach]

    def positions(self, depths: Tensor) -> Tensor:
        """[R, T] depths in a tree or chain -> absolute positions [B, T]."""
        return depths + self.lengths[:, None]

    def key_positions(self, depths: Tensor) -> Tensor:
        """As ``KVCache.key_positions``: [B, reach]."""
        slots = torch.arange(self._reach, device=self.lengths.device).expand(self.rows, -1)
        node = slots - self.lengths[:, None]
        nodes = self.positions(depths).gather(1, node.clamp(0, depths.shape[1] - 1))
        return torch.where(node < 0, slots, nodes)

    def mask(self, ancestors_RTP: Tensor, dtype: torch.dtype) -> Tensor:
        """Additive mask [B, 1, T, reach]: each row's prefix, and of its pending and new nodes the ancestors."""
        new, nodes = ancestors_RTP.shape[1:]
        offset = torch.arange(self._reach, device=self.lengths.device) - self.lengths[:, None]  # [B, reach]
        inside = (offset >= 0) & (offset < nodes)
        node = offset.clamp(0, nodes - 1)[:, None].expand(-1, new, -1)
        seen = ancestors_RTP.expand(self.rows, -1, -1).gather(2, node) & inside[:, None]
        seen |= (offset < 0)[:, None]
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return mask.masked_fill_(~seen, -torch.inf)[:, None]

    def held(self, mask: Tensor | None, keys: Tensor) -> tuple[Tensor | None, Tensor]:
        """As ``KVCache.held``."""
        if self.trim is None:
            return mask, keys
        assert mask is not None
        places = self.dropped[:, None] + torch.arange(self._held, device=keys.device)  # of a row in the whole text
        inside = places.clamp(max=self._reach - 1)
        found = mask.gather(3, inside[:, None, None].expand(-1, -1, mask.shape[2], -1))
        return found.masked_fill_((places >= self._reach)[:, None, None], -torch.inf), keys.gather(1, inside)

    def commit(self, counts: Tensor | None = None) -> None:
        """Keep every row's pending chain, or its first ``counts`` ([B]) positions."""
        self.lengths = self.lengths + (self.pending if counts is None else counts)
        self.pending = 0
        if self.trim is not None and int((self.lengths - self.dropped).max()) + self.trim.room > self.trim.held:
            self._drop(self.trim)

    def _drop(self, trim: Trim) -> None:
        """As ``KVCache._drop``, for every row."""
        first = torch.maximum(self.dropped, self.lengths - trim.window + 1)
        rows = torch.arange(self.rows, device=first.device)[:, None]
        target = torch.arange(trim.window - 1, device=first.device)
        source = target + (first - self.dropped)[:, None]
        for stack, trimmed in zip(self.stacks, self._trimmed_stacks(), strict=True):
            if trimmed:
                # What a row has less than a window needs is not read; the right side is a copy.
                stack[:, rows, :, target.expand_as(source)] = stack[:, rows, :, source]
        self.dropped = first

    def commit_path(self, nodes: Tensor, counts: Tensor) -> None:
        """Commit of each row's pending nodes the path ``nodes[b, :counts[b]]`` ([B, P] int64, ascending)."""
        if self.pending == 1:  # a root alone is where it belongs
            return self.commit(counts)
        rows = torch.arange(self.rows, device=nodes.device)[:, None]
        target = torch.arange(nodes.shape[1], device=nodes.device)
        for stack, trimmed in zip(self.stacks, self._trimmed_stacks(), strict=True):
            start = (self.lengths - self.dropped if trimmed else self.lengths)[:, None]
            stack[:, rows, :, start + target] = stack[:, rows, :, start + nodes]  # the right side is a copy
        return self.commit(counts)

    def crop(self, lengths: Tensor | None = None) -> None:
        """Forget what is pending, and all but the first ``lengths`` ([B] int64) positions of each row."""
        assert lengths is None or self.trim is None, "no row of a trimmed cache goes back"
        self.lengths = self.lengths if lengths is None else lengths
        self.pending = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed positions of the longest row (transformers' name)."""
        return int(self.lengths.max())


def check_capacity(needed: int, capacity: int) -> None:
    """Refuse to write past the end."""
    if needed > capacity:
        raise UserError(
            f"the cache holds {capacity} positions but {needed} are needed; shorten the prompt or the answer"
        )


def check_room(needed: int, trim: Trim) -> None:
    """Refuse more pending nodes than a cache with trimmed layers was made for."""
    if needed > trim.held:
        raise UserError(
            f"layers with a window hold {trim.held} positions but {needed} are needed: the cache was made for trees of "
            f"{trim.room} nodes; make it for larger ones"
        )


def _read_through(states: Tensor, new: Tensor, start: int) -> Tensor:
    """All of the states up to and with the new ones, more than there is memory for: it keeps the latest."""
    whole = torch.cat([states[:, :, :start], new], 2)
    states.copy_(whole[:, :, -states.shape[2] :])
    return whole
