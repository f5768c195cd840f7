"""Tokenised documents in one flat array, in memory or mapped from disk. N documents, S tokens in all."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tokenize import TokenError

import numpy as np
import numpy.typing as npt

from drafthead.errors import UserError, one_line
from drafthead.files.local import disk_errors, new_file, read_checksummed_json, safe_join, write_checksummed_json

_TOKENS, _INDEX = "tokens.npy", "documents.json"
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Documents:
    """Token ids of documents, which are numbered from 0. Drafts never cross a document's ends."""

    tokens: Ids  # [S]
    offsets: npt.NDArray[np.int64]  # [N + 1]; document n is tokens[offsets[n] : offsets[n + 1]]
    trained: npt.NDArray[np.bool_] | None = None  # [S]; True: may be a target of a draft in training. None: all may

    @classmethod
    def of(cls, documents: Iterable[Ids], trained: Sequence[npt.NDArray[np.bool_]] | None = None) -> "Documents":
        documents = [np.zeros(0, np.int32), *documents]
        tokens = np.concatenate(documents, dtype=np.int32)
        offsets = np.cumsum([*map(len, documents)], dtype=np.int64)
        return cls(tokens, offsets, None if trained is None else np.concatenate(trained))

    @classmethod
    def open(cls, folder: Path) -> "Documents":
        """Memory-map what ``save`` wrote to ``folder``; raise a ``UserError`` if it is damaged."""
        path = safe_join(folder, _TOKENS)
        try:
            index = read_checksummed_json(safe_join(folder, _INDEX))
            documents = cls(np.load(path, mmap_mode="r"), np.array(index["offsets"], np.int64))
            if documents.tokens.dtype != np.int32:  # the header, which the digest leaves out, gives the byte order, too
                raise ValueError(f"its type is {documents.tokens.dtype.str}")
            if documents.digest != index["digest"]:
                raise ValueError("its checksum is another one")
        # numpy raises the last two for a damaged header.
        except (OSError, ValueError, EOFError, SyntaxError, TokenError) as error:
            what = f"{path} is damaged ({one_line(error)})"
            raise UserError(f"{what}; remove {folder}, and its text is tokenised again") from None
        return documents

    def save(self, folder: Path) -> None:
        with disk_errors("the tokenised text", folder):
            with new_file(folder / _TOKENS) as tmp_path, tmp_path.open("wb") as file:
                np.save(file, self.tokens)
            write_checksummed_json(folder / _INDEX, {"offsets": self.offsets.tolist(), "digest": self.digest})

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Ids:
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:  # [N]
        return np.diff(self.offsets)

    @cached_property
    def digest(self) -> str:  # of all tokens and lengths, hexadecimal
        digest = hashlib.sha256(np.ascontiguousarray(self.tokens).data)
        digest.update(self.offsets.data)
        return digest.hexdigest()
