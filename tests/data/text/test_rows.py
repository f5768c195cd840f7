"""Rows of tokens: packing loses and repeats nothing, and streamed rows are the same for everyone, always."""

import itertools
import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthead.data.batch import NO_DOCUMENT
from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.text import streaming
from drafthead.data.text.documents import Documents
from drafthead.data.text.packing import MIN_PIECE, pack, text_documents
from drafthead.data.text.sources import SourceConfig
from drafthead.data.text.streaming import Mixture, SourceStream, StreamedRows
from drafthead.errors import UserError
from drafthead.files.local import read_checksummed_json, write_checksummed_json
from support import refuses

LENGTHS = st.lists(st.one_of(st.integers(0, 40), st.integers(14, 50)), min_size=1, max_size=25).filter(any)


def numbered(lengths: list[int]) -> Documents:
    """Documents whose tokens are all different, so that every token identifies its document."""
    ids = np.split(np.arange(1, sum(lengths) + 1, dtype=np.int32), np.cumsum(lengths)[:-1])
    return Documents.of(ids, [document % 3 > 0 for document in ids])


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(16, 33), st.booleans(), st.integers(0, 4))
def test_nothing_lost_repeated_or_crossed(lengths: list[int], seq_len: int, split: bool, depth: int) -> None:
    documents = numbered(lengths)
    rows = pack(documents, seq_len, split)
    batch = rows.batch(range(len(rows)))
    real = batch.document_ids != NO_DOCUMENT
    expected_ids = [ids if split else ids[:seq_len] for ids in documents]
    assert sorted(batch.input_ids[real].tolist()) == np.concatenate(expected_ids).tolist()
    assert not batch.loss_mask[~real].any() and not batch.input_ids[~real].any()
    for r in range(len(rows)):
        for number, (document, start, length, offset) in enumerate(rows.row(r)):
            here = slice(offset, offset + length)
            source = documents[document]
            assert batch.input_ids[r, here].tolist() == source[start : start + length].tolist()
            assert batch.loss_mask[r, here].tolist() == (source[start : start + length] % 3 > 0).tolist()
            assert batch.position_ids[r, here].tolist() == list(range(length))
            assert set(batch.document_ids[r, here].tolist()) == {number}
            assert length >= min(MIN_PIECE, len(source))
        assert sum(piece.length for piece in rows.row(r)) == int(real[r].sum())
    assert rows.trained_tokens.tolist() == batch.loss_mask.sum(1).tolist()
    assert rows.span(1, len(rows)).trained_tokens.tolist() == batch.loss_mask[1:].sum(1).tolist()

    # Targets of draft positions stay in their document.
    owner = {int(token): number for number, ids in enumerate(documents) for token in ids}
    targets, valid = batch.next_tokens(depth)
    for r, t in valid.nonzero().tolist():
        token, target = int(batch.input_ids[r, t]), int(targets[r, t])
        assert target == token + 1 + depth and owner[token] == owner[target] and target % 3 > 0
    # As many as an independent count gives: none is missing either.
    expected = 0
    for r in range(len(rows)):
        for document, start, length, _ in rows.row(r):
            expected += int((documents[document][start + 1 + depth : start + length] % 3 > 0).sum())
    assert int(valid.sum()) == expected


def test_split_fills_rows() -> None:
    rows = pack(numbered([100] * 20), 64, split=True)
    batch = rows.batch(range(len(rows)))
    assert len(rows) == 32 and (batch.document_ids[:-1] != NO_DOCUMENT).float().mean() > 0.97
    refuses("no document to pack", pack, numbered([0]), 16, True)


def test_whole_documents_fit_well_and_losses_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    lengths = [*np.random.default_rng(0).integers(40, 250, 500).tolist(), 600, 513]
    with caplog.at_level(logging.WARNING):
        rows = pack(numbered(lengths), 512, split=False)
    # Laying documents in order, one row at a time, takes 22 % more here.
    assert len(rows) * 512 <= 1.05 * sum(min(n, 512) for n in lengths)
    assert "2 of 502 documents are longer than 512 tokens" in caplog.text


