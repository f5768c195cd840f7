"""Batches of one phase: which rows a step trains on, and their hidden states."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from time import perf_counter

import datasets
import numpy as np
from torch import Tensor

from drafthead.data.answers.hidden_states import StoredHiddenStates
from drafthead.data.batch import HiddenStates, HiddenStatesSpec, TrainBatch
from drafthead.data.text.packing import collate
from drafthead.data.text.streaming import StreamedRows
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.train.config import PhaseConfig
from drafthead.train.corpora.corpora import Corpora

Batch = tuple[TrainBatch, HiddenStates]
MAX_UNSEEN_ROWS = 64
"""Rows of text that a trained base is measured on, at most."""


class PhaseData:
    """Rows with hidden states. A step's rows depend on the seed and the step alone, so resuming needs no position."""

    def __init__(
        self,
        rows: datasets.Dataset | StreamedRows,
        base: BaseModel,
        spec: HiddenStatesSpec,
        cache: StoredHiddenStates | None,
        part: np.ndarray | None = None,
    ) -> None:
        """``part`` are the rows that steps take; by default all."""
        self.rows, self.base, self.spec, self.cache = rows, base, spec, cache
        self.waited_s = 0.0
        """Seconds that ``stream`` has waited for the thread that reads."""
        self._order = RowOrder(0 if isinstance(rows, StreamedRows) else len(rows) if part is None else part)

    def __len__(self) -> int:
        return len(self.rows)  # type: ignore[arg-type]  # a stream has no end

    def load(self, numbers: list[int]) -> Batch:
        """The rows ``numbers`` and their hidden states, on the base's device."""
        return self.with_hidden_states(*self.read(numbers))

    def stream(self, wanted: Iterable[list[int]]) -> Iterator[Batch]:
        """``load`` of one list after the other; the next one is read from disk meanwhile."""
        with ThreadPoolExecutor(1, thread_name_prefix="rows") as reader:
            upcoming: Future[tuple[TrainBatch, Tensor | None]] | None = None
            for numbers in chain(wanted, [None]):
                current = upcoming
                upcoming = None if numbers is None else reader.submit(self.read, numbers)
                if current is not None:
                    started = perf_counter()
                    found = current.result()
                    self.waited_s += perf_counter() - started
                    yield self.with_hidden_states(*found)

    def read(self, numbers: list[int]) -> tuple[TrainBatch, Tensor | None]:
        """The rows ``numbers`` and, where there is a cache, their hidden states; in host memory."""
        if isinstance(self.rows, StreamedRows):
            return self.rows.batch(numbers), None
        batch = collate(self.rows, numbers)
        if self.cache is None:
            return batch, None
        values = self.cache.read(numbers)
        # Pinned memory is copied to the device without waiting.
        return batch, values.pin_memory() if self.base.device.type == "cuda" else values

    def with_hidden_states(self, batch: TrainBatch, cached: Tensor | None) -> Batch:
        """What ``read`` returned, on the base's device; the base computes what was not cached."""
        batch = batch.to(self.base.device)
        if cached is None:
            return batch, self.base.hidden_states(batch, self.spec)
        return batch, HiddenStates.split(cached.to(self.base.device, non_blocking=True), self.base.hidden_size)

    def numbers(self, seed: int, first: int, count: int) -> list[int]:
        """Row numbers ``first`` to ``first + count`` of the endless stream of reshuffled epochs."""
        if isinstance(self.rows, StreamedRows):  # shuffled by itself
            return list(range(first, first + count))
        return self._order.numbers(seed, first, count)


class RowOrder:
    """The endless stream of reshuffled epochs over ``rows``, numbers or how many: any part of it, by the seed alone."""

    def __init__(self, rows: int | np.ndarray) -> None:
        self._rows = np.arange(rows) if isinstance(rows, int) else rows
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def numbers(self, seed: int, first: int, count: int) -> list[int]:
        """Row numbers ``first`` to ``first + count`` of the stream."""
        found = []
        for index in range(first, first + count):
            epoch, place = divmod(index, len(self._rows))
            if (seed, epoch) not in self._orders:
                self._orders = {(seed, epoch): np.random.default_rng([seed, epoch]).permutation(self._rows)}
            found.append(int(self._orders[(seed, epoch)][place]))
        return found


