"""Logs that a kill may have torn."""

from pathlib import Path

import pytest

from drafthead.data.errors import UserError
from drafthead.data.files import read_json_lines


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    assert read_json_lines(log) == []
    log.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_json_lines(log) == [{"step": 1}, {"step": 2}]
    log.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        read_json_lines(log)
