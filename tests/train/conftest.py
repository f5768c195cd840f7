"""Tiny runs in forks of one prepared process (``forked_runs.py``), for tests that interrupt runs."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drafthead.eval.trees.cost_model import CONTEXT, measure_costs
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.drafter import Drafter
from drafthead.train.pipeline import run_pipeline
from support import assert_same_run, composed, losses_of

OPTIONS = (
    "recipe=hydra_pp_smollm2",  # a head with attention and dropout
    "debug=tiny",
    "head.dropout=0.2",
    "head.context_vocabulary=false",  # so that the score peaks before the end
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
TESTS = Path(__file__).parents[1]
SHORT = ("phases.pretrain.steps=2", "phases.distill.steps=4", "tree_prompts=1", "eval.limit=1", "eval.max_new_tokens=8")
"""Overrides of a run that is only there to be resumed, copied or rejected."""


class Runs:
    """Forks of one prepared process that train."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "forked_runs.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))},
        )
        self.seconds = 0.0
        """How long the latest job took."""

    def all(self, folder: Path, *overrides: str, **job: Any) -> list[int]:
        """Train in ``folder`` and return every process's exit code, negative for a signal that killed it."""
        folders = [f"out={folder / 'run'}", f"data.folder={folder / 'corpora'}"]
        return self._run(folder, {"command": ["train", *OPTIONS, *folders, *overrides], **job})

    def command(self, folder: Path, *arguments: str, **job: Any) -> int:
        """Run ``drafthead`` with these arguments, log in ``folder``, and return the exit code."""
        (code,) = self._run(folder, {"command": arguments, **job})
        return code

    def script(self, folder: Path, *arguments: str, **job: Any) -> list[int]:
        """Run a Python script with these arguments, log in ``folder``, and return every process's exit code."""
        return self._run(folder, {"script": arguments, **job})

    def _run(self, folder: Path, job: dict[str, Any]) -> list[int]:
        folder.mkdir(exist_ok=True)
        job = {"log": str(folder / "log"), **job}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        self.seconds = answer["seconds"]
        return [int(code) for code in answer["codes"]]

    def one(self, folder: Path, *overrides: str, at: tuple[str, int] | None = None, do: str = "SIGKILL") -> int:
        """Train on one process, with the event ``do`` just before the call ``at``, and return its exit code."""
        events = [] if at is None else [{"call": at, "do": do}]
        (code,) = self.all(folder, *overrides, at=events)
        return code

    @staticmethod
    def output(folder: Path, rank: int = 0) -> str:
        """Return everything that runs in ``folder`` have printed."""
        return (folder / (f"log.{rank}" if rank else "log")).read_text()

    def last_line(self, folder: Path, rank: int = 0) -> str:
        """Return the last line of ``output``."""
        return self.output(folder, rank).strip().splitlines()[-1]

    @staticmethod
    def assert_equal(folder: Path, whole: Path) -> None:
        """Compare every step's loss and every bit of the weights."""
        assert_same_run(folder / "run", whole / "run")
        assert len(losses_of(whole / "run")) == STEPS

    def close(self) -> None:
        self._server.communicate()


class StepCosts:
    """A stand-in for ``measure_costs`` in runs, which measures once: these tests need a tree, not a good one."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        """Batch sizes that were measured."""
        self.model: Callable[[int], CostModel] | None = None
        """Costs by batch size, instead of measured ones."""

    def __call__(
        self, base: BaseModel, drafter: Drafter, context: int = CONTEXT, rows: int = 1, progress: Any = None
    ) -> CostModel:
        self.rows.append(rows)
        return self.model(rows) if self.model else measure_costs(base, drafter, context, rows=rows, repeats=1)


@pytest.fixture(scope="session", autouse=True)
def all_costs() -> Iterator[StepCosts]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("drafthead.train.pipeline.measure_costs", costs := StepCosts())
        yield costs


@pytest.fixture
def step_costs(all_costs: StepCosts) -> Iterator[StepCosts]:
    all_costs.rows.clear()
    yield all_costs
    all_costs.model = None


@pytest.fixture(scope="session")
def runs() -> Iterator[Runs]:
    """One prepared process for all tests of a worker."""
    forks = Runs()
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert runs.one(folder) == 0, runs.output(folder)[-2000:]
    return folder


@pytest.fixture
def with_corpora(whole: Path, tmp_path: Path) -> Path:
    """A folder with the corpora of ``whole``, for runs that are only interrupted in training."""
    shutil.copytree(whole / "corpora", tmp_path / "corpora", symlinks=True)
    return tmp_path


@pytest.fixture(scope="session")
def medusa_run(tmp_path_factory: pytest.TempPathFactory, all_costs: StepCosts) -> Path:
    """The folder of a finished tiny Medusa run and its corpora, for tests to copy."""
    folder = tmp_path_factory.mktemp("medusa")
    run_pipeline(*composed(folder, "recipe=medusa_smollm2", "debug=tiny", *SHORT))
    return folder


@pytest.fixture
def with_medusa_corpora(medusa_run: Path, tmp_path: Path) -> Path:
    """A folder with the corpora of ``medusa_run``."""
    shutil.copytree(medusa_run / "corpora", tmp_path / "corpora", symlinks=True)
    return tmp_path


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave 100 kB on every disk."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100_000}))


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(key, "")  # so that it is put back in any case
        monkeypatch.delenv(key)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
