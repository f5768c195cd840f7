"""``drafthead eval`` as a user types it, on a tiny head."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drafthead.models.base.base_model import BaseModel
from support import call, small_head

ROOT = Path(__file__).parent.parent.parent


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "drafthead.commands.eval", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.fixture
def head(tiny_base: Callable[..., BaseModel], tmp_path: Path) -> Path:
    return small_head(tiny_base(), tmp_path / "head")


def test_evaluates_a_saved_head(head: Path, tmp_path: Path) -> None:
    done = run(tmp_path, f"head={head}", "suite=builtin", "limit=2", "max_new_tokens=8")
    assert done.returncode == 0, done.stderr
    evaluation = json.loads((tmp_path / "eval-builtin" / "eval.json").read_text())
    assert evaluation["overall"]["identical_outputs"]["same"] == 2
    assert (tmp_path / "eval-builtin" / "report.html").stat().st_size > 1000


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "head=/nowhere/head")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [
        "error: no draft head at /nowhere/head: give a run's head folder (outputs/NAME/head) or a Hub repository "
        "(user/name)"
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([], "name a head: head=outputs/NAME/head or head=user/repo"),
        (["head=x", "max_new_tokens=1"], "eval.max_new_tokens must be at least 2, got 1"),
        (["head=x", "limit=0"], "eval.limit must be >= 1 or null, got 0"),
        (["head=x", "suit=builtin"], "'suit' .* did you mean suite"),
    ],
)
def test_bad_settings(settings: list[str], says: str) -> None:
    with pytest.raises(SystemExit, match=f"^error: .*{says}"):
        call("eval", *settings)
