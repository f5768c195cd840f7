"""Tiny runs in forks of one prepared process (``forked_runs.py``), for tests of what may interrupt a run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from drafthead.data.utils.files import read_json_lines
from drafthead.eval.trees.cost_model import measure_costs

OPTIONS = (
    "recipe=hydra_pp_smollm2",  # a head with attention and dropout
    "debug=tiny",
    "head.dropout=0.2",
    "stages=[corpora,train]",
    "log_every=1",
    "checkpoint.every_steps=2",
    "validate_every=4",
    "base.shape.hidden_size=32",
    "base.shape.num_hidden_layers=2",
    "base.shape.head_dim=8",
    "data.answers.batch_size=2",
    "data.answers.max_prompt_tokens=240",
    "data.answers.sampler.max_new_tokens=16",
    "phases.pretrain.seq_len=256",
    "phases.distill.seq_len=256",
)
STEPS = 20


class Runs:
    """Forks of one prepared process that train."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "forked_runs.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.seconds = 0.0
        """How long the latest job took."""

    def all(self, folder: Path, *overrides: str, **job: Any) -> list[int]:
        """Train in ``folder``; returns every process's exit code, negative for a signal that killed it."""
        places = [f"out={folder / 'run'}", f"data.folder={folder / 'corpora'}"]
        return self._done(folder, {"overrides": [*OPTIONS, *places, *overrides], **job})

    def command(self, folder: Path, *arguments: str, **job: Any) -> int:
        """``drafthead`` with these arguments, which logs in ``folder``; the exit code, negative for a signal."""
        (code,) = self._done(folder, {"command": arguments, **job})
        return code

    def _done(self, folder: Path, job: dict[str, Any]) -> list[int]:
        folder.mkdir(exist_ok=True)
        job = {"log": str(folder / "log"), **job}
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        self.seconds = answer["seconds"]
        return [int(code) for code in answer["codes"]]

    def one(self, folder: Path, *overrides: str, at: tuple[str, int] | None = None, do: str = "SIGKILL") -> int:
        """The same on one process, to which something may happen: ``do`` just before the call ``at``."""
        events = [] if at is None else [{"call": at, "do": do}]
        (code,) = self.all(folder, *overrides, at=events)
        return code

    @staticmethod
    def said(folder: Path, rank: int = 0) -> str:
        """All that runs in ``folder`` have printed."""
        return (folder / (f"log.{rank}" if rank else "log")).read_text()

    @staticmethod
    def losses(folder: Path) -> list[float]:
        """The loss of every step."""
        return [row["loss"] for row in read_json_lines(folder / "run" / "metrics.jsonl") if "loss" in row]

    @staticmethod
    def bits(folder: Path) -> dict[str, bytes]:
        """The weights of the trained head."""
        weights = load_file(folder / "run" / "head" / "model.safetensors")
        return {name: tensor.numpy().tobytes() for name, tensor in weights.items()}

    def assert_equal(self, folder: Path, whole: Path) -> None:
        """Every step's loss and every bit of the weights are those of ``whole``."""
        assert self.losses(folder) == self.losses(whole) and len(self.losses(whole)) == STEPS
        assert self.bits(folder) == self.bits(whole)

    def close(self) -> None:
        self._server.communicate()


@pytest.fixture(autouse=True)
def quick_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of a step are measured once, which is enough for trees that only have to be there."""
    monkeypatch.setattr("drafthead.train.pipeline.measure_costs", partial(measure_costs, repeats=1))


@pytest.fixture(scope="session")
def runs() -> Iterator[Runs]:
    """One prepared process for all tests of a worker."""
    found = Runs()
    yield found
    found.close()


@pytest.fixture(scope="session")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing ended."""
    folder = tmp_path_factory.mktemp("whole")
    assert runs.one(folder) == 0, runs.said(folder)[-2000:]
    return folder


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(key, "")  # so that it is put back in any case
        monkeypatch.delenv(key)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
