"""The cache of hidden states returns what was written, resumes, and refuses what it cannot hold."""

import os
from pathlib import Path

import pytest
import torch

from drafthead.data.answers.hidden_states import HiddenStateCache
from drafthead.errors import UserError

MADE_BY = {"base": "tiny"}


def create(folder: Path, dtype: str = "float16", rows: int = 5) -> HiddenStateCache:
    return HiddenStateCache(folder, rows, 3, 2, dtype, MADE_BY)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_round_trip_and_resume(tmp_path: Path, dtype: str) -> None:
    values = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(0))
    create(tmp_path, dtype).write([4, 1], values)
    again = create(tmp_path, dtype)
    assert again.missing_rows() == [0, 2, 3]
    with pytest.raises(UserError, match=r"rows \[2\] of .* have no hidden states yet"):
        again.read([1, 2])
    rows = again.read([1, 4, 1])
    expected = values.to(getattr(torch, dtype)).float()
    assert rows.dtype == torch.float32 and torch.equal(rows, expected[[1, 0, 1]])


def test_space_is_really_taken(tmp_path: Path) -> None:
    HiddenStateCache(tmp_path, 100, 100, 20, "float16", MADE_BY)
    stat = os.stat(tmp_path / "features.bin")
    assert stat.st_size == 400_000 and stat.st_blocks * 512 >= 400_000


def test_overflow(tmp_path: Path) -> None:
    cache = create(tmp_path)
    with pytest.raises(UserError, match="7e.04 does not fit float16.*set base.dtype=bfloat16"):
        cache.write([0], torch.full((1, 3, 2), 7e4))
    assert cache.missing_rows() == [0, 1, 2, 3, 4]
    # An infinity of the base itself is stored.
    cache.write([0], torch.full((1, 3, 2), float("inf")))


def test_bad_input(tmp_path: Path) -> None:
    create(tmp_path)
    with pytest.raises(UserError, match="cache.rows = 5, expected 6"):
        create(tmp_path, rows=6)
    with pytest.raises(UserError, match='base = "tiny", expected "other"'):
        HiddenStateCache(tmp_path, 5, 3, 2, "float16", {"base": "other"})


def test_disk_too_full(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the cache of hidden states needs about .* GB"):
        HiddenStateCache(tmp_path / "new", 10**9, 4096, 4096, "float16", MADE_BY)
    assert not list(tmp_path.rglob("*.bin"))
