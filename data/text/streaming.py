"""Rows packed from streams during training. Row n is the same for every process and after every restart.

Row n is in shard ``n // micro_batch_size % shards``. If the number of processes divides the number of shards, each
process therefore reads only its own shards. A shard is a sequence of windows of ``WINDOW`` rows, shuffled within each
window. A window starts with a new document; the rest of the previous document is dropped. The positions where windows
start are stored on disk, so that any row can be packed again by reading its window. With ``WINDOW`` = 4, two shards and
a micro-batch of two, rows 0, 1, 4, 5 fill window 0 of shard 0, and rows 2, 3, 6, 7 window 0 of shard 1.

``datasets`` streams, shards and restores a position in a dataset (``IterableDataset``). The mixture is implemented
here, because it counts characters, not rows, and has no random state to save. T row length.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafthead.data.batch import TrainBatch
from drafthead.data.text.chat import Tokenizer
from drafthead.data.text.documents import Documents, Ids
from drafthead.data.text.packing import PackedRows, Piece, split_rows, text_documents
from drafthead.data.text.sources import SourceConfig, as_text, column_value, iter_documents, open_source, shares
from drafthead.errors import UserError, one_line
from drafthead.files.local import read_checksummed_json, write_checksummed_json

State = dict[str, Any]  # a position in a stream, as JSON values
WINDOW = 64  # rows
KEPT_POSITIONS = 256  # latest windows per shard whose start is stored; for others the shard is read from its beginning
_WRITING = threading.Lock()  # two phases of a run may write positions of the same shards


class SourceStream:
    """The texts of one source and shard, repeated without end."""

    def __init__(self, source: SourceConfig, shard: int, shards: int) -> None:
        self.source, self.shard, self.shards = source, shard, shards
        self.load({"epoch": 0, "taken": 0})

    def load(self, state: State) -> None:
        self._epoch, self._taken = int(state["epoch"]), int(state["taken"])
        self._rows: Any = None
        self._start: State | None = state.get("dataset")
        # Local files are read again from their first line up to the position.
        first = self.shard + self._taken * self.shards
        local = self.source.kind != "hf"
        self._texts = islice(iter_documents(self.source), first, None, self.shards) if local else self._dataset_texts()

    def state(self) -> State:
        state: State = {"epoch": self._epoch, "taken": self._taken}
        if self._rows is not None:
            return state | {"dataset": {"rows": self._rows.state_dict(), "number": self._number}}
        return state if self._start is None else state | {"dataset": self._start}

    def __next__(self) -> str:
        text = next(self._texts, None)
        if text is None:
            if not self._taken:
                what = f"source {self.source} has no text for shard {self.shard + 1} of {self.shards}"
                raise UserError(f"{what}; lower data.text.stream_shards, or leave out data.text.stream")
            self.load({"epoch": self._epoch + 1, "taken": 0})
            text = next(self._texts)
        self._taken += 1
        return text

    def _dataset_texts(self) -> Iterator[str]:
        """Yield the texts of the shard's files or, with fewer files than shards, of every ``shards``-th row."""
        source = self.source
        with open_source(source, stream=True) as rows:
            rows = rows if source.limit is None else rows.take(source.limit)
            by_files = rows.num_shards >= self.shards
            rows = rows.shard(self.shards, self.shard) if by_files else rows
            self._number = 0  # rows read, including those of other shards
            if self._start is not None:
                rows.load_state_dict(self._start["rows"])
                self._number = self._start["number"]
            self._rows = rows
            for row in rows:
                self._number += 1
                number = self._number - 1
                if by_files or number % self.shards == self.shard:
                    text = as_text(*column_value(row, source, f"{source} row {number}"))
                    if text.strip():
                        yield text


class Mixture:
    """Texts of several sources, each with its share of the characters; without weights all shares are equal. The next
    text comes from the source that is furthest behind its share. Any stretch of the stream therefore has the requested
    shares, with a deviation of about one text, and nothing is random."""

    def __init__(self, sources: Sequence[SourceConfig], shard: int, shards: int) -> None:
        self._shares = shares(sources) or [1 / len(sources)] * len(sources)
        self._streams = [SourceStream(source, shard, shards) for source in sources]
        self._given = [0] * len(sources)

    def load(self, state: State) -> None:
        self._given = list(state["given"])
        for stream, position in zip(self._streams, state["sources"], strict=True):
            stream.load(position)

    def state(self) -> State:
        return {"given": list(self._given), "sources": [stream.state() for stream in self._streams]}

    def __next__(self) -> str:
        total = sum(self._given)
        behind = [share * total - given for share, given in zip(self._shares, self._given, strict=True)]
        source = behind.index(max(behind))
        text = next(self._streams[source])
        self._given[source] += len(text)
        return text


