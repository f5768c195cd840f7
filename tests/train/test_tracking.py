"""No step is logged twice, lines keep their order, and no tracker ever stops a run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import wandb

from drafthead.data.errors import UserError
from drafthead.train import tracking
from drafthead.train.tracking import ConsoleLine, MetricsLog, Tracker, TrackerConfig, peak_memory, wandb_mode


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"phase": "distill", "step": step, "total_step": step, "loss": 1.0 / (step + 1), **more}


def logged(path: Path) -> list[int]:
    return [json.loads(line)["total_step"] for line in path.read_text().splitlines()]


def test_resume_drops_rows_past_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3, 4):
        log.write(row(step))
    resumed = MetricsLog(path)
    resumed.truncate(2)
    for step in (3, 4, 5):
        resumed.write(row(step))
    assert logged(path) == [1, 2, 3, 4, 5]
    assert resumed.rows()[1] == row(2)


def test_a_fresh_run_empties_an_old_log_and_needs_none(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.truncate(0)
    assert log.rows() == [] and not log.path.exists()
    log.write(row(1))
    log.truncate(0)
    assert log.rows() == []


def test_a_torn_last_line_is_dropped_and_a_broken_middle_is_named(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(row(1))
    with log.path.open("a") as file:
        file.write('{"phase": "dis')
    log.truncate(9)
    log.write(row(2))
    assert logged(log.path) == [1, 2]
    log.path.write_text("oops\n" + log.path.read_text())
    with pytest.raises(UserError, match="metrics.jsonl line 1 is not JSON.*remove that line"):
        log.truncate(9)


def test_not_finite_becomes_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(row(1, overlap_1=math.nan, more={"a": [math.inf, 2]}))
    assert "NaN" not in log.path.read_text()
    (found,) = log.rows()
    assert found["overlap_1"] is None and found["more"] == {"a": [None, 2]}


def test_console_line_has_a_fixed_order() -> None:
    numbers = {"accept_10": 0.01, "accept_2": 0.2, "accept_1": 0.4, "accept_rate": 9.0, "lr": 1e-3, "loss": 2.5}
    speed = {"grad_norm": 0.5, "tokens_per_second": 12345.6, "step_ms": 2000.0, "memory_bytes": 3 * 2**30}
    shown = ConsoleLine("distill", 400).render({"step": 40, **speed, **numbers})
    assert shown == (
        "   distill  40/400  loss 2.5000  accept 0.400 0.200 0.010  lr 1.00e-03  grad 0.500  12,346 tok/s  2000 ms"
        "  3.00 GiB  eta 12:00"
    )


def test_parts_of_a_loss_stand_behind_it() -> None:
    numbers = {"accept_1": 0.4, "lr": 1e-3, "loss": 2.5, "grad_norm": 0.5, "tokens_per_second": 1.0, "step_ms": 60e3}
    parts = {"loss_1": 3.0, "base_loss": 0.25, "heads_loss": 11.25, "base_accept": 0.9}
    assert "  loss 2.5000 (base 0.2500, heads 11.2500)  accept 0.400  lr" in ConsoleLine("joint", 9).render(
        {"step": 1, **numbers, **parts}
    )


def test_eta_of_hours_and_of_the_last_step() -> None:
    numbers = {"accept_1": 0.4, "lr": 1e-3, "loss": 2.5, "grad_norm": 0.5, "tokens_per_second": 1.0, "step_ms": 60e3}
    line = ConsoleLine("text", 62)
    assert line.render({"step": 1, **numbers}).endswith("eta 1:01:00")
    assert line.render({"step": 62, **numbers}).endswith("eta 0:00")


def test_peak_memory_is_plausible() -> None:
    """A process with torch loaded takes between 50 MiB and the machine; a unit error is a factor of 1024."""
    assert 50 * 2**20 < peak_memory() < 64 * 2**30


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "k"}, "online"),
        ("auto", {"WANDB_API_KEY": ""}, "offline"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, "disabled"),
        ("offline", {"WANDB_API_KEY": "k"}, "offline"),
        ("online", {}, "online"),
    ],
)
def test_wandb_mode(tmp_path: Path, mode: str, environment: dict[str, str], expected: str) -> None:
    assert wandb_mode(mode, {"NETRC": str(tmp_path / "none"), **environment}) == expected


def test_wandb_mode_reads_the_servers_netrc_entry(tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    file.write_text("machine api.wandb.ai login user password k\n")
    file.chmod(0o600)
    assert wandb_mode("auto", {"NETRC": str(file)}) == "online"
    assert wandb_mode("auto", {"NETRC": str(file), "WANDB_BASE_URL": "https://wandb.example.org"}) == "offline"
    file.write_text("machine\n")
    assert wandb_mode("auto", {"NETRC": str(file)}) == "offline"


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DIR"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


@pytest.mark.usefixtures("no_login")
def test_wandb_without_a_login_is_offline_and_says_how_to_sync(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    folder = tmp_path / "run"
    tracker = Tracker(TrackerConfig(kind="wandb", project="p"), folder, "name", "seed: 0\n", said.append)
    tracker.log(row(1, overlap_1=math.nan), step=1)
    tracker.finish({"overall": {"speedup": 1.5}, "tasks": [1, 2]})
    assert capfd.readouterr() == ("", "")
    wandb.teardown()  # its service writes in a process of its own; this waits for the end of it
    (line,) = said
    assert line.startswith("wandb: offline (no login found); to upload later: wandb login && wandb sync ")
    (data,) = Path(line.split()[-1]).glob("run-*.wandb")
    assert folder in data.parents
    assert b"overall/speedup" in data.read_bytes() and b"total_step" in data.read_bytes()


def test_a_resumed_folder_continues_its_wandb_run(tmp_path: Path) -> None:
    first = tracking._run_id(tmp_path)
    assert tracking._run_id(tmp_path) != first, "nothing was logged: a new run"
    second = tracking._run_id(tmp_path)
    MetricsLog(tmp_path / "metrics.jsonl").write(row(1))
    assert tracking._run_id(tmp_path) == second


class Broken:
    def __init__(self, *args: object) -> None:
        self.calls = 0

    def log(self, numbers: dict[str, float], step: int) -> None:
        raise ConnectionError("server is down\nwith details")

    def finish(self, summary: dict[str, float]) -> None:
        raise AssertionError("a tracker that failed must not be called again")


def test_a_tracker_that_fails_is_warned_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_WandbSink", Broken)
    said: list[str] = []
    tracker = Tracker(TrackerConfig(kind="wandb"), tmp_path, "name", "", said.append)
    for step in range(3):
        tracker.log(row(step), step=step)
    tracker.finish({"a": 1})
    assert said == ["warning: wandb failed (server is down); training goes on, metrics.jsonl has every row"]


def test_a_tracker_that_does_not_open_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("wandb.init", refuse)
    said: list[str] = []
    tracker = Tracker(TrackerConfig(kind="wandb", mode="online"), tmp_path, "name", "", said.append)
    tracker.log(row(1), step=1)
    tracker.finish()
    assert said == ["warning: wandb failed (RuntimeError); training goes on, metrics.jsonl has every row"]


def test_tensorboard_writes_events_or_says_what_to_install(tmp_path: Path) -> None:
    said: list[str] = []
    tracker = Tracker(TrackerConfig(kind="tensorboard"), tmp_path, "name", "seed: 0", said.append)
    tracker.log(row(1), step=1)
    tracker.finish({"speedup": 1.5})
    if said[0].startswith("warning"):
        assert "pip install tensorboard" in said[0]
    else:
        (events,) = (tmp_path / "tensorboard").glob("events.*")
        assert b"summary/speedup" in events.read_bytes()


def test_none_does_nothing(tmp_path: Path) -> None:
    tracker = Tracker(TrackerConfig(), tmp_path, "name", "", pytest.fail)
    tracker.log(row(1), step=1)
    tracker.finish({"a": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("key", "value"), [("kind", "wanbd"), ("mode", "on")])
def test_an_unknown_choice_lists_what_there_is(key: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"tracker.{key} must be one of \[.*\], got '{value}'"):
        TrackerConfig(**{key: value})
