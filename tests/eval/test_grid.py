"""The grid of an evaluation: every combination decodes for real, and the fastest becomes its head's default."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafthead.eval.config import EvalRunConfig, GridConfig
from drafthead.eval.grid import grid_candidates, keep_fastest
from drafthead.files.local import read_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import CostTree, TreeCosts
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.token_tree import TokenTree
from support import TinyBase, call, evaluation_of, task_results


def saved_head(base: BaseModel, folder: Path, exit_layer: int) -> str:
    head = KangarooConfig(exit_layer=exit_layer, num_draft_tokens=3, confidence_threshold=0.9).build(base)
    head.tree = TokenTree.from_paths([(0,), (1,), (0, 0)])
    head.save_pretrained(folder)
    return str(folder)


def files_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def evaluation_with(speedups: dict[str, tuple[float, float | None]]) -> dict[str, Any]:
    """Return ``eval.json`` with the speedup and its lower bound of every method."""
    overall = task_results(1.0)
    methods = {name: task_results(value)["methods"]["speculative"] for name, (value, _) in speedups.items()}
    for name, (_, low) in speedups.items():
        methods[name]["speedup"]["interval_95"] = [low, low and 9.0]
    return evaluation_of(overall | {"methods": methods})


@pytest.mark.slow
def test_every_combination_is_decoded_once(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    folders = [saved_head(base, tmp_path / f"exit{n}" / "head", n) for n in (1, 2)]
    grid = [f"grid.heads=[{folders[1]}]", "grid.confidence_threshold=[0,0.9]", "grid.drafts=[0,3]"]
    settings = ["suite=builtin", "limit=1", "max_new_tokens=8", f"out={tmp_path / 'out'}", "stock_baseline=false"]
    call("eval", f"head={folders[0]}", *grid, *settings)
    evaluation = json.loads((tmp_path / "out" / "eval.json").read_text())
    shapes = ["tree, 0", "chain:3, 0", "chain:3, 0.9"]
    names = {"speculative", "exit2, default", *(f"exit{n}, {shape}" for n in (1, 2) for shape in shapes)}
    methods = evaluation["overall"]["methods"]
    assert set(methods) == names
    assert all(method["identical_outputs"]["same"] == 1 for method in methods.values())
    (written,) = tmp_path.glob("*/head/grid.json")
    record = json.loads(written.read_text())
    assert {row["name"] for row in record["rows"]} == names
    best = next(row for row in record["rows"] if row["name"] == record["best"])
    assert str(written.parent) == best["head"] and (written.parent / "grid.png").stat().st_size > 5000
    assert record["default_before"] == {"choices": [[0], [1], [0, 0]], "confidence_threshold": 0.9, "by_cost": False}


@pytest.mark.parametrize(
    ("default", "best", "dry", "changes", "line"),
    [
        (1.2, (1.5, 1.21), False, True, "now the default"),
        (1.2, (1.5, 1.19), False, False, "within the noise"),
        (1.2, (1.5, None), False, False, "within the noise"),  # one prompt has no interval
        (1.2, (1.1, 1.0), False, False, "already the default"),
        (1.2, (1.5, 1.21), True, False, "dry=true"),
    ],
)
def test_the_winner_is_written_only_if_its_interval_lies_above_its_default(
    tiny_base: TinyBase,
    tmp_path: Path,
    default: float,
    best: tuple[float, float | None],
    dry: bool,
    changes: bool,
    line: str,
) -> None:
    base = tiny_base()
    folder = saved_head(base, tmp_path / "head", 1)
    before = files_of(folder)
    config = EvalRunConfig(head=folder, grid=GridConfig(confidence_threshold=[0.3], drafts=[3]))
    candidates = grid_candidates(base, load_head(folder, base), config)
    assert [candidate.default for candidate in candidates] == [True, False]
    speedups = dict(zip([candidate.name for candidate in candidates], [(default, default - 0.1), best], strict=True))
    assert line in keep_fastest(evaluation_with(speedups), candidates, config, dry)
    after = files_of(folder)
    assert after.keys() - before.keys() == (set() if dry else {"grid.json", "grid.png"})
    assert ({name: after[name] for name in before} == before) == (not changes)
    head = load_head(folder, base)
    assert head.confidence_threshold == (0.3 if changes else 0.9) and head.tree is not None
    assert head.tree.depth == (3 if changes else 2)


def test_a_static_winner_replaces_trees_by_cost(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    head = load_head(saved_head(base, tmp_path / "head", 1), base)
    costs = CostModel(verify={1: 1.0, 8: 1.1}, draft=0.1, overhead=0.0, context=8)
    head.tree_costs, head.prefers_cost, head.confidence_threshold = TreeCosts(costs={1: costs}), True, 0.0
    head.save_pretrained(tmp_path / "head")
    config = EvalRunConfig(head=str(tmp_path / "head"), grid=GridConfig(drafts=[3]))
    candidates = grid_candidates(base, load_head(tmp_path / "head", base), config)
    assert [isinstance(candidate.draft_config.tree, CostTree) for candidate in candidates] == [True, False]
    speedups = dict(zip([candidate.name for candidate in candidates], [(1.2, 1.1), (1.5, 1.21)], strict=True))
    assert "now the default" in keep_fastest(evaluation_with(speedups), candidates, config, dry=False)
    assert read_json(tmp_path / "head" / "grid.json")["default_before"]["by_cost"]
    assert not load_head(tmp_path / "head", base).by_cost


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("grid.drafts=[0,4]", "grid.drafts.*3 positions"),
        ("grid.confidence_threshold=[1.5]", "grid.confidence_threshold"),
        ("grid.drafts=[-1]", "grid.drafts"),
        ("grid.heads=[none]", "no head folder at none"),
        ("grid.drafts=[2] tree=chain:2", "tree"),
        ("grid.drafts=[2] drafter=head+prompt_lookup:4", "drafter"),
    ],
)
def test_bad_input(tiny_base: TinyBase, tmp_path: Path, setting: str, message: str) -> None:
    folder = saved_head(tiny_base(), tmp_path / "head", 1)
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        call("eval", f"head={folder}", "suite=builtin", *setting.split())


def test_candidates_that_a_head_cannot_draft_are_left_out(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    deep, shallow = (saved_head(base, tmp_path / name, 1) for name in ("deep", "shallow"))
    short = KangarooConfig(exit_layer=1, num_draft_tokens=2).build(base)
    short.save_pretrained(shallow)
    config = EvalRunConfig(head=deep, grid=GridConfig(heads=[shallow], drafts=[3]))
    head = load_head(deep, base)
    names = [candidate.name for candidate in grid_candidates(base, head, config)]
    assert names == ["speculative", "deep, chain:3, 0.9", "shallow, default"]
    only = replace(config, grid=GridConfig(heads=[shallow]))
    assert len(grid_candidates(base, head, only)) == 2