def random_part(rows: datasets.Dataset, tokens: int) -> np.ndarray:
    """Numbers of random rows with about ``tokens`` trained tokens; those of a smaller part are among a larger one's."""
    trained = np.array([int(collate(rows, [row]).loss_mask.sum()) for row in range(len(rows))])
    order = np.random.default_rng(0).permutation(len(rows))
    return order[: 1 + np.searchsorted(np.cumsum(trained[order]), tokens)]


def num_micro_batches(rows: int, micro_batch_size: int, processes: int) -> int:
    """Micro-batches of every process in a step of so many rows."""
    return -(-rows // (micro_batch_size * processes))


def split_rows(numbers: list[int], micro_batch_size: int, processes: int, rank: int) -> list[list[int]]:
    """One process's micro-batches of a step that trains on the rows ``numbers``.

    Every process gets equally many, each of at most ``micro_batch_size`` rows and none empty, so the rows of a step do
    not depend on the number of processes.
    """
    parts = num_micro_batches(len(numbers), micro_batch_size, processes) * processes
    if parts > len(numbers):
        raise UserError(
            f"a step of this run has {len(numbers)} rows, which {processes} processes cannot share; resume with at "
            f"most {len(numbers)}, or start over with resume=false"
        )
    return [part.tolist() for part in np.array_split(np.asarray(numbers), parts)[rank::processes]]


def open_phase(
    corpora: Corpora, name: str, phase: PhaseConfig, spec: HiddenStatesSpec, seed: int = 0, wanted: int | None = None
) -> PhaseData:
    """Rows of a phase's corpus, with cached hidden states where the phase asks for them.

    Only the first ``wanted`` rows of the stream of ``seed`` are read by the base; by default all.
    """
    if phase.corpus == "text" and corpora.config.text.stream:
        return PhaseData(corpora.text_stream(phase.seq_len, phase.micro_batch_size), corpora.base, spec, None)
    if phase.corpus == "text":
        rows, prompts = corpora.text_rows(phase.seq_len), None
        if phase.train_base:
            rows = rows.select(range(len(rows) - _rows_left_out(rows)))
    else:
        rows, prompts = corpora.answer_rows(phase.seq_len, held_out=False)
    part = np.arange(len(rows)) if phase.max_tokens is None else random_part(rows, phase.max_tokens)
    order = RowOrder(part)
    only = set(order.numbers(seed, 0, len(part) if wanted is None else min(wanted, len(part))))
    stored = phase.store_hidden_states
    cache = corpora.stored_hidden_states(rows, name, spec, prompts, only) if stored else None
    return PhaseData(rows, corpora.base, spec, cache, part)


def open_held_out(
    corpora: Corpora, seq_len: int, spec: HiddenStatesSpec, cached: bool, base: BaseModel | None = None
) -> PhaseData:
    """The held-out answers, with hidden states of the corpora's base, on disk if ``cached``.

    Those of another ``base``, such as a trained one, are always computed.
    """
    rows, prompts = corpora.answer_rows(seq_len, held_out=True)
    if base is not None and base is not corpora.base:
        return PhaseData(rows, base, spec, None)
    cache = corpora.stored_hidden_states(rows, "held-out", spec, prompts) if cached else None
    return PhaseData(rows, corpora.base, spec, cache)


def unseen_text(corpora: Corpora, phases: Mapping[str, PhaseConfig]) -> datasets.Dataset | None:
    """Rows of the text corpus that no phase has trained the base on; None for a run without text.

    Phases that train the heads alone may have read them.
    """
    reading = [p for p in phases.values() if p.corpus == "text"]
    tuning = [p for p in reading if p.train_base]
    if not reading:
        return None
    rows = corpora.text_rows((tuning or reading)[0].seq_len)
    count = _rows_left_out(rows) if tuning else min(len(rows), MAX_UNSEEN_ROWS)
    return rows.select(range(len(rows) - count, len(rows)))


def _rows_left_out(rows: datasets.Dataset) -> int:
    """How many of the last text rows phases with ``train_base`` leave out: a tenth."""
    return min(MAX_UNSEEN_ROWS, max(1, len(rows) // 10))
