"""Preallocated key/value caches under stock transformers modules: no reallocation per token.

transformers' attention modules call ``update(key, value, layer_idx)`` and nothing else of a cache, so these
classes offer that and what tree verification needs besides: keeping an accepted path, rolling back.

Shape legend: B rows, H key/value heads, C capacity, T new tokens, E head width, L layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.data.errors import UserError


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """What a cache of one base must hold."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class KVCache:
    """Rows of one common length.

    The last ``pending`` positions are a verified tree that is not committed yet: ``keep`` commits a path of it,
    ``roll_back`` drops all of it, and both only move the accepted entries.
    """

    def __init__(self, shape: CacheShape, batch: int, capacity: int) -> None:
        self.keys = torch.zeros(
            shape.layers, batch, shape.heads, capacity, shape.head_dim, dtype=shape.dtype, device=shape.device
        )
        self.values = torch.zeros_like(self.keys)
        self.length = 0
        self.pending = 0

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.keys.shape[3]

    def update(self, key_BHTE: Tensor, value_BHTE: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append the states of one layer; returns all states of the layer up to and with them (views).

        Raises:
            UserError: more positions than the capacity.
        """
        new = key_BHTE.shape[2]
        end = self.length + new
        if end > self.capacity:
            raise UserError(
                f"the cache holds {self.capacity} positions but {end} are needed; shorten the prompt or the answer"
            )
        self.keys[layer_idx, :, :, self.length : end] = key_BHTE
        self.values[layer_idx, :, :, self.length : end] = value_BHTE
        self.pending = new
        return self.keys[layer_idx, :, :, :end], self.values[layer_idx, :, :, :end]

    def commit(self) -> None:
        """Keep all pending positions (a chain that was read as it is)."""
        self.length += self.pending
        self.pending = 0

    def keep(self, nodes: Tensor) -> None:
        """Commit the pending positions ``nodes`` ([P] int64, ascending), in that order, and drop the others."""
        kept = nodes.shape[0]
        source = nodes + self.length
        # index_select copies before the write, so overlapping source and destination are safe.
        for buffer in (self.keys, self.values):
            buffer[:, :, :, self.length : self.length + kept] = buffer.index_select(3, source)
        self.length += kept
        self.pending = 0

    def roll_back(self, length: int) -> None:
        """Forget everything from position ``length`` on."""
        self.length = length
        self.pending = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed positions (transformers' name)."""
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next query (transformers' name)."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that ``query_length`` new queries see, and their offset (transformers' name)."""
        return self.length + query_length, 0


class SlotCache:
    """Rows of different lengths, for batched generation in which a finished row's slot is taken over by another.

    Decoding appends one position to every row at that row's own length; ``slot`` lends one row as a ``KVCache``
    of batch 1 to read a new prompt into.
    """

    def __init__(self, shape: CacheShape, slots: int, capacity: int) -> None:
        self.keys = torch.zeros(
            shape.layers, slots, shape.heads, capacity, shape.head_dim, dtype=shape.dtype, device=shape.device
        )
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=shape.device)
        self._rows = torch.arange(slots, device=shape.device)
        self._reach = 0

    @property
    def capacity(self) -> int:
        """Positions that fit in a row."""
        return self.keys.shape[3]

    def slot(self, row: int, length: int = 0) -> KVCache:
        """Row ``row`` as a cache of its own with ``length`` positions already read; shares memory with this one."""
        lent = KVCache.__new__(KVCache)
        lent.keys = self.keys[:, row : row + 1]
        lent.values = self.values[:, row : row + 1]
        lent.length, lent.pending = length, 0
        return lent

    def select(self, rows: list[int]) -> "SlotCache":
        """A copy with these rows only."""
        chosen = SlotCache.__new__(SlotCache)
        chosen.keys, chosen.values = self.keys[:, rows], self.values[:, rows]
        chosen.lengths = self.lengths[rows]
        chosen._rows, chosen._reach = torch.arange(len(rows), device=self.lengths.device), 0
        return chosen

    def step_mask(self) -> Tensor:
        """Additive float mask [B, 1, 1, reach]: each row sees its positions up to and with the one being appended."""
        self._reach = int(self.lengths.max()) + 1
        seen = torch.arange(self._reach, device=self.lengths.device) <= self.lengths[:, None]
        mask = torch.zeros(seen.shape, dtype=self.keys.dtype, device=seen.device)
        return mask.masked_fill_(~seen, float("-inf"))[:, None, None]

    def update(self, key_BH1E: Tensor, value_BH1E: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write each row's one new state at the row's length; returns the states up to the longest row."""
        self.keys[layer_idx, self._rows, :, self.lengths] = key_BH1E[:, :, 0]
        self.values[layer_idx, self._rows, :, self.lengths] = value_BH1E[:, :, 0]
        return self.keys[layer_idx, :, :, : self._reach], self.values[layer_idx, :, :, : self._reach]
