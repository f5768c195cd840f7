"""Whatever ends a run, the same command goes on, and the result is that of a run that nothing ended."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from drafthead.data.files import read_json_lines

HERE = Path(__file__).parent
KILLED = -signal.SIGKILL
OPTIONS = (
    "recipe=hydra_pp_smollm2",  # a head with attention and dropout
    "debug=tiny",
    "head.dropout=0.2",
    "log_every=1",
    "checkpoint.every_steps=2",
    "validate_every=4",
    "data.generations.slots=3",
    "data.generations.sampler.max_new_tokens=16",
)


class Runs:
    """Forks of one prepared process that train."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "forked_runs.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def train(self, folder: Path, *more: str, **job: Any) -> int:
        """Train in ``folder``; returns the exit code, negative for a signal."""
        folder.mkdir(exist_ok=True)
        places = [f"out={folder / 'run'}", f"data.folder={folder / 'corpora'}"]
        job = {"overrides": [*OPTIONS, *places, *more], "log": str(folder / "log"), **job}
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        self.seconds = float(answer["seconds"])
        return int(answer["code"])

    def close(self) -> None:
        self._server.communicate()


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    found = Runs()
    yield found
    found.close()


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing ends."""
    folder = tmp_path_factory.mktemp("whole")
    assert runs.train(folder) == 0, (folder / "log").read_text()[-2000:]
    return folder


def said(folder: Path) -> str:
    return (folder / "log").read_text()


def bits(folder: Path) -> dict[str, bytes]:
    weights = load_file(folder / "run" / "head" / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in weights.items()}


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_json_lines(folder / "run" / "metrics.jsonl") if "loss" in row]


def assert_equal(folder: Path, whole: Path) -> None:
    assert losses(folder) == losses(whole) and len(losses(whole)) == 20
    assert bits(folder) == bits(whole)


MOMENTS = {
    "while answers are written": ("publish_shard", 4),
    "while features of a shard are written": ("shard", 2),
    "in the first phase's first save": ("save_tensors", 2),
    "between a save's files and its state": ("write_state", 2),
    "in the second phase, while old checkpoints are removed": ("prune", 8),
}


def test_killed_at_every_delicate_moment(runs: Runs, whole: Path, tmp_path: Path) -> None:
    """One run, killed again and again as it goes on."""
    for moment, call in MOMENTS.items():
        # Each start counts its own calls: what is on disk already is not written again.
        assert runs.train(tmp_path, kill_at=call) == KILLED, f"{moment}: {said(tmp_path)[-2000:]}"
    assert runs.train(tmp_path) == 0, said(tmp_path)[-2000:]
    assert_equal(tmp_path, whole)


@pytest.mark.slow
def test_killed_twenty_times_at_random(runs: Runs, whole: Path, tmp_path: Path) -> None:
    """kill -9 from outside at random times, and from inside before a random write; runs that end are begun anew."""
    runs.train(tmp_path / "timed")
    duration, rng, kills, ended, stages = runs.seconds, random.Random(), 0, 0, set()
    while kills < 20:
        folder = tmp_path / f"run{ended}"
        if kills % 2:
            job: dict[str, Any] = {"kill_after": rng.uniform(0.1, 1.0) * duration}
        else:
            job = {"kill_at": ("fsync", rng.randint(1, 60))}
        code = runs.train(folder, **job)
        assert code in (0, KILLED), said(folder)[-2000:]
        if code == KILLED:
            kills += 1
            headings = [line for line in said(folder).splitlines() if line.startswith("==")]
            stages.add(headings[-1].split(":")[0] if headings else "start")
        else:
            ended += 1
            assert_equal(folder, whole)
    if (tmp_path / f"run{ended}").exists():
        assert runs.train(tmp_path / f"run{ended}") == 0, said(tmp_path / f"run{ended}")[-2000:]
        assert_equal(tmp_path / f"run{ended}", whole)
    assert {"== corpus", "== phase pretrain", "== phase distill"} <= stages
