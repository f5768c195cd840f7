"""The context's ids in a draft vocabulary: a head with ``context_vocabulary`` can draft names and rare words of its
context, too.

A small draft vocabulary lacks a tenth to a fifth of an answer's tokens, and most of these occurred before, where the
induction head finds them. Their logits need no trained weights: they come from the base's output head, and from the
codes that the induction head gives every id. Draft ids W, W + 1, ... stand for these ids, after the W of ``d2t``.

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


class ContextIds(SessionPart):
    """The ids outside the draft vocabulary in the rows being decoded."""

    def __init__(self, t2d: Tensor, rows: int, projection: Callable[[Tensor], LMHead]) -> None:
        """``t2d`` [V] is -1 for ids outside the draft vocabulary; ``projection`` returns the rows for such ids."""
        self._t2d, self._lengths, self._projection = t2d, [0] * rows, projection
        self._first: list[dict[int, int]] = [{} for _ in range(rows)]  # by row: id and first position
        self._update()

    def _update(self) -> None:
        device = self._t2d.device
        ids = sorted(set().union(*self._first))
        self.ids = torch.tensor(ids, dtype=torch.int64, device=device)
        """[C] int64 ids of all rows, ascending."""
        self.projection = self._projection(self.ids)
        self.missing: Tensor | None = None
        """[B, 1, C] bool: ids that do not occur in a row; None if there are none."""
        if any(len(row) < len(ids) for row in self._first):
            self.missing = torch.tensor([[i not in row for i in ids] for row in self._first], device=device)[:, None]

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
            self._update()

    def select(self, rows: list[int]) -> None:
        self._lengths, self._first = [self._lengths[row] for row in rows], [dict(self._first[row]) for row in rows]
        self._update()

    def rollback(self, lengths: list[int]) -> None:
        self._lengths = list(lengths)
        self._first = [
            {i: at for i, at in row.items() if at < length} for row, length in zip(self._first, lengths, strict=True)
        ]
        self._update()
