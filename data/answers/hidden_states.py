"""The frozen base's hidden states per packed row, on disk. R rows, T row length, D width."""

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import check_manifest, disk_errors, exclusive, require_space, safe_join, write_manifest

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FORMAT = 2
"""Of the files; caches of another one are not opened."""
_REMEDY = "remove the folder or choose another one for these settings"


class HiddenStateCache:
    """Rows of hidden states in one memory-mapped file; filling it can be resumed.

    Several processes may fill different rows. A row's checksum is written after the row and compared when a process
    first reads it, so neither a kill nor a power failure nor a bad disk can pass half a row off as a whole one.
    """

    def __init__(self, folder: Path, shape: tuple[int, int, int], dtype: str) -> None:
        """Map existing files; use ``create``."""
        self.folder = folder
        self.rows, self.seq_len, self.width = shape
        self._name = dtype
        self._dtype = _DTYPES[dtype]
        # numpy has no bfloat16: the file is mapped as integers of the same size and viewed by torch.
        self._stored = _map(folder, "features.bin", np.int16, shape)
        self._values = torch.from_numpy(self._stored).view(self._dtype)
        self._checksums = _map(folder, "marks.bin", np.uint32, (self.rows,))
        self._checked = np.zeros(self.rows, dtype=np.bool_)

    @classmethod
    def create(
        cls, folder: Path, rows: int, seq_len: int, width: int, dtype: str, manifest: dict[str, Any]
    ) -> "HiddenStateCache":
        """A cache for [R, T, D] values; one that exists with the same settings is opened with what it holds.

        Of several processes that create the same cache at once one makes the files, and the others wait. ``manifest``
        is what makes the hidden states (base, revision, corpus; JSON values).
        """
        sizes = {"rows": rows, "seq_len": seq_len, "width": width, "dtype": dtype}
        entries = {**manifest, "cache": {**sizes, "format": FORMAT}}
        with exclusive(folder):
            if not check_manifest(folder, entries, _REMEDY):
                size = rows * seq_len * width * _DTYPES[dtype].itemsize
                require_space(folder, size + 4 * rows, "the cache of hidden states")
                with disk_errors("the cache of hidden states", folder):
                    _reserve(folder / "features.bin", size)
                    _reserve(folder / "marks.bin", 4 * rows)
                    write_manifest(folder, entries)
        return cls(folder, (rows, seq_len, width), dtype)

    def write(self, row_numbers: list[int], values: Tensor) -> None:
        """Store ``values`` [b, T, D] (any float dtype, any device) as the rows ``row_numbers``."""
        source = values.detach().cpu()
        stored = source.to(self._dtype)
        overflow = torch.isinf(stored) & torch.isfinite(source)
        if bool(overflow.any()):
            largest = float(source[overflow].abs().max())
            raise UserError(
                f"a hidden state of {largest:.3g} does not fit {self._name} (largest "
                f"{torch.finfo(self._dtype).max:.3g}); set base.dtype=bfloat16, whose hidden states are kept as such"
            )
        self._values[row_numbers] = stored
        for row in row_numbers:
            self._checksums[row] = _checksum(self._stored[row])
            self._checked[row] = True

    def read(self, row_numbers: list[int]) -> Tensor:
        """The rows ``row_numbers`` as [b, T, D] float32."""
        missing = [row for row in row_numbers if not self._checksums[row]]
        if missing:
            raise UserError(f"rows {missing[:5]} of {self.folder} have no hidden states yet; fill the cache first")
        for row in row_numbers:
            if not self._checked[row] and self._checksums[row] != _checksum(self._stored[row]):
                self._checksums[row] = 0
                raise UserError(
                    f"row {row} of {self.folder} does not have its checksum: the disk or a crash damaged it. Give the "
                    "same command again, and the row is computed anew"
                )
            self._checked[row] = True
        return self._values[row_numbers].to(torch.float32)

    def missing_rows(self) -> list[int]:
        """Numbers of the rows that are not filled, ascending."""
        return [int(row) for row in np.flatnonzero(self._checksums == 0)]


def _map(folder: Path, name: str, dtype: type, shape: tuple[int, ...]) -> "np.memmap[Any, Any]":
    path, size = safe_join(folder, name), int(np.prod(shape)) * np.dtype(dtype).itemsize
    try:
        found = path.stat().st_size
        if found != size:
            raise UserError(f"{path} has {found} bytes, expected {size}; remove {folder}, and it is filled again")
        return np.memmap(path, dtype=dtype, mode="r+", shape=shape)
    except OSError as error:
        raise UserError(
            f"{path} cannot be opened ({error.strerror}); remove {folder}, and it is filled again"
        ) from None


def _checksum(row: npt.NDArray[Any]) -> int:
    """Of one row's bytes; 0 stands for a row that is not filled."""
    return zlib.crc32(np.ascontiguousarray(row).data) or 1


def _reserve(path: Path, size: int) -> None:
    """A file of ``size`` zero bytes that really has its blocks: a full disk under a sparse map kills the process."""
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
