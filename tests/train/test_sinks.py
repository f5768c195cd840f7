"""What trackers receive, read back from what they wrote; none needs a network, and none stops a run."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from drafthead.train import sinks, tracking
from drafthead.train.sinks import wandb_mode
from drafthead.train.tracking import MetricsLog, Tracker, TrackerConfig

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


def records(file: Path) -> list[Record]:
    """A wandb log: LevelDB's log format behind seven bytes of its own."""
    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # no record's head crosses a block
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            found.append(Record.FromString(whole))
            whole = b""
    return found


class Read:
    """The parts of a wandb run in a run folder, oldest first."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        assert files
        self.files = files
        found = [record for file in files for record in records(file)]
        self.runs = [r.run for r in found if r.WhichOneof("record_type") == "run"]
        self.config = {u.key: json.loads(u.value_json) for u in self.runs[0].config.update}
        self.artifacts = [r.artifact for r in found if r.WhichOneof("record_type") == "artifact"]
        self.metrics = [r.metric for r in found if r.WhichOneof("record_type") == "metric"]
        self.history = [
            {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
            for r in found
            if r.WhichOneof("record_type") == "history"
        ]

    def curve(self, key: str) -> list[tuple[int, float]]:
        return [(entry["_step"], entry[key]) for entry in self.history if key in entry]


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(key, "")  # so that it is put back in any case
        monkeypatch.delenv(key)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


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
    assert said == [f"wandb: offline (no login found); to upload later: wandb login && wandb sync {folder / 'wandb'}"]
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


@pytest.mark.usefixtures("no_login")
def test_resuming_continues_the_same_wandb_run(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        tracker = Tracker(TrackerConfig(kind="wandb"), tmp_path, "name", SETTINGS, lambda line: None)
        tracker.log(row("distill", step, step), step=step)
        log.write(row("distill", step, step))
        tracker.finish()
        wandb.teardown()
        for part in tmp_path.glob("wandb/offline-run-*"):  # named after the second that they began in
            part.rename(part.with_name(f"{part.name}-{step}") if not part.name[-2] == "-" else part)
    found = Read(tmp_path)
    assert len(found.files) == 2 and len({run.run_id for run in found.runs}) == 1
    assert found.curve("distill/loss_1") == [(1, 1.0), (2, 0.5)]


def test_the_run_id_belongs_to_the_rows(tmp_path: Path) -> None:
    first = sinks._run_id(tmp_path)
    assert sinks._run_id(tmp_path) != first, "nothing was logged: a new run"
    second = sinks._run_id(tmp_path)
    MetricsLog(tmp_path / "metrics.jsonl").write(row("distill", 1, 1))
    assert sinks._run_id(tmp_path) == second


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
    assert said == [
        f"wandb: offline (no route to host); to upload later: wandb login && wandb sync {tmp_path / 'wandb'}"
    ]
    assert Read(tmp_path).curve("distill/loss_1") == [(1, 1.0)]


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

    assert {str(kind) for kind in LOGGER_TYPE_TO_CLASS} == {*tracking.THROUGH_ACCELERATE, "wandb"}


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
