"""The committed tokens of rows, for drafters that read tokens and not hidden states.

Shape legend: B rows, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.models.drafter import DraftState


@dataclass
class Committed(DraftState):
    """What every row has committed, as a state of its own or a part of one. Never changed in place."""

    tokens: Tensor
    """[B, T] int64, left-aligned; behind a row's length anything. T is the longest row's length."""
    lengths: Tensor
    """[B] int64."""

    @classmethod
    def none(cls, rows: int) -> "Committed":
        """Nothing yet."""
        return cls(tokens=torch.zeros(rows, 0, dtype=torch.int64), lengths=torch.zeros(rows, dtype=torch.int64))

    def append(self, tokens: Tensor, counts: Tensor | None = None) -> "Committed":
        """With the first ``counts`` ([B], default all) of ``tokens`` ([B, T]) behind each row."""
        rows, new = tokens.shape
        known, lengths = self.tokens.to(tokens.device), self.lengths.to(tokens.device)
        if counts is None:
            counts = torch.full_like(lengths, new)
        if rows == 1:
            kept = tokens[:, : int(counts)]
            return Committed(tokens=torch.cat([known, kept], 1), lengths=lengths + counts)
        wider = torch.cat([known, torch.zeros_like(tokens)], 1)
        # What does not count stands behind the row's new length, or is written over by the next tokens.
        wider.scatter_(1, lengths[:, None] + torch.arange(new, device=tokens.device), tokens)
        total = lengths + counts
        return Committed(tokens=wider[:, : int(total.max())], lengths=total)

    @property
    def longest(self) -> int:
        """Length of the longest row."""
        return self.tokens.shape[1]

    def select(self, rows: list[int]) -> "Committed":
        lengths = self.lengths[rows]
        return Committed(tokens=self.tokens[rows, : int(lengths.max())], lengths=lengths)


def common_prefix(left: Committed, right: Committed) -> Tensor:
    """[B] int64: leading tokens in which the rows of both agree."""
    width = min(left.longest, right.longest)
    same = left.tokens[:, :width] == right.tokens[:, :width]
    agreed = same.cumprod(1, dtype=torch.int32).sum(1)
    return torch.minimum(agreed, torch.minimum(left.lengths, right.lengths))
