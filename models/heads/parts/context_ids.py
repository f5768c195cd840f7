"""The context's ids in a draft vocabulary: a head with ``context_vocabulary`` can draft names and rare words of its
context, too.

A small draft vocabulary lacks a tenth to a fifth of an answer's tokens, and most of these occurred before, where the
induction head finds them. Their logits need no trained weights: they come from the base's output head, and from the
codes that the induction head gives every id. Their draft ids follow the W of the draft vocabulary: W, W + 1, ...

A row may draft only what it has read: training hides an id before its first occurrence in the document, decoding hides
the ids of other rows.

Shape legend: B rows, T tokens, N = B * T, n predictions, W draft vocabulary, C ids of contexts outside it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.data.batch import BaseHidden, TrainBatch
from drafthead.models.base.lm_head import LMHead
from drafthead.models.decoding.drafter import SessionPart

ASSUMED = 12
"""Tokens of a batch for each different id outside the draft vocabulary, for estimates."""


@dataclass(frozen=True, kw_only=True)
class BatchIds:
    """The ids outside the draft vocabulary in the documents of a batch."""

    ids: Tensor  # [C] int64 target ids, ascending
    tokens: Tensor  # [N] int64
    document: Tensor  # [N] int64 number of each token's document
    first: Tensor  # [documents, C] int64 index of the token with which an id first occurs in a document; N: nowhere

    @classmethod
    def of(cls, batch: TrainBatch, t2d: Tensor) -> "BatchIds":
        """Return the ids of ``batch`` for which ``t2d`` [V] is -1."""
        tokens, documents = batch.input_ids.flatten(), batch.document_ids
        if t2d.is_meta:
            return cls._assumed(tokens.to(t2d.device), len(t2d))
        outside = (t2d[tokens] < 0).nonzero()[:, 0]
        # A document does not continue on the next row.
        rows = torch.arange(len(documents), device=documents.device)[:, None] * (documents.amax() + 2)
        _, document = torch.unique_consecutive((documents + rows).flatten(), return_inverse=True)
        ids, column = torch.unique(tokens[outside], return_inverse=True)
        count = int(document[-1]) + 1
        first = torch.full((count * len(ids),), len(tokens), device=tokens.device)
        first.scatter_reduce_(0, document[outside] * len(ids) + column, outside, "amin")
        return cls(ids=ids, tokens=tokens, document=document, first=first.view(count, -1))

    @classmethod
    def _assumed(cls, tokens: Tensor, vocabulary: int) -> "BatchIds":
        """Return ids for an estimate without data: one per ``ASSUMED`` tokens, and a document."""
        count = min(vocabulary, len(tokens) // ASSUMED)
        zeros = torch.zeros_like(tokens)
        return cls(ids=zeros[:count], tokens=tokens, document=zeros, first=zeros[None, :count])

    @property
    def absent(self) -> Tensor:
        """[documents, C] bool: ids that do not occur in a document."""
        return self.first == len(self.tokens)

    def draft_ids(self, t2d: Tensor, size: int, targets: Tensor, anchors: Tensor) -> Tensor:
        """Return the draft ids [n] of the tokens at ``targets`` [n], drafted after ``anchors`` [n]; both are indices in
        [N]. An id outside the draft vocabulary of ``size`` = W ids gets -1 if it does not occur up to the anchor."""
        tokens = self.tokens[targets]
        inside = t2d[tokens]
        if not len(self.ids):
            return inside
        column = torch.searchsorted(self.ids, tokens).clamp(max=len(self.ids) - 1)
        seen = self.first[self.document[targets], column] <= anchors
        return torch.where((inside < 0) & (self.ids[column] == tokens) & seen, size + column, inside)

    def unseen(self, anchors: Tensor) -> Tensor:
        """Return which ids do not occur up to each of the ``anchors`` [n] in its document: [n, C] bool."""
        return self.first[self.document[anchors]] > anchors[:, None]


@dataclass(frozen=True, kw_only=True)
class CurrentIds:
    """The ids outside the draft vocabulary in all rows of a batch that is decoded."""

    ids: Tensor  # [C] int64, ascending
    projection: LMHead  # with a row for each of ``ids``
    missing: Tensor | None  # [B, 1, C] bool: ids that do not occur in a row; None if there are none


class ContextIds(SessionPart):
    """The ids outside the draft vocabulary in the rows being decoded."""

    def __init__(self, t2d: Tensor, rows: int, projection: Callable[[Tensor], LMHead]) -> None:
        """``t2d`` [V] is -1 for ids outside the draft vocabulary; ``projection`` returns the rows for such ids."""
        self._t2d, self._lengths, self._projection = t2d, [0] * rows, projection
        self._first: list[dict[int, int]] = [{} for _ in range(rows)]  # by row: id and first position
        self._current: CurrentIds | None = None  # None: out of date

    @property
    def current(self) -> CurrentIds:
        if self._current is None:
            ids, device, missing = sorted(set().union(*self._first)), self._t2d.device, None
            if any(len(row) < len(ids) for row in self._first):
                column = {token: n for n, token in enumerate(ids)}
                missing = torch.ones(len(self._first), 1, len(ids), dtype=torch.bool)
                for row, first in enumerate(self._first):
                    missing[row, 0, [column[token] for token in first]] = False
                missing = missing.to(device)
            tensor = torch.tensor(ids, dtype=torch.int64, device=device)
            self._current = CurrentIds(ids=tensor, projection=self._projection(tensor), missing=missing)
        return self._current

    def commit(
        self, tokens: Tensor, counts: list[int], base_hidden: BaseHidden = None, nodes: Tensor | None = None
    ) -> None:
        outside = (self._t2d[tokens] < 0).nonzero().tolist()
        known = sum(map(len, self._first))
        if outside:
            values = tokens.tolist()
            for row, at in outside:
                if at < counts[row]:
                    self._first[row].setdefault(values[row][at], self._lengths[row] + at)
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        if sum(map(len, self._first)) > known:
            self._current = None

    def select(self, rows: list[int]) -> None:
        if rows != list(range(len(self._first))):
            self._lengths = [self._lengths[row] for row in rows]
            self._first, self._current = [dict(self._first[row]) for row in rows], None

    def rollback(self, lengths: list[int]) -> None:
        for row, length in enumerate(lengths):
            if length < self._lengths[row]:
                remaining = {token: at for token, at in self._first[row].items() if at < length}
                if len(remaining) < len(self._first[row]):
                    self._first[row], self._current = remaining, None
        self._lengths = list(lengths)
