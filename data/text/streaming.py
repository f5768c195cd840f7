"""Rows packed from streams while training: any row by its number, the same for every process and every restart.

Row n is in lane ``n // turn % lanes``, so with a turn as long as a micro-batch a process meets few lanes: where the
number of processes divides the lanes, each reads its own part of the sources and nothing else. A lane is cut into
windows of ``WINDOW`` rows. A window begins with a text, and the positions where windows begin are kept on disk, so that
any row can be had again for the price of its window; what a window's end cuts off a text is left out. Within a window
the rows are shuffled.

T row length.
"""
# Texts of sources larger than the disk, read while training: without end, dealt into lanes, with a position.

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drafthead.data.batch import TrainBatch
from drafthead.data.text.chat import Document
from drafthead.data.text.hub_datasets import hub_errors, open_hub
from drafthead.data.text.packing import PackedRow, collate_rows, split_rows, text_documents
from drafthead.data.text.sources import SourceConfig, as_text, column_value, iter_documents, shares
from drafthead.data.utils.errors import UserError, one_line
from drafthead.data.utils.files import read_sealed_json, write_sealed_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

State = dict[str, Any]
"""A position, as JSON values."""


class SourceStream:
    """One source's texts of one lane, from its beginning again after its end."""

    def __init__(self, source: SourceConfig, lane: int, lanes: int) -> None:
        self.source, self.lane, self.lanes = source, lane, lanes
        self.load({"epoch": 0, "taken": 0})

    def load(self, state: State) -> None:
        """Go to a position that ``state`` returned, of the same source and lane."""
        self._epoch, self._taken = int(state["epoch"]), int(state["taken"])
        self._dataset: _Dataset | None = None
        self._begin: State | None = state.get("dataset")
        self._texts = self._open()

    def state(self) -> State:
        """Where the next text is."""
        state: State = {"epoch": self._epoch, "taken": self._taken}
        dataset = self._begin if self._dataset is None else self._dataset.state()
        return state if dataset is None else state | {"dataset": dataset}

    def __next__(self) -> str:
        text = next(self._texts, None)
        if text is None:
            if not self._taken:
                raise UserError(
                    f"source {self.source} has no text for lane {self.lane + 1} of {self.lanes}; lower "
                    "data.text.lanes, or leave data.text.stream out for a source so small"
                )
            self.load({"epoch": self._epoch + 1, "taken": 0})
            text = next(self._texts)
        self._taken += 1
        return text

    def _open(self) -> Iterator[str]:
        if self.source.kind == "hf":
            return self._hub_texts()
        # Local files are read again up to the position: no more than a disk holds.
        return islice(iter_documents(self.source), self.lane + self._taken * self.lanes, None, self.lanes)

    def _hub_texts(self) -> Iterator[str]:
        with hub_errors(self.source):
            self._dataset = dataset = _Dataset(self.source, self.lane, self.lanes, self._begin)
            for row, number in dataset:
                value = _value(row, self.source, number)
                if value.strip():
                    yield value


class _Dataset:
    """The rows of one lane of a streamed dataset: files of its own, or where these are too few every so-manieth row."""

    def __init__(self, source: SourceConfig, lane: int, lanes: int, state: State | None) -> None:
        rows = open_hub(source, stream=True)
        rows = rows if source.limit is None else rows.take(source.limit)
        apart = rows.num_shards >= lanes
        self.rows = rows.shard(lanes, lane) if apart else rows
        self.lane, self.lanes = (0, 1) if apart else (lane, lanes)
        self.number = 0
        """Rows read, those of other lanes among them."""
        if state is not None:
            self.rows.load_state_dict(state["rows"])
            self.number = state["number"]

    def __iter__(self) -> Iterator[tuple[dict[str, Any], int]]:
        for row in self.rows:
            self.number += 1
            if (self.number - 1) % self.lanes == self.lane:
                yield row, self.number - 1

    def state(self) -> State:
        return {"rows": self.rows.state_dict(), "number": self.number}


def _value(row: dict[str, Any], source: SourceConfig, number: int) -> str:
    where = f"{source} row {number}"
    value = column_value(row, source.column, where)
    return "" if value is None else as_text(value, source.column, where)


class Mixture:
    """Texts of several sources, each with its part of the characters. Without weights all parts are equal.

    The next text is of the source that is furthest behind its part: no chance is involved, and any stretch of the
    stream has the parts that were asked for, up to a text.
    """

    def __init__(self, sources: Sequence[SourceConfig], lane: int, lanes: int) -> None:
        if not sources:
            raise UserError("no data source is given; list at least one")
        self._shares = shares(sources) or [1 / len(sources)] * len(sources)
        self._streams = [SourceStream(source, lane, lanes) for source in sources]
        self._given = [0] * len(sources)

    def load(self, state: State) -> None:
        """Go to a position that ``state`` returned, of the same sources and lane."""
        self._given = list(state["given"])
        for stream, position in zip(self._streams, state["sources"], strict=True):
            stream.load(position)

    def state(self) -> State:
        """Where the next text is."""
        return {"given": list(self._given), "sources": [stream.state() for stream in self._streams]}

    def __next__(self) -> str:
        total = sum(self._given)
        behind = [share * total - given for share, given in zip(self._shares, self._given, strict=True)]
        chosen = behind.index(max(behind))
        text = next(self._streams[chosen])
        self._given[chosen] += len(text)
        return text


