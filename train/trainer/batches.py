"""Batches of one phase: the rows of each step, and their hidden states."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from drafthead.data.batch import HiddenStates, HiddenStatesSpec, TrainBatch
from drafthead.data.states.source import StatesSource
from drafthead.data.text.packing import PackedRows
from drafthead.data.text.streaming import StreamedRows
from drafthead.errors import UserError
from drafthead.system.devices import pinned
from drafthead.train.config import PhaseConfig, RunConfig
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.original_base import OriginalBase

Batch = tuple[TrainBatch, HiddenStates]
MAX_UNSEEN_ROWS = 64  # text rows on which a trained base is measured


class PhaseData:
    """Packed rows of a phase and the base's hidden states at their tokens. The phase trains on an endless sequence of
    rows: epochs of the same rows, each in another random order. The seed determines any part of the sequence, so a
    resumed run needs no stored position."""

    def __init__(
        self,
        rows: PackedRows | StreamedRows,
        base: OriginalBase,
        spec: HiddenStatesSpec,
        subset: np.ndarray | None = None,
        seed: int = 0,
    ) -> None:
        """Use the rows with numbers ``subset`` (None: all). ``spec`` names the layers of hidden states to return."""
        self.rows, self.base, self.spec, self.seed = rows, base, spec, seed
        self.states: StatesSource | None = None  # on disk; None: the base computes them when rows are loaded
        self.waited_s = 0.0  # seconds that ``stream`` waited for its reading thread; the trainer resets it to 0
        self.subset = np.arange(0 if isinstance(rows, StreamedRows) else len(rows)) if subset is None else subset
        self._epoch, self._order = -1, self.subset  # row numbers in the order of the epoch

    def __len__(self) -> int:
        return len(self.rows)  # type: ignore[arg-type]  # a stream has no end

    def store(self, states: StatesSource, numbers: Sequence[int]) -> None:
        """Read hidden states from ``states``, which are made now for the documents of the rows ``numbers``."""
        assert isinstance(self.rows, PackedRows)
        states.prepare(self.rows.documents_of(numbers))
        self.states = states

    def load(self, numbers: list[int]) -> Batch:
        """Return the rows ``numbers``, in host memory, and the base's hidden states at their tokens, on its device."""
        return self.with_hidden_states(*self.read(numbers))

    def stream(self, batches: Iterable[list[int]]) -> Iterator[Batch]:
        """Yield ``load`` of each list of row numbers in order, while threads read the next ones: one from disk, more
        from a server (``StatesSource.ahead``)."""
        ahead = 1 if self.states is None else self.states.ahead
        coming, upcoming = iter(batches), deque[Future[tuple[TrainBatch, Tensor | None]]]()
        reader = ThreadPoolExecutor(ahead, thread_name_prefix="rows")
        try:
            while True:
                upcoming += [reader.submit(self.read, n) for n in islice(coming, ahead + 1 - len(upcoming))]
                if not upcoming:
                    return
                started = perf_counter()
                batch, stored = upcoming.popleft().result()
                self.waited_s += perf_counter() - started
                yield self.with_hidden_states(batch, stored)
        finally:
            reader.shutdown(cancel_futures=True)

    def read(self, numbers: list[int]) -> tuple[TrainBatch, Tensor | None]:
        """Return the rows ``numbers`` and their hidden states from disk, in host memory; None without ``states``."""
        batch = self.rows.batch(numbers)
        if self.states is None or isinstance(self.rows, StreamedRows):
            states = self.base.read_rows(batch, self.spec)
            return batch, None if states is None else pinned(states, self.base.parts.device)
        pieces = [(b, piece) for b, number in enumerate(numbers) for piece in self.rows.row(number)]
        stored = self.states.read([piece.document for _, piece in pieces])
        values = stored[0].new_zeros(*batch.input_ids.shape, stored[0].shape[-1])
        for (b, piece), states in zip(pieces, stored, strict=True):
            end = piece.start + piece.length
            values[b, piece.offset : piece.offset + piece.length] = states[piece.start : end]
        # Pinned memory is copied to the device without waiting.
        return batch, pinned(values, self.base.parts.device)

    def with_hidden_states(self, batch: TrainBatch, stored: Tensor | None) -> Batch:
        """Add ``stored`` hidden states, on the base's device; if None, the base computes the states."""
        if stored is None:
            return batch, self.base.for_states().hidden_states(batch, self.spec)
        parts = self.base.parts
        values = stored.to(parts.device, non_blocking=True).to(torch.float32)
        return batch, HiddenStates.split(values, parts.hidden_size)

    def numbers(self, first: int, count: int) -> list[int]:
        """Return ``count`` row numbers of the endless sequence of shuffled epochs, from index ``first`` (0-based)."""
        if isinstance(self.rows, StreamedRows):  # a stream numbers its rows in the order of training
            return list(range(first, first + count))
        numbers = []
        for index in range(first, first + count):
            epoch, position = divmod(index, len(self.subset))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.subset)
            numbers.append(int(self._order[position]))
        return numbers


