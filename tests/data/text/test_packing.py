"""Packing loses nothing, repeats nothing, and no target crosses a document."""

import itertools
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthead.data.batch import NO_DOCUMENT
from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.text.documents import Documents
from drafthead.data.text.packing import MIN_PIECE, pack, text_documents
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


def test_bad_input() -> None:
    refuses("no document to pack", pack, numbered([0]), 16, True)


def test_text_documents() -> None:
    tokenizer = tiny_tokenizer()
    documents = list(text_documents(tokenizer, ["ab", "", "é"]))
    assert [ids.tolist() for ids in documents] == [[97, 98, 258], [258], [195, 169, 258]]
    assert all(ids.dtype == np.int32 for ids in documents)
    endless = ("word " * n for n in itertools.count(1))
    assert sum(map(len, text_documents(tokenizer, endless, max_tokens=5000))) == 5000
    tokenizer.eos_token = None
    refuses("no end-of-sequence token", list, text_documents(tokenizer, ["a"]))
