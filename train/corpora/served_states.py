"""Hidden states of documents from a server: stored before a phase, or computed again whenever they are trained on.

Shape legend: T tokens, n layers, L layers that the head reads, D width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from drafthead.data.answers.store import ProcessGroup
from drafthead.data.batch import HiddenStatesSpec
from drafthead.data.text.documents import Documents
from drafthead.train.corpora.served_base import CHECKED, ServedBase, Text
from drafthead.train.corpora.states import StatesOfDocuments


@dataclass(frozen=True, eq=False)
class ReadStates:
    """The states that a head reads, from those in a server's files."""

    documents: Documents
    spec: HiddenStatesSpec
    base: ServedBase
    with_final: bool

    def text(self, number: int) -> Text:
        ids: list[int] = np.asarray(self.documents[number]).tolist()
        return number, ids

    def chosen(self, states: Tensor) -> Tensor:
        """Return [T, D (1 + L)] of the states [T, n, D] of all layers in a file."""
        return self.base.chosen(states, self.spec.layers, self.with_final)


@dataclass(eq=False)
class ServedStates(StatesOfDocuments):
    """States that a server computes from the documents' token ids, unless they arrived with an answer."""

    base: ServedBase

    def fill(self, documents: Sequence[int], missing: Sequence[int]) -> None:
        read = ReadStates(self.documents, self.spec, self.base, self.with_final)
        ours = missing[self.group.rank :: self.group.size]
        label, done, absent = f"hidden states of {self.label}, from the server", 0, list[Text]()

        def arrived() -> Iterator[tuple[int, Tensor]]:
            for number in ours:
                text = read.text(number)
                if (states := self.base.kept(text[1])) is None:
                    absent.append(text)
                else:
                    yield number, states

        found = arrived()
        first = list(islice(found, CHECKED))
        self.base.compare_layers([states[:-1] for _, states in first])
        for number, states in chain(first, found):
            self._store(number, read.chosen(states), lacks_last=True)
            done += 1
            self.display.progress(label, done, len(ours))
        if self.group.rank == 0 and absent:
            self.base.start()
        self.group.wait()
        if absent:
            self.base.check(absent[:CHECKED])
        for number, states, _ in self.base.ask(absent):
            self._store(number, read.chosen(states))
            done += 1
            self.display.progress(label, done, len(ours))

    def _store(self, number: int, values: Tensor, lacks_last: bool = False) -> None:
        if lacks_last and self.with_final:
            values[-1, : self.base.parts.hidden_size] = torch.nan  # as of answers by the built-in decoding
        self.stored.write([number], [values])


@dataclass(eq=False)
class PassingStates:
    """States that a server computes when they are read, and that are not stored."""

    read_states: ReadStates
    group: ProcessGroup

    @property
    def ahead(self) -> int:
        return self.read_states.base.config.ahead

    def prepare(self, documents: Sequence[int]) -> None:
        if self.group.rank == 0:
            self.read_states.base.start()
        self.group.wait()

    def read(self, documents: Sequence[int]) -> list[Tensor]:
        read, texts = self.read_states, [self.read_states.text(number) for number in documents]
        read.base.check_once(texts)
        states = {number: read.chosen(states) for number, states, _ in read.base.ask(texts)}
        return [states[number] for number in documents]
