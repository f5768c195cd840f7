"""The interface to hidden states of documents, and the final states that decoding stored with its answers. D hidden
size, L early layers, T tokens of a document."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from drafthead.data.answers.store import AnswerStore


class StatesSource(Protocol):
    """Hidden states of a corpus's documents, by document number."""

    @property
    def ahead(self) -> int:
        """Number of batches to read before their use, each in its own thread."""

    def prepare(self, documents: Sequence[int]) -> None:
        """Make the states of ``documents`` that are missing. All processes call this at once, with equal lists."""

    def read(self, documents: Sequence[int]) -> list[Tensor]:
        """Return [T, D (1 + L)] for each document, in the stored dtype: the final state, then the early layers."""


class AnswerStates:
    """Final states in the answer store, and early layers from another source. The base never reads the last token of an
    answer, so its final state is NaN."""

    def __init__(self, answers: AnswerStore, layers: StatesSource | None) -> None:
        """Document n is the answer with the n-th lowest prompt number. ``layers`` None: only final states are read."""
        self._answers, self._layers, self._prompt_numbers = answers, layers, sorted(answers.done)

    @property
    def ahead(self) -> int:
        return 1 if self._layers is None else self._layers.ahead

    def prepare(self, documents: Sequence[int]) -> None:
        if self._layers is not None:
            self._layers.prepare(documents)

    def read(self, documents: Sequence[int]) -> list[Tensor]:
        """Return [T, D (1 + L)]; float32 if final states and layers have different dtypes."""
        finals = [self._final(self._prompt_numbers[document]) for document in documents]
        if self._layers is None:
            return finals
        return [torch.cat(parts, -1) for parts in zip(finals, self._layers.read(documents), strict=True)]

    def _final(self, prompt_number: int) -> Tensor:
        stored = self._answers.hidden_states(prompt_number)
        assert stored is not None
        states = torch.full((len(stored) + 1, stored.shape[1]), torch.nan, dtype=torch.float16)
        states[:-1] = torch.from_numpy(stored)
        return states
