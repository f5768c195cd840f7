"""The files of a generation store: one Parquet table a shard, its features beside it, each whole or absent."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from drafthead.data.errors import UserError

if TYPE_CHECKING:
    from drafthead.data.generations import Generation

_WIDTH = b"features_width"
_COLUMNS = {
    "prompt_number": pa.int64(),
    "input_ids": pa.list_(pa.int32()),
    "boundary": pa.int32(),
    "finished": pa.bool_(),
}


def shard_table(generations: list["Generation"], width: int) -> pa.Table:
    """One row a generation, with the width of their features (0: none) beside the columns."""
    columns = {name: pa.array([getattr(g, name) for g in generations], type=kind) for name, kind in _COLUMNS.items()}
    return pa.table(columns).replace_schema_metadata({_WIDTH: str(width).encode()})


def features_width(table: pa.Table) -> int:
    """Width of a shard's features; 0 when it has none."""
    return int((table.schema.metadata or {}).get(_WIDTH, b"0"))


def read_shard(path: Path) -> pa.Table:
    """The shard in ``path``.

    Raises:
        UserError: it is damaged.
    """
    try:
        return pq.read_table(path, columns=list(_COLUMNS), partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove it, and its prompts are answered again") from error


def joined_features(generations: list["Generation"]) -> npt.NDArray[np.float16] | None:
    """[sum of n, D]: every row keeps as many features as it has tokens; its last token has none (NaN)."""
    present = [g.features for g in generations if g.features is not None]
    if not present:
        return None
    if len(present) < len(generations) or len({f.shape[1] for f in present}) > 1:
        raise ValueError("the generations of a shard must all have features of one width, or none")
    gap = np.full((1, present[0].shape[1]), np.nan, dtype=np.float16)
    return np.concatenate([part for f in present for part in (f.astype(np.float16, copy=False), gap)])


def publish(aside: Path, path: Path) -> None:
    """Rename a complete file into place, on disk before anyone can see it."""
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    aside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
