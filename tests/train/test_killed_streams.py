"""A stream of ``drafthead adapt`` that is killed goes on, and ends with the answers and weights of one that was not."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from drafthead.data.utils.files import read_json_lines
from drafthead.models.heads.medusa import MedusaConfig
from support import TinyBase, randomised

KILLED = -signal.SIGKILL
MOMENTS = {
    "in the second update": ("update", 2),
    "while the checkpoint's tensors are saved": ("save tensors", 2),
    "between a checkpoint's tensors and its state": ("write state", 1),
    "while old checkpoints are removed": ("prune", 3),
    "while the log is written": ("fsync", 12),
}


@pytest.fixture
def settings(tiny_base: TinyBase, tmp_path: Path) -> list[str]:
    head = randomised(MedusaConfig(num_draft_tokens=2).build(tiny_base()), 0.02)
    head.save_pretrained(tmp_path / "head")
    return [
        f"head={tmp_path / 'head'}",
        "suite=builtin",
        "interval=1",
        "max_new_tokens=12",
        "optim.lr=0.01",
    ]


@pytest.fixture
def whole(runs: Any, settings: list[str], tmp_path: Path) -> Path:
    """The folder of a stream that nothing ended."""
    assert runs.command(tmp_path / "whole", "adapt", *settings, f"out={tmp_path / 'whole'}") == 0
    return tmp_path / "whole"


def assert_equal(folder: Path, whole: Path) -> None:
    """Every answer but its time, and every bit of the weights."""
    answers = [[{**row, "s": 0} for row in read_json_lines(each / "answers.jsonl")] for each in (folder, whole)]
    assert answers[0] == answers[1] and len(answers[1]) == 6
    weights = [load_file(each / "head" / "model.safetensors") for each in (folder, whole)]
    assert all(value.numpy().tobytes() == weights[1][name].numpy().tobytes() for name, value in weights[0].items())


def test_killed_at_every_delicate_moment(runs: Any, settings: list[str], whole: Path, tmp_path: Path) -> None:
    """One stream, killed again and again as it goes on. Each start counts its own calls."""
    folder = tmp_path / "killed"
    arguments = ["adapt", *settings, f"out={folder}"]
    for moment, call in MOMENTS.items():
        code = runs.command(folder, *arguments, at=[{"call": call, "do": "SIGKILL"}])
        assert code == KILLED, f"{moment}: {runs.said(folder)[-2000:]}"
    assert runs.command(folder, *arguments) == 0, runs.said(folder)[-2000:]
    assert runs.said(folder).count("going on after") >= 3
    assert_equal(folder, whole)


@pytest.mark.slow
def test_killed_at_random(runs: Any, settings: list[str], whole: Path, tmp_path: Path) -> None:
    """kill -9 from outside at random times, ten times; streams that end are begun anew."""
    duration, draw, kills, ended = runs.seconds, random.Random(0), 0, 0
    folder = tmp_path / "stream0"
    while kills < 10:
        code = runs.command(folder, "adapt", *settings, f"out={folder}", kill_after=draw.uniform(0.2, 1.0) * duration)
        assert code in (0, KILLED), runs.said(folder)[-2000:]
        kills += code == KILLED
        if code == 0:
            assert_equal(folder, whole)
            ended += 1
            folder = tmp_path / f"stream{ended}"
    assert runs.command(folder, "adapt", *settings, f"out={folder}") == 0, runs.said(folder)[-2000:]
    assert_equal(folder, whole)
