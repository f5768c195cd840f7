"""What trackers receive, read back from what they wrote; none needs a network, and none stops a run."""

import json
import math
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import wandb

from drafthead.train.config import TrackerConfig
from drafthead.train.tracking import backends as sinks
from drafthead.train.tracking.backends import wandb_mode
from drafthead.train.tracking.tracker import MetricsLog, Tracker
from wandb_support import Read, Server

SETTINGS = {
    "seed": 3,
    "base": {"name": "user/base", "revision": None},
    "phases": {"pretrain": {"optim": {"lr": 0.001, "betas": (0.9, 0.95)}}, "distill": {"steps": 20}},
}


def row(phase: str, step: int, total: int, **more: Any) -> dict[str, Any]:
    return {"phase": phase, "step": step, "total_step": total, "loss_1": 1 / total, "accept_1": 0.4, **more}


def evaluation() -> dict[str, Any]:
    """As ``evaluate`` returns it, as far as tables read it."""
    group = {
        "mean_accepted_tokens": 1.8,
        "tokens_per_second": 30.0,
        "baseline_tokens_per_second": {"transformers": 18.0, "drafthead": 20.0},
        "speedup": {"vs_transformers": 1.67, "vs_drafthead": 1.5, "interval_95": [1.4, 1.6]},
        "identical_outputs": {"same": 3, "of": 3},
    }
    return {"tasks": {"math": group}, "overall": group, "rule": {"name": "exact", "lossless": True}}


def finished_run(folder: Path) -> None:
    (folder / "plots").mkdir(parents=True)
    (folder / "report.html").write_text("<h1>a report</h1>")
    (folder / "eval.json").write_text(json.dumps(evaluation()))
    (folder / "plots" / "training_loss.png").write_bytes(b"png")


@pytest.mark.usefixtures("no_login")
def test_wandb_receives_settings_curves_tables_and_the_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    folder = tmp_path / "run"
    finished_run(folder)
    tracker = Tracker(TrackerConfig(kind="wandb", project="p"), folder, "name", SETTINGS, said.append)
    tracker.log(row("pretrain", 1, 1, overlap_1=math.nan, tokens_per_second=5.0), step=1)
    tracker.log(row("distill", 1, 2), step=2)
    tracker.log({"phase": "distill", "step": 1, "held_out_accept_1": 0.3}, step=2)
    tracker.finish(evaluation())
    assert capfd.readouterr() == ("", "")
    wandb.teardown()  # its service writes in a process of its own; this waits for the end of it
    (part,) = parts(folder)
    assert said == [f"wandb: offline (no login found); to upload later: wandb login && wandb sync {part}"]
    found = Read(folder)
    assert {key: found.config[key] for key in ("seed", "base")} == {key: SETTINGS[key] for key in ("seed", "base")}
    assert found.config["phases"]["pretrain"]["optim"]["betas"] == [0.9, 0.95]
    assert found.curve("pretrain/loss_1") == [(1, 1.0)] and found.curve("distill/loss_1") == [(2, 0.5)]
    assert found.curve("distill/held_out_accept_1") == [(2, 0.3)]
    assert found.curve("pretrain/tokens_per_second") == [(1, 5.0)] and not found.curve("pretrain/overlap_1")
    assert {(m.glob_name, m.step_metric) for m in found.metrics if m.glob_name} == {
        ("pretrain/*", "pretrain/step"),
        ("distill/*", "distill/step"),
    }
    (results,) = [a for a in found.artifacts if a.type == "evaluation"]
    assert {c.path for c in results.manifest.contents} == {"eval.json", "report.html", "plots/training_loss.png"}
    assert all(folder in Path(c.local_path).parents for c in results.manifest.contents), "syncs from the folder alone"
    (tasks,) = folder.glob("wandb/offline-run-*/files/media/table/evaluation/tasks_*.json")
    table = json.loads(tasks.read_text())
    assert table["columns"][:2] == ["task", "speedup"] and table["data"][0][:2] == ["math", "1.50x"]
    (page,) = folder.glob("wandb/offline-run-*/files/media/html/report_*.html")
    assert page.read_text() == "<h1>a report</h1>"


def process(folder: Path, *steps: int, mode: str = "auto") -> list[str]:
    """What a process of a run does that goes on before ``steps``; returns what it said."""
    said: list[str] = []
    log = MetricsLog(folder / "metrics.jsonl")
    tracker = Tracker(TrackerConfig(kind="wandb", mode=mode), folder, "name", SETTINGS, said.append)
    log.truncate(steps[0] - 1)
    tracker.replay(log.rows())
    for step in steps:
        log.write(row("distill", step, step))
        tracker.log(row("distill", step, step), step=step)
    tracker.finish()
    wandb.teardown()
    return said


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*"))


@pytest.mark.usefixtures("no_login")
def test_the_newest_part_of_an_offline_run_is_all_of_it(tmp_path: Path) -> None:
    process(tmp_path, 1, 2, 3, 4)
    first = Read(tmp_path).runs[0].run_id
    (said,) = process(tmp_path, 3, 4, 5)
    (part,) = parts(tmp_path)
    assert said.endswith(f"wandb sync {part}"), "what the line names is where the rows are"
    found = Read(tmp_path)
    assert {run.run_id for run in found.runs} == {first}
    assert found.curve("distill/loss_1") == [(step, 1 / step) for step in range(1, 6)]
    assert len(list(tmp_path.glob("wandb/replaced/*/*.wandb"))) == 1