class StreamedRows:
    """An endless sequence of text rows of T tokens each. ``shards`` and ``micro_batch_size`` determine the shard of
    each row, as the module describes. ``folder`` stores the positions in the stream where windows (``WINDOW`` rows of a
    shard) start; every combination of settings needs its own folder. ``workers`` threads pack the next windows in
    advance."""

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        seed: int,
        shards: int,
        micro_batch_size: int,
        folder: Path,
        workers: int,
    ) -> None:
        self.micro_batch_size, self.seq_len = micro_batch_size, seq_len
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="rows")
        self._shards = [
            _Shard(Mixture(sources, n, shards), tokenizer, seq_len, (seed, n), folder / f"lane-{n:03}.json")
            for n in range(shards)
        ]
        self._windows: dict[tuple[int, int], Future[PackedRows]] = {}

    def batch(self, numbers: Sequence[int]) -> TrainBatch:
        rows = []
        for number in numbers:
            micro_batch, offset = divmod(number, self.micro_batch_size)
            round_, shard = divmod(micro_batch, len(self._shards))
            window, row = divmod(round_ * self.micro_batch_size + offset, WINDOW)
            for key in ((shard, window), (shard, window + 1)):  # a worker makes the next window ahead
                if key not in self._windows:
                    self._windows[key] = self._workers.submit(self._shards[shard].window, key[1])
            for passed in [key for key in self._windows if key[0] == shard and key[1] < window - 1]:
                del self._windows[passed]
            rows.append(vars(self._windows[shard, window].result().batch([row])))
        tensors: Any = {n: torch.cat([row[n] for row in rows]) for n, value in rows[0].items() if value is not None}
        return TrainBatch(**tensors)


class _Shard:
    """One shard of the stream, as windows of ``WINDOW`` rows that are packed in any order; ascending is fastest."""

    def __init__(self, texts: Mixture, tokenizer: Tokenizer, seq_len: int, seed: tuple[int, int], path: Path) -> None:
        self.texts, self.tokenizer, self.seq_len, self.seed, self.path = texts, tokenizer, seq_len, seed, path
        self._lock = threading.Lock()
        self._next = 0
        self._positions: dict[int, State] = {0: texts.state()}
        if path.exists():
            saved = read_checksummed_json(path)
            if not isinstance(saved, dict) or not all(window.isdecimal() for window in saved):
                raise UserError(f"{path} holds no positions of a stream; remove the file")
            self._positions |= {int(window): state for window, state in saved.items()}

    def window(self, number: int) -> PackedRows:  # from 0; its rows are shuffled
        with self._lock:
            if number != self._next:
                start = max(window for window in self._positions if window <= number)
                try:
                    self.texts.load(self._positions[start])
                except UserError:
                    raise
                except (KeyError, TypeError, ValueError) as error:
                    what = f"{self.path} holds a position of other sources ({one_line(error)})"
                    raise UserError(f"{what}; remove the file") from None
                self._next = start
            while self._next < number:
                self._make()
            documents, rows = self._make()
        order = np.random.default_rng([*self.seed, number]).permutation(WINDOW)
        return PackedRows.of(documents, self.seq_len, [rows[index] for index in order])

    def _make(self) -> tuple[Documents, list[list[Piece]]]:
        documents: list[Ids] = []

        def lengths() -> Iterator[tuple[int, int]]:
            # One text at a time, because texts read ahead would be lost at the end of a window.
            while True:
                for ids in text_documents(self.tokenizer, [next(self.texts)]):
                    documents.append(ids)
                    yield len(documents) - 1, len(ids)

        rows = list(islice(split_rows(lengths(), self.seq_len), WINDOW))
        self._next += 1
        if self._next not in self._positions:
            self._positions[self._next] = self.texts.state()
            for old in sorted(self._positions)[1:-KEPT_POSITIONS]:
                del self._positions[old]
            with _WRITING:
                positions = {str(number): state for number, state in sorted(self._positions.items())}
                write_checksummed_json(self.path, positions)
        return Documents.of(documents), rows
