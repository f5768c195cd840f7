"""Killed runs: the same command resumes, and the result equals that of an uninterrupted run."""

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafthead.files.local import read_checksummed_json, read_json_lines, write_checksummed_json
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.train.trainer.checkpoint import load_best
from support import TinyBase, randomised

KILLED = -signal.SIGKILL
UNFINISHED = (".writing", ".replaced")
"""Prefixes of a checkpoint while it is written, and of the one that it replaces."""
MOMENTS = {
    "while answers are written": ("write shard", 2),
    "while hidden states of a shard are written": ("save features", 2),
    "in the first phase, while tensors are saved": ("save tensors", 5),
    "between a checkpoint's tensors and its state": ("write state", 2),
    "in the second phase, while old checkpoints are removed": ("prune", 5),
}


def test_killed_at_every_delicate_moment(runs: Any, whole: Path, tmp_path: Path) -> None:
    """One run, killed again and again. Each start counts its own calls."""
    for moment, call in MOMENTS.items():
        assert runs.one(tmp_path, at=call) == KILLED, f"{moment}: {runs.output(tmp_path)[-2000:]}"
    assert runs.one(tmp_path) == 0, runs.output(tmp_path)[-2000:]
    assert runs.output(tmp_path).count("resuming after step") >= 3
    assert not [p for p in tmp_path.rglob(".*") if p.name.startswith(UNFINISHED)]
    runs.assert_equal(tmp_path, whole)


def test_a_damaged_newest_checkpoint_costs_only_its_steps(runs: Any, whole: Path, with_corpora: Path) -> None:
    assert runs.one(with_corpora, at=("step", 14)) == KILLED
    newest = with_corpora / "run" / "checkpoints" / "step-0000012" / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    assert runs.one(with_corpora) == 0
    (line,) = (line for line in runs.output(with_corpora).splitlines() if "is damaged" in line)
    assert "step-0000012 is damaged (optimizer.safetensors does not have the checksum" in line
    assert "falling back to the one before" in line and "resuming after step 10" in runs.output(with_corpora)
    runs.assert_equal(with_corpora, whole)


def test_other_corpora_than_the_checkpoint_was_trained_on_are_refused(runs: Any, with_corpora: Path) -> None:
    """The saved manifest is changed to claim one more answer."""
    assert runs.one(with_corpora, at=("step", 14)) == KILLED
    for path in (with_corpora / "run" / "checkpoints").glob("step-*/state.json"):
        content = read_checksummed_json(path)
        assert content["manifests"]["answers"]["answers"] == 24 and len(content["manifests"]) == 2
        content["manifests"]["answers"]["answers"] = 25
        write_checksummed_json(path, content)
    assert runs.one(with_corpora) == 1
    assert "was trained on answers with answers = 25" in runs.last_line(with_corpora)


@pytest.mark.slow
def test_killed_twenty_times_at_random(runs: Any, whole: Path, tmp_path: Path) -> None:
    """kill -9 from outside at random times, and from inside before a random write; finished runs start over."""
    seed = int(os.environ.get("DRAFTHEAD_TEST_SEED", "0"))
    assert runs.one(tmp_path / "timed") == 0
    duration, draw, kills, ended, stages = runs.seconds, random.Random(seed), 0, 0, Counter[str]()
    folder, torn = tmp_path / "run0", set[Path]()
    while kills < 20:
        if kills % 2:
            (code,) = runs.all(folder, kill_after=draw.uniform(0.1, 1.0) * duration)
        else:
            code = runs.one(folder, at=("fsync", draw.randint(1, 60)))
        assert code in (0, KILLED), f"seed {seed}, kill {kills}: {runs.output(folder)[-2000:]}"
        if code == KILLED:
            kills += 1
            headings = [line for line in runs.output(folder).splitlines() if line.startswith("==")]
            stages[headings[-1].split(":")[0] if headings else "start"] += 1
            left = {p for p in tmp_path.rglob("*") if p.name.startswith(UNFINISHED)}
            stages["in a save"] += any(p.parent.name == "checkpoints" for p in left - torn)
            torn |= left
        else:
            runs.assert_equal(folder, whole)
            ended += 1
            folder = tmp_path / f"run{ended}"
    assert runs.one(folder) == 0, f"seed {seed}: {runs.output(folder)[-2000:]}"
    runs.assert_equal(folder, whole)
    stages_to_hit = {"== corpus", "== phase pretrain", "== phase distill", "in a save"}
    assert stages_to_hit <= set(+stages), f"seed {seed} (another: DRAFTHEAD_TEST_SEED=N): killed in {dict(stages)}"


