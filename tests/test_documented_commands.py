"""Every `drafthead` command that the documentation gives is one that its settings allow."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafthead.cli import COMMANDS
from drafthead.commands import data, settings
from drafthead.data.utils.errors import UserError
from drafthead.train import run
from support import call

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
UNDERSTOOD = "the settings are understood"


def commands(page: Path) -> list[str]:
    """Lines of code blocks and code spans that begin with ``drafthead COMMAND`` and have settings."""
    text = page.read_text().replace("\\\n", " ")
    spans = re.findall(r"`(drafthead [^`]+)`", text) + re.findall(r"^ *(drafthead \w+ .+)$", text, re.MULTILINE)
    found = [span.split("   #")[0].strip() for span in spans]
    known = [each for each in found if each.split()[1] in COMMANDS and "=" in each]
    return [each for each in known if "..." not in each and " -m" not in each]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_is_understood(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The settings are composed and checked as the command does; what it would do is not begun."""

    def only(check: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any) -> None:
            check(*arguments)
            raise UserError(UNDERSTOOD)

        return checked

    monkeypatch.setattr(settings, "parse", only(settings.parse))
    monkeypatch.setattr(run, "parse_run", only(run.parse_run))
    monkeypatch.setattr(data, "parse_run", only(data.parse_run))
    monkeypatch.chdir(tmp_path)
    wrong = []
    for text in dict.fromkeys(commands(page)):
        with pytest.raises(SystemExit) as ended:
            call(*shlex.split(text)[1:])
        if UNDERSTOOD not in str(ended.value):
            wrong.append(f"{text}: {ended.value}")
    assert not wrong, "\n".join(wrong)
