"""Heads that draft with a state per node: Hydra and MLP speculators.

A node's state is a function of its parent's and of its own token, so drafting carries no text and no cache, and a
frontier of any shape is one product per level.

Shape legend: B rows, F frontier nodes, P nodes of the level above, D base width, W draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from drafthead.models.drafter import DraftPlan, DraftState
from drafthead.models.position_head import HeadState, LastStateHead

States = tuple[Tensor, ...]
"""What a node hands on to its children: tensors [..., width], [B, F, width] while drafting."""


class RecurrentHead(LastStateHead):
    """A head that says how a state begins, and what one more token makes of it."""

    @abstractmethod
    def first_states(self, hidden: Tensor) -> States:
        """The state before any token is read, of the base's ``h``: [..., D]."""

    @abstractmethod
    def read_token(self, k: int, states: States, tokens: Tensor) -> tuple[Tensor, States]:
        """Draft logits [B, F, W] of position k (0-based) and the states after it, for inference.

        Args:
            k: position.
            states: of the parents, [B, F, ...].
            tokens: [B, F] int64 target ids: the root for k = 0, then drafts.
        """

    def begin(self, state: DraftState, last: Tensor, plan: DraftPlan) -> "RecurrentExpansion":
        assert isinstance(state, HeadState)
        return RecurrentExpansion(self.advance, self.first_states(state.hidden[:, None].to(self.dtype)), last)

    def advance(self, k: int, tokens: Tensor, parents: Tensor, *states: Tensor) -> States:
        """Logits and states of position k, of ``states`` [B, P, ...] above and ``parents`` [B, F], places there."""
        if self._static is None:
            return self._advance(k, tokens, parents, *states)
        return self._static(k, partial(self._advance, k), tokens, parents, *states)

    def _advance(self, k: int, tokens: Tensor, parents: Tensor, *states: Tensor) -> States:
        above = tuple(s.gather(1, parents[..., None].expand(-1, -1, s.shape[-1])) for s in states)
        logits, below = self.read_token(k, above, tokens)
        return (logits, *below)


class RecurrentExpansion:
    """Drafting in progress: the states of the level that was read last."""

    def __init__(self, advance: Callable[..., States], states: States, last: Tensor) -> None:
        """``advance`` as :meth:`RecurrentHead.advance`; ``states`` [B, 1, ...] before ``last`` ([B]) is read."""
        self._advance, self._states, self._last = advance, states, last
        self._position = 0

    def root(self) -> Tensor:
        """As ``Expansion.root``: [B, 1, W]."""
        tokens = self._last[:, None]
        return self.grow(tokens, torch.zeros_like(tokens))

    def grow(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """As ``Expansion.grow``: [B, F] int64 each -> [B, F, W]."""
        logits, *states = self._advance(self._position, tokens, parents, *self._states)
        self._states = tuple(states)
        self._position += 1
        return logits
