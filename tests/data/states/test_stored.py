"""The store of hidden states returns what was written, resumes, and refuses what it cannot hold."""

from pathlib import Path

import numpy as np
import pytest
import torch

from drafthead.data.states.stored import StoredStates
from drafthead.errors import UserError
from support import refuses

MADE_BY = {"base": "tiny"}
LENGTHS = [3, 1, 4, 2]


def create(folder: Path, dtype: str = "float16", lengths: list[int] = LENGTHS, width: int = 2) -> StoredStates:
    return StoredStates(folder, np.array(lengths), width, dtype, MADE_BY)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_round_trip_and_resume(tmp_path: Path, dtype: str) -> None:
    values = [torch.randn(n, 2, generator=torch.Generator().manual_seed(n)) for n in (2, 1)]
    create(tmp_path, dtype).write([3, 1], values)
    again = create(tmp_path, dtype)
    assert again.missing(range(4)) == [0, 2]
    refuses(r"document 2 of .* has no hidden states yet", again.read, [1, 2])
    last, first = again.read([3, 1])
    assert torch.equal(last, values[0].to(getattr(torch, dtype))), "in the stored dtype"
    assert torch.equal(first, values[1].to(getattr(torch, dtype)))


def test_a_damaged_document_is_missing(tmp_path: Path) -> None:
    create(tmp_path).write([0, 2], [torch.ones(3, 2), torch.ones(4, 2)])
    content = bytearray((tmp_path / "states.bin").read_bytes())
    content[-15] ^= 1  # of document 2, before the 8 bytes of document 3
    (tmp_path / "states.bin").write_bytes(content)
    opened = create(tmp_path)
    refuses("document 2 of .* does not match its checksum", opened.read, [0, 2])
    assert create(tmp_path).missing(range(4)) == [1, 2, 3]
    opened.write([2], [torch.ones(4, 2)])
    assert torch.equal(opened.read([2])[0], torch.ones(4, 2, dtype=torch.float16))


def test_overflow(tmp_path: Path) -> None:
    store = create(tmp_path)
    with pytest.raises(UserError, match="7e.04 does not fit float16.*set base.dtype=bfloat16"):
        store.write([1, 0], [torch.ones(1, 2), torch.full((3, 2), 7e4)])
    assert store.missing(range(4)) == [0, 1, 2, 3]
    # An infinity of the base itself is stored.
    store.write([0], [torch.full((3, 2), float("inf"))])


def test_bad_input(tmp_path: Path) -> None:
    create(tmp_path)
    refuses("store.documents = 4, expected 3", create, tmp_path, lengths=[3, 1, 6])
    with pytest.raises(UserError, match='base = "tiny", expected "other"'):
        StoredStates(tmp_path, np.array(LENGTHS), 2, "float16", {"base": "other"})


def test_only_filled_documents_take_space(tmp_path: Path) -> None:
    store = create(tmp_path, lengths=[10**9, 4, 10**9], width=4096)
    assert (tmp_path / "states.bin").stat().st_blocks < 1000
    refuses("hidden states needs about .* GB", store.require_space, [0, 1])
    store.require_space([1])
    store.write([1], [torch.ones(4, 4096)])
    assert (tmp_path / "states.bin").stat().st_blocks < 1000 and store.missing([0, 1]) == [0]