@pytest.mark.usefixtures("no_login")
def test_what_the_server_has_is_not_sent_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server() as server:
        for key, value in server.environment.items():
            monkeypatch.setenv(key, value)
        process(tmp_path, 1, 2, 3, 4, mode="online")
        process(tmp_path, 3, 4, 5, mode="online")
        (rows,) = server.rows.values()
        assert [r["_step"] for r in rows] == [1, 2, 3, 4, 5], "goes on where the server stands"
        (said,) = process(tmp_path, 6, mode="offline")
        server.sync(said)
        whole = list(server.rows.values())[-1]
        assert len(server.rows) == 2, "offline it cannot know what is there: another run, with all"
        assert [r["_step"] for r in whole] == [1, 2, 3, 4, 5, 6]
        process(tmp_path, 6, 7, mode="online")
        assert [r["_step"] for r in server.rows[list(server.rows)[-1]]] == [1, 2, 3, 4, 5, 6, 7]


def test_the_run_id_belongs_to_the_rows(tmp_path: Path) -> None:
    first = sinks._run_id(tmp_path, offline=True)
    assert sinks._run_id(tmp_path, offline=True) != first, "nothing was logged: a new run"
    second = sinks._run_id(tmp_path, offline=True)
    MetricsLog(tmp_path / "metrics.jsonl").write(row("distill", 1, 1))
    part = tmp_path / "wandb" / f"offline-run-20300101_000000-{second}"
    part.mkdir(parents=True)
    assert sinks._run_id(tmp_path, offline=True) == second
    (part / f"run-{second}.wandb.synced").touch()
    assert sinks._run_id(tmp_path, offline=False) == second
    sinks._set_aside(tmp_path, second)
    assert not part.exists()
    assert sinks._run_id(tmp_path, offline=True) != second, "the server has some of its rows"


@pytest.mark.usefixtures("no_login")
def test_a_wandb_that_cannot_be_reached_is_kept_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init, asked = wandb.init, []

    def unreachable(*, mode: str, **options: Any) -> Any:
        asked.append(mode)
        if mode == "online":
            raise wandb.errors.CommError("no route to host\ndetails")
        return init(mode=mode, **options)

    monkeypatch.setattr(wandb, "init", unreachable)
    said: list[str] = []
    tracker = Tracker(TrackerConfig(kind="wandb", mode="online"), tmp_path, "name", SETTINGS, said.append)
    tracker.log(row("distill", 1, 1), step=1)
    tracker.finish()
    wandb.teardown()
    assert asked == ["online", "offline"]
    (part,) = parts(tmp_path)
    assert said == [f"wandb: offline (no route to host); to upload later: wandb login && wandb sync {part}"]
    assert Read(tmp_path).curve("distill/loss_1") == [(1, 1.0)]


@pytest.mark.usefixtures("no_login")
def test_a_closed_port_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound and not listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setattr(sinks, "START_PATIENCE", 2)
        started = time.monotonic()
        (said,) = process(tmp_path, 1, 2)
        assert time.monotonic() - started < 30
    assert said.startswith("wandb: offline (") and "\n" not in said
    assert Read(tmp_path).curve("distill/loss_1") == [(1, 1.0), (2, 0.5)]
    assert len(MetricsLog(tmp_path / "metrics.jsonl").rows()) == 2


@pytest.mark.usefixtures("no_login")
def test_a_wandb_that_goes_down_does_not_hold_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*args: Any) -> None:
        raise TimeoutError("not uploaded")

    said: list[str] = []
    tracker = Tracker(TrackerConfig(kind="wandb"), tmp_path, "name", SETTINGS, said.append)
    run = wandb.run
    assert run is not None and run.settings.finish_timeout == sinks.PATIENCE and run.settings.finish_timeout_raises
    finish = run.finish
    monkeypatch.setattr(type(run), "finish", late)
    tracker.finish()
    monkeypatch.undo()
    finish()
    wandb.teardown()
    assert said[1].startswith("warning: wandb did not take everything within 600 s; to send the rest later: wandb sync")


def test_tensorboard_receives_settings_and_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is no dependency: pip install tensorboard")
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    said: list[str] = []
    tracker = Tracker(TrackerConfig(kind="tensorboard"), tmp_path, "name", SETTINGS, said.append)
    for step in (1, 2):
        tracker.log(row("distill", step, step, overlap_1=math.inf), step=step)
    tracker.finish({"overall": {"speedup": 1.5}})
    assert said == [f"tensorboard: tensorboard --logdir {tmp_path / 'tensorboard'}"]
    found = EventMultiplexer()
    found.AddRunsFromDirectory(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars(".", "distill/loss_1")] == [(1, 1.0), (2, 0.5)]
    assert [(e.step, e.value) for e in found.Scalars(".", "evaluation/overall/speedup")] == [(2, 1.5)]
    assert "distill/overlap_1" not in found.Runs()["."]["scalars"]
    (kept,) = (tmp_path / "tensorboard").rglob("hparams.yml")
    assert "phases.pretrain.optim.lr: 0.001" in kept.read_text()


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    said: list[str] = []
    tracker = Tracker(TrackerConfig(kind="aim"), tmp_path, "name", SETTINGS, said.append)
    tracker.log(row("distill", 1, 1), step=1)
    assert len(said) == 1
    assert "warning: aim failed (the aim package is missing" in said[0] and "pip install aim" in said[0]


def test_accelerate_knows_every_kind() -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    from drafthead.train import config

    assert {str(kind) for kind in LOGGER_TYPE_TO_CLASS} == {*config.THROUGH_ACCELERATE, "wandb"}


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
