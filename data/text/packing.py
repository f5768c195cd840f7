"""Packing of documents into rows of one length. R rows, T row length, B batch, P pieces of documents."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from drafthead.data.batch import NO_DOCUMENT, TrainBatch
from drafthead.data.text.chat import Tokenizer
from drafthead.data.text.documents import Documents, Ids
from drafthead.errors import UserError

MIN_PIECE = 8  # tokens of a cut document: drafts need context before them and targets after
OPEN_ROWS = 64  # partly filled rows among which the best fit for a whole document is searched
Integers = npt.NDArray[np.int64]
_log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """A part of a document in a row."""

    document: int
    start: int  # first token in the document
    length: int
    offset: int  # first token in the row


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of T tokens, as an index into documents."""

    documents: Documents
    seq_len: int  # T
    pieces: Integers  # [P, 4], the ``Piece`` tuples of all rows
    bounds: Integers  # [R + 1]; row r consists of pieces[bounds[r] : bounds[r + 1]]

    @classmethod
    def of(cls, documents: Documents, seq_len: int, rows: Iterable[Sequence[Piece]]) -> "PackedRows":
        """Collect ``rows`` in order; raise a ``UserError`` if there are none."""
        pieces, bounds = list[Piece](), [0]
        for row in rows:
            pieces += row
            bounds.append(len(pieces))
        if not pieces:
            raise UserError("there is no document to pack; check the data source")
        return cls(documents, seq_len, np.array(pieces, dtype=np.int64), np.array(bounds, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def span(self, start: int, end: int) -> "PackedRows":
        return replace(self, bounds=self.bounds[start : end + 1])

    def row(self, number: int) -> list[Piece]:
        return [Piece(*piece) for piece in self.pieces[self.bounds[number] : self.bounds[number + 1]].tolist()]

    def documents_of(self, numbers: Iterable[int]) -> list[int]:
        """Return the documents of the rows ``numbers``, each once, in the order of their first use."""
        return list(dict.fromkeys(piece.document for number in numbers for piece in self.row(number)))

    @property
    def trained_tokens(self) -> Integers:  # [R]
        counts, trained = self.pieces[:, 2], self.documents.trained
        if trained is not None:
            before = np.concatenate([[0], np.cumsum(trained)])  # before[i]: trained ones among the first i tokens
            first = self.documents.offsets[self.pieces[:, 0]] + self.pieces[:, 1]
            counts = before[first + counts] - before[first]
        sums = np.concatenate([[0], np.cumsum(counts)])
        trained_tokens: Integers = sums[self.bounds[1:]] - sums[self.bounds[:-1]]
        return trained_tokens

    @property
    def digest(self) -> str:  # of the rows and their tokens, hexadecimal
        return sha256(self.documents.digest.encode() + self.pieces.tobytes() + self.bounds.tobytes()).hexdigest()

    def batch(self, numbers: Sequence[int]) -> TrainBatch:
        """Return the rows ``numbers`` as one batch [B, T], in that order. A token's document id is the number of its
        piece in the row. Padding has ``NO_DOCUMENT`` and is not trained."""
        shape, documents = (len(numbers), self.seq_len), self.documents
        input_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        document_ids, loss_mask = np.full(shape, NO_DOCUMENT), np.zeros(shape, np.bool_)
        for b, number in enumerate(numbers):
            for n, (document, start, length, offset) in enumerate(self.row(number)):
                first, here = documents.offsets[document] + start, slice(offset, offset + length)
                input_ids[b, here] = documents.tokens[first : first + length]
                position_ids[b, here] = np.arange(length)
                document_ids[b, here] = n
                loss_mask[b, here] = True if documents.trained is None else documents.trained[first : first + length]
        return TrainBatch(
            input_ids=torch.from_numpy(input_ids),
            position_ids=torch.from_numpy(position_ids),
            document_ids=torch.from_numpy(document_ids),
            loss_mask=torch.from_numpy(loss_mask),
        )


def pack(documents: Documents, seq_len: int, split: bool, numbers: Sequence[int] | None = None) -> PackedRows:
    """Pack documents that are not empty into rows of ``seq_len`` tokens (T >= 16), in the order of ``numbers``.
    ``numbers`` None takes all documents. ``split`` cuts documents that do not fit into pieces of at least ``MIN_PIECE``
    tokens, so that rows are full except for a few tokens. Otherwise each document stays whole in the row with the best
    fit. A document longer than a row then loses its end, and the log reports the number of such documents."""
    lengths = documents.lengths.tolist()
    chosen = ((number, lengths[number]) for number in (range(len(lengths)) if numbers is None else numbers))
    return PackedRows.of(documents, seq_len, split_rows(chosen, seq_len) if split else _whole_rows(chosen, seq_len))


def one_row(documents: Documents, numbers: Sequence[int]) -> TrainBatch:  # without padding
    total = sum(documents.lengths[[*numbers]].tolist())
    return pack(documents, total, split=True, numbers=numbers).batch([0])


def text_documents(tokenizer: Tokenizer, texts: Iterable[str], max_tokens: int | None = None) -> Iterator[Ids]:
    """Tokenise texts; yield the ids of each, which end with the EOS token. Special tokens that the tokenizer puts first
    (a BOS) are kept, because the base expects them. With ``max_tokens``, stop after exactly this number of tokens,
    which may cut the last document."""
    if tokenizer.eos_token_id is None:
        what = "the tokenizer has no end-of-sequence token, so documents cannot be closed"
        raise UserError(f"{what}; set eos_token in its tokenizer_config.json")
    left = max_tokens
    texts = iter(texts)
    while batch := list(islice(texts, 128)):
        for ids in tokenizer(batch, verbose=False)["input_ids"]:
            if not ids or ids[-1] != tokenizer.eos_token_id:
                ids = [*ids, tokenizer.eos_token_id]
            yield np.asarray(ids[:left], dtype=np.int32)
            if left is not None:
                left -= min(left, len(ids))
                if left == 0:
                    return


def split_rows(lengths: Iterable[tuple[int, int]], seq_len: int) -> Iterator[list[Piece]]:
    """Yield rows of ``seq_len`` tokens, filled with documents in order. Documents that do not fit are cut.
    ``lengths`` has (number, length) of each document."""
    row, space = list[Piece](), seq_len
    for number, length in lengths:
        start = 0
        while start < length:
            # Of 20 tokens, a space of 15 takes 12: both pieces have at least ``MIN_PIECE`` tokens.
            rest = length - start
            take = rest if rest <= space else min(space, rest - MIN_PIECE)
            if rest > space and take < MIN_PIECE:
                yield row
                row, space = [], seq_len
                continue
            row.append(Piece(number, start, take, seq_len - space))
            space -= take
            start += take
    if row:
        yield row


@dataclass(eq=False)
class _OpenRow:
    space: int  # number of tokens that still fit
    pieces: list[Piece]


def _whole_rows(lengths: Iterable[tuple[int, int]], seq_len: int) -> Iterator[list[Piece]]:
    """Yield rows of ``seq_len`` tokens, filled with whole documents; a document longer than a row loses its end. A
    document is added to the fullest of up to ``OPEN_ROWS`` unfinished rows in which it fits, or to a new row."""
    rows: list[_OpenRow] = []
    total = shortened = 0
    for number, length in lengths:
        if not length:
            continue
        total += 1
        shortened += length > seq_len
        length = min(length, seq_len)
        row = min((row for row in rows if row.space >= length), key=lambda row: row.space, default=None)
        if row is None:
            if len(rows) == OPEN_ROWS:
                fullest = min(rows, key=lambda row: row.space)
                rows.remove(fullest)
                yield fullest.pieces
            row = _OpenRow(seq_len, [])
            rows.append(row)
        row.pieces.append(Piece(number, 0, length, seq_len - row.space))
        row.space -= length
        if not row.space:
            rows.remove(row)
            yield row.pieces
    yield from (row.pieces for row in rows)
    if shortened:
        _log.warning("%d of %d documents are longer than %d tokens and lost their ends", shortened, total, seq_len)