def test_on_disk_equals_in_memory_and_rows_are_read_in_any_order(tmp_path: Path) -> None:
    lengths = [30, 50, 12, 70]
    memory = Documents(numbered(lengths).tokens, numbered(lengths).offsets)
    memory.save(tmp_path / "text")
    disk = Documents.open(tmp_path / "text")
    assert disk.digest == memory.digest != numbered([30, 50, 13, 69]).digest
    rows = pack(disk, 32, split=True)
    assert rows.digest == pack(memory, 32, split=True).digest != pack(memory, 33, split=True).digest
    batch, alone = rows.batch([3, 1]), rows.span(1, 3).batch([0])
    assert str(batch.input_ids.dtype) == "torch.int64" and batch.loss_mask.any()
    assert batch.input_ids[1].tolist() == alone.input_ids[0].tolist() == rows.batch([1]).input_ids[0].tolist()
    assert rows.documents_of([2, 0, 1]) == [1, 2, 0]
    refuses("documents.json does not exist", Documents.open, tmp_path)


def test_text_documents() -> None:
    tokenizer = tiny_tokenizer()
    documents = list(text_documents(tokenizer, ["ab", "", "é"]))
    assert [ids.tolist() for ids in documents] == [[97, 98, 258], [258], [195, 169, 258]]
    assert all(ids.dtype == np.int32 for ids in documents)
    endless = ("word " * n for n in itertools.count(1))
    assert sum(map(len, text_documents(tokenizer, endless, max_tokens=5000))) == 5000
    tokenizer.eos_token = None
    refuses("no end-of-sequence token", list, text_documents(tokenizer, ["a"]))


# Streams --------------------------------------------------------------------------------------------------------------


TOKENIZER = tiny_tokenizer()
T = 32


def hub(folder: Path, files: int, rows: int = 12, **settings: Any) -> SourceConfig:
    """A dataset of several files that ``datasets`` streams, including rows without text."""
    folder.mkdir(parents=True, exist_ok=True)
    for f in range(files):
        texts = [f"{folder.name} {f} {i}" for i in range(rows)]
        texts[3], texts[5] = " ", None  # type: ignore[call-overload]
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"part-{f}.jsonl").write_text("\n".join(lines))
    return SourceConfig(kind="hf", name=str(folder), **settings)


def local(path: Path, rows: int = 40, **settings: Any) -> SourceConfig:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps({"text": f"{path.stem} {i}"}) for i in range(rows)))
    return SourceConfig(kind="jsonl", name=str(path), **settings)


def take(stream: Any, count: int) -> list[str]:
    return list(islice(iter(stream.__next__, None), count))


@pytest.mark.parametrize(("files", "shards"), [(5, 2), (5, 5), (2, 3), (1, 1)])
@pytest.mark.parametrize("kind", ["hf", "jsonl"])
def test_shards_share_out_every_text(tmp_path: Path, kind: str, files: int, shards: int) -> None:
    """By files if there are enough, else row by row; each text once an epoch."""
    source = hub(tmp_path / "set", files) if kind == "hf" else local(tmp_path / "set.jsonl", files * 10)
    seen: list[str] = []
    for shard in range(shards):
        stream = SourceStream(source, shard, shards)
        epoch: list[str] = []
        while stream.state()["epoch"] == 0:
            epoch.append(next(stream))
        assert [*epoch[:-1]] and epoch[-1] == epoch[0], "the next epoch begins as this one did"
        seen += epoch[:-1]
    assert len(seen) == len(set(seen)) == files * 10


