"""Masks of packed rows without a tensor of size [T, T].

The rows of a batch are read as one row of N = B * T tokens, because no document continues in the next row. Query q sees
the keys ``first[q]`` to ``last[q]`` of these tokens: from the start of its document, or of its window, to itself::

    token    a b c | d e      two documents
    first    0 0 0   3 3
    last     0 1 2   3 4

Attention is computed in spans: queries with the keys that at least one of them sees. A CPU takes one document per span,
which saves the scores between documents. Other devices take several short ones, which saves launches.

Shape legend: B rows, T tokens of a row, N tokens of the batch, Q queries, K keys of a span.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

JOINED = {"cpu": 0, "meta": 0, "accelerator": 1024}
"""Largest number of tokens of several documents in one span. Estimates (``meta``) read one document per row."""
MAX_SCORES = 2**26  # in memory at once when attention scores are computed explicitly


@dataclass(eq=False)
class Span:
    """Queries and keys whose attention is computed together."""

    queries: slice
    keys: slice
    first: Tensor  # [Q] int64 first key of each query, of all N tokens
    last: Tensor  # [Q] int64 last key
    causal: bool  # query i sees exactly the keys 0 to i of the span

    @cached_property
    def seen(self) -> Tensor:  # [Q, K] bool
        keys = torch.arange(self.keys.start, self.keys.stop, device=self.first.device)
        return (keys >= self.first[:, None]) & (keys <= self.last[:, None])

    def seen_within(self, window: int, offsets: Tensor) -> Tensor:
        """Return ``seen`` [Q, P, K] for queries that stand ``offsets`` [P] tokens after each query of the span, and see
        only the last ``window`` tokens up to themselves."""
        keys = torch.arange(self.keys.start, self.keys.stop, device=self.first.device)
        return self.seen[:, None] & (keys > (self.last[:, None] + offsets - window)[..., None])


class OwnMask(BlockMask):
    """A mask that only our attention can read. It is a block mask because transformers gives block masks to the
    attention unchanged. Subclasses have a ``shape`` of four sizes, and no blocks."""

    ndim = 4
    __repr__ = object.__repr__

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Return the attention [B, H, T, F] of queries [B, H, T, E] over keys [B, G, S, E] and values [B, G, S, F].
        ``scaling`` multiplies the scores; None: 1 / sqrt(E)."""
        raise NotImplementedError


class PackedMask(OwnMask):
    """The keys that each query of packed rows sees, as ranges. ``packed_attention`` reads them."""

    def __init__(
        self, first: Tensor, last: Tensor, starts: Tensor, rows: int, device: torch.device, window: int | None = None
    ) -> None:
        """Take the ranges of keys in host memory: ``first`` and ``last`` [Q] int64, ascending. ``starts``: first token
        of each document, and N. ``window``: size of the sliding window, if one cuts a range."""
        self.first, self.last, self.starts, self.rows, self.device = first, last, starts, rows, device
        self.tokens, self.window = int(starts[-1]), window
        self._spans: dict[int, list[Span]] = {}

    @classmethod
    def of(cls, document_ids: Tensor, device: torch.device | None = None) -> "PackedMask":
        """Return the mask of rows [B, T] in which a token sees itself and earlier tokens of its document."""
        ids = document_ids.cpu()
        opens = torch.ones_like(ids, dtype=torch.bool)
        opens[:, 1:] = ids[:, 1:] != ids[:, :-1]
        tokens = torch.arange(ids.numel())
        starts = torch.cat([opens.flatten().nonzero()[:, 0], torch.tensor([len(tokens)])])
        first = torch.repeat_interleave(starts[:-1], starts.diff())
        return cls(first, tokens, starts, len(ids), device or document_ids.device)

    def within(self, size: int, chunked: bool) -> "PackedMask":
        """Return this mask, limited to a sliding window of ``size`` tokens, or to chunks of ``size`` tokens."""
        if self.longest <= size:
            return self
        if not chunked:
            first = torch.maximum(self.first, self.last - size + 1)
            return PackedMask(first, self.last, self.starts, self.rows, self.device, size)
        first = self.last - (self.last - self.first) % size
        starts = torch.cat([(first == self.last).nonzero()[:, 0], self.starts[-1:]])
        return PackedMask(first, self.last, starts, self.rows, self.device)

    def at(self, queries: Tensor) -> "PackedMask":
        """Return the mask of some of the N tokens as queries, [Q] int64 ascending, in host memory."""
        return PackedMask(self.first[queries], queries, self.starts, self.rows, self.device, self.window)

    @cached_property
    def longest(self) -> int:  # tokens of a document
        return int(self.starts.diff().max())

    @cached_property
    def cumulative(self) -> Tensor:
        """[documents + 1] int32 on the device: first token of each document, and N."""
        return self.starts.to(self.device, torch.int32, non_blocking=True)

    @property
    def shape(self) -> tuple[int, ...]:
        time = self.tokens // self.rows
        return self.rows, 1, time, time

    def __getitem__(self, index: Any) -> "PackedMask":
        """Return self for a slice of everything, which Gemma 4 takes."""
        if any(part.start or part.stop is not None for part in index):
            raise IndexError("a mask of packed rows cannot be sliced")
        return self

    def spans(self, scores: int = 0) -> list[Span]:
        """Return all spans, ascending. ``scores``: number of scores per query and key, if they are kept in memory."""
        if scores not in self._spans:
            self._spans[scores] = list(self._cut(scores))
        return self._spans[scores]

    @cached_property
    def _ranges(self) -> tuple[Tensor, Tensor]:  # on the device
        return self.first.to(self.device, non_blocking=True), self.last.to(self.device, non_blocking=True)

    def _cut(self, scores: int) -> Iterator[Span]:
        starts, edges = self.starts.tolist(), torch.searchsorted(self.last, self.starts).tolist()
        joined, begin = JOINED.get(self.device.type, JOINED["accelerator"]), 0
        while begin < len(starts) - 1:
            end = begin + 1
            while end < len(starts) - 1 and starts[end + 1] - starts[begin] <= joined:
                end += 1
            size = self.window or self.tokens
            if scores:
                size = min(size, max(1, MAX_SCORES // (scores * (starts[end] - starts[begin]))))
            for query in range(edges[begin], edges[end], size):
                queries = slice(query, min(query + size, edges[end]))
                keys = slice(int(self.first[query]), int(self.last[queries.stop - 1]) + 1)
                count = queries.stop - queries.start
                causal = end == begin + 1 and self.window is None and keys.stop - keys.start == count
                first, last = (values[queries] for values in self._ranges)
                yield Span(queries, keys, first, last, causal)
            begin = end

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the same mask as an additive tensor [B, 1, T, T]."""
        time = self.tokens // self.rows
        offsets = torch.arange(0, self.tokens, time, device=self.device)[:, None]
        first, last = (values.view(self.rows, time) - offsets for values in self._ranges)
        keys = torch.arange(time, device=self.device)
        seen = (keys >= first[..., None]) & (keys <= last[..., None])
        return torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, -torch.inf)[:, None]
