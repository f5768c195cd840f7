"""The page about a machine."""

import pytest

from drafthead.commands import doctor
from support import call


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1 parts of the page failed"):
        call("doctor", "train=[recipe=medusa_smollm2,debug=tiny]", "recipes=[medusa_smollm2,nowhere]")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 160
    text = "\n".join(lines)
    assert text.count("3 of 3 as plain decoding") == 6
    assert "drafthead 0." in text and "pass, ms" in text and "other processes" in text
    assert any(line.startswith("training medusa_smollm2") and line.endswith("fits") for line in lines)
    assert lines[-1].startswith("memory of nowhere FAILED: UserError: recipe=nowhere: ")


def test_the_page_keeps_its_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "LIMIT_S", 0)
    with pytest.raises(SystemExit, match="parts of the page failed"):
        call("doctor")
    assert "costs of a step FAILED: TimeoutError: time ran out" in capsys.readouterr().out
