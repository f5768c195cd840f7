"""What one shard of generations holds: a table that states its own checksum, and the features beside it."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from drafthead.data.errors import UserError, one_line

if TYPE_CHECKING:
    from drafthead.data.generations import Generation

_WIDTH, _FEATURES, _DIGEST = b"features_width", b"features_sha256", b"sha256"
"""Metadata: width and checksum of the features, and the checksum of all that the table says."""
_COLUMNS = {
    "prompt_number": pa.int64(),
    "input_ids": pa.list_(pa.int32()),
    "boundary": pa.int32(),
    "finished": pa.bool_(),
}


def shard_table(generations: "list[Generation]", width: int, checksum: str) -> pa.Table:
    """One row a generation, without features; the table's own checksum stands in its metadata.

    Args:
        generations: of one shard.
        width: of the features kept beside it, 0 for none.
        checksum: of their file, "" for none.
    """
    columns = {name: pa.array([getattr(g, name) for g in generations], type=kind) for name, kind in _COLUMNS.items()}
    metadata = {_WIDTH: str(width).encode(), _FEATURES: checksum.encode()}
    table = pa.table(columns).replace_schema_metadata(metadata)
    return table.replace_schema_metadata({**metadata, _DIGEST: _digest(table)})


def features_width(table: pa.Table) -> int:
    """Width of a shard's features; 0 when it has none."""
    return int((table.schema.metadata or {}).get(_WIDTH, b"0"))


def features_checksum(table: pa.Table) -> str:
    """The sha256 that the file of the features beside a shard must have; "" when it states none."""
    checksum: bytes = (table.schema.metadata or {}).get(_FEATURES, b"")
    return checksum.decode()


def _digest(table: pa.Table) -> bytes:
    """Checksum of what a shard says, however it is encoded: values, width of the features and their checksum."""
    metadata = table.schema.metadata or {}
    digest = hashlib.sha256(metadata.get(_WIDTH, b"?") + b"," + metadata.get(_FEATURES, b"?"))
    for name in _COLUMNS:
        column = table[name].combine_chunks()
        if name == "input_ids":
            digest.update(column.value_lengths().to_numpy(zero_copy_only=False).tobytes())
            column = column.flatten()
        digest.update(column.to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest().encode()


def read_shard(path: Path) -> pa.Table:
    """A shard's table from disk.

    Raises:
        UserError: it cannot be read, or is not what was written.
    """
    try:
        table = pq.read_table(path, columns=list(_COLUMNS), partitioning=None)
        if {n: table.schema.field(n).type for n in _COLUMNS} != _COLUMNS or any(table[n].null_count for n in _COLUMNS):
            raise pa.ArrowInvalid("its columns are not those of a shard")
        stated = (table.schema.metadata or {}).get(_DIGEST)  # shards of earlier versions state none
        if stated is not None and stated != _digest(table):
            raise pa.ArrowInvalid("its content does not have the checksum that it states")
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise UserError(
            f"{path} cannot be read ({one_line(error)}); remove it, and its prompts are answered again"
        ) from None
    return table


def joined_features(generations: "list[Generation]") -> npt.NDArray[np.float16] | None:
    """[sum of n, D]: every row keeps as many features as it has tokens; its last token has none (NaN)."""
    present = [g.features for g in generations if g.features is not None]
    if not present:
        return None
    if len(present) < len(generations) or len({f.shape[1] for f in present}) > 1:
        raise ValueError("the generations of a shard must all have features of one width, or none")
    gap = np.full((1, present[0].shape[1]), np.nan, dtype=np.float16)
    return np.concatenate([part for f in present for part in (f.astype(np.float16, copy=False), gap)])