WINDOW = 64
KEPT = 256
"""Positions kept a lane: going back behind them reads the lane from its beginning."""
_WRITING = threading.Lock()
"""Two phases of a run may have the same lanes."""


class StreamedRows:
    """An endless sequence of rows of text.

    Args:
        sources: of the texts.
        tokenizer: of the base.
        seq_len: T.
        seed: of the shuffles.
        lanes: parts of the sources; decides, like ``turn``, which row has which number.
        turn: consecutive rows of a lane.
        folder: of the positions; one for every combination of all these.
        workers: windows made at a time, ahead of their use.

    Raises:
        UserError: positions that are kept on disk are damaged.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        tokenizer: "PreTrainedTokenizerBase",
        seq_len: int,
        *,
        seed: int,
        lanes: int,
        turn: int,
        folder: Path,
        workers: int,
    ) -> None:
        self.turn, self.lanes = turn, lanes
        self.seq_len = seq_len
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="rows")
        self._lanes = [
            _Lane(Mixture(sources, n, lanes), tokenizer, seq_len, (seed, n), folder / f"lane-{n:03}.json")
            for n in range(lanes)
        ]
        self._windows: dict[tuple[int, int], Future[list[PackedRow]]] = {}

    def batch(self, numbers: Sequence[int]) -> TrainBatch:
        """The rows ``numbers`` as one batch [B, T], in that order.

        Raises:
            UserError: a source cannot be read.
        """
        return collate_rows([self._row(number) for number in numbers], self.seq_len)

    def _row(self, number: int) -> PackedRow:
        turn, place = divmod(number, self.turn)
        window, row = divmod(turn // self.lanes * self.turn + place, WINDOW)
        lane = turn % self.lanes
        rows = self._window(lane, window)
        self._window(lane, window + 1)
        for old in [key for key in self._windows if key[0] == lane and key[1] < window - 1]:
            del self._windows[old]
        return rows.result()[row]

    def _window(self, lane: int, window: int) -> "Future[list[PackedRow]]":
        if (lane, window) not in self._windows:
            self._windows[lane, window] = self._workers.submit(self._lanes[lane].window, window)
        return self._windows[lane, window]


class _Lane:
    """Makes the windows of one lane, in any order; fast in theirs."""

    def __init__(
        self, texts: Mixture, tokenizer: "PreTrainedTokenizerBase", seq_len: int, seed: tuple[int, int], path: Path
    ) -> None:
        self.texts, self.tokenizer, self.seq_len, self.seed, self.path = texts, tokenizer, seq_len, seed, path
        self._lock = threading.Lock()
        self._positions: dict[int, State] = {0: texts.state()}
        self._next = 0
        if path.exists():
            self._positions |= _read_positions(path)

    def window(self, number: int) -> list[PackedRow]:
        with self._lock:
            if number != self._next:
                self._go_to(max(window for window in self._positions if window <= number))
            while self._next < number:
                self._make()
            rows = self._make()
        order = np.random.default_rng([*self.seed, number]).permutation(WINDOW)
        return [rows[place] for place in order]

    def _go_to(self, window: int) -> None:
        try:
            self.texts.load(self._positions[window])
        except UserError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.path} holds a position that is none of these sources ({one_line(error)}); remove the file"
            ) from None
        self._next = window

    def _make(self) -> list[PackedRow]:
        rows = list(islice(split_rows(self._documents(), self.seq_len), WINDOW))
        self._next += 1
        if self._next not in self._positions:
            self._positions[self._next] = self.texts.state()
            for old in sorted(self._positions)[1:-KEPT]:
                del self._positions[old]
            with _WRITING:
                write_sealed_json(self.path, {str(number): state for number, state in sorted(self._positions.items())})
        return rows

    def _documents(self) -> Iterator[Document]:
        """One text at a time: what is read ahead would be lost at the end of a window."""
        while True:
            yield from text_documents(self.tokenizer, [next(self.texts)])


def _read_positions(path: Path) -> dict[int, State]:
    """Positions by window.

    Raises:
        UserError: the file is damaged. Without it the lane is read from its beginning, to the same rows.
    """
    found = read_sealed_json(path)
    if not isinstance(found, dict) or not all(window.isdecimal() for window in found):
        raise UserError(f"{path} holds no positions of a stream; remove it")
    return {int(window): state for window, state in found.items()}
