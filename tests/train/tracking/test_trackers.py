"""Rows that trackers and ``metrics.jsonl`` receive, without a network. No tracker stops a run."""

import json
import math
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import wandb
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from drafthead.train.tracking import tracker as tracking
from drafthead.train.tracking.metrics_log import MetricsLog, console_line
from drafthead.train.tracking.tracker import Tracker, TrackerConfig, wandb_mode, wandb_run_id
from support import cases, evaluation_of, task_results

EVALUATION = evaluation_of(task_results(1.5), math=task_results(1.5))
SETTINGS = {
    "seed": 3,
    "base": {"name": "user/base", "revision": None},
    "phases": {"pretrain": {"optim": {"lr": 0.001, "betas": (0.9, 0.95)}}, "distill": {"steps": 20}},
}


def row(phase: str, step: int, total: int, **more: Any) -> dict[str, Any]:
    return {"phase": phase, "step": step, "total_step": total, "loss_1": 1 / total, "accept_1": 0.4, **more}


class Recorder(GeneralTracker):
    name, requires_logging_directory, tracker = "recorder", False, None

    def __init__(self, fails_in: str = "") -> None:
        super().__init__()
        self.received = Mock()
        if fails_in:
            getattr(self.received, fails_in).side_effect = RuntimeError("server is down:\ndetails")
        for method in ("start", "store_init_configuration", "log", "finish"):
            setattr(self, method, getattr(self.received, method))


Open = Callable[..., tuple[Tracker, list[str]]]


@pytest.fixture
def open_tracker(tmp_path: Path) -> Open:
    def opened(log_with: Any = None, **options: Any) -> tuple[Tracker, list[str]]:
        lines: list[str] = []
        chosen = TrackerConfig(**{"kind": "tensorboard", **options})
        trackers = chosen.kind if log_with is None else log_with
        accelerator = Accelerator(cpu=True, log_with=trackers, project_dir=tmp_path)
        return Tracker(accelerator, chosen, tmp_path, "name", SETTINGS, lines.append), lines

    return opened


@pytest.fixture
def wandb_service(no_login: None) -> Iterator[None]:
    yield
    wandb.teardown()


@pytest.mark.parametrize("fails_in", ["start", "log", "finish"])
def test_a_tracker_that_fails_costs_one_line_and_is_not_called_again(open_tracker: Open, fails_in: str) -> None:
    recorder = Recorder(fails_in)
    tracker, lines = open_tracker(recorder)
    for step in (1, 2):
        tracker.log(row("distill", step, step), step=step)
    tracker.finish({"a": 1})
    tracker.finish()
    assert "warning: tensorboard failed (server is down: details); training continues" in lines[-1]
    names = [name for name, *_ in recorder.received.mock_calls]
    assert names.count(fails_in) == 1 and names[-1] == fails_in


def test_a_run_that_failed_is_marked_so_in_wandb(open_tracker: Open) -> None:
    tracker, _ = open_tracker(Recorder())
    tracker._wandb_run = Mock()
    tracker.finish(failed=True)
    tracker.finish()
    tracker._wandb_run.finish.assert_called_once_with(exit_code=1)


def test_a_missing_package_is_named(open_tracker: Open) -> None:
    tracker, lines = open_tracker(log_with=[])
    tracker.log(row("distill", 1, 1), step=1)
    (line,) = lines
    assert line.startswith("warning: tensorboard failed") and "pip install tensorboard" in line


