"""Hidden states that are computed once for documents, by all processes together: by the base, or by a server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
class StatesOfDocuments:
    """Hidden states of ``documents`` in ``stored``, into which ``fill`` puts those that are missing."""

    documents: Documents
    spec: HiddenStatesSpec
    stored: StoredStates
    group: ProcessGroup
    display: Display
    label: str  # for the progress line
    ahead: int = field(default=1, init=False)
    with_final: bool = field(default=True, kw_only=True)  # store the final state, before the layers of ``spec``

    def read(self, documents: Sequence[int]) -> list[Tensor]:
        return self.stored.read(documents)

    def prepare(self, documents: Sequence[int]) -> None:
        missing = self.stored.missing(documents)
        self.stored.require_space(missing)
        self.group.wait()  # every process sees the same documents missing before one of them writes
        if missing:
            self.fill(documents, missing)
        self.group.wait()
        if left := self.stored.missing(documents):
            raise UserError(
                f"{len(left)} documents have no states in {self.stored.folder}; data.folder must be shared by all nodes"
            )

    def fill(self, documents: Sequence[int], missing: Sequence[int]) -> None:
        """Store this process's share of the ``missing`` documents, out of the ``documents`` that are asked for."""
        raise NotImplementedError


@dataclass(eq=False)
class ComputedStates(StatesOfDocuments):
    """States that ``base`` computes. A pass reads several documents, packed into one row, each from its start. The
    passes depend only on the documents that are asked for, so that any number of processes stores the same bytes, also
    if some are killed and start again."""

    base: OriginalBase

    def fill(self, documents: Sequence[int], missing: Sequence[int]) -> None:
        wanted = {*missing}
        passes = [group for group in self._passes(documents) if not wanted.isdisjoint(group)]
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
                new = {n: value for n, value in zip(numbers, values, strict=True) if n in wanted}
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
