"""Batches of one phase: which rows a step trains on, and their features."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import datasets
import numpy as np
from torch import Tensor

from drafthead.data.answers.hidden_states import FeatureCache
from drafthead.data.batch import Features, FeatureSpec, TrainBatch
from drafthead.data.text.packing import collate
from drafthead.data.text.streaming import StreamedRows
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.train.config import PhaseConfig
from drafthead.train.corpora.corpora import Corpora

Batch = tuple[TrainBatch, Features]
UNSEEN_MOST = 64
"""Rows of text that a tuned base is measured on, at most."""


class PhaseData:
    """Rows with features. A step's rows depend on nothing but the seed and the step, so resuming needs no position."""

    def __init__(self, rows: datasets.Dataset, base: BaseModel, spec: FeatureSpec, cache: FeatureCache | None) -> None:
        self.rows, self.base, self.spec, self.cache = rows, base, spec, cache
        self.waited_s = 0.0
        """Seconds that ``stream`` has waited for what another thread reads."""
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def load(self, numbers: list[int]) -> tuple[TrainBatch, Features]:
        """The rows ``numbers`` and their features, on the base's device."""
        return self.with_features(*self.read(numbers))

    def stream(self, wanted: Iterable[list[int]]) -> Iterator[tuple[TrainBatch, Features]]:
        """``load`` of one list after the other; what comes next is read from disk meanwhile."""
        with ThreadPoolExecutor(1, thread_name_prefix="rows") as reader:
            coming: Future[tuple[TrainBatch, Tensor | None]] | None = None
            for numbers in wanted:
                current, coming = coming, reader.submit(self.read, numbers)
                if current is not None:
                    yield self.with_features(*self._wait(current))
            if coming is not None:
                yield self.with_features(*self._wait(coming))

    def read(self, numbers: list[int]) -> tuple[TrainBatch, Tensor | None]:
        """The rows ``numbers`` and, where there is a cache, what it holds of them; in host memory."""
        batch = collate(self.rows, numbers)
        if self.cache is None:
            return batch, None
        values = self.cache.read(numbers)
        # Pinned, so that copying to the device does not hold up who asked for it.
        return batch, values.pin_memory() if self.base.device.type == "cuda" else values

    def with_features(self, batch: TrainBatch, cached: Tensor | None) -> tuple[TrainBatch, Features]:
        """What ``read`` returned, on the base's device; the base computes the features that were not cached."""
        batch = batch.to(self.base.device)
        if cached is None:
            return batch, self.base.features(batch, self.spec)
        return batch, Features.split(cached.to(self.base.device, non_blocking=True), self.base.hidden_size)

    def _wait(self, reading: Future[tuple[TrainBatch, Tensor | None]]) -> tuple[TrainBatch, Tensor | None]:
        started = perf_counter()
        found = reading.result()
        self.waited_s += perf_counter() - started
        return found

    def numbers(self, seed: int, first: int, count: int) -> list[int]:
        """Row numbers ``first`` to ``first + count`` of the endless stream of reshuffled epochs."""
        found = []
        for index in range(first, first + count):
            epoch, place = divmod(index, len(self.rows))
            if (seed, epoch) not in self._orders:
                self._orders = {(seed, epoch): np.random.default_rng([seed, epoch]).permutation(len(self.rows))}
            found.append(int(self._orders[(seed, epoch)][place]))
        return found


class StreamedPhase(PhaseData):
    """Rows of a stream, in its order: a step's rows are those of its number, whatever was trained before."""

    def __init__(self, rows: StreamedRows, base: BaseModel, spec: FeatureSpec) -> None:
        self._streamed, self.base, self.spec = rows, base, spec
        self.waited_s = 0.0

    def read(self, numbers: list[int]) -> tuple[TrainBatch, Tensor | None]:
        return self._streamed.batch(numbers), None

    def numbers(self, seed: int, first: int, count: int) -> list[int]:
        """``first`` to ``first + count``: a stream is shuffled by itself."""
        return list(range(first, first + count))


def rounds(rows: int, micro_batch_size: int, processes: int) -> int:
    """Micro-batches of every process in a step of so many rows."""
    return -(-rows // (micro_batch_size * processes))


def rows_of_rank(numbers: list[int], micro_batch_size: int, processes: int, rank: int) -> list[list[int]]:
    """One process's micro-batches of a step that trains on the rows ``numbers``, whoever else takes part.

    Every process gets equally many, each of at most ``micro_batch_size`` rows and none empty: what belongs to a step
    does not
    depend on the number of processes.

    Raises:
        UserError: the step has fewer rows than there are processes.
    """
    parts = rounds(len(numbers), micro_batch_size, processes) * processes
    if parts > len(numbers):
        raise UserError(
            f"a step of this run has {len(numbers)} rows, which {processes} processes cannot share; go on with at most "
            f"{len(numbers)}, or start over with resume=false"
        )
    return [part.tolist() for part in np.array_split(np.asarray(numbers), parts)[rank::processes]]


def open_phase(corpora: Corpora, name: str, phase: PhaseConfig, spec: FeatureSpec) -> PhaseData:
    """Rows of a phase's corpus, with cached features when the phase asks for them."""
    if phase.corpus == "text" and corpora.config.text.stream:
        return StreamedPhase(corpora.text_stream(phase.seq_len, phase.micro_batch_size), corpora.base, spec)
    if phase.corpus == "text":
        rows, prompts = corpora.text_rows(phase.seq_len), None
        if phase.train_base:
            rows = rows.select(range(len(rows) - _kept_aside(rows)))
    else:
        rows, prompts = corpora.generation_rows(phase.seq_len, held_out=False)
    cache = None
    if phase.cached:
        cache = corpora.cached_features(rows, name, spec, prompts)
    return PhaseData(rows, corpora.base, spec, cache)


def open_held_out(
    corpora: Corpora, seq_len: int, spec: FeatureSpec, cached: bool, reader: BaseModel | None = None
) -> PhaseData:
    """The held-out answers, with features of the corpora's base, on disk if ``cached`` and else computed anew.

    Another ``reader``, such as the tuned base, always reads them anew.
    """
    rows, prompts = corpora.generation_rows(seq_len, held_out=True)
    if reader is not None and reader is not corpora.base:
        return PhaseData(rows, reader, spec, None)
    cache = corpora.cached_features(rows, "held-out", spec, prompts) if cached else None
    return PhaseData(rows, corpora.base, spec, cache)


def unseen_text(corpora: Corpora, phases: Mapping[str, PhaseConfig]) -> datasets.Dataset | None:
    """Rows of the text corpus that no phase has trained the base on; None for a run without text.

    What a phase trains the heads alone on may be among them: the base has not learnt it.
    """
    reading = [p for p in phases.values() if p.corpus == "text"]
    tuning = [p for p in reading if p.train_base]
    if not reading:
        return None
    rows = corpora.text_rows((tuning or reading)[0].seq_len)
    return rows.select(range(len(rows) - (_kept_aside(rows) if tuning else min(len(rows), UNSEEN_MOST)), len(rows)))


def _kept_aside(rows: datasets.Dataset) -> int:
    """How many of the last text rows phases with ``train_base`` leave out: a tenth."""
    return min(UNSEEN_MOST, max(1, len(rows) // 10))
