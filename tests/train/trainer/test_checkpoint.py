"""Resuming equals never having stopped, and damage never goes unnoticed."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from drafthead.errors import UserError
from drafthead.train.distributed.sharding import full_state_dict
from drafthead.train.trainer.checkpoint import capture_rng, load_best, load_latest, restore_rng, save_checkpoint
from support import flip

STATE = {"phase": 1, "losses": [0.1, None, 1 / 3], "score": None}


class Run:
    """Two layers in training."""

    def __init__(self) -> None:
        self.head = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.optimizers = [torch.optim.AdamW(self.head.parameters(), lr=0.1)]

    def step(self) -> None:
        torch.autograd.backward(self.head(torch.ones(4)).sum())
        self.optimizers[0].step()

    def save(self, folder: Path, step: int, keep: int = 2, score: float | None = None) -> Path:
        states = full_state_dict(self.head, self.optimizers)
        return save_checkpoint(folder, step, {**STATE, "score": score}, *states, rng=[capture_rng()], keep=keep)


def test_the_random_generators_are_restored(tmp_path: Path) -> None:
    Run().save(tmp_path, 7)
    expected = torch.rand(9)
    checkpoint = load_latest(tmp_path)
    assert checkpoint is not None and checkpoint.state == STATE and not torch.rand(9).equal(expected)
    restore_rng(checkpoint.rng[0])
    assert torch.rand(9).equal(expected)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def link(path: Path) -> None:
    elsewhere = path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(elsewhere)


FILES = ("head.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip, truncate, link, Path.unlink], ids=lambda f: f.__name__)
def test_a_damaged_newest_falls_back(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    run = Run()
    run.save(tmp_path, 1)
    newest = run.save(tmp_path, 2)
    damage(newest / name)
    checkpoint = load_latest(tmp_path)
    assert checkpoint is not None and checkpoint.path.name == "step-0000001"
    (warning,) = checkpoint.warnings
    assert "step-0000002 is damaged" in warning and name in warning and "\n" not in warning
    assert ("is a link to" in warning) == (damage is link)


def test_only_damaged_checkpoints_are_an_error(tmp_path: Path) -> None:
    run = Run()
    for step in (1, 2):
        flip(run.save(tmp_path, step) / "head.safetensors")
    with pytest.raises(UserError, match="every checkpoint .*step-0000002.*step-0000001"):
        load_latest(tmp_path)


@pytest.mark.parametrize(
    ("saved", "remaining"),
    [
        ([1, 2, 9, 10, 11], [10, 11]),
        ([5, 100, 10], [5, 10]),  # later steps belong to another run
        ([9_999_999, 10_000_000], [9_999_999, 10_000_000]),  # names sort as numbers
        ([4, 4], [4]),
    ],
)
def test_the_newest_are_kept(tmp_path: Path, saved: list[int], remaining: list[int]) -> None:
    assert load_latest(tmp_path / "absent") is None and load_latest(tmp_path) is None
    run = Run()
    for step in saved:
        run.step()
        run.save(tmp_path, step)
    assert load_best(tmp_path) is None, "nothing was measured"
    assert {p.name for p in tmp_path.iterdir()} == {f"step-{step:07d}" for step in remaining}
    checkpoint = load_latest(tmp_path)
    assert checkpoint is not None and checkpoint.path.name == f"step-{saved[-1]:07d}"
    assert checkpoint.head["0.weight"].equal(run.head[0].weight)


def test_no_pickle_is_written(tmp_path: Path) -> None:
    run = Run()
    run.step()
    path = run.save(tmp_path, 1)
    assert sorted(p.name for p in path.iterdir()) == sorted(FILES)
    assert all(not zipfile.is_zipfile(p) and not p.read_bytes().startswith(b"\x80") for p in path.iterdir())


def test_the_best_is_marked_and_kept(tmp_path: Path) -> None:
    run = Run()
    for step, score in ((1, 1.2), (2, 1.5), (3, None), (4, 1.4), (5, 1.5), (6, 1.1)):
        run.save(tmp_path, step, keep=1, score=score)
        if step == 4:
            assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "step-0000002", "step-0000004"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "step-0000005", "step-0000006"]
    assert (tmp_path / "best").resolve().name == "step-0000005", "the later one of equals"
    best, latest = load_best(tmp_path), load_latest(tmp_path)
    assert best is not None and latest is not None
    assert (best.state["score"], best.path.name, latest.path.name) == (1.5, "step-0000005", "step-0000006")


@pytest.mark.usefixtures("full_disk")
def test_too_little_space_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a checkpoint needs about .* are free"):
        Run().save(tmp_path, 1)
