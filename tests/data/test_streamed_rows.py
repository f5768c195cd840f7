"""Streamed rows: the same row for the same number, whoever asks, in whatever order, and after a restart."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.text import streaming
from drafthead.data.text.sources import SourceConfig
from drafthead.data.text.streaming import Mixture, StreamedRows
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_checksummed_json, write_checksummed_json

TOKENIZER = tiny_tokenizer()
T = 32


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "WINDOW", 6)


@pytest.fixture
def source(tmp_path: Path) -> SourceConfig:
    texts = [f"text {i} " + f"{i * 7919} " * (i % 12) for i in range(300)]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return SourceConfig(kind="jsonl", name=str(tmp_path / "x.jsonl"))


def rows(source: SourceConfig, folder: Path, **changes: Any) -> StreamedRows:
    settings = {"seed": 0, "shards": 4, "micro_batch_size": 2, "workers": 2, **changes}
    return StreamedRows([source], TOKENIZER, T, folder=folder, **settings)


def ids(stream: StreamedRows, numbers: list[int]) -> torch.Tensor:
    batch = stream.batch(numbers)
    assert batch.input_ids.shape == (len(numbers), T)
    return batch.input_ids


def test_batches_are_packed_rows(source: SourceConfig, tmp_path: Path) -> None:
    """Whole texts but at the cuts, each with positions from 0, and hardly any padding."""
    batch = rows(source, tmp_path).batch(list(range(40)))
    assert batch.loss_mask.float().mean() > 0.95 and bool((batch.document_ids[batch.loss_mask] >= 0).all())
    starts = (batch.position_ids == 0) & batch.loss_mask
    partial_forward = [
        "".join(map(chr, row[place : place + 5])) for row, place in zip(*_places(batch, starts), strict=True)
    ]
    assert sum(text.startswith("text") for text in partial_forward) > 0.5 * len(partial_forward)
    for row in range(40):
        documents = batch.document_ids[row][batch.loss_mask[row]].tolist()
        assert sorted(documents, key=documents.index) == documents


def _places(batch: Any, starts: torch.Tensor) -> tuple[list[list[int]], list[int]]:
    found = starts.nonzero().tolist()
    return [batch.input_ids[row].tolist() for row, _ in found], [place for _, place in found]


def test_a_row_is_the_same_whoever_asks(source: SourceConfig, tmp_path: Path) -> None:
    """One process or several, forwards or backwards, one worker or more, from the start or after one."""
    wanted = ids(rows(source, tmp_path / "one"), list(range(96)))
    assert len({tuple(row) for row in wanted.tolist()}) > 80
    for world in (2, 4):
        for rank in range(world):
            mine = [n for n in range(96) if n // 2 % world == rank]
            assert torch.equal(ids(rows(source, tmp_path / f"{world}-{rank}"), mine), wanted[mine])
    together = [rows(source, tmp_path / "shared", workers=1) for _ in range(3)]  # shards are no multiple of these
    for rank, stream in enumerate(together):
        mine = [n for n in range(96) if n // 2 % 3 == rank]
        assert torch.equal(ids(stream, mine), wanted[mine])
    backwards = list(range(95, -1, -1))
    assert torch.equal(ids(rows(source, tmp_path / "back"), backwards), wanted[backwards])
    assert torch.equal(ids(rows(source, tmp_path / "one"), [90, 3, 41]), wanted[[90, 3, 41]])


def test_a_process_reads_its_shards_only(source: SourceConfig, tmp_path: Path) -> None:
    stream = rows(source, tmp_path)
    ids(stream, [n for n in range(96) if n // 2 % 2 == 1])
    assert sorted(path.name for path in tmp_path.glob("lane-*.json")) == ["lane-001.json", "lane-003.json"]


def test_a_restart_reads_no_more_than_its_window(
    source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ids(rows(source, tmp_path, shards=1), list(range(60)))
    read: list[int] = []
    original = Mixture.__next__
    monkeypatch.setattr(Mixture, "__next__", lambda self: read.append(1) or original(self))
    assert torch.equal(ids(rows(source, tmp_path, shards=1), [54, 55]), wanted[54:56])
    assert len(read) < 30, "60 rows of 32 bytes have some 40 texts, 12 rows hardly 10"


def test_positions_are_forgotten_in_the_end(
    source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "KEPT_POSITIONS", 3)
    stream = rows(source, tmp_path, shards=1)
    wanted = ids(stream, list(range(60)))
    ids(stream, [61])
    kept = sorted(map(int, read_checksummed_json(tmp_path / "lane-000.json")))
    assert len(kept) == 4 and kept[0] == 0 and kept[1] >= 9
    assert torch.equal(ids(rows(source, tmp_path, shards=1), list(range(60))), wanted)


def test_damaged_positions_are_refused(source: SourceConfig, tmp_path: Path) -> None:
    """They say which text comes next: a digit that has changed would be other rows, without a word."""

    def read(*numbers: int) -> torch.Tensor:
        stream = rows(source, tmp_path, shards=1)
        try:
            return ids(stream, list(numbers))
        finally:
            stream._workers.shutdown()  # it writes positions

    wanted = read(*range(30))
    path = tmp_path / "lane-000.json"
    path.write_text(path.read_text().replace('"taken": ', '"taken": 1', 1))
    with pytest.raises(UserError, match=r"lane-000.json is damaged: .* remove it"):
        read(0)
    for odd in ([], {"x": {}}):
        write_checksummed_json(path, odd)
        with pytest.raises(UserError, match="holds no positions of a stream; remove it"):
            read(0)
    for state in (None, {}, {"given": [0], "sources": []}, {"given": [0], "sources": [{"epoch": "x", "taken": 0}]}):
        write_checksummed_json(path, {"1": state})
        with pytest.raises(UserError, match=r"holds a position that is none of these sources .* remove the file"):
            read(7)
    path.unlink()
    assert torch.equal(read(*range(30)), wanted)


def test_seeds_shuffle(source: SourceConfig, tmp_path: Path) -> None:
    a, b = (ids(rows(source, tmp_path / str(seed), shards=1, seed=seed), list(range(6))) for seed in (0, 1))
    assert not torch.equal(a, b) and sorted(a.tolist()) == sorted(b.tolist())


def test_errors_of_workers_arrive(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n{')
    with pytest.raises(UserError, match="line 2 is not valid JSON"):
        ids(rows(SourceConfig(kind="jsonl", name=str(tmp_path / "x.jsonl")), tmp_path / "f", shards=1), [0])
