"""Two kinds of cache layers: those that hold every position, and sliding-window layers that hold the latest ones.

The keys of equal layers are one tensor (a stack), and so are their values, so a commit takes one copy per stack. The
kind decides at which index of a stack a position is stored. Several rows are written by index tensors, because their
lengths differ; a single row is written by slices.

Shape legend: B rows, R rows or 1 for all rows, H key/value heads, C positions held, T new tokens, P nodes of a path,
E head width, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.data.utils.devices import on_device
from drafthead.data.utils.errors import UserError


@dataclass
class Row:
    """Position counts of one row, shared by a cache and its views of that row."""

    length: int = 0
    """Number of committed positions."""
    dropped: int = 0
    """Number of leading positions that sliding-window layers have dropped."""


class FullLayers:
    """Layers that hold every position, or, in a cache from ``TreeCache.selected``, selected and later positions."""

    def __init__(self, stacks: Sequence[Tensor], rows: list[Row], first: int = 0) -> None:
        """Use the memory ``stacks`` [L, B, H, C, E] for ``rows``.

        ``first``: number of committed positions that are left out; a new position p is written at index p - ``first``.
        """
        self.stacks, self.rows = stacks, rows
        self._first: int | Tensor = first  # of several sliding rows [B]
        self._span = slice(0, 0)
        self._index = self._rows = torch.empty(0)  # for several rows: [B, T] and [B, 1]

    def first(self, row: Row) -> int:
        """Return the number of left-out positions of ``row``: a new position p is at index p minus this number."""
        return int(self._first)

    @property
    def ends(self) -> list[int]:
        """The index of each row's first pending (not yet committed) position."""
        return [row.length - self.first(row) for row in self.rows]

    def begin(self, lengths_B: Tensor, pending: int, new: int, committed: bool) -> None:
        """Prepare the indices of ``new`` tokens after ``lengths_B`` committed and ``pending`` ones.

        ``committed``: True if all new tokens will be committed.
        """
        start = max(self.ends) + pending
        self._span = slice(start, start + new)
        if len(self.rows) > 1:
            offsets = torch.arange(pending, pending + new, device=lengths_B.device)
            self._index = (lengths_B - self._first)[:, None] + offsets
            self._rows = torch.arange(len(self.rows), device=lengths_B.device)[:, None]

    def update(self, keys: Tensor, values: Tensor, key_BHTE: Tensor, value_BHTE: Tensor) -> tuple[Tensor, Tensor]:
        """Write new states into a layer's ``keys`` and ``values``, and return both up to the longest row's end."""
        span, end = self._span, self._span.stop
        if len(self.rows) == 1:
            keys[:, :, span] = key_BHTE
            values[:, :, span] = value_BHTE
        else:
            keys[self._rows, :, self._index] = key_BHTE.transpose(1, 2)
            values[self._rows, :, self._index] = value_BHTE.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def move(self, nodes_BP: Tensor, counts: list[int]) -> None:
        """Copy each row's accepted nodes, the first ``counts`` of ``nodes_BP``, to its first pending positions."""
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
        """Keep positions that a query with this ``window`` sees, and up to ``room`` pending nodes."""
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
        """Return a mask [R, 1, T, n] and key positions [R, n], restricted to the positions that these layers hold."""
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
        """Drop the positions that no later query sees from every row that lacks space for another tree."""
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
