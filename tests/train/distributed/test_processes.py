"""Several processes: one signal stops all of them, none waits for a dead one, and another number goes on."""

import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from drafthead.data.utils.errors import UserError
from drafthead.train.trainer.batches import split_rows
from drafthead.train.trainer.checkpoint import load_latest

TERMINATED, KILLED = 128 + signal.SIGTERM, -signal.SIGKILL
QUICK = "heartbeat_timeout_s=3"
TOLERANCE = 2e-5
"""Relative difference of a step's loss that another order of summation makes, after some steps of AdamW in float32."""


def events(rank: int, call: tuple[str, int], do: str) -> list[dict[str, Any]]:
    return [{"rank": rank, "call": call, "do": do}]


@pytest.mark.parametrize(("rows", "micro_batch_size"), [(8, 2), (6, 3), (12, 2), (5, 5)])
def test_a_steps_rows_do_not_depend_on_who_takes_part(rows: int, micro_batch_size: int) -> None:
    numbers = list(range(100, 100 + rows))
    for processes in range(1, rows + 1):
        parts = [split_rows(numbers, micro_batch_size, processes, rank) for rank in range(processes)]
        assert sorted(row for part in parts for batch in part for row in batch) == numbers
        assert len({len(part) for part in parts}) == 1, "every process must take part in every collective"
        assert all(1 <= len(batch) <= micro_batch_size for part in parts for batch in part)
    blocks = [split_rows(list(range(8)), 2, 2, rank) for rank in range(2)]
    assert blocks == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], "of the number that began, blocks stay whole"
    with pytest.raises(UserError, match=f"a step of this run has {rows} rows, which {rows + 1} processes cannot share"):
        split_rows(numbers, micro_batch_size, rows + 1, 0)


@pytest.fixture(scope="module")
def whole_of_two(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two processes that nothing ended."""
    folder = tmp_path_factory.mktemp("whole")
    assert runs.all(folder, processes=2) == [0, 0]
    return folder


def test_a_signal_to_one_stops_both_and_both_go_on(runs: Any, whole_of_two: Path, tmp_path: Path) -> None:
    """Dropout on: every process has random numbers of its own, and both are saved."""
    assert runs.all(tmp_path, processes=2, at=events(1, ("step", 7), "SIGTERM")) == [TERMINATED, TERMINATED]
    checkpoint = load_latest(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None and checkpoint.state.global_step == 7 and checkpoint.state.processes == 2
    first, second = (state["torch"] for state in checkpoint.rng)
    assert not first.equal(second)
    assert runs.all(tmp_path, processes=2) == [0, 0]
    runs.assert_equal(tmp_path, whole_of_two)


def test_killed_while_generating_two_go_on_bit_for_bit(runs: Any, whole_of_two: Path, tmp_path: Path) -> None:
    """Once the process that dies, and so the shards that are missing, are of the one rank and once of the other."""
    for rank, answer in ((1, 4), (0, 3)):
        codes = runs.all(tmp_path, QUICK, processes=2, at=events(rank, ("answer", answer), "SIGKILL"))
        assert codes[rank] == KILLED and codes[1 - rank] == 1
        assert not (tmp_path / "corpora" / "answers" / "complete.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("corpora/answers/shard-*")}
    assert kept, "nothing was kept of two starts"
    assert runs.all(tmp_path, processes=2) == [0, 0], runs.said(tmp_path)[-2000:]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    runs.assert_equal(tmp_path, whole_of_two)


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_another_number_of_processes_goes_on(runs: Any, tmp_path: Path, before: int, after: int) -> None:
    """The losses are those of the number that began, up to rounding (``TOLERANCE``)."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    still = ("head.dropout=0", "phases.distill.grad_accum_steps=2")
    assert runs.all(whole, *still, processes=before) == [0] * before
    codes = runs.all(moved, *still, processes=before, at=events(0, ("step", 7), "SIGTERM"))
    assert codes == [TERMINATED] * before
    assert runs.all(moved, *still, processes=after) == [0] * after, runs.said(moved)[-2000:]
    assert f"on {after} processes instead of {before}: the same rows a step" in runs.said(moved)
    newest = load_latest(moved / "run" / "checkpoints")
    assert newest is not None and newest.state.processes == before
    found, wanted = runs.losses(moved), runs.losses(whole)
    assert found[:7] == wanted[:7]
    assert all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(found, wanted, strict=True)), (found, wanted)


SILENT, FAILED = "has sent no heartbeat for", "error: process {} of 2 ended, and so does this one: "


@pytest.mark.parametrize(
    ("rank", "call", "do", "codes", "says"),
    [
        (0, ("step", 4), "SIGKILL", [KILLED, 1], "process 0"),
        (
            1,
            ("step", 4),
            "SIGSTOP",
            [1, KILLED],
            f"error: process 1 of 2 .*{SILENT}.*resumes from",
        ),  # its connections stay open
        (1, ("step", 4), "raise", [1, 70], FAILED.format(1) + "it failed; its own output says how$"),
        (0, ("save tensors", 1), "full", [1, 1], FAILED.format(0) + "a checkpoint could not be written to"),
    ],
    ids=["the first killed", "hangs", "fails", "full disk"],
)
def test_the_other_ends_and_names_the_one_that_was_lost(
    runs: Any, tmp_path: Path, rank: int, call: tuple[str, int], do: str, codes: list[int], says: str
) -> None:
    patience = {"patience": 2} if do == "SIGSTOP" else {}  # then the one that hangs is killed
    assert runs.all(tmp_path, QUICK, processes=2, at=events(rank, call, do), **patience) == codes
    assert re.search(says, runs.said(tmp_path, rank=1 - rank).strip().splitlines()[-1])
    assert runs.seconds < 60
