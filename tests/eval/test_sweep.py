"""The sweep: every combination decodes for real, and the fastest becomes its head's default."""

import json
from pathlib import Path
from typing import Any

import pytest

from drafthead.commands import sweep
from drafthead.commands.sweep import Candidate
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.token_tree import TokenTree
from support import TinyBase, call

SHORT = ("thresholds=[0]", "drafts=[1]", "suite=builtin", "limit=1", "max_new_tokens=4")


def saved_head(base: BaseModel, folder: Path, exit_layer: int) -> str:
    head = KangarooConfig(exit_layer=exit_layer, num_draft_tokens=3, confidence_threshold=0.9).build(base)
    head.tree = TokenTree.from_paths([(0,), (1,), (0, 0)])
    head.save_pretrained(folder)
    return str(folder)


def with_speedup_of_defaults(monkeypatch: pytest.MonkeyPatch, speedup: float) -> None:
    """Timings of tiny models say nothing: the defaults' speedups are given."""
    rows_of = sweep.rows_of

    def changed(candidates: list[Candidate], results: Any) -> list[dict[str, Any]]:
        rows = [row | ({"speedup": speedup} if row["default"] else {}) for row in rows_of(candidates, results)]
        return sorted(rows, key=lambda row: -row["speedup"])

    monkeypatch.setattr(sweep, "rows_of", changed)


def files_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_the_fastest_is_kept(tiny_base: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base()
    folders = [saved_head(base, tmp_path / f"exit{n}" / "head", n) for n in (1, 2)]
    with_speedup_of_defaults(monkeypatch, 0.0)
    settings = ["thresholds=[0,0.3]", "drafts=[0,3]", "suite=builtin", "limit=2", "max_new_tokens=12"]
    call("sweep", f"heads=[{','.join(folders)}]", *settings)
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


@pytest.mark.parametrize(("dry", "written"), [(True, set()), (False, {"sweep.json", "sweep.png"})])
def test_a_dry_run_or_a_default_that_is_fastest_changes_nothing(
    tiny_base: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry: bool, written: set[str]
) -> None:
    folder = saved_head(tiny_base(), tmp_path / "head", 1)
    before = files_of(folder)
    with_speedup_of_defaults(monkeypatch, 0.0 if dry else 1e9)
    call("sweep", f"heads=[{folder}]", *SHORT, f"dry={dry}")
    after = files_of(folder)
    assert after.keys() - before.keys() == written
    assert {name: after[name] for name in before} == before


def test_bad_input(tiny_base: TinyBase, tmp_path: Path) -> None:
    folder = saved_head(tiny_base(), tmp_path / "head", 1)
    bad = (
        ("drafts=[0,4]", "drafts=4 is more than the 3 positions"),
        ("thresholds=[1.5]", "thresholds must be in"),
        ("drafts=[-1]", "drafts must be at least 0"),
        ("max_new_tokens=1", "max_new_tokens must be at least 2"),
        ("heads=[]", "heads is empty"),
        (f"heads=[{tmp_path / 'none'}]", "no head folder at"),
    )
    for setting, message in bad:
        with pytest.raises(SystemExit, match=f"^error: .*{message}"):
            call("sweep", f"heads=[{folder}]", setting)
