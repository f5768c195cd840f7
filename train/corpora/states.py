"""Hidden states that a base computes once for documents, in passes that all processes share."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.data.answers.store import ProcessGroup
from drafthead.data.batch import HiddenStatesSpec
from drafthead.data.states.stored import StoredStates
from drafthead.data.text.documents import Documents
from drafthead.data.text.packing import one_row
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.layers import first_layers, reading_copy
from drafthead.system.display import Display

PASS_TOKENS = 2048
"""Largest number of tokens in a pass of several documents."""


@dataclass(eq=False)
class ComputedStates:
    """Hidden states of ``documents`` that ``base`` computes if they are not in ``stored`` yet.

    A pass reads several documents, packed into one row, each from its start. The passes depend only on the documents
    that are asked for, so that any number of processes stores the same bytes, also if some are killed and start again.
    """

    base: BaseModel
    documents: Documents
    spec: HiddenStatesSpec
    stored: StoredStates
    group: ProcessGroup
    display: Display
    label: str
    """Name of the documents for the progress line."""
    with_final: bool = True
    """Store the final state, before the layers of ``spec``."""

    def read(self, documents: Sequence[int]) -> list[Tensor]:
        """Return the stored states of each document."""
        return self.stored.read(documents)

    def prepare(self, documents: Sequence[int]) -> None:
        """Compute and store what is missing. A pass with a missing document is computed whole."""
        missing = {*self.stored.missing(documents)}
        passes = [group for group in self._passes(documents) if not missing.isdisjoint(group)]
        self.group.wait()  # every process sees the same documents missing before one of them writes
        if not passes:
            return
        first, label = self.group.rank == 0, f"hidden states of {self.label}"
        if first:
            self.stored.require_space([*missing])
        compute = self._computation()
        # If the base is sharded, processes run it together, so each makes the same number of passes.
        rounds = -(-len(passes) // self.group.size)
        for round_ in range(rounds):
            if first:
                self.display.progress(label, round_ * self.group.size, len(passes))
            index = round_ * self.group.size + self.group.rank
            computed = compute(passes[index % len(passes)])
            if index < len(passes):
                states = {n: s for n, s in zip(passes[index], computed, strict=True) if n in missing}
                self.stored.write([*states], [*states.values()])
        if first:
            self.display.progress(label, len(passes), len(passes))
        self.group.wait()
        if left := self.stored.missing(documents):
            raise UserError(
                f"{len(left)} documents have no hidden states in {self.stored.folder}; all processes must see the same "
                "data.folder: put it on a file system that the nodes share"
            )

    def _passes(self, documents: Sequence[int]) -> Iterator[list[int]]:
        """Yield lists of documents with up to ``PASS_TOKENS`` tokens, or one longer document."""
        group, tokens, lengths = list[int](), 0, self.documents.lengths
        for document in documents:
            if group and tokens + lengths[document] > PASS_TOKENS:
                yield group
                group, tokens = [], 0
            group.append(document)
            tokens += lengths[document]
        if group:
            yield group

    def _computation(self) -> Callable[[list[int]], Sequence[Tensor]]:
        """Return the function that computes the states of the documents of a pass."""
        reader = reading_copy(self.base)
        if not self.with_final:
            reader = first_layers(reader, max(self.spec.layers))

        def compute(numbers: list[int]) -> Sequence[Tensor]:
            states = reader.hidden_states(one_row(self.documents, numbers), self.spec)
            parts = [states.final] if self.with_final else []
            values = torch.cat(parts if states.layers is None else [*parts, states.layers], -1)
            return torch.split(values[0], self.documents.lengths[numbers].tolist())

        return compute
