"""Logs that a kill may have torn, and folders that cannot be written."""

from pathlib import Path

import pytest

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import make_folder, read_json_lines


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    assert read_json_lines(log) == []
    log.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_json_lines(log) == [{"step": 1}, {"step": 2}]
    log.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2 is not a JSON object"):
        read_json_lines(log)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b", "out=...")
    make_folder(tmp_path / "a" / "b", "out=...")
    assert not list((tmp_path / "a" / "b").iterdir())
    (tmp_path / "file").touch()
    for path in (Path("/proc/nope/x"), Path("/proc"), tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(UserError, match=rf"^{path} cannot be written \(.*\); choose another folder \(out=...\)$"):
            make_folder(path, "out=...")
