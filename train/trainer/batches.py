"""Batches of one phase: the rows of each step, and their hidden states."""

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
from drafthead.data.utils.devices import pinned
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.train.config import PhaseConfig
from drafthead.train.corpora.corpora import Corpora

Batch = tuple[TrainBatch, HiddenStates]
MAX_UNSEEN_ROWS = 64
"""Largest number of text rows on which a trained base is measured."""


class PhaseData:
    """Rows of a phase and their hidden states. A step's rows depend only on the seed and the number of the step."""

    def __init__(
        self,
        rows: datasets.Dataset | StreamedRows,
        base: BaseModel,
        spec: HiddenStatesSpec,
        cache: StoredHiddenStates | None,
        subset: np.ndarray | None = None,
    ) -> None:
        """Use only the rows numbered ``subset``, by default all. Without ``cache`` the base computes hidden states."""
        self.rows, self.base, self.spec, self.cache = rows, base, spec, cache
        self.waited_s = 0.0
        """Seconds that ``stream`` has waited for the reading thread since the trainer last set this to 0."""
        self._order = RowOrder(0 if isinstance(rows, StreamedRows) else len(rows) if subset is None else subset)

    def __len__(self) -> int:
        return len(self.rows)  # type: ignore[arg-type]  # a stream has no end

    def epochs(self, rows: int) -> float:
        """Return how often each row is read by the time that ``rows`` rows are read."""
        return rows / len(self._order)

    def load(self, numbers: list[int]) -> Batch:
        """Return the rows ``numbers`` and their hidden states, on the base's device."""
        return self.with_hidden_states(*self.read(numbers))

    def stream(self, batches: Iterable[list[int]]) -> Iterator[Batch]:
        """Yield ``load`` of each list of row numbers in order, while a thread reads the next list from disk."""
        with ThreadPoolExecutor(1, thread_name_prefix="rows") as reader:
            upcoming: Future[tuple[TrainBatch, Tensor | None]] | None = None
            for numbers in chain(batches, [None]):
                current = upcoming
                upcoming = None if numbers is None else reader.submit(self.read, numbers)
                if current is not None:
                    started = perf_counter()
                    batch, cached = current.result()
                    self.waited_s += perf_counter() - started
                    yield self.with_hidden_states(batch, cached)

    def read(self, numbers: list[int]) -> tuple[TrainBatch, Tensor | None]:
        """Return the rows ``numbers`` and their cached hidden states (None without a cache), in host memory."""
        if isinstance(self.rows, StreamedRows):
            return self.rows.batch(numbers), None
        batch = collate(self.rows, numbers)
        if self.cache is None:
            return batch, None
        values = self.cache.read(numbers)
        # Pinned memory is copied to the device without waiting.
        return batch, pinned(values, self.base.device)

    def with_hidden_states(self, batch: TrainBatch, cached: Tensor | None) -> Batch:
        """Move a result of ``read`` to the base's device; the base computes hidden states that were not cached."""
        batch = batch.to(self.base.device)
        if cached is None:
            return batch, self.base.hidden_states(batch, self.spec)
        return batch, HiddenStates.split(cached.to(self.base.device, non_blocking=True), self.base.hidden_size)

    def numbers(self, seed: int, first: int, count: int) -> list[int]:
        """Return ``RowOrder.numbers``; for a text stream, whose rows have no end, the positions themselves."""
        if isinstance(self.rows, StreamedRows):  # it shuffles its rows itself
            return list(range(first, first + count))
        return self._order.numbers(seed, first, count)


class RowOrder:
    """An endless stream of reshuffled epochs. The seed determines any range of it, so resuming stores no position."""

    def __init__(self, rows: int | np.ndarray) -> None:
        """Take the rows to shuffle: their count, or an array of row numbers."""
        self._rows = np.arange(rows) if isinstance(rows, int) else rows
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def numbers(self, seed: int, first: int, count: int) -> list[int]:
        """Return the row numbers at positions ``first`` to ``first + count - 1`` (from 0) of the shuffled epochs."""
        numbers = []
        for index in range(first, first + count):
            epoch, position = divmod(index, len(self._rows))
            if (seed, epoch) not in self._orders:
                self._orders = {(seed, epoch): np.random.default_rng([seed, epoch]).permutation(self._rows)}
            numbers.append(int(self._orders[(seed, epoch)][position]))
        return numbers


