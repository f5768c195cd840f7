"""Tokenised documents in one flat array, in memory or mapped from disk. N documents, S tokens in all."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from drafthead.errors import UserError
from drafthead.files.local import (
    disk_errors,
    file_digest,
    new_file,
    read_checksummed_json,
    safe_join,
    write_checksummed_json,
)

TOKENS, _INDEX = "tokens.bin", "documents.json"
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Documents:
    """Token ids of documents, which count from 0. Drafts never cross a document's ends."""

    tokens: Ids
    """[S]"""
    offsets: npt.NDArray[np.int64]
    """[N + 1]: document n is ``tokens[offsets[n] : offsets[n + 1]]``."""
    trained: npt.NDArray[np.bool_] | None = None
    """[S] True for tokens that may be targets of drafts in training; None: all may."""

    @classmethod
    def of(cls, documents: Sequence[Ids], trained: Sequence[npt.NDArray[np.bool_]] | None = None) -> "Documents":
        """Join documents in memory; ``trained`` has a mask per document."""
        tokens = np.concatenate([np.zeros(0, np.int32), *documents], dtype=np.int32)
        return cls(tokens, _offsets([*map(len, documents)]), None if trained is None else np.concatenate(trained))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Ids:
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[N]"""
        return np.diff(self.offsets)

    @cached_property
    def digest(self) -> str:
        """Hash of all tokens and lengths: 16 hexadecimal digits."""
        digest = hashlib.sha256(np.ascontiguousarray(self.tokens).data)
        digest.update(self.offsets.data)
        return digest.hexdigest()[:16]


def write_documents(folder: Path, documents: Iterable[Ids]) -> None:
    """Write documents to ``folder`` one by one, with a checksum."""
    with disk_errors("the tokenised text", folder), new_file(folder / TOKENS) as tmp_path:
        lengths = []
        with tmp_path.open("wb") as file:
            for ids in documents:
                file.write(ids.astype("<i4").data)
                lengths.append(len(ids))
        write_checksummed_json(folder / _INDEX, {"lengths": lengths, "sha256": file_digest(tmp_path)})


def open_documents(folder: Path) -> Documents:
    """Memory-map the documents that ``write_documents`` wrote to ``folder``; raise a ``UserError`` if damaged."""
    path, again = safe_join(folder, TOKENS), f"remove {folder}, and its text is tokenised again"
    try:
        index = read_checksummed_json(safe_join(folder, _INDEX))
        if file_digest(path) != index["sha256"]:
            raise UserError(f"{path} is damaged: its checksum is not the one in {_INDEX}; {again}")
        offsets = _offsets(index["lengths"])
        return Documents(np.memmap(path, "<i4", "r") if offsets[-1] else np.zeros(0, np.int32), offsets)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {again}") from None


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
