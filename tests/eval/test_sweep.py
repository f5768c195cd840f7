"""The sweep: every combination decodes for real, and the fastest becomes its head's default."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafthead.commands import sweep
from drafthead.commands.sweep import Candidate, candidates_of
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.common.contract import DraftHead
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.token_tree import TokenTree

TinyBase = Callable[..., BaseModel]


def saved_head(base: BaseModel, folder: Path, exit_layer: int) -> str:
    head = KangarooConfig(exit_layer=exit_layer, num_draft_tokens=3, confidence_threshold=0.9).build(base)
    head.tree = TokenTree.from_paths([(0,), (1,), (0, 0)])
    head.save_pretrained(folder)
    return str(folder)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["drafthead sweep", *arguments])
    sweep.main()


def test_the_fastest_is_kept(tiny_base: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base()
    folders = [saved_head(base, tmp_path / f"exit{n}" / "head", n) for n in (1, 2)]
    rows_of = sweep.rows_of

    def without_defaults(candidates: list[Candidate], results: Any) -> list[dict[str, Any]]:
        rows = rows_of(candidates, results)
        rows = [row | {"speedup": 0.0} if row["default"] else row for row in rows]
        return sorted(rows, key=lambda row: -row["speedup"])

    monkeypatch.setattr(sweep, "rows_of", without_defaults)
    options = ["--thresholds", "0", "0.3", "--drafts", "0", "3", "--suite", "builtin", "--limit", "2"]
    run(monkeypatch, "--heads", *folders, *options, "--max-new-tokens", "12")
    (found,) = tmp_path.glob("*/head/sweep.json")
    record = json.loads(found.read_text())
    speeds = [row["speedup"] for row in record["rows"]]
    assert len(speeds) == 10 and sum(row["default"] for row in record["rows"]) == 2
    assert speeds == sorted(speeds, reverse=True)
    assert {row["exit_layer"] for row in record["rows"]} == {1, 2}
    assert all(row["identical"] == row["answers"] == 2 for row in record["rows"])
    best = record["rows"][0]
    assert str(found.parent) == best["head"] and (found.parent / "sweep.png").stat().st_size > 5000
    winner = DraftHead.from_pretrained(found.parent, base)
    assert winner.confidence_threshold == best["threshold"] < 0.9
    assert record["default_before"] == {"choices": [[0], [1], [0, 0]], "confidence_threshold": 0.9}
    assert winner.tree is not None and (winner.tree.depth == 3 if best["drafts"] else len(winner.tree) == 4)
    (other,) = set(folders) - {best["head"]}
    assert DraftHead.from_pretrained(other, base).confidence_threshold == 0.9


def test_what_is_within_the_noise_changes_no_default() -> None:
    default = {"speedup": 1.2}
    assert sweep.is_faster({"interval": [1.21, 1.4]}, default)
    assert not sweep.is_faster({"interval": [1.19, 1.4]}, default)
    assert not sweep.is_faster({"interval": None}, default), "one prompt has no interval"


def test_a_dry_run_changes_nothing(tiny_base: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_head(tiny_base(), tmp_path / "head", 1)
    before = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
    options = ["--thresholds", "0", "--drafts", "1", "--suite", "builtin", "--limit", "1", "--max-new-tokens", "4"]
    run(monkeypatch, "--heads", folder, *options, "--dry")
    assert {p.name: p.read_bytes() for p in Path(folder).iterdir()} == before


def test_bad_input(tiny_base: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = KangarooConfig(exit_layer=1, num_draft_tokens=3).build(tiny_base())
    with pytest.raises(UserError, match="--drafts 4 is more than the 3 positions"):
        candidates_of({"x": head}, [0, 4], [0.5])
    bad = (
        (["--thresholds", "1.5"], "thresholds must be"),
        (["--drafts", "-1"], "drafts must be at least 0"),
        ([], "no head folder at"),
    )
    for options, message in bad:
        with pytest.raises(SystemExit, match=message):
            run(monkeypatch, "--heads", str(tmp_path / "none"), *options)
    assert torch.is_grad_enabled()


def test_a_default_that_is_fastest_stays(tiny_base: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_head(tiny_base(), tmp_path / "head", 1)
    before = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
    rows_of = sweep.rows_of

    def slowed(candidates: list[Candidate], results: Any) -> list[dict[str, Any]]:
        rows = rows_of(candidates, results)
        return [row | {"speedup": 9.0 if row["default"] else 1.0} for row in rows]

    monkeypatch.setattr(sweep, "rows_of", slowed)
    options = ["--thresholds", "0", "--drafts", "1", "--suite", "builtin", "--limit", "1", "--max-new-tokens", "4"]
    run(monkeypatch, "--heads", folder, *options)
    after = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
    assert after.keys() - before.keys() == {"sweep.json", "sweep.png"}
    assert {name: after[name] for name in before} == before