@pytest.mark.parametrize(("files", "shards"), [(5, 2), (2, 3)])
def test_every_position_goes_on_to_the_text(tmp_path: Path, files: int, shards: int) -> None:
    """Positions travel as JSON, over the ends of files, rows and epochs, and through a position not yet used."""
    first, last = hub(tmp_path / "a", files, weight=2), hub(tmp_path / "c", 9, weight=1)
    sources = [first, local(tmp_path / "b.jsonl", weight=1), last]
    texts, states = [], []
    mixture = Mixture(sources, 1, shards)
    for _ in range(60):
        states.append(json.dumps(mixture.state()))
        texts.append(next(mixture))
    assert len(set(texts)) < len(texts), "no epoch ended"
    for start in (0, 1, 17, 58):
        other = Mixture(sources, 1, shards)
        other.load(json.loads(states[start]))
        assert json.loads(json.dumps(other.state())) == json.loads(states[start])
        assert take(other, 60 - start) == texts[start:]
    # Back and forth, in the same object.
    mixture.load(json.loads(states[30]))
    assert take(mixture, 5) == texts[30:35]


def test_a_position_spares_reading_what_is_before_it(tmp_path: Path) -> None:
    """Files that lie behind could not even be read. ``datasets`` opens the first one, for the columns' types, and the
    one before the position's, at its end."""
    source = hub(tmp_path / "set", 6, rows=30)
    stream = SourceStream(source, 0, 1)
    take(stream, 5 * 28 + 10)
    state = stream.state()
    expected = next(stream)
    assert expected.startswith("set 5 ")
    for f in (1, 2, 3):
        (tmp_path / "set" / f"part-{f}.jsonl").write_text("no JSON")
    again = SourceStream(source, 0, 1)
    again.load(state)
    assert next(again) == expected
    refuses("could not be read", take, SourceStream(source, 0, 1), 5 * 28)


def test_parts_of_the_characters(tmp_path: Path) -> None:
    short = local(tmp_path / "s.jsonl", 50, weight=3)
    long = local(tmp_path / "long-name-and-so-long-texts.jsonl", 50, weight=1)
    mixture = Mixture([short, long], 0, 1)
    given = {"s": 0, "long": 0}
    for n, text in enumerate(take(mixture, 400)):
        given["long" if text.startswith("long") else "s"] += len(text)
        total = sum(given.values())
        assert n < 5 or abs(given["s"] - 0.75 * total) <= 32, "no stretch may be off by more than a text"
    equal = Mixture([SourceConfig(kind="jsonl", name=short.name), SourceConfig(kind="jsonl", name=long.name)], 0, 1)
    texts = take(equal, 400)
    longer = sum(len(t) for t in texts if t.startswith("long"))
    assert abs(longer / sum(map(len, texts)) - 0.5) < 0.01


def test_a_limit_is_of_the_source_not_of_a_shard(tmp_path: Path) -> None:
    for source in (hub(tmp_path / "set", 5, limit=20), local(tmp_path / "x.jsonl", 50, limit=20)):
        seen = set()
        for shard in range(2):
            seen |= set(take(SourceStream(source, shard, 2), 60))
        assert len(seen) == (16 if source.kind == "hf" else 20)  # rows without a text count as read