def split_rows(numbers: list[int], micro_batch_size: int, processes: int, rank: int) -> list[list[int]]:
    """Return the micro-batches of process ``rank`` in a step that trains on the rows ``numbers``.

    Every process gets the same number of micro-batches, each with 1 to ``micro_batch_size`` rows; too few rows raise a
    ``UserError``. The rows of a step do not depend on the number of processes. Example: 8 rows in micro-batches of 2 on
    2 processes are [0 1] [4 5] on rank 0 and [2 3] [6 7] on rank 1.
    """
    count = -(-len(numbers) // (micro_batch_size * processes)) * processes
    if count > len(numbers):
        raise UserError(
            f"a step of this run has {len(numbers)} rows, which {processes} processes cannot share; resume with a "
            f"number of processes that divides {len(numbers)}, or start over with resume=false"
        )
    return [rows.tolist() for rows in np.array_split(np.asarray(numbers), count)[rank::processes]]


def open_phase(
    corpora: Corpora, name: str, phase: PhaseConfig, spec: HiddenStatesSpec, seed: int = 0, num_rows: int | None = None
) -> PhaseData:
    """Open the rows of a phase's corpus. With ``store_hidden_states``, compute and store missing hidden states now.

    They are stored for the first ``num_rows`` rows in the order of ``seed``; by default for all rows of the phase.
    """
    if phase.corpus == "text" and corpora.config.text.stream:
        return PhaseData(corpora.text_stream(phase.seq_len, phase.micro_batch_size), corpora.base, spec, None)
    if phase.corpus == "text":
        rows, prompts = corpora.text_rows(phase.seq_len), None
        if phase.train_base:
            rows = rows.select(range(len(rows) - _rows_left_out(rows)))
    else:
        rows, prompts = corpora.answer_rows(phase.seq_len, held_out=False)
    subset = np.arange(len(rows))
    if phase.max_tokens is not None:
        # Random rows with about this many trained tokens; larger subsets contain smaller ones.
        trained = np.array([int(collate(rows, [row]).loss_mask.sum()) for row in range(len(rows))])
        order = np.random.default_rng(0).permutation(len(rows))
        subset = order[: 1 + np.searchsorted(np.cumsum(trained[order]), phase.max_tokens)]
    needed = len(subset) if num_rows is None else min(num_rows, len(subset))
    only = set(RowOrder(subset).numbers(seed, 0, needed))
    cache = corpora.stored_hidden_states(rows, name, spec, prompts, only) if phase.store_hidden_states else None
    return PhaseData(rows, corpora.base, spec, cache, subset)


def open_held_out(
    corpora: Corpora, seq_len: int, spec: HiddenStatesSpec, cached: bool, base: BaseModel | None = None
) -> PhaseData:
    """Open the held-out answers with hidden states of the corpora's base, computed and stored now if ``cached``.

    Hidden states of another ``base``, such as a trained one, are always computed.
    """
    rows, prompts = corpora.answer_rows(seq_len, held_out=True)
    if base is not None and base is not corpora.base:
        return PhaseData(rows, base, spec, None)
    cache = corpora.stored_hidden_states(rows, "held-out", spec, prompts) if cached else None
    return PhaseData(rows, corpora.base, spec, cache)


def unseen_text(corpora: Corpora, phases: Mapping[str, PhaseConfig]) -> datasets.Dataset | None:
    """Return the last rows of the text corpus, on which no phase trains the base; None for a run without text.

    Phases that train only the head may have used them. ``phases`` are those of the run, by name.
    """
    text_phases = [p for p in phases.values() if p.corpus == "text"]
    base_phases = [p for p in text_phases if p.train_base]
    if not text_phases:
        return None
    rows = corpora.text_rows((base_phases or text_phases)[0].seq_len)
    count = _rows_left_out(rows) if base_phases else min(len(rows), MAX_UNSEEN_ROWS)
    return rows.select(range(len(rows) - count, len(rows)))


def _rows_left_out(rows: datasets.Dataset) -> int:
    """Return the number of last rows that ``train_base`` phases leave out: a tenth, 1 to ``MAX_UNSEEN_ROWS``."""
    return min(MAX_UNSEEN_ROWS, max(1, len(rows) // 10))
