"""Stages of a run: what a second start does again, what ``resume=false`` removes, and stages that run alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafthead.data.batch import LossOutput
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json
from drafthead.eval.timing import methods
from drafthead.models.heads.medusa import MedusaHead
from drafthead.train import pipeline
from drafthead.train.pipeline import run_pipeline
from support import composed


def train(folder: Path, *overrides: str) -> Path:
    run_pipeline(*composed(folder, "recipe=medusa_smollm2", "debug=tiny", *overrides))
    return folder / "run"


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("measured again")


def test_a_second_start_measures_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(tmp_path)
    first = read_json(run / "eval.json")
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "measure_costs", never)
        patched.setattr(methods, "decode", never)
        train(tmp_path)
    assert read_json(run / "eval.json") == first
    assert len(list(run.glob("eval-log-*.jsonl"))) == 1

    kept = [run / "calibration.json", *run.glob("eval-log-*.jsonl")]
    stale = run / "eval-log-of-another-tree.jsonl"
    stale.write_text("")
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "measure_costs", never)
        with pytest.raises(AssertionError, match="measured again"):
            train(tmp_path, "resume=false")
    assert not any(path.exists() for path in (*kept, stale))


def test_resume_false_keeps_what_no_run_made(tmp_path: Path) -> None:
    precious = tmp_path / "run" / "head" / "novel.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("Call me Ishmael.")
    with pytest.raises(UserError, match=r"would remove .*head, but .* has no training-settings.json"):
        train(tmp_path, "resume=false")
    assert precious.exists()


def test_what_the_launcher_says_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UserError, match="mixed_precision=fp8"):
        train(tmp_path)
    assert not (tmp_path / "run").exists()


def test_nothing_to_train_on_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = MedusaHead.loss

    def nothing(self: MedusaHead, *args: Any) -> LossOutput:
        out = original(self, *args)
        return LossOutput(
            loss_sum=out.loss_sum * 0, tokens=torch.zeros_like(out.tokens), sums=out.sums * 0, names=out.names
        )

    monkeypatch.setattr(MedusaHead, "loss", nothing)
    with pytest.raises(UserError, match=r"phase pretrain, step 2: the last 2 steps had no token to train on"):
        train(tmp_path, "log_every=2")


def test_validation_and_saving_do_not_count_as_training_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every validation takes an hour by the clock that the loop reads."""
    from drafthead.train.trainer import trainer as loop

    clock = [0.0]
    monkeypatch.setattr(loop, "perf_counter", lambda: clock.__setitem__(0, clock[0] + 0.001) or clock[0])
    validate = loop.Trainer._validate

    def slow(self: loop.Trainer, *args: Any) -> None:
        validate(self, *args)
        clock[0] += 3600

    monkeypatch.setattr(loop.Trainer, "_validate", slow)
    run = train(tmp_path, "log_every=2", "validate_every=3")
    rows = loop.MetricsLog(run / "metrics.jsonl").rows()
    assert max(row["step_ms"] for row in rows if "step_ms" in row) < 1000


@pytest.mark.parametrize("content", ["null", "[1]", "3", "{"])
def test_damaged_settings_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "training-settings.json").write_text(content)
    with pytest.raises(UserError, match=r"training-settings.json (holds a|is not valid JSON)"):
        train(tmp_path)


def test_each_stage_runs_alone(tmp_path: Path) -> None:
    """From what the stages before it left on disk; without that, the line names the stage that is missing."""
    short = ("eval.limit=1", "eval.max_new_tokens=8")
    for stage, missing in (("tree", "train"), ("evaluate", "train"), ("card", "evaluate")):
        with pytest.raises(UserError, match=f"run the stage {missing} first"):
            train(tmp_path, *short, f"stages=[{stage}]")
    train(tmp_path, *short, "stages=[corpora]")
    assert not (tmp_path / "run" / "checkpoints").exists()
    train(tmp_path, *short, "stages=[train]")
    assert not (tmp_path / "run" / "calibration.json").exists()
    with pytest.raises(UserError, match="run the stage tree first"):
        train(tmp_path, *short, "stages=[evaluate]")
    for stage in ("tree", "evaluate", "card"):
        train(tmp_path, *short, f"stages=[{stage}]")
    run = tmp_path / "run"
    assert (run / "head" / "README.md").exists() and (run / "report.html").exists()
    kept = read_json(run / "eval.json")
    train(tmp_path, *short, "stages=[evaluate]", "resume=false")
    assert read_json(run / "eval.json")["suite"] == kept["suite"] and (run / "checkpoints").exists()
    with pytest.raises(UserError, match=r"stages must be a list of corpora, train, .*, got \['trein'\]"):
        train(tmp_path, "stages=[trein]")
    with pytest.raises(UserError, match=r"push must be true for stages=\[push\], got False"):
        train(tmp_path, "stages=[push]")
