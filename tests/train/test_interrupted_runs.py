"""Runs that a kill, a signal or a fault of the machine ends: the same command resumes, and the result is equal."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafthead.eval.engines.served import free_port
from drafthead.files.local import read_checksummed_json, read_json_lines, write_checksummed_json
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.train.trainer.checkpoint import load_best
from support import TinyBase, flip, randomised

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


@pytest.mark.slow
def test_killed_at_every_delicate_moment(runs: Any, whole: Path, tmp_path: Path) -> None:
    """One run, killed again and again. Each start counts its own calls."""
    for moment, call in MOMENTS.items():
        assert runs.one(tmp_path, at=call) == KILLED, f"{moment}: {runs.output(tmp_path)[-2000:]}"
    assert runs.one(tmp_path) == 0, runs.output(tmp_path)[-2000:]
    assert runs.output(tmp_path).count("resuming after step") >= 3
    assert not [p for p in tmp_path.rglob(".*") if p.name.startswith(UNFINISHED)]
    runs.assert_equal(tmp_path, whole)


@pytest.mark.slow
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


# Signals --------------------------------------------------------------------------------------------------------------


ROOT = Path(__file__).parent.parent.parent
SHORT_PHASES = "phases.pretrain.steps=4", "phases.distill.steps=4"
TERMINATED, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (folder / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_a_preempted_job_resumes_bit_for_bit(runs: Any, whole: Path, tmp_path: Path) -> None:
    """While generating, in the first phase, and by Ctrl-C in the second."""
    assert runs.one(tmp_path, at=("answer", 6), do="SIGTERM") == TERMINATED
    assert "stopped by SIGTERM; finished work is kept" in runs.output(tmp_path)
    assert runs.one(tmp_path, at=("step", 7), do="SIGTERM") == TERMINATED
    assert "stopped by SIGTERM after step 7 (over all phases), which is saved" in runs.output(tmp_path)
    assert steps_saved(tmp_path)[-1] == 7
    assert runs.one(tmp_path, at=("step", 8), do="SIGINT") == INTERRUPTED
    assert steps_saved(tmp_path)[-1] == 15
    assert runs.one(tmp_path) == 0
    runs.assert_equal(tmp_path, whole)


@pytest.mark.slow
def test_a_signal_ends_a_validation_that_the_resumed_run_repeats(runs: Any, tmp_path: Path) -> None:
    passes = ("data.answers.self_prompted=120", "phases.pretrain.micro_batch_size=1", *SHORT_PHASES)  # one row each
    assert runs.one(tmp_path, *passes, at=("validate", 1), do="SIGTERM") == TERMINATED
    rows = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    assert steps_saved(tmp_path)[-1] == 4 and not any("held_out_mean_accepted_length" in row for row in rows)
    assert runs.one(tmp_path, *passes) == 0
    rows = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["total_step"] for row in rows if "held_out_mean_accepted_length" in row] == [4, 8]


@pytest.mark.slow
def test_a_signal_while_saving_or_before_measuring(runs: Any, whole: Path, tmp_path: Path) -> None:
    """It waits until all is saved. The resumed run measures what was not measured, so that the best weights are those
    of a whole run."""
    for call, reached in ((("save tensors", 1), 3), (("step", 1), 4), (("prune", 1), 5)):
        assert runs.one(tmp_path, at=call, do="SIGTERM") == TERMINATED
        assert steps_saved(tmp_path)[-1] == reached
    assert runs.one(tmp_path) == 0
    runs.assert_equal(tmp_path, whole)


PROGRAM = """
    import sys, time
    from drafthead.train.distributed import signals

    def leave():
        with signals.install_handlers(lambda line: print(line, flush=True)):
            with signals.defer_signals():
                print("ready", flush=True)
                for _ in range(150):
                    time.sleep(0.01)
                    if signals.stop_signal() and "patient" not in sys.argv:
                        break
            print("never", flush=True)

    signals.REPEAT_S = 0.2
    leave()
