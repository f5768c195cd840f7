"""Hidden states of documents on disk. S tokens of all documents, T of one."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafthead.errors import UserError
from drafthead.files.local import check_manifest, disk_errors, exclusive, require_space, safe_join, write_manifest

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FORMAT = 3  # stores of other versions are not opened
_STATES, _MARKS = "states.bin", "marks.bin"


class StoredStates:
    """Hidden states of documents in one file, which several processes and runs can fill. The file is sparse: documents
    that are not filled take no space. A document's checksum is written after its states, and compared when a process
    first reads it. This detects documents that a kill, a power failure or a bad disk has damaged."""

    def __init__(
        self, folder: Path, lengths: npt.NDArray[np.int64], width: int, dtype: str, manifest: dict[str, Any]
    ) -> None:
        """Create a store for documents of ``lengths`` tokens in ``folder``, or open the existing one. ``width`` is the
        number of values per token, ``dtype`` "float16" or "bfloat16". ``manifest`` names all that determines the states
        (base, tokens, layers), as JSON values. An existing store with other sizes or another manifest raises a
        ``UserError``."""
        self.folder, self.width, self._dtype_name, self._dtype = folder, width, dtype, _DTYPES[dtype]
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])
        count, tokens = len(lengths), int(self._offsets[-1])
        sizes = {"documents": count, "tokens": tokens, "width": width, "dtype": dtype, "format": FORMAT}
        with exclusive(folder):
            if not check_manifest(folder, {**manifest, "store": sizes}, "remove the folder or choose another one"):
                with disk_errors("hidden states", folder):
                    for name, size in ((_STATES, tokens * self._token_bytes), (_MARKS, 4 * count)):
                        with (folder / name).open("wb") as file:
                            file.truncate(size)
                    write_manifest(folder, {**manifest, "store": sizes})
        self._states = _of_size(folder, _STATES, tokens * self._token_bytes)
        self._marks = np.memmap(_of_size(folder, _MARKS, 4 * count), np.uint32, "r")  # per document; 0: not filled
        self._checked = np.zeros(count, dtype=np.bool_)

    @property
    def _token_bytes(self) -> int:
        return self.width * self._dtype.itemsize

    def missing(self, documents: Sequence[int]) -> list[int]:
        """Return the ``documents`` that are not filled, by all processes so far."""
        marks = np.fromfile(self.folder / _MARKS, np.uint32)  # the map may be behind on a network file system
        return [document for document in documents if not marks[document]]

    def require_space(self, documents: Sequence[int]) -> None:
        tokens = sum(int(self._offsets[n + 1] - self._offsets[n]) for n in documents)
        require_space(self.folder, tokens * self._token_bytes, "hidden states")

    def write(self, documents: Sequence[int], values: Sequence[Tensor]) -> None:
        """Store the states [T, width] of each document, of any float dtype and device. Raises a ``UserError`` if a
        finite value overflows the store's dtype; no document is then stored."""
        stored = [self._rounded(states) for states in values]
        with disk_errors("hidden states", self.folder):
            # Not by the map: if the disk is full, writing to a map ends the process.
            with (self.folder / _STATES).open("r+b") as file:
                for document, data in zip(documents, stored, strict=True):
                    file.seek(int(self._offsets[document]) * self._token_bytes)
                    file.write(data.data)
            self._mark(documents, [_checksum(data) for data in stored])

    def read(self, documents: Sequence[int]) -> list[Tensor]:
        """Return the states [T, width] of each document. A missing or damaged document raises a ``UserError``. A
        damaged one counts as missing from then on."""
        result = []
        with self._states.open("rb") as file:  # a map would count all that was read as this process's memory
            for document in documents:
                if not self._marks[document]:
                    what = f"document {document} of {self.folder} has no hidden states yet"
                    raise UserError(f"{what}; give the same command again to compute them")
                tokens = int(self._offsets[document + 1] - self._offsets[document])
                data = np.empty((tokens, self.width), np.int16)  # numpy has no bfloat16
                file.seek(int(self._offsets[document]) * self._token_bytes)
                complete = file.readinto(data.data) == data.nbytes
                if not self._checked[document]:
                    if not complete or _checksum(data) != self._marks[document]:
                        self._mark([document], [0])
                        what = f"document {document} of {self.folder} does not match its checksum"
                        raise UserError(f"{what}; give the same command again to recompute it")
                    self._checked[document] = True
                result.append(torch.from_numpy(data).view(self._dtype))
        return result

    def _rounded(self, values: Tensor) -> npt.NDArray[np.int16]:
        """Round states to the store's dtype, in host memory, and check that all finite values fit."""
        values = values.detach()
        stored = values.to(self._dtype)
        overflow = torch.isinf(stored) & torch.isfinite(values)
        if bool(overflow.any()):
            largest = float(values[overflow].abs().max())
            what = f"a hidden state of {largest:.3g} does not fit {self._dtype_name}"
            limit = f"largest {torch.finfo(self._dtype).max:.3g}"
            raise UserError(f"{what} ({limit}); set base.dtype=bfloat16 to store hidden states in bfloat16")
        return stored.cpu().contiguous().view(torch.int16).numpy()

    def _mark(self, documents: Sequence[int], checksums: Sequence[int]) -> None:
        with (self.folder / _MARKS).open("r+b") as file:
            for document, checksum in zip(documents, checksums, strict=True):
                file.seek(4 * document)
                file.write(np.uint32(checksum).tobytes())


def _of_size(folder: Path, name: str, expected: int) -> Path:
    path = safe_join(folder, name)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} cannot be opened ({error.strerror}); remove {folder} to fill it again") from None
    if size != expected:
        raise UserError(f"{path} has {size} bytes, expected {expected}; remove {folder} to fill it again")
    return path


def _checksum(states: npt.NDArray[np.int16]) -> int:
    """Return the checksum of a document's bytes. It is never 0, because 0 marks an unfilled document."""
    return zlib.crc32(np.ascontiguousarray(states).data) or 1
