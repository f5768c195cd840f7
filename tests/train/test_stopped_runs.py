"""Runs that a signal or a fault of the machine ends: files left behind, messages, and exact continuation."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from drafthead.eval.engines.served import free_port
from support import flip

ROOT = Path(__file__).parent.parent.parent
TERMINATED, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (folder / "run" / "checkpoints").glob("step-*"))


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
def test_a_signal_while_saving_or_measuring_waits_for_its_end(runs: Any, whole: Path, tmp_path: Path) -> None:
    for call, reached in ((("save tensors", 1), 3), (("validate", 1), 5), (("prune", 1), 7)):
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
    "in the state of a checkpoint": (("write state", 2), "a checkpoint"),
}


@pytest.mark.parametrize("how", ["full", pytest.param("small files", marks=pytest.mark.slow)])
def test_a_full_disk_costs_no_finished_work(runs: Any, whole: Path, tmp_path: Path, how: str) -> None:
    """``full``: the call fails. ``small files``: the system refuses to write more than 3 kB into one file."""
    for moment, (call, written) in FULL.items():
        if how == "small files" and call[0] in ("write shard", "write state"):
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
