"""A whole run that wandb follows: killed, gone on with, and uploaded afterwards."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drafthead.data.utils.files import read_json_lines
from wandb_support import Read, Server

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.usefixtures("no_login")
def test_a_killed_run_uploads_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, str(ROOT / "train" / "run.py"), "recipe=medusa_smollm2", "debug=tiny"]
    command += [f"out={run}", f"data.folder={tmp_path}/corpora", "tracker.kind=wandb", "log_every=1"]
    command += ["checkpoint.every_steps=4", "eval.limit=1", "phases.distill.steps=40"]
    with log.open("w") as file:
        first = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        while "distill  7/40" not in log.read_text() and first.poll() is None:
            time.sleep(0.01)
        first.kill()
        assert first.wait() == -signal.SIGKILL, log.read_text()[-2000:]
    (part,) = run.glob("wandb/offline-run-*")
    number = part.name.rpartition("-")[2]
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "resuming after step" in again.stdout

    found = Read(run)
    assert {record.run_id for record in found.runs} == {number}
    logged = [row for row in read_json_lines(run / "metrics.jsonl") if "loss" in row]
    curve = found.curve("pretrain/loss") + found.curve("distill/loss")
    assert curve == [(row["total_step"], row["loss"]) for row in logged]
    assert [step for step, _ in curve] == list(range(1, 51))
    (results,) = [a for a in found.artifacts if a.type == "evaluation"]
    assert {"eval.json", "report.html", "metrics.jsonl"} <= {c.path for c in results.manifest.contents}
    media = next(run.glob("wandb/offline-run-*")) / "files" / "media"
    assert len(list(media.glob("table/evaluation/*.json"))) == 2 and len(list(media.glob("html/report_*.html"))) == 1

    said = next(line for line in again.stdout.splitlines() if "wandb sync" in line)
    with Server() as server:
        server.sync(said)
        (rows,) = server.rows.values()
    sent = {row["_step"]: row["distill/loss"] for row in rows if "distill/loss" in row}
    assert sent == {row["total_step"]: row["loss"] for row in logged if row["phase"] == "distill"}