"""


def play(*acts: tuple[float, signal.Signals], patient: bool = False) -> tuple[int, str]:
    """Return exit code and output of a program that defers signals; each act is a pause in seconds and a signal.

    The program has announced the first signal before the second is sent: Python handles signals that arrive together
    in the order of their numbers.
    """
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), *(["patient"] if patient else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    announced = ""
    for pause, signum in acts:
        time.sleep(pause)
        process.send_signal(signum)
        announced = announced or process.stdout.readline()
    return process.wait(timeout=60), announced + process.stdout.read()


def test_a_second_ctrl_c_ends_the_run_at_once_and_an_echo_does_not() -> None:
    code, said = play((0.0, signal.SIGINT), patient=True)
    assert code == INTERRUPTED and "stopped by SIGINT" in said and "never" not in said
    code, said = play((0.0, signal.SIGINT), (0.5, signal.SIGINT), patient=True)
    assert code == -signal.SIGINT and "SIGINT: saving and exiting after this step" in said and "stopped" not in said
    # A launcher and a scheduler may both pass a signal on; SIGTERM never stops a save, however often it comes.
    code, said = play((0.0, signal.SIGTERM), (0.0, signal.SIGINT), (0.5, signal.SIGTERM))
    assert code == TERMINATED and said.count("stopped by SIGTERM") == 1


def signalled_run(folder: Path, signum: signal.Signals, *launcher: str) -> tuple[int, str]:
    """Return exit code and output of a run that receives ``signum`` in its first phase."""
    command = [sys.executable, *launcher, str(ROOT / "train" / "run.py"), "recipe=medusa_smollm2", "debug=tiny"]
    command += [f"out={folder}/run", f"data.folder={folder}/corpora", "phases.pretrain.steps=100000", "log_every=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        while "/100000  loss" not in log.read_text() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signum)
        return process.wait(timeout=60), log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGTERM, TERMINATED), (signal.SIGINT, INTERRUPTED)])
def test_the_command_exits_with_the_documented_code(tmp_path: Path, signum: signal.Signals, expected: int) -> None:
    code, said = signalled_run(tmp_path, signum)
    assert code == expected and f"stopped by {signum.name} after step" in said and "Traceback" not in said
    assert steps_saved(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_forwards_the_signal_and_fails_itself(tmp_path: Path, signum: signal.Signals) -> None:
    """Two processes save and exit. The launcher has its own exit code, and the same command resumes."""
    reached = 0
    for start in range(2):
        launcher = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
        code, said = signalled_run(tmp_path, signum, *launcher, "--main_process_port", str(free_port()))
        assert code == 1 and f"stopped by {signum.name} after step" in said and "SignalException" in said, said
        assert start == 0 or f"resuming after step {reached} " in said
        assert steps_saved(tmp_path)[-1] > reached
        reached = steps_saved(tmp_path)[-1]


# Faults -------------------------------------------------------------------------------------------------------

FULL = {
    "while hidden states of answers are written": (("save features", 2), "the next shard of answers"),
    "while answers are written": (("write shard", 2), "the next shard of answers"),
    "in the first phase's checkpoints": (("save tensors", 3), "a checkpoint"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", "small files"])
def test_a_full_disk_costs_no_finished_work(runs: Any, whole: Path, tmp_path: Path, how: str) -> None:
    """``full``: the call fails. ``small files``: the system refuses to write more than 3 kB into one file."""
    for moment, (call, written) in FULL.items():
        if how == "small files" and call[0] == "write shard":
            continue  # these files are smaller
        before = {p for p in tmp_path.rglob("*") if p.name.startswith(("shard", "step"))}
        (tmp_path / "log").unlink(missing_ok=True)  # the limit applies to the log too
        assert runs.one(tmp_path, at=call, do=how) == 1, moment
        last = runs.last_line(tmp_path)
        assert last.startswith(f"error: {written} could not be written to {tmp_path}"), last
        assert "the same command resumes" in last
        assert before <= set(tmp_path.rglob("*")), "a finished file is gone"
        assert not [p for p in tmp_path.rglob(".*") if p.name.startswith((".writing", ".shard"))], "the disk stays full"
    assert runs.one(tmp_path) == 0
    runs.assert_equal(tmp_path, whole)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.slow
def test_damaged_corpora_are_named_and_rebuilt(runs: Any, whole: Path, tmp_path: Path) -> None:
    assert runs.one(tmp_path, at=("step", 3)) == -signal.SIGKILL
    text = next(tmp_path.glob("corpora/text/*/tokens.npy"))
    flip(text)
    assert runs.one(tmp_path, at=("step", 12)) == 1
    assert "tokens.npy is damaged" in runs.last_line(tmp_path)
    for path in text.parent.iterdir():
        path.unlink()
    answers = tmp_path / "corpora" / "answers"
    for name, damage in (("shard-00001.parquet", cut), ("shard-00002.safetensors", flip)):
        damage(answers / name)
        assert runs.one(tmp_path) == 1  # hidden states are first read in the second phase
        assert f"{answers / name} cannot be read" in runs.last_line(tmp_path)
        for path in answers.glob(f"{Path(name).stem}.*"):
            path.unlink()
    assert runs.one(tmp_path) == 0
    runs.assert_equal(tmp_path, whole)


@pytest.mark.slow
def test_a_failing_tracker_costs_no_step(runs: Any, whole: Path, tmp_path: Path) -> None:
    assert runs.one(tmp_path, "tracker.kind=wandb", "tracker.mode=offline", at=("track", 5), do="raise") == 0
    assert "warning: wandb failed (this process has a fault)" in runs.output(tmp_path)
    runs.assert_equal(tmp_path, whole)
