"""Whole tiny runs of Hydra and MLP speculators: golden losses, and resuming."""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors.torch import load_file

from drafthead.train.config import parse_run
from drafthead.train.pipeline import run_pipeline

ROOT = Path(__file__).parent.parent.parent


def run(folder: Path, recipe: str, *overrides: str) -> Path:
    text = f"data.text.sources=[{{kind: text, name: {ROOT / 'LICENSE'}}}]"
    places = [f"out={folder / 'run'}", f"data.folder={folder / 'corpora'}", text, "log_every=1", *overrides]
    with initialize_config_module("drafthead.recipes", version_base="1.3"):
        cfg = compose("train", overrides=[f"recipe={recipe}", "debug=tiny", *places])
    run_pipeline(parse_run(cfg), OmegaConf.to_yaml(cfg, resolve=True))
    return folder / "run"


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["hydra_smollm2", "hydra_pp_smollm2", "mlp_speculator_smollm2"])
def test_golden_losses_and_resume(tmp_path: Path, recipe: str) -> None:
    """Ten steps a phase, and a run that goes on from step 12 bit for bit (dropout included)."""
    golden = json.loads((ROOT / "tests" / "golden" / f"{recipe.removesuffix('_smollm2')}_tiny_losses.json").read_text())
    more = ["checkpoint.every_steps=4", "checkpoint.keep=20", "eval.limit=1"]
    whole = losses(run(tmp_path, recipe, *more))
    assert whole == pytest.approx(golden, rel=1e-4)
    wanted = load_file(tmp_path / "run" / "head" / "model.safetensors")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > 12:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    (tmp_path / "run" / "head" / "model.safetensors").unlink()
    assert losses(run(tmp_path, recipe, *more)) == whole
    found = load_file(tmp_path / "run" / "head" / "model.safetensors")
    assert all(torch.equal(wanted[k], found[k]) for k in wanted)
