"""Folders of texts with their hidden states, as speculators writes them by ``prepare-data`` and
``generate-offline-data``.

A folder is an Arrow data set with ``input_ids`` [T] and ``loss_mask`` [T] (1: trained) in each row. The states of row i
are in ``hidden_states/hs_<i>.safetensors``: ``hidden_states`` [T, n, D] and ``token_ids`` [T] int64. States in FP8 must
be multiplied by ``hidden_states_scales`` [T, 1, 1]. Layers are numbered as in ``engine_file.py``, but no file states
the numbers. The last one is the base's last layer, before the final norm.

Shape legend: T tokens, n layers, D width.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafthead.data.states.engine_file import BadStatesError, check_states
from drafthead.data.text.readers import dataset_errors, open_dataset
from drafthead.errors import UserError, one_line
from drafthead.files.local import file_digest

SETTING = "data.offline.folder"
COLUMNS = ("input_ids", "loss_mask")
STATES, TOKENS, SCALES = "hidden_states", "token_ids", "hidden_states_scales"  # names of tensors
FLOATS = ("F32", "F16", "BF16", "F8_E4M3")


class OfflineFolder:
    """Texts and hidden states of a folder. Every file of states is checked when it is first read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "state.json").is_file():
            what = f"{SETTING}={folder} is not a folder of `speculators prepare-data` (it has no state.json)"
            raise UserError(f"{what}; correct the path")
        with dataset_errors(str(folder), SETTING):
            self._rows: Any = open_dataset(str(folder)).with_format("numpy")
        if absent := [name for name in COLUMNS if name not in self._rows.column_names]:
            what = f"{folder} has the columns {', '.join(self._rows.column_names)}, but not {', '.join(absent)}"
            raise UserError(f"{what}; write it with `speculators prepare-data`")
        self._checked = np.zeros(len(self), np.bool_)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Return the token ids [T] of a row, and which of them are trained [T]."""
        row = self._rows[number]
        ids, mask = (np.asarray(row[name]) for name in COLUMNS)
        if len(ids) != len(mask):
            what = f"row {number} of {self.folder} has {len(ids)} tokens and a loss mask of {len(mask)}"
            raise UserError(f"{what}; write it again with `speculators prepare-data`")
        return ids.astype(np.int32), mask.astype(np.bool_)

    @cached_property
    def digest(self) -> str:  # of the texts
        return "-".join(file_digest(path)[:16] for path in sorted(self.folder.glob("*.arrow")))

    def path(self, number: int) -> Path:
        return self.folder / "hidden_states" / f"hs_{number}.safetensors"

    def missing(self) -> list[int]:
        """Return the rows without a file of states."""
        return [number for number in range(len(self)) if not self.path(number).exists()]

    def check_header(self, number: int, layers: int, width: int) -> None:
        """Reject a row whose file is missing or cut off, or has other sizes than n = ``layers`` layers of ``width`` D.
        Only the header is read."""
        shape, dtype, scaled = self._header(number)
        expected = [len(self.row(number)[0]), layers, width]
        if shape != expected:
            raise self._bad(number, f"has states of shape {shape}, expected {expected} (tokens, layers, width)")
        if dtype not in FLOATS or scaled != dtype.startswith("F8"):
            raise self._bad(number, f"has states in {dtype} {'with' if scaled else 'without'} {SCALES}")

    def is_scaled(self, number: int) -> bool:
        """Return True if the states of a row are stored in FP8."""
        return self._header(number)[2]

    def _header(self, number: int) -> tuple[list[int], str, bool]:
        """Return shape and dtype of a row's states, and whether there are scales."""
        try:
            with safe_open(self.path(number), "pt") as file:
                states: Any = file.get_slice(STATES)
                shape, dtype = states.get_shape(), states.get_dtype()
                scaled = SCALES in file.keys()  # an open file is not iterable
        except (OSError, SafetensorError) as error:
            raise self._bad(number, f"is not readable ({one_line(error)})") from None
        return shape, dtype, scaled

    def states(self, number: int, layers: int, width: int) -> Tensor:
        """Return the states [T, n, D] of a row, for n = ``layers`` layers of ``width`` D, in the file's dtype, or in
        bfloat16 if that is FP8."""
        first = not self._checked[number]
        if first:
            self.check_header(number, layers, width)
        try:
            with safe_open(self.path(number), "pt") as file:
                states: Tensor = file.get_tensor(STATES)
                if states.dtype == torch.float8_e4m3fn:
                    states = (states.float() * file.get_tensor(SCALES)).to(torch.bfloat16)
                if first:
                    ids: Sequence[int] = self.row(number)[0].tolist()
                    check_states(states, file.get_tensor(TOKENS), ids, layers, width)
        except (OSError, SafetensorError) as error:
            raise self._bad(number, f"is not readable ({one_line(error)})") from None
        except BadStatesError as error:
            raise self._bad(number, f"has {error}") from None
        self._checked[number] = True
        return states

    def _bad(self, number: int, what: str) -> UserError:
        remedy = "remove it, and write it again with `speculators generate-offline-data`"
        return UserError(f"{self.path(number)} {what}; {remedy}")