def split_rows(numbers: list[int], micro_batch_size: int, processes: int, rank: int) -> list[list[int]]:
    """Return the row numbers of each micro-batch of process ``rank``, in a step that trains on the rows ``numbers``.
    Every process gets the same number of micro-batches, each with 1 to ``micro_batch_size`` rows. Too few rows raise a
    ``UserError``. Example: 8 rows in micro-batches of 2 on 2 processes are [0 1] [4 5] on rank 0 and [2 3] [6 7] on
    rank 1."""
    count = -(-len(numbers) // (micro_batch_size * processes)) * processes
    if count > len(numbers):
        raise UserError(
            f"a step of this run has {len(numbers)} rows, which {processes} processes cannot share; resume with a "
            f"number of processes that divides {len(numbers)}, or start over with resume=false"
        )
    return [rows.tolist() for rows in np.array_split(np.asarray(numbers), count)[rank::processes]]


def open_phase(
    corpora: Corpora, phase: PhaseConfig, spec: HiddenStatesSpec, seed: int = 0, num_rows: int | None = None
) -> PhaseData:
    """Open the rows of a phase's corpus, in the training order of ``seed``. With ``store_hidden_states``, hidden states
    that are not on disk are computed and stored now, for the first ``num_rows`` rows of the training order (None: for
    all rows)."""
    if phase.corpus == "text" and corpora.config.text.stream:
        if corpora.group.rank == 0:
            corpora.base.start()
        corpora.group.wait()
        return PhaseData(corpora.text_stream(phase.seq_len, phase.micro_batch_size), corpora.base, spec)
    if phase.corpus == "text":
        rows = corpora.text_rows(phase.seq_len)
        if phase.train_base:
            rows = rows.span(0, len(rows) - _rows_left_out(rows))
    else:
        rows = corpora.answer_rows(phase.seq_len, held_out=False)
    subset: np.ndarray | None = None
    if phase.max_tokens is not None:
        # Random rows with about this many trained tokens; larger subsets contain smaller ones.
        order = np.random.default_rng(0).permutation(len(rows))
        subset = order[: 1 + np.searchsorted(np.cumsum(rows.trained_tokens[order]), phase.max_tokens)]
    data = PhaseData(rows, corpora.base, spec, subset, seed)
    if phase.store_hidden_states:
        needed = len(data.subset) if num_rows is None else min(num_rows, len(data.subset))
        data.store(corpora.states(phase.corpus, rows.documents, spec, keep=False), data.numbers(0, needed))
    return data


def open_phase_of(run: RunConfig, name: str, corpora: Corpora, spec: HiddenStatesSpec, processes: int) -> PhaseData:
    """Open the rows of the phase ``name``, of a run that started with ``processes`` processes. Hidden states are stored
    only for rows that the phase's steps use."""
    phase = run.phases[name]
    seed = run.seed * 1000 + list(run.phases).index(name)
    return open_phase(corpora, phase, spec, seed, num_rows=phase.steps * phase.rows(processes))


def open_held_out(
    corpora: Corpora,
    seq_len: int,
    spec: HiddenStatesSpec,
    stored: bool,
    base: OriginalBase | None = None,
    most: int | None = None,
) -> PhaseData:
    """Open the held-out answers in rows of ``seq_len`` tokens; of more than ``most`` rows, every n-th one. If
    ``stored``, missing hidden states are computed and stored now. ``base`` is the model whose hidden states are read
    (None: the corpora's base). States of any other model, such as a trained base, are never stored."""
    rows = corpora.answer_rows(seq_len, held_out=True)
    numbers = range(0, len(rows), -(-len(rows) // most) if most else 1)
    data = PhaseData(rows, corpora.base if base is None else base, spec, np.array(numbers))
    if stored and data.base is corpora.base:
        data.store(corpora.states("answers", rows.documents, spec), numbers)
    return data


def unseen_text(corpora: Corpora, phases: Mapping[str, PhaseConfig]) -> PackedRows | None:
    """Return the last rows of the text corpus, on which no phase trains the base; None for a run without text. Phases
    that train only the head may have trained on these rows."""
    text_phases = [p for p in phases.values() if p.corpus == "text"]
    base_phases = [p for p in text_phases if p.train_base]
    if not text_phases:
        return None
    rows = corpora.text_rows((base_phases or text_phases)[0].seq_len)
    count = _rows_left_out(rows) if base_phases else min(len(rows), MAX_UNSEEN_ROWS)
    return rows.span(len(rows) - count, len(rows))


def _rows_left_out(rows: PackedRows) -> int:
    """Return how many of the last text rows ``train_base`` phases leave out: a tenth, within limits."""
    return min(MAX_UNSEEN_ROWS, max(1, len(rows) // 10))
