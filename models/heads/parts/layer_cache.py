"""Keys and values of a head's own attention layer, for the text and for the nodes that are being drafted.

A layer that reads one input per position (Hydra++'s prefix layer, Kangaroo's adapter, EAGLE's layer) is run over the
committed text once. Which inputs are still to be read belongs to a head's state, which never changes; the keys and
values do not, and are shared by successive states: what drafting has read of the text is not read again.

Shape legend: B rows, P unread positions, F frontier nodes, I input width, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from drafthead.models.cache.kv_cache import CacheShape, KVCache, RaggedCache
from drafthead.models.decoding.draft_cache import NodeCache, PendingNodes
from drafthead.models.decoding.drafter import DraftState
from drafthead.models.heads.parts.attention_layer import Layer
from drafthead.models.token_tree import causal_mask


class LayerKVCache(NodeCache):
    """Keys and values of one layer for rows of a batch."""

    def __init__(self, layer: Layer, shape: CacheShape) -> None:
        def run(
            inputs: Tensor, cache: KVCache | RaggedCache, counts: Tensor | None, nodes: PendingNodes | None
        ) -> Tensor:
            rows, new = inputs.shape[:2]
            if nodes is None:
                ancestors = causal_mask(new, inputs.device)[None]
            else:
                ancestors = nodes.ancestors[:, -new:]
            positions = cache.positions(ancestors.sum(-1) - 1).expand(rows, -1)
            cache.reserve(new)
            found = layer(inputs, positions, cache.mask(ancestors, shape.dtype), cache)
            if nodes is None:
                cache.commit(counts)
            return found

        super().__init__(run, shape, lambda capacity: KVCache(shape, capacity))
        self.text: PendingInputs | None = None
        """The text that was read last, all of its unread positions included."""
        self._last_out: Tensor | None = None
        """What the layer put out after that text; None when it was read together with a root."""

    def prefill(self, text: "PendingInputs") -> Tensor:
        """Read what ``text`` has not read yet; [B, D] after every row's last position."""
        if self.text is not text or self._last_out is None:
            self._last_out = self._read_after(text.lengths, text.unread, text.counts)
            self.text = text
        else:  # a root or nodes may stand after the text
            self.cache.crop(text.lengths + text.counts)
            self._drop_nodes(len(text.counts))
        return self._last_out

    def prefill_block(self, text: "PendingInputs", block: Tensor) -> Tensor:
        """The same with a chain of draft nodes after it, [B, P, I] -> [B, P, D]. The next call drops them."""
        rows, size = torch.arange(len(block), device=block.device)[:, None], block.shape[1]
        offsets = torch.arange(size, device=block.device).expand(len(block), -1)
        if self.text is text:
            start, inputs = text.lengths + text.counts, block
        else:
            start, offsets = text.lengths, text.counts[:, None] + offsets
            inputs = torch.cat([text.unread, torch.zeros_like(block)], 1)
            inputs[rows, offsets] = block
        self._reserve(len(inputs), int(start.max()) + inputs.shape[1])
        self.cache.crop(start)
        self._drop_nodes(len(inputs))
        self.text, self._last_out = text, None
        return self._run(inputs, self.cache, offsets[:, -1] + 1, None)[rows, offsets]

    def extend(self, inputs: Tensor, parents: Tensor) -> Tensor:
        root = torch.zeros(1, 1, dtype=torch.int64, device=inputs.device)
        pending = self._nodes.ancestors.shape[1]
        self._reserve(len(inputs), int(self.cache.positions(root).max()) + pending + inputs.shape[1])
        return super().extend(inputs, parents)

    def _read_after(self, start: Tensor, inputs: Tensor, counts: Tensor) -> Tensor:
        """Read inputs [B, P, I], of which ``counts`` count, after the first ``start`` positions; [B, D] at the last."""
        self._reserve(len(inputs), int(start.max()) + inputs.shape[1])  # padding is written too
        self.cache.crop(start)
        self._drop_nodes(len(inputs))
        return self._read_chain(inputs, start, counts)


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

    def reader(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Reads one step's nodes level by level, as ``NodeCache.extend``; the root with the text that is unread."""
        levels = count()

        def read(inputs: Tensor, parents: Tensor) -> Tensor:
            first = next(levels) == 0
            return self.cache.prefill_block(self, inputs) if first else self.cache.extend(inputs, parents)

        return read

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
