"""Packing of documents into rows of one length. R rows, T row length, B batch."""

import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from drafthead.data.batch import NO_DOCUMENT, TrainBatch
from drafthead.data.text.chat import Document, Tokenizer
from drafthead.errors import UserError, one_line
from drafthead.files.local import disk_errors, file_digest, new_file, read_json, safe_join, write_json

MIN_PIECE = 8
"""Smallest piece of a cut document, in tokens, because drafts need context before them and targets after."""
OPEN_ROWS = 64
"""Number of partly filled rows among which the best fit for a whole document is searched."""
ROWS_PER_WRITE = 256
_FILE, _CHECKSUM = "rows.arrow", "rows.sha256.json"
_ROW = {"input_ids": pa.int32(), "position_ids": pa.int32(), "document_ids": pa.int32(), "loss_mask": pa.bool_()}
"""Columns of a packed row that have a value per token, and their types."""
_Array = npt.NDArray[Any]
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass
class PackedRow:
    """A partly filled row."""

    space: int
    """Number of tokens that still fit."""
    pieces: list[tuple[int, int, Document]] = field(default_factory=list)
    """Per piece: the document's number, the start of the piece in the document, and the piece itself."""

    def add(self, number: int, document: Document, start: int, length: int) -> None:
        """Append ``length`` tokens of ``document`` from token ``start`` on; ``number`` is the document's number."""
        span = slice(start, start + length)
        self.pieces.append((number, start, Document(document.input_ids[span], document.loss_mask[span])))
        self.space -= length


def pack(documents: Iterable[Document], seq_len: int, split: bool, folder: Path | None = None) -> datasets.Dataset:
    """Pack the documents that are not empty into rows of ``seq_len`` tokens (T >= 16).

    Args:
        documents: the documents in order.
        seq_len: T.
        split: True cuts documents that do not fit. The pieces have at least ``MIN_PIECE`` tokens, their own document
            ids and positions from 0. Rows are then full except for a few tokens. False keeps documents whole and puts
            each into the row with the best fit. A document longer than a row loses its end; the log reports the number
            of such documents.
        folder: rows are written to a file there and memory-mapped. None keeps them in memory (13 bytes per token).

    Returns:
        A dataset of R rows with the columns input_ids, position_ids, document_ids (int32) and loss_mask (bool), each
        [R, T], and pieces: per row a list of [document number, start in the document, length, offset in the row].
        Document numbers count all ``documents`` from 0, including empty ones. A token's document id is the number of
        its piece in the row, from 0; padding has ``NO_DOCUMENT`` and is not trained. A ``UserError`` is raised if there
        is no row.
    """
    rows = split_rows(documents, seq_len) if split else _whole_rows(documents, seq_len)
    if folder is None:
        sink = pa.BufferOutputStream()
        _write_rows(sink, rows, seq_len)
        dataset = datasets.Dataset.from_buffer(sink.getvalue())
    else:
        with disk_errors("the packed rows", folder), new_file(folder / _FILE) as tmp_path:
            with pa.OSFile(str(tmp_path), "wb") as sink:
                _write_rows(sink, rows, seq_len)
            write_json(folder / _CHECKSUM, {"sha256": file_digest(tmp_path)})
        dataset = open_packed(folder)
    if not len(dataset):
        raise UserError("there is no document to pack; check the data source")
    return dataset


def is_packed(folder: Path) -> bool:
    """Return True if ``folder`` has packed rows and their checksum."""
    return (folder / _FILE).exists() and (folder / _CHECKSUM).exists()


def open_packed(folder: Path) -> datasets.Dataset:
    """Memory-map the rows that ``pack`` wrote to ``folder``; raise a ``UserError`` if they are missing or damaged."""
    path = safe_join(folder, _FILE)
    again = f"remove {folder}, and its rows are packed again"
    if not path.exists():
        raise UserError(f"{path} is missing; {again}")
    try:
        if read_json(safe_join(folder, _CHECKSUM)) != {"sha256": file_digest(path)}:
            raise UserError(f"{path} is damaged: its checksum is not the one in {_CHECKSUM}; {again}")
        return datasets.Dataset.from_file(str(path))
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}); {again}") from None


def digest_rows(dataset: datasets.Dataset) -> str:
    """Return a hash (16 hexadecimal digits) of the tokens and document ids of all rows."""
    digest = hashlib.sha256()
    for start in range(0, len(dataset), 64):
        batch = collate(dataset, list(range(start, min(len(dataset), start + 64))))
        digest.update(batch.input_ids.numpy().astype(np.int32).tobytes())
        digest.update(batch.document_ids.numpy().astype(np.int32).tobytes())
    return digest.hexdigest()[:16]


def collate(dataset: datasets.Dataset, row_numbers: list[int]) -> TrainBatch:
    """Return the rows ``row_numbers`` of a packed dataset as one batch [B, T], in that order."""
    table = dataset.with_format("arrow")[row_numbers]
    flat = {name: table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False) for name in _ROW}
    return _batch({name: values.reshape(len(row_numbers), -1) for name, values in flat.items()})


