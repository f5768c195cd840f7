"""Keys and values of a head's own attention layer, for the text and for the nodes that are being drafted.

A layer that reads one input per position (Hydra++'s prefix layer, Kangaroo's adapter, EAGLE's layer) is run over the
committed text once. Which inputs are still to be read belongs to a head's state, which never changes; the keys and
values do not, and are shared by successive states: what drafting has read of the text is not read again.

Shape legend: B rows, P unread positions, F frontier nodes, I input width, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.models.cache.kv_cache import CacheShape, KVCache, RaggedCache
from drafthead.models.decoding.contract import DraftState, last_valid
from drafthead.models.decoding.draft_cache import ROW_BY_ROW, PendingNodes, rewind
from drafthead.models.heads.common.attention_layer import Layer

INITIAL_CAPACITY = 256
"""Positions to begin with, after what is read first; doubled when they run out."""


class LayerKVCache:
    """Keys and values of one layer for rows of a batch."""

    def __init__(self, layer: Layer, shape: CacheShape) -> None:
        self.layer, self._shape = layer, shape
        self._cache: KVCache | RaggedCache | None = None
        self._nodes = PendingNodes.none(0, shape.device)
        self._depth = self._width = 0  # of the nodes that are pending
        self.text: PendingInputs | None = None
        """The text that was read last, all of its unread positions included."""
        self._last_out: Tensor | None = None
        """What the layer put out after that text; None when it was read together with a root."""

    def select(self, rows: list[int]) -> "LayerKVCache":
        """These rows only, in memory of their own."""
        chosen = LayerKVCache(self.layer, self._shape)
        if self._cache is not None:
            self._cache.crop()
            chosen._cache = self._cache.select(rows)
        return chosen

    def prefill(self, text: "PendingInputs") -> Tensor:
        """Read what ``text`` has not read yet; [B, D] after every row's last position."""
        if self.text is not text or self._last_out is None:
            self._last_out = self._forward(text.unread, text.lengths, text.counts)
            self.text = text
        else:
            assert self._cache is not None  # a root or nodes may stand after the text
            rewind(self._cache, text.lengths + text.counts)
            self._forget_nodes(len(text.counts))
        return self._last_out

    def prefill_with(self, text: "PendingInputs", root: Tensor) -> Tensor:
        """Read what ``text`` has not read yet and, as a draft node, the root ([B, I]) after it; [B, D] at the root."""
        if self.text is text:
            return self._forward(root[:, None], text.lengths + text.counts, torch.ones_like(text.counts))
        rows = torch.arange(len(root), device=root.device)
        inputs = torch.cat([text.unread, torch.zeros_like(root)[:, None]], 1)
        inputs[rows, text.counts] = root
        self.text, self._last_out = text, None
        return self._forward(inputs, text.lengths, text.counts + 1)

    def extend(self, inputs: Tensor, parents: Tensor) -> Tensor:
        """Read one more level of nodes: inputs [B, F, I] -> [B, F, D]; ``parents`` [B, F] are places a level before."""
        cache = self._cache
        assert cache is not None
        new, pending = inputs.shape[1], self._nodes.ancestors.shape[1]
        root = torch.zeros(1, 1, dtype=torch.int64, device=inputs.device)
        self._reserve(cache.positions(root)[:, 0] + pending, new)
        above = parents + (pending - self._width) if self._depth else None
        self._nodes = self._nodes.extend(inputs.shape[0], new, above)
        depths = torch.full((1, new), self._depth, device=inputs.device)
        self._depth, self._width = self._depth + 1, new
        return self._run(inputs, depths, self._nodes.ancestors[:, -new:])

    def _forward(self, inputs: Tensor, start: Tensor, counts: Tensor) -> Tensor:
        """Inputs [B, P, I], of which ``counts`` count, after the first ``start`` positions; [B, D] after the last."""
        rows, new = inputs.shape[:2]
        cache = self._reserve(start, new)
        self._forget_nodes(rows)
        chain = torch.ones(1, new, new, dtype=torch.bool, device=inputs.device).tril_()
        depths = torch.arange(new, device=inputs.device)[None]
        if isinstance(cache, RaggedCache) and new > ROW_BY_ROW:
            last = []
            for row, (length, count) in enumerate(zip(start.tolist(), counts.tolist(), strict=True)):
                lent, count = cache.slot(row, length), max(1, count)  # a row may have nothing to read yet
                found = self._run(inputs[row : row + 1, :count], depths[:, :count], chain[:, :count, :count], lent)
                last.append(found[:, -1])
            rewind(cache, start + counts)
            return torch.cat(last)
        rewind(cache, start)
        found = self._run(inputs, depths, chain)
        cache.commit(counts)
        return last_valid(found, counts)

    def _forget_nodes(self, rows: int) -> None:
        self._nodes, self._depth, self._width = PendingNodes.none(rows, self._shape.device), 0, 0

    def _run(
        self, inputs: Tensor, depths: Tensor, ancestors: Tensor, cache: KVCache | RaggedCache | None = None
    ) -> Tensor:
        cache = cache or self._cache
        assert cache is not None
        positions = cache.positions(depths).expand(inputs.shape[0], -1)
        cache.reserve(inputs.shape[1])
        return self.layer(inputs, positions, cache.mask(ancestors, self._shape.dtype), cache)

    def _reserve(self, start: Tensor, new: int) -> KVCache | RaggedCache:
        """A cache that holds ``new`` positions after ``start``, made or enlarged."""
        needed, old = int(start.max()) + new, self._cache  # a padded pass writes after the shorter rows too
        if old is not None and old.capacity >= needed:
            return old
        capacity = needed + INITIAL_CAPACITY if old is None else 2 * needed
        if old is None:
            self._cache = (
                KVCache(self._shape, capacity) if len(start) == 1 else RaggedCache(self._shape, len(start), capacity)
            )
        else:
            self._cache = old.resize(self._shape, capacity)
        return self._cache


@dataclass
class PendingInputs(DraftState):
    """How far a layer has read for one state, and what it has still to read. Never changed in place."""

    cache: LayerKVCache
    lengths: Tensor
    """[B] int64 positions before the unread ones."""
    unread: Tensor
    """[B, P, I] inputs of the positions after them; P may be 0."""
    counts: Tensor
    """[B] int64 how many of them count."""

    @classmethod
    def none(cls, cache: LayerKVCache, rows: int, like: Tensor) -> "PendingInputs":
        """Nothing yet; inputs will be as wide as ``like`` ([..., I]), of its dtype and on its device."""
        zero = torch.zeros(rows, dtype=torch.int64, device=like.device)
        return cls(cache=cache, lengths=zero, unread=like.new_zeros(rows, 0, like.shape[-1]), counts=zero)

    def append(self, inputs: Tensor, counts: Tensor | None) -> "PendingInputs":
        """With the inputs of more positions ([B, P, I]); those unread so far are read, if drafting has not done so."""
        if counts is None:
            counts = torch.full_like(self.lengths, inputs.shape[1])
        first = self.unread.shape[1] == 0
        if not first and self.cache.text is not self:
            self.cache.prefill(self)
        state = PendingInputs(cache=self.cache, lengths=self.lengths + self.counts, unread=inputs, counts=counts)
        if first and inputs.shape[1]:
            self.cache.prefill(state)  # the prompt: belongs to the prefill, and not to the first step
        return state
