"""Texts of sources larger than the disk, read while training: without end, dealt into lanes, with a position.

A lane is a fixed part of every source. Lanes are independent of each other and of how many processes read them, so a
text is in the same place of the same lane whoever reads it.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from drafthead.data.errors import UserError
from drafthead.data.hub_sets import hub_errors, open_hub
from drafthead.data.source_rows import as_text, column_value
from drafthead.data.sources import SourceConfig, iter_documents, shares

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