def test_tensorboard_receives_settings_and_curves(open_tracker: Open, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is optional: pip install tensorboard")
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    tracker, lines = open_tracker(kind="tensorboard")
    for step in (1, 2):
        tracker.log(row("distill", step, step, overlap_1=math.inf, parts={"a": 2}), step=step)
    tracker.replay([row("distill", 1, 1)])
    tracker.finish({"overall": {"speedup": 1.5, "suite": "x"}})
    tracker.finish({"overall": {"speedup": 9.0}})
    assert lines == [f"tensorboard: tensorboard --logdir {tmp_path / 'tensorboard'}"]
    events = EventMultiplexer()
    events.AddRunsFromDirectory(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars(".", "distill/loss_1")] == [(1, 1.0), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars(".", "evaluation/overall/speedup")] == [(2, 1.5)]
    assert [e.value for e in events.Scalars(".", "distill/parts/a")] == [2, 2]
    assert not {"distill/overlap_1", "evaluation/overall/suite"} & set(events.Runs()["."]["scalars"])
    (hparams,) = (tmp_path / "tensorboard").rglob("hparams.yml")
    settings = hparams.read_text()
    assert "phases.pretrain.optim.lr: 0.001" in settings and "base.revision" not in settings


@pytest.mark.usefixtures("wandb_service")
def test_wandb_offline_receives_settings_curves_tables_and_the_report(
    open_tracker: Open, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import openai  # noqa: F401 # wandb advertises its Weave where it finds this module

    (tmp_path / "report.html").write_text("<h1>a report</h1>")
    (tmp_path / "eval.json").write_text(json.dumps(EVALUATION))
    tracker, lines = open_tracker(kind="wandb")
    run = tracker.accelerator.get_tracker("wandb", unwrap=True)
    tracker.log(row("pretrain", 1, 1, overlap_1=math.nan), step=1)
    tracker.log(row("distill", 1, 2), step=2)
    curves = dict(run.summary)
    tracker.finish(EVALUATION)
    assert capfd.readouterr() == ("", "")
    (wandb_run,) = tmp_path.glob("wandb/offline-run-*")
    assert lines == [f"wandb: offline (no login found); to upload later: wandb login && wandb sync {wandb_run}"]
    assert run.config["seed"] == 3 and run.config["base"] == SETTINGS["base"]
    assert run.config["phases"]["pretrain"]["optim"]["betas"] == [0.9, 0.95]
    assert curves["pretrain/loss_1"] == 1.0 and "pretrain/overlap_1" not in curves
    (tasks,) = wandb_run.glob("files/media/table/evaluation/by_task_*.json")
    table = json.loads(tasks.read_text())
    assert table["columns"][:2] == ["task", "speedup"] and table["data"][0][:2] == ["math", "1.50x"]
    (page,) = wandb_run.glob("files/media/html/report_*.html")
    assert page.read_text() == "<h1>a report</h1>"
    assert any((tmp_path / "wandb").rglob("staging/*")), "artifacts wait in the run folder, not in the home folder"


@pytest.mark.usefixtures("wandb_service")
def test_a_resumed_run_is_the_same_wandb_run_with_all_rows(open_tracker: Open, tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    runs = []
    for steps in ((1, 2, 3, 4), (3, 4, 5)):
        tracker, lines = open_tracker(kind="wandb", mode="offline")
        run = tracker.accelerator.get_tracker("wandb", unwrap=True)
        log.truncate(steps[0] - 1)
        tracker.replay(log.rows())
        assert run.step == steps[0] - 1, "wandb has the rows up to the checkpoint"
        for step in steps:
            log.write(row("distill", step, step))
            tracker.log(row("distill", step, step), step=step)
        assert run.step == steps[-1]
        tracker.finish()
        assert lines[0].endswith(f"wandb sync {run.settings.sync_dir}")
        runs.append(run.id)
    assert runs[0] == runs[1]
    assert [logged["total_step"] for logged in log.rows()] == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("wandb_service")
def test_an_evaluation_alone_goes_to_the_last_step_of_a_resumed_run(
    open_tracker: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb drops results at an earlier step; when it is online, no row has to be sent again."""
    monkeypatch.setattr(wandb.Run, "starting_step", property(lambda run: 40))
    tracker, _ = open_tracker(kind="wandb", mode="offline")
    monkeypatch.setattr(tracker.accelerator, "log", sent := Mock())
    tracker.finish(EVALUATION)
    assert sent.call_args.kwargs["step"] == 40


def test_the_run_id_belongs_to_the_rows(tmp_path: Path) -> None:
    first = wandb_run_id(tmp_path)
    second = wandb_run_id(tmp_path)
    assert second != first, "nothing was logged: a new run"
    MetricsLog(tmp_path / "metrics.jsonl").write(row("distill", 1, 1))
    assert wandb_run_id(tmp_path) == second


@pytest.mark.usefixtures("wandb_service")
def test_an_unreachable_wandb_goes_offline(open_tracker: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound and not listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setitem(tracking.WANDB_TIMEOUTS, "init_timeout", 2)
        tracker, lines = open_tracker(kind="wandb", mode="online")
        tracker.log(row("distill", 1, 1), step=1)
        tracker.finish()
    (line,) = lines
    assert line.startswith("wandb: offline (") and line.count("\n") == 0 and "wandb sync " in line
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1


@cases(
    "mode, environment, expected",
    ("auto", {}, "offline"),
    ("auto", {"WANDB_API_KEY": "k"}, "online"),
    ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, "disabled"),
    ("offline", {"WANDB_API_KEY": "k"}, "offline"),
)
def test_wandb_mode(tmp_path: Path, mode: str, environment: dict[str, str], expected: str) -> None:
    assert wandb_mode(mode, {"NETRC": str(tmp_path / "none"), **environment}) == expected


def test_wandb_mode_reads_the_servers_netrc_entry(tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    file.write_text("machine api.wandb.ai login user password k\n")
    file.chmod(0o600)
    assert wandb_mode("auto", {"NETRC": str(file)}) == "online"
    assert wandb_mode("auto", {"NETRC": str(file), "WANDB_BASE_URL": "https://wandb.example.org"}) == "offline"


# ``metrics.jsonl`` ----------------------------------------------------------------------------------------------------


def test_not_finite_becomes_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1, "overlap_1": math.nan, "more": {"a": [math.inf, 2]}})
    assert "NaN" not in log.path.read_text()
    (logged,) = log.rows()
    assert logged["overlap_1"] is None and logged["more"] == {"a": [None, 2]}


def test_console_line_has_a_fixed_order() -> None:
    row = {"phase": "distill", "step": 40, "lr": 1e-3, "loss": 2.5, "loss_1": 3.0, "base_loss": 0.25}
    row |= {"accept_10": 0.01, "accept_2": 0.2, "accept_1": 0.4, "accept_rate": 9.0, "base_accept": 0.9}
    row |= {"grad_norm": 0.5, "tokens_per_second": 12345.6, "step_ms": 10000.0}
    line = console_line(row, 410)
    peak = re.search(r"\d+\.\d\d GiB", line)
    # A process with torch loaded takes between 50 MiB and the machine; a unit error is a factor of 1024.
    assert peak and 0.05 <= float(peak[0].removesuffix(" GiB")) < 64
    line = line.replace(peak[0], "3.00 GiB")
    assert line == (
        "   distill  40/410  loss 2.5000 (base 0.2500)  accept 0.400 0.200 0.010  lr 1.00e-03  grad 0.500"
        "  12,346 tok/s  10000 ms  3.00 GiB  eta 1:01:40"
    )
