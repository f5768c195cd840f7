"""Whole tiny runs of the heads behind Medusa: golden losses, and resuming."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafthead.train.pipeline import run_pipeline
from support import GOLDEN_TEXT, composed, losses_of

ROOT = Path(__file__).parent.parent.parent


def run(folder: Path, recipe: str, *overrides: str) -> Path:
    run_pipeline(*composed(folder, f"recipe={recipe}", "debug=tiny", GOLDEN_TEXT, "log_every=1", *overrides))
    return folder / "run"


def golden(recipe: str) -> list[float]:
    """Losses of ten steps a phase; after ``python tests/golden/regenerate.py`` give a reason in the changelog."""
    path = ROOT / "tests" / "golden" / f"{recipe.removesuffix('_smollm2')}_tiny_losses.json"
    found: list[float] = json.loads(path.read_text())
    return found


@pytest.mark.slow
def test_golden_losses_of_eagle3(tmp_path: Path) -> None:
    found = losses_of(run(tmp_path, "eagle3_smollm2", "eval.limit=1"))
    assert found == pytest.approx(golden("eagle3_smollm2"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["hydra_smollm2", "hydra_pp_smollm2", "mlp_speculator_smollm2"])
def test_golden_losses_and_resume(tmp_path: Path, recipe: str) -> None:
    """A run that goes on from step 12 does so bit for bit (dropout included)."""
    more = ["checkpoint.every_steps=4", "checkpoint.keep=20", "eval.limit=1"]
    whole = losses_of(run(tmp_path, recipe, *more))
    assert whole == pytest.approx(golden(recipe), rel=1e-4)
    wanted = load_file(tmp_path / "run" / "head" / "model.safetensors")
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > 12:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    (tmp_path / "run" / "head" / "model.safetensors").unlink()
    assert losses_of(run(tmp_path, recipe, *more)) == whole
    found = load_file(tmp_path / "run" / "head" / "model.safetensors")
    assert all(torch.equal(wanted[k], found[k]) for k in wanted)
