"""``drafthead eval`` as a user types it, on a tiny head."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafthead.models.base import BaseModel
from drafthead.models.medusa import MedusaConfig

ROOT = Path(__file__).parent.parent.parent


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "eval" / "run.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.fixture
def head(tiny_base: Callable[..., BaseModel], tmp_path: Path) -> Path:
    MedusaConfig(num_heads=2, draft_vocab_size=50).build(tiny_base(), torch.arange(50)).save_pretrained(
        tmp_path / "head"
    )
    return tmp_path / "head"


def test_evaluates_a_saved_head(head: Path, tmp_path: Path) -> None:
    done = run(tmp_path, f"head={head}", "suite=builtin", "limit=2", "max_new_tokens=8")
    assert done.returncode == 0, done.stderr
    evaluation = json.loads((tmp_path / "eval-builtin" / "eval.json").read_text())
    assert evaluation["overall"]["identical_outputs"]["same"] == 2
    assert (tmp_path / "eval-builtin" / "report.html").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["suite=builtin"], "error: config: name a head: head=outputs/NAME/head or head=user/repo"),
        (["head=nowhere", "suite=mtbench"], "mtbench"),
        (["head=/nowhere/head"], "error: no draft head at /nowhere/head"),
        (["head=x", "max_new_tokens=1"], "eval.max_new_tokens must be at least 2, got 1"),
        (["head=x", "sweet=builtin"], "sweet"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert says in done.stderr and len(lines) == 1, done.stderr