def test_the_best_weights_are_saved_and_used(runs: Any, whole: Path, with_corpora: Path) -> None:
    """Requires that the score of ``whole`` peaks before its end."""
    best = load_best(whole / "run" / "checkpoints")
    assert best is not None and best.state["global_step"] < 20
    rows = read_json_lines(whole / "run" / "metrics.jsonl")
    measured = {
        row["total_step"]: row["held_out_mean_accepted_length"]
        for row in rows
        if "held_out_mean_accepted_length" in row
    }
    assert best.state["score"] == max(measured.values()) == measured[best.state["global_step"]]
    assert "the weights are the best ones" in runs.output(whole)
    weights = load_file(whole / "run" / "head" / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in best.head.items())
    assert runs.one(with_corpora, "checkpoint.final=last") == 0
    assert "checkpoint.final=best takes them" in runs.output(with_corpora)
    last = load_file(with_corpora / "run" / "head" / "model.safetensors")
    assert not all(torch.equal(last[name], tensor) for name, tensor in best.head.items())


# Streams of ``drafthead adapt`` ---------------------------------------------------------------------------------------

STREAM_MOMENTS = {
    "in the second update": ("update", 2),
    "while the checkpoint's tensors are saved": ("save tensors", 2),
    "between a checkpoint's tensors and its state": ("write state", 1),
    "while old checkpoints are removed": ("prune", 3),
    "while the log is written": ("fsync", 12),
}


@pytest.fixture
def adapt(runs: Any, tiny_base: TinyBase, tmp_path: Path) -> Callable[..., int]:
    """Function that learns from a stream in a folder and returns the exit code."""
    head = randomised(MedusaConfig(num_draft_tokens=2).build(tiny_base()), 0.02)
    head.save_pretrained(tmp_path / "head")
    settings = (f"head={tmp_path / 'head'}", "suite=builtin", "interval=1", "max_new_tokens=12", "optim.lr=0.01")
    return lambda folder, **job: runs.command(folder, "adapt", *settings, f"out={folder}", **job)


@pytest.fixture
def whole_stream(adapt: Callable[..., int], tmp_path: Path) -> Path:
    """The folder of an uninterrupted stream."""
    assert adapt(tmp_path / "whole") == 0
    return tmp_path / "whole"


def assert_same_stream(folder: Path, whole: Path) -> None:
    """Compare every answer except its time, and every bit of the weights."""
    answers = [[{**row, "s": 0} for row in read_json_lines(each / "answers.jsonl")] for each in (folder, whole)]
    assert answers[0] == answers[1] and len(answers[1]) == 6
    weights = [load_file(each / "head" / "model.safetensors") for each in (folder, whole)]
    assert all(value.numpy().tobytes() == weights[1][name].numpy().tobytes() for name, value in weights[0].items())


def test_a_stream_killed_at_delicate_moments(
    runs: Any, adapt: Callable[..., int], whole_stream: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    for moment, call in STREAM_MOMENTS.items():
        code = adapt(folder, at=[{"call": call, "do": "SIGKILL"}])
        assert code == KILLED, f"{moment}: {runs.output(folder)[-2000:]}"
    assert adapt(folder) == 0, runs.output(folder)[-2000:]
    assert runs.output(folder).count("continuing after") >= 3
    assert_same_stream(folder, whole_stream)
