"""Several processes: one signal stops all, none waits for a dead one, and another number of processes resumes."""

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from drafthead.train.trainer.batches import split_rows
from drafthead.train.trainer.checkpoint import load_latest
from support import cases, losses_of, refuses

TERMINATED, KILLED = 128 + signal.SIGTERM, -signal.SIGKILL
QUICK = "heartbeat_timeout_s=3"
SLOW = pytest.mark.slow
TOLERANCE = 2e-5
"""Relative difference of a loss after some steps of AdamW in float32, if sums are taken in another order."""


def events(rank: int, call: tuple[str, int], do: str) -> list[dict[str, Any]]:
    return [{"rank": rank, "call": call, "do": do}]


@pytest.mark.parametrize(("rows", "micro_batch_size"), [(8, 2), (6, 3), (12, 2), (5, 5)])
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_processes(rows: int, micro_batch_size: int) -> None:
    numbers = list(range(100, 100 + rows))
    for processes in range(1, rows + 1):
        by_rank = [split_rows(numbers, micro_batch_size, processes, rank) for rank in range(processes)]
        assert sorted(row for batches in by_rank for batch in batches for row in batch) == numbers
        assert len({len(batches) for batches in by_rank}) == 1, "every process must take part in every collective"
        assert all(1 <= len(batch) <= micro_batch_size for batches in by_rank for batch in batches)
    by_rank = [split_rows(list(range(8)), 2, 2, rank) for rank in range(2)]
    assert by_rank == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], "micro-batches of the original number stay whole"
    refuses(f"{rows} rows, which {rows + 1} processes", split_rows, numbers, micro_batch_size, rows + 1, 0)


@pytest.fixture(scope="module")
def whole_of_two(runs: Any, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run on two processes, with the corpora of one."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(whole / "corpora", folder / "corpora", symlinks=True)
    assert runs.all(folder, processes=2) == [0, 0]
    return folder


@pytest.mark.slow
def test_a_signal_to_one_stops_both_and_both_resume(runs: Any, whole_of_two: Path, with_corpora: Path) -> None:
    """With dropout, every process has its own random numbers, and the checkpoint saves both."""
    assert runs.all(with_corpora, processes=2, at=events(1, ("step", 7), "SIGTERM")) == [TERMINATED, TERMINATED]
    checkpoint = load_latest(with_corpora / "run" / "checkpoints")
    assert checkpoint is not None and checkpoint.state["global_step"] == 7 and checkpoint.state["processes"] == 2
    first, second = (state["torch"] for state in checkpoint.rng)
    assert not first.equal(second)
    assert runs.all(with_corpora, processes=2) == [0, 0]
    runs.assert_equal(with_corpora, whole_of_two)


@pytest.mark.slow
def test_two_killed_while_generating_resume_bit_for_bit(runs: Any, whole_of_two: Path, tmp_path: Path) -> None:
    """First rank 1 is killed and its shards are missing, then rank 0."""
    for rank, answer in ((1, 4), (0, 3)):
        codes = runs.all(tmp_path, QUICK, processes=2, at=events(rank, ("answer", answer), "SIGKILL"))
        assert codes[rank] == KILLED and codes[1 - rank] == 1
        assert not (tmp_path / "corpora" / "answers" / "complete.json").exists()
    shards = {path: path.stat().st_mtime_ns for path in tmp_path.glob("corpora/answers/shard-*")}
    assert shards, "two starts left no shard"
    assert runs.all(tmp_path, processes=2) == [0, 0], runs.output(tmp_path)[-2000:]
    assert {path: path.stat().st_mtime_ns for path in shards} == shards
    runs.assert_equal(tmp_path, whole_of_two)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes_resumes(runs: Any, tmp_path: Path, before: int, after: int) -> None:
    """Losses equal those of the original number, up to rounding (``TOLERANCE``)."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    still = ("head.dropout=0", "phases.distill.grad_accum_steps=2")
    assert runs.all(whole, *still, processes=before) == [0] * before
    codes = runs.all(moved, *still, processes=before, at=events(0, ("step", 7), "SIGTERM"))
    assert codes == [TERMINATED] * before
    assert runs.all(moved, *still, processes=after) == [0] * after, runs.output(moved)[-2000:]
    assert f"on {after} processes instead of {before}: each step keeps its rows" in runs.output(moved)
    newest = load_latest(moved / "run" / "checkpoints")
    assert newest is not None and newest.state["processes"] == before
    losses, expected = losses_of(moved / "run"), losses_of(whole / "run")
    assert losses[:7] == expected[:7]
    assert losses == pytest.approx(expected, rel=TOLERANCE)


@cases(
    "rank, call, do, codes, message",
    pytest.param(0, ("step", 4), "SIGKILL", [KILLED, 1], "process 0", marks=SLOW, id="killed"),
    # A stopped process keeps its connections open, so only the missing heartbeat shows that it hangs.
    pytest.param(1, ("step", 4), "SIGSTOP", [1, KILLED], "error: process 1 of 2 .* no heartbeat", id="hangs"),
    pytest.param(1, ("step", 4), "raise", [1, 70], "error: process 1 of 2 ended.* failed", marks=SLOW, id="fails"),
    pytest.param(0, ("save tensors", 1), "full", [1, 1], "process 0 of 2 .*not be written", marks=SLOW, id="full disk"),
)
def test_the_other_process_ends_and_names_the_lost_one(
    runs: Any, with_corpora: Path, rank: int, call: tuple[str, int], do: str, codes: list[int], message: str
) -> None:
    patience = {"patience": 2} if do == "SIGSTOP" else {}  # after that the stopped process is killed
    assert runs.all(with_corpora, QUICK, processes=2, at=events(rank, call, do), **patience) == codes
    assert re.search(message, runs.last_line(with_corpora, rank=1 - rank))
    assert runs.seconds < 60
