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
from drafthead.data.text.chat import Document
from drafthead.data.text.packing import MIN_PIECE, collate, digest_rows, open_packed, pack, text_documents
from drafthead.errors import UserError

LENGTHS = st.lists(st.one_of(st.integers(0, 40), st.integers(14, 50)), min_size=1, max_size=25).filter(any)


def numbered(lengths: list[int]) -> list[Document]:
    """Documents whose tokens are all different, so that every token identifies its document."""
    ids = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    return [Document(ids, ids % 3 > 0) for ids in np.split(ids, np.cumsum(lengths)[:-1])]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(16, 33), st.booleans(), st.integers(0, 4))
def test_nothing_lost_repeated_or_crossed(lengths: list[int], seq_len: int, split: bool, depth: int) -> None:
    documents = numbered(lengths)
    dataset = pack(documents, seq_len, split)
    batch = collate(dataset, list(range(len(dataset))))
    real = batch.document_ids != NO_DOCUMENT
    expected_ids = [d.input_ids if split else d.input_ids[:seq_len] for d in documents]
    assert sorted(batch.input_ids[real].tolist()) == np.concatenate(expected_ids).tolist()
    assert not batch.loss_mask[~real].any() and not batch.input_ids[~real].any()
    for r, pieces in enumerate(dataset["pieces"]):
        for number, (document, start, length, offset) in enumerate(pieces):
            here = slice(offset, offset + length)
            source = documents[document]
            assert batch.input_ids[r, here].tolist() == source.input_ids[start : start + length].tolist()
            assert batch.loss_mask[r, here].tolist() == source.loss_mask[start : start + length].tolist()
            assert batch.position_ids[r, here].tolist() == list(range(length))
            assert set(batch.document_ids[r, here].tolist()) == {number}
            assert length >= min(MIN_PIECE, len(source))
        assert sum(p[2] for p in pieces) == int(real[r].sum())

    # Targets of draft positions stay in their document.
    owner = {int(token): number for number, d in enumerate(documents) for token in d.input_ids}
    targets, valid = batch.next_tokens(depth)
    for r, t in valid.nonzero().tolist():
        token, target = int(batch.input_ids[r, t]), int(targets[r, t])
        assert target == token + 1 + depth and owner[token] == owner[target] and target % 3 > 0
    # As many as an independent count gives: none is missing either.
    expected = 0
    for row in dataset["pieces"]:
        for document, start, length, _ in row:
            expected += int(documents[document].loss_mask[start + 1 + depth : start + length].sum())
    assert int(valid.sum()) == expected


def test_split_fills_rows() -> None:
    dataset = pack(numbered([100] * 20), 64, split=True)
    batch = collate(dataset, list(range(len(dataset))))
    assert len(dataset) == 32 and (batch.document_ids[:-1] != NO_DOCUMENT).float().mean() > 0.97


def test_whole_documents_fit_well_and_losses_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    lengths = [*np.random.default_rng(0).integers(40, 250, 500).tolist(), 600, 513]
    with caplog.at_level(logging.WARNING):
        dataset = pack(numbered(lengths), 512, split=False)
    # Laying documents in order, one row at a time, takes 22 % more here.
    assert len(dataset) * 512 <= 1.05 * sum(min(n, 512) for n in lengths)
    assert "2 of 502 documents are longer than 512 tokens" in caplog.text


def test_on_disk_equals_in_memory_and_collate_orders_rows(tmp_path: Path) -> None:
    documents = numbered([30, 50, 12, 70])
    memory, disk = pack(documents, 32, True), pack(documents, 32, True, tmp_path / "rows")
    other = pack(documents[1:], 32, True)
    assert digest_rows(open_packed(tmp_path / "rows")) == digest_rows(memory) != digest_rows(other)
    with pytest.raises(UserError, match="rows.arrow is missing"):
        open_packed(tmp_path)
    assert memory.to_dict() == disk.to_dict() and not list((tmp_path / "rows").glob("*.tmp"))
    batch = collate(disk, [3, 1])
    assert str(batch.input_ids.dtype) == "torch.int64"
    assert batch.input_ids.tolist() == [memory[3]["input_ids"], memory[1]["input_ids"]]
    assert collate(memory.select([2, 0]), [1]).input_ids.tolist() == [memory[0]["input_ids"]]


def test_bad_input() -> None:
    with pytest.raises(UserError, match="no document to pack"):
        pack(numbered([0]), 16, True)


def test_text_documents() -> None:
    tokenizer = tiny_tokenizer()
    documents = list(text_documents(tokenizer, ["ab", "", "é"]))
    assert [d.input_ids.tolist() for d in documents] == [[97, 98, 258], [258], [195, 169, 258]]
    assert all(d.loss_mask.all() and d.input_ids.dtype == np.int32 for d in documents)
    endless = ("word " * n for n in itertools.count(1))
    assert sum(map(len, text_documents(tokenizer, endless, max_tokens=5000))) == 5000
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token"):
        list(text_documents(tokenizer, ["a"]))
