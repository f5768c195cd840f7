"""Hidden states that a base computes once for documents, in passes that all processes share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.data.answers.store import ProcessGroup
from drafthead.data.batch import HiddenStatesSpec
from drafthead.data.states.stored import StoredStates
from drafthead.data.text.documents import Documents
from drafthead.data.text.packing import one_row
from drafthead.errors import UserError
from drafthead.models.base.layers import first_layers, reading_copy
from drafthead.system.display import Display
from drafthead.train.original_base import OriginalBase, is_sharded

PASS_TOKENS = 2048  # largest number of tokens in a pass of several documents


@dataclass(eq=False)
class ComputedStates:
    """Hidden states of ``documents`` that ``base`` computes if they are not in ``stored`` yet. A pass reads several
    documents, packed into one row, each from its start. The passes depend only on the documents that are asked for, so
    that any number of processes stores the same bytes, also if some are killed and start again."""

    base: OriginalBase
    documents: Documents
    spec: HiddenStatesSpec
    stored: StoredStates
    group: ProcessGroup
    display: Display
    label: str  # for the progress line
    with_final: bool = True  # store the final state, before the layers of ``spec``

    def read(self, documents: Sequence[int]) -> list[Tensor]:
        return self.stored.read(documents)

    def prepare(self, documents: Sequence[int]) -> None:
        missing = {*self.stored.missing(documents)}
        passes = [group for group in self._passes(documents) if not missing.isdisjoint(group)]
        self.stored.require_space([*missing])
        self.group.wait()  # every process sees the same documents missing before one of them writes
        if passes:
            self._fill(passes, missing)
        self.group.wait()
        if left := self.stored.missing(documents):
            raise UserError(
                f"{len(left)} documents have no states in {self.stored.folder}; data.folder must be shared by all nodes"
            )

    def _fill(self, passes: list[list[int]], missing: set[int]) -> None:
        """Compute this process's share of ``passes``, and store the documents among ``missing``."""
        base = self.base.for_states()
        reader, label = reading_copy(base), f"hidden states of {self.label}"
        # Processes run a sharded base together: only all of its layers, and each process as many times.
        if not self.with_final and not is_sharded(base):
            reader = first_layers(reader, max(self.spec.layers))
        for first in range(0, len(passes), self.group.size):
            self.display.progress(label, first, len(passes))
            index = first + self.group.rank
            numbers = passes[index % len(passes)]
            states = reader.hidden_states(one_row(self.documents, numbers), self.spec)
            parts = [part for part in (states.final if self.with_final else None, states.layers) if part is not None]
            values = torch.split(torch.cat(parts, -1)[0], self.documents.lengths[numbers].tolist())
            if index < len(passes):
                new = {n: value for n, value in zip(numbers, values, strict=True) if n in missing}
                self.stored.write([*new], [*new.values()])
        self.display.progress(label, len(passes), len(passes))

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