def test_bad_streams(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no text for shard 3 of 3; lower data.text.stream_shards"):
        take(SourceStream(local(tmp_path / "x.jsonl", 2), 2, 3), 1)
    with pytest.raises(UserError, match=r"row 0 has no column 'body'; present: text"):
        take(SourceStream(hub(tmp_path / "a", 1, column="body"), 0, 1), 1)
    with pytest.raises(UserError, match="names a path that does not exist"):
        take(SourceStream(SourceConfig(kind="hf", name=str(tmp_path / "none")), 0, 1), 1)


# Rows ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SourceConfig:
    monkeypatch.setattr(streaming, "WINDOW", 6)
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
    starts = ((batch.position_ids == 0) & batch.loss_mask).nonzero().tolist()
    first_words = ["".join(map(chr, batch.input_ids[row, column : column + 4].tolist())) for row, column in starts]
    assert first_words.count("text") > 0.5 * len(first_words)
    for row in range(40):
        documents = batch.document_ids[row][batch.loss_mask[row]].tolist()
        assert sorted(documents, key=documents.index) == documents


def test_a_row_is_the_same_whoever_asks(source: SourceConfig, tmp_path: Path) -> None:
    """One process or several, forwards or backwards, one worker or more, from the start or after one."""
    expected = ids(rows(source, tmp_path / "one"), list(range(96)))
    assert len({tuple(row) for row in expected.tolist()}) > 80
    for world in (2, 4):
        for rank in range(world):
            mine = [n for n in range(96) if n // 2 % world == rank]
            assert torch.equal(ids(rows(source, tmp_path / f"{world}-{rank}"), mine), expected[mine])
    together = [rows(source, tmp_path / "shared", workers=1) for _ in range(3)]  # not a divisor of the number of shards
    for rank, stream in enumerate(together):
        mine = [n for n in range(96) if n // 2 % 3 == rank]
        assert torch.equal(ids(stream, mine), expected[mine])
    backwards = list(range(95, -1, -1))
    assert torch.equal(ids(rows(source, tmp_path / "back"), backwards), expected[backwards])
    assert torch.equal(ids(rows(source, tmp_path / "one"), [90, 3, 41]), expected[[90, 3, 41]])


def test_a_process_reads_its_shards_only(source: SourceConfig, tmp_path: Path) -> None:
    stream = rows(source, tmp_path)
    ids(stream, [n for n in range(96) if n // 2 % 2 == 1])
    assert sorted(path.name for path in tmp_path.glob("lane-*.json")) == ["lane-001.json", "lane-003.json"]


def test_a_restart_reads_only_its_window(source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(rows(source, tmp_path, shards=1), list(range(60)))
    reads: list[int] = []
    original = Mixture.__next__
    monkeypatch.setattr(Mixture, "__next__", lambda self: reads.append(1) or original(self))
    assert torch.equal(ids(rows(source, tmp_path, shards=1), [54, 55]), expected[54:56])
    assert len(reads) < 30, "60 rows of 32 bytes have some 40 texts, 12 rows hardly 10"


def test_positions_are_forgotten_in_the_end(
    source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "KEPT_POSITIONS", 8)
    stream = rows(source, tmp_path, shards=1)
    expected = ids(stream, list(range(60)))
    ids(stream, [6 * (streaming.KEPT_POSITIONS + 10)])
    positions = sorted(map(int, read_checksummed_json(tmp_path / "lane-000.json")))
    assert len(positions) == streaming.KEPT_POSITIONS + 1 and positions[0] == 0 and positions[1] >= 9
    assert torch.equal(ids(rows(source, tmp_path, shards=1), list(range(60))), expected)


def test_odd_positions_are_refused(source: SourceConfig, tmp_path: Path) -> None:
    path = tmp_path / "lane-000.json"
    for odd in ([], {"x": {}}):
        write_checksummed_json(path, odd)
        refuses("holds no positions of a stream", rows, source, tmp_path, shards=1)
    for state in (None, {}, {"given": [0], "sources": []}, {"given": [0], "sources": [{"epoch": "x", "taken": 0}]}):
        write_checksummed_json(path, {"1": state})
        refuses("holds a position of other sources", ids, rows(source, tmp_path, shards=1), [7])


def test_seeds_shuffle(source: SourceConfig, tmp_path: Path) -> None:
    a, b = (ids(rows(source, tmp_path / str(seed), shards=1, seed=seed), list(range(6))) for seed in (0, 1))
    assert not torch.equal(a, b) and sorted(a.tolist()) == sorted(b.tolist())


def test_errors_of_workers_arrive(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n{')
    with pytest.raises(UserError, match="line 2 is not valid JSON"):
        ids(rows(SourceConfig(kind="jsonl", name=str(tmp_path / "x.jsonl")), tmp_path / "f", shards=1), [0])
