"""Stored hidden states of the frozen base for packed rows. T row length, D hidden size, L early layers, b rows read."""

import os
import zlib
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafthead.data.answers.store import AnswerStore
from drafthead.errors import UserError
from drafthead.files.local import check_manifest, disk_errors, exclusive, require_space, safe_join, write_manifest

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FORMAT = 2
"""Version of the file format. Caches of other versions are not opened."""
_REMEDY = "remove the folder or choose another one for these settings"


class HiddenStateCache:
    """Hidden states of packed rows in one memory-mapped file, which can be filled in several runs.

    Several processes may fill different rows. A row's checksum is written after the row and compared when a process
    first reads the row. This detects rows damaged by a kill, a power failure or a bad disk.
    """

    def __init__(self, folder: Path, rows: int, seq_len: int, width: int, dtype: str, manifest: dict[str, Any]) -> None:
        """Create a cache of shape [rows, seq_len, width] in ``folder``, or open the existing one.

        If several processes call this at once, one creates the files and the others wait. ``width`` is the number of
        values per token. ``dtype`` is "float16" or "bfloat16". ``manifest`` names all that determines the hidden states
        (base, revision, corpus), as JSON values.
        An existing cache with another shape, dtype or manifest raises a ``UserError``.
        """
        self.folder, self._dtype_name, self._dtype = folder, dtype, _DTYPES[dtype]
        sizes = {"rows": rows, "seq_len": seq_len, "width": width, "dtype": dtype}
        entries = {**manifest, "cache": {**sizes, "format": FORMAT}}
        with exclusive(folder):
            if not check_manifest(folder, entries, _REMEDY):
                size = rows * seq_len * width * self._dtype.itemsize
                require_space(folder, size + 4 * rows, "the cache of hidden states")
                with disk_errors("the cache of hidden states", folder):
                    _reserve(folder / "features.bin", size)
                    _reserve(folder / "marks.bin", 4 * rows)
                    write_manifest(folder, entries)
        # numpy has no bfloat16: the file is mapped as integers of the same size and viewed by torch.
        self._stored = _map(folder, "features.bin", np.int16, (rows, seq_len, width))
        self._values = torch.from_numpy(self._stored).view(self._dtype)
        self._checksums = _map(folder, "marks.bin", np.uint32, (rows,))
        self._checked = np.zeros(rows, dtype=np.bool_)

    def write(self, row_numbers: list[int], values: Tensor) -> None:
        """Store ``values`` [b, T, width] (any float dtype and device) as the rows ``row_numbers``, which count from 0.

        Raises a ``UserError`` if a finite value overflows the cache's dtype.
        """
        source = values.detach().cpu()
        stored = source.to(self._dtype)
        overflow = torch.isinf(stored) & torch.isfinite(source)
        if bool(overflow.any()):
            largest = float(source[overflow].abs().max())
            raise UserError(
                f"a hidden state of {largest:.3g} does not fit {self._dtype_name} (largest "
                f"{torch.finfo(self._dtype).max:.3g}); set base.dtype=bfloat16 to store hidden states in bfloat16"
            )
        self._values[row_numbers] = stored
        for row in row_numbers:
            self._checksums[row] = _checksum(self._stored[row])
            self._checked[row] = True

    def read(self, row_numbers: list[int]) -> Tensor:
        """Return the rows ``row_numbers`` as [b, T, width] float32; raise a ``UserError`` for a missing or damaged row.

        A damaged row counts as missing from then on.
        """
        missing = [row for row in row_numbers if not self._checksums[row]]
        if missing:
            raise UserError(
                f"rows {missing[:5]} of {self.folder} have no hidden states yet; give the same command again to "
                "compute them"
            )
        for row in row_numbers:
            if not self._checked[row] and self._checksums[row] != _checksum(self._stored[row]):
                self._checksums[row] = 0
                raise UserError(
                    f"row {row} of {self.folder} does not match its checksum: the disk or a crash damaged the row. "
                    "Give the same command again to recompute it"
                )
            self._checked[row] = True
        return self._values[row_numbers].to(torch.float32)

    def missing_rows(self) -> list[int]:
        """Return the numbers of the rows that are not filled yet, ascending."""
        return [int(row) for row in np.flatnonzero(self._checksums == 0)]


class AnswerStates:
    """Hidden states of packed answers: final states from the answer store, and early layers from a cache."""

    def __init__(
        self, store: AnswerStore, rows: datasets.Dataset, prompt_numbers: list[int], layers: HiddenStateCache | None
    ) -> None:
        """Prepare to read the states of ``rows``, which ``pack`` made from answers in ``store``.

        ``prompt_numbers`` has the prompt number of each packed document, by document number. ``layers`` has the early
        layers of the same rows; None if the head reads only the final state.
        """
        self._store, self._prompt_numbers, self._layers = store, prompt_numbers, layers
        self._shape = len(rows[0]["input_ids"]), store.width
        self._pieces = rows.select_columns(["pieces"]).with_format("arrow")

    def read(self, row_numbers: list[int]) -> Tensor:
        """Return the rows ``row_numbers`` as [b, T, D (1 + L)] float32: the final state, then the early layers.

        Final states that are not stored, such as those of padding and of a document's last token, are NaN.
        """
        rows = []
        for pieces in self._pieces[row_numbers]["pieces"].to_pylist():
            row = torch.full(self._shape, torch.nan)
            for document, start, length, offset in pieces:
                states = self._store.hidden_states(self._prompt_numbers[document])
                assert states is not None
                # A document of n tokens has n - 1 states: the base never reads the last token.
                known = torch.from_numpy(states[start : start + length])
                row[offset : offset + len(known)] = known
            rows.append(row)
        finals = torch.stack(rows)
        return finals if self._layers is None else torch.cat([finals, self._layers.read(row_numbers)], -1)


StoredHiddenStates = AnswerStates | HiddenStateCache
"""Stored hidden states of packed rows, of width D (1 + L): the final state, then the early layers."""


def _map(folder: Path, name: str, dtype: type, shape: tuple[int, ...]) -> "np.memmap[Any, Any]":
    path, expected = safe_join(folder, name), int(np.prod(shape)) * np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
        if size != expected:
            raise UserError(f"{path} has {size} bytes, expected {expected}; remove {folder} to fill it again")
        return np.memmap(path, dtype=dtype, mode="r+", shape=shape)
    except OSError as error:
        raise UserError(f"{path} cannot be opened ({error.strerror}); remove {folder} to fill it again") from None


def _checksum(row: npt.NDArray[Any]) -> int:
    """Return the checksum of a row's bytes. It is never 0, because 0 marks an unfilled row."""
    return zlib.crc32(np.ascontiguousarray(row).data) or 1


def _reserve(path: Path, size: int) -> None:
    """Create a file of ``size`` zero bytes, with allocated disk space where the OS supports this.

    Without allocated space, writing to the memory map crashes when the disk is full.
    """
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
