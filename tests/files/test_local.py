"""Files, manifests and locks: what a kill may have torn, what differs, and who waits."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from drafthead.errors import UserError
from drafthead.files.local import check_manifest, claimed, exclusive, make_folder, read_json_lines, write_manifest
from support import cases, refuses

MADE_BY: dict[str, Any] = {"base": "smol", "sampler": {"temperature": 0.0, "stops": (1, 2)}, "rows": 1}


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    assert read_json_lines(log) == []
    log.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_json_lines(log) == [{"step": 1}, {"step": 2}]
    log.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    refuses("line 2 is not a JSON object", read_json_lines, log)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b", "out=...")
    make_folder(tmp_path / "a" / "b", "out=...")
    assert not list((tmp_path / "a" / "b").iterdir())
    (tmp_path / "file").touch()
    for path in (Path("/proc/nope/x"), Path("/proc"), tmp_path / "file", tmp_path / "file" / "x"):
        refuses(rf"^{path} cannot be written \(.*\); choose another folder \(out=...\)$", make_folder, path, "out=...")


@cases(
    "expected, says",
    (MADE_BY | {"base": "other"}, 'base = "smol", expected "other"; remove it'),
    (MADE_BY | {"sampler": {"temperature": 1.0, "stops": [1, 2]}}, r"sampler.temperature = 0.0, expected 1.0"),
    (MADE_BY | {"sampler": {"temperature": 0.0, "stops": [1]}}, r"sampler.stops = \[1, 2\], expected \[1\]"),
    (MADE_BY | {"revision": "main"}, r'revision = \(absent\), expected "main"'),
    (MADE_BY | {"rows": True}, "rows = 1, expected true"),
    ({k: v for k, v in MADE_BY.items() if k != "rows"}, r"rows = 1, expected \(absent\)"),
)
def test_a_manifest_that_differs_names_the_key(tmp_path: Path, expected: dict[str, Any], says: str) -> None:
    assert not check_manifest(tmp_path / "none", MADE_BY, "x")
    write_manifest(tmp_path, MADE_BY)
    assert check_manifest(tmp_path, MADE_BY, "x")
    refuses(says, check_manifest, tmp_path, expected, "remove it")


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    for _ in range(2):  # the first block releases the lock
        with claimed(tmp_path), pytest.raises(UserError, match=rf"in use by process {os.getpid()} on .*\(out=...\)"):
            with claimed(tmp_path):
                pass


def test_a_second_process_waits_for_the_first(tmp_path: Path) -> None:
    waiting, order = Event(), []

    def second() -> None:
        with exclusive(tmp_path / "new", lambda *_: waiting.set()):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with exclusive(tmp_path / "new"):
            done = pool.submit(second)
            assert waiting.wait(10)
            order.append("first")
        done.result(10)
    assert order == ["first", "second"]