def collate_rows(rows: list[PackedRow], seq_len: int) -> TrainBatch:
    """Return packed rows from memory, padded to ``seq_len``, as one batch [B, T]."""
    return _batch(_arrays(rows, seq_len)[0])


def _batch(columns: dict[str, _Array]) -> TrainBatch:
    dtypes = {"loss_mask": np.bool_}
    tensors: Any = {n: torch.from_numpy(array.astype(dtypes.get(n, np.int64))) for n, array in columns.items()}
    return TrainBatch(**tensors)


def text_documents(tokenizer: Tokenizer, texts: Iterable[str], max_tokens: int | None = None) -> Iterator[Document]:
    """Tokenise texts; yield each as a document whose tokens are all trained and which ends with the EOS token.

    Special tokens that the tokenizer puts first (a BOS) are kept, because the base expects them. ``max_tokens``: stop
    after exactly this number of tokens, which may cut the last document; None: no limit.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            "the tokenizer has no end-of-sequence token, so documents cannot be closed; set eos_token in its "
            "tokenizer_config.json"
        )
    left = max_tokens
    for batch in _batched(texts, 128):
        for ids in tokenizer(batch, verbose=False)["input_ids"]:
            if not ids or ids[-1] != tokenizer.eos_token_id:
                ids = [*ids, tokenizer.eos_token_id]
            array = np.asarray(ids[:left], dtype=np.int32)
            yield Document(array, np.ones(len(array), dtype=np.bool_))
            if left is not None:
                left -= len(array)
                if left == 0:
                    return


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def split_rows(documents: Iterable[Document], seq_len: int) -> Iterator[PackedRow]:
    """Yield rows of ``seq_len`` tokens, filled with ``documents`` in order; those that do not fit are cut in pieces."""
    row = PackedRow(seq_len)
    for number, document in enumerate(documents):
        start = 0
        while start < len(document):
            # Of 20 tokens, a space of 15 takes 12: both pieces have at least ``MIN_PIECE`` tokens.
            rest = len(document) - start
            take = rest if rest <= row.space else min(row.space, rest - MIN_PIECE)
            if rest > row.space and take < MIN_PIECE:
                yield row
                row = PackedRow(seq_len)
                continue
            row.add(number, document, start, take)
            start += take
    if row.pieces:
        yield row


def _whole_rows(documents: Iterable[Document], seq_len: int) -> Iterator[PackedRow]:
    """Yield rows of ``seq_len`` tokens, filled with whole documents; a document longer than a row loses its end.

    A document is added to the fullest of up to ``OPEN_ROWS`` unfinished rows in which it fits, or to a new row.
    """
    rows: list[PackedRow] = []
    total = shortened = 0
    for number, document in enumerate(documents):
        length = min(len(document), seq_len)
        if not length:
            continue
        total += 1
        shortened += length < len(document)
        row = min((row for row in rows if row.space >= length), key=lambda row: row.space, default=None)
        if row is None:
            if len(rows) == OPEN_ROWS:
                fullest = min(rows, key=lambda r: r.space)
                rows.remove(fullest)
                yield fullest
            row = PackedRow(seq_len)
            rows.append(row)
        row.add(number, document, 0, length)
        if not row.space:
            rows.remove(row)
            yield row
    yield from rows
    if shortened:
        _log.warning("%d of %d documents are longer than %d tokens and lost their ends", shortened, total, seq_len)


def _write_rows(sink: pa.NativeFile, rows: Iterator[PackedRow], seq_len: int) -> None:
    pieces_type = pa.list_(pa.list_(pa.int64(), 4))
    columns = {name: pa.list_(kind, seq_len) for name, kind in _ROW.items()} | {"pieces": pieces_type}
    with pa.ipc.new_stream(sink, pa.schema(columns)) as writer:
        for batch in _batched(rows, ROWS_PER_WRITE):
            arrays, pieces = _arrays(batch, seq_len)
            lists = [pa.FixedSizeListArray.from_arrays(pa.array(a.ravel()), seq_len) for a in arrays.values()]
            lists.append(pa.array(pieces, type=pieces_type))
            writer.write_batch(pa.RecordBatch.from_arrays(lists, schema=pa.schema(columns)))


def _arrays(rows: list[PackedRow], seq_len: int) -> tuple[dict[str, _Array], list[list[list[int]]]]:
    """Return the columns of ``_ROW``, each [R, T] for R ``rows``, and the column ``pieces`` that ``pack`` describes."""
    arrays = {name: np.zeros((len(rows), seq_len), kind.to_pandas_dtype()) for name, kind in _ROW.items()}
    arrays["document_ids"][:] = NO_DOCUMENT
    pieces: list[list[list[int]]] = [[] for _ in rows]
    for r, row in enumerate(rows):
        offset = 0
        for number, (document, start, piece) in enumerate(row.pieces):
            columns = (piece.input_ids, np.arange(len(piece)), number, piece.loss_mask)
            for array, values in zip(arrays.values(), columns, strict=True):
                array[r, offset : offset + len(piece)] = values
            pieces[r].append([document, start, len(piece), offset])
            offset += len(piece)
    return arrays, pieces
