"""Modules that keep their weights a second time in a form that drafts fast."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn


class KeepsCopies(nn.Module):
    """A module whose copies are void once its weights may change (``train``, ``eval``) or move (``to``, ``float``)."""

    def forget_copies(self) -> None:
        """Drop copies of weights, and graphs that read them where they are; by default there are none."""

    def train(self, mode: bool = True) -> Self:
        """As any module's; the copies are forgotten."""
        self.forget_copies()
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.forget_copies()
        moved: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return moved
