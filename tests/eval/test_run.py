"""``drafthead eval`` as a user types it, on a tiny head."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from drafthead.data.utils.config import parse
from drafthead.eval.config import EvalRunConfig
from drafthead.models.base.base_model import BaseModel
from support import small_head

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
    ("overrides", "says"),
    [
        ([], "name a head: head=outputs/NAME/head or head=user/repo"),
        (["head=x", "max_new_tokens=1"], "eval.max_new_tokens must be at least 2, got 1"),
        (["head=x", "limit=0"], "eval.limit must be >= 1 or null, got 0"),
        (["head=x", "sweet=builtin"], "sweet"),
    ],
)
def test_bad_settings(overrides: list[str], says: str) -> None:
    with (
        initialize_config_module("drafthead.recipes.evaluation", version_base="1.3"),
        pytest.raises(Exception, match=says),
    ):
        parse(compose("eval", overrides=overrides), EvalRunConfig)
