"""Keys and values of a head's own attention layers, for the context and for the nodes being drafted.

Hydra++'s prefix layer, Kangaroo's adapter and EAGLE's layer read one input per committed token. A head's state says
which inputs are unread and never changes. The keys and values do change, and successive states share them, so no
context is read twice.

Shape legend: B rows, P unread positions, F frontier nodes, I input width, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from drafthead.models.cache.kv_cache import CacheShape, TreeCache
from drafthead.models.decoding.draft_cache import NodeCache, PendingNodes
from drafthead.models.decoding.drafter import DraftState
from drafthead.models.heads.parts.attention_layer import Layer
from drafthead.models.token_tree import causal_mask


class LayerKVCache(NodeCache):
    """Keys and values of a layer for the rows of a batch."""

    def __init__(self, layer: Layer, shape: CacheShape) -> None:
        def run(inputs: Tensor, cache: TreeCache, counts: Tensor | None, nodes: PendingNodes | None) -> Tensor:
            rows, new = inputs.shape[:2]
            if nodes is None:
                ancestors = causal_mask(new, inputs.device)[None]
            else:
                ancestors = nodes.ancestors[:, -new:]
            # A node's position is its depth below the context: the number of its ancestors but itself.
            cache.begin(new)
            positions = cache.positions(ancestors.sum(-1) - 1).expand(rows, -1)
            out = layer(inputs, positions, cache.mask(ancestors, shape.dtype), cache)
            if nodes is None:
                cache.commit(None if counts is None else counts.tolist())
            return out

        super().__init__(run, shape, lambda capacity: TreeCache.empty(shape, capacity))
        self.context: PendingInputs | None = None
        """The context that was read last, with its then unread positions."""
        self._last_out: Tensor | None = None
        """[B, D] output after that context; None if it was read together with a block of nodes."""

    def prefill(self, context: "PendingInputs") -> Tensor:
        """Read the unread positions of ``context``; return the output after every row's last position, [B, D]."""
        if self.context is not context or self._last_out is None:
            self._last_out = self._read_after(context.lengths, context.unread, context.counts)
            self.context = context
        else:  # nodes of an earlier draft may follow the context in the cache
            self.cache.crop((context.lengths + context.counts).tolist())
            self._drop_nodes(len(context.counts))
        return self._last_out

    def prefill_block(self, context: "PendingInputs", block: Tensor) -> Tensor:
        """Read unread positions and a chain of draft nodes in one pass, [B, P, I] -> [B, P, D].

        The nodes stay in the cache until the next call. Row b of the pass is its ``counts[b]`` unread inputs, then
        the block, then padding::

            counts 2, 1; block of 2:    u0 u1 n0 n1
                                        u0 n0 n1 --
        """
        rows, size = torch.arange(len(block), device=block.device)[:, None], block.shape[1]
        offsets = torch.arange(size, device=block.device).expand(len(block), -1)
        if self.context is context:
            start, inputs = context.lengths + context.counts, block
        else:
            start, offsets = context.lengths, context.counts[:, None] + offsets
            inputs = torch.cat([context.unread, torch.zeros_like(block)], 1)
            inputs[rows, offsets] = block
        self._reserve(len(inputs), int(start.max()) + inputs.shape[1])
        self.cache.crop(start.tolist())
        self._drop_nodes(len(inputs))
        self.context, self._last_out = context, None
        return self._run(inputs, self.cache, offsets[:, -1] + 1, None)[rows, offsets]

    def extend(self, inputs: Tensor, parents: Tensor) -> Tensor:
        self._reserve(len(inputs), self.cache.length + self.cache.pending + inputs.shape[1])
        return super().extend(inputs, parents)

    def _read_after(self, start: Tensor, inputs: Tensor, counts: Tensor) -> Tensor:
        """Read the first ``counts`` inputs [B, P, I] after ``start`` [B] positions; return the last outputs [B, D]."""
        self._reserve(len(inputs), int(start.max()) + inputs.shape[1])  # padding is written too
        self.cache.crop(start.tolist())
        self._drop_nodes(len(inputs))
        return self._read_chain(inputs, start, counts)


@dataclass
class PendingInputs(DraftState):
    """Progress of a layer in the context, and the inputs that it has not read yet. Never changed in place."""

    cache: LayerKVCache
    lengths: Tensor
    """[B] int64 positions before the unread ones."""
    unread: Tensor
    """[B, P, I] inputs of the following positions; P may be 0."""
    counts: Tensor
    """[B] int64 number of valid inputs in ``unread``."""

    @classmethod
    def none(cls, cache: LayerKVCache, rows: int, like: Tensor) -> "PendingInputs":
        """Return the state before any context; inputs will have the width, dtype and device of ``like`` ([..., I])."""
        zero = torch.zeros(rows, dtype=torch.int64, device=like.device)
        return cls(cache=cache, lengths=zero, unread=like.new_zeros(rows, 0, like.shape[-1]), counts=zero)

    def reader(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function that reads one step's nodes level by level, as ``NodeCache.extend`` does.

        It reads the root together with the unread context.
        """
        levels = count()

        def read(inputs: Tensor, parents: Tensor) -> Tensor:
            first = next(levels) == 0
            return self.cache.prefill_block(self, inputs) if first else self.cache.extend(inputs, parents)

        return read

    def append(self, inputs: Tensor, counts: Tensor | None) -> "PendingInputs":
        """Return the state after more positions ([B, P, I]); earlier unread ones are read now, if drafting has not."""
        if counts is None:
            counts = torch.full_like(self.lengths, inputs.shape[1])
        first = self.unread.shape[1] == 0
        if not first and self.cache.context is not self:
            self.cache.prefill(self)
        state = PendingInputs(cache=self.cache, lengths=self.lengths + self.counts, unread=inputs, counts=counts)
        if first and inputs.shape[1]:
            self.cache.prefill(state)  # reading the prompt belongs to the prefill, not to the first step
        return state
