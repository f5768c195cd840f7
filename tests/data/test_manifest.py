"""A mismatch names the key; equality survives JSON."""

from pathlib import Path
from typing import Any

import pytest

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import check_manifest, write_manifest

MADE_BY: dict[str, Any] = {"base": "smol", "sampler": {"temperature": 0.0, "stops": (1, 2)}, "rows": 1}


def test_absent_equal(tmp_path: Path) -> None:
    assert not check_manifest(tmp_path / "none", MADE_BY, "x")
    write_manifest(tmp_path, MADE_BY)
    assert check_manifest(tmp_path, MADE_BY, "x")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base": "other"}, 'base = "smol", expected "other"; remove it'),
        ({"sampler": {"temperature": 1.0, "stops": [1, 2]}}, r"sampler.temperature = 0.0, expected 1.0"),
        ({"sampler": {"temperature": 0.0, "stops": [1]}}, r"sampler.stops = \[1, 2\], expected \[1\]"),
        ({"revision": "main"}, r'revision = \(absent\), expected "main"'),
        ({"rows": True}, "rows = 1, expected true"),
    ],
)
def test_mismatch_names_the_key(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    write_manifest(tmp_path, MADE_BY)
    with pytest.raises(UserError, match=says):
        check_manifest(tmp_path, MADE_BY | change, "remove it")


def test_key_that_is_no_longer_expected(tmp_path: Path) -> None:
    write_manifest(tmp_path, MADE_BY)
    with pytest.raises(UserError, match=r"rows = 1, expected \(absent\)"):
        check_manifest(tmp_path, {k: v for k, v in MADE_BY.items() if k != "rows"}, "x")


def test_damaged(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("[1]")
    with pytest.raises(UserError, match="holds a list, expected an object"):
        check_manifest(tmp_path, MADE_BY, "x")
