"""Whole tiny runs: golden losses, and runs that resume from any checkpoint bit for bit."""

import json
import shutil
from pathlib import Path

import pytest

from drafthead.train.pipeline import run_pipeline
from support import GOLDEN_TEXT, assert_same_run, cases, composed, forget_after, losses_of

GOLDEN = Path(__file__).parents[1] / "golden"
HEADS = ("medusa", "eagle3", "hydra", "hydra_pp", "mlp_speculator")
TRAINED = "stages=[corpora,train]"
STREAM = ("data.text.stream=true", "data.text.stream_shards=2")
JOINT = ("phases.joint.steps=6", "phases.pretrain.steps=2", "phases.distill.steps=4", "head.lora_dropout=0.3")


def train(folder: Path, recipe: str, *overrides: str) -> Path:
    run_pipeline(*composed(folder, f"recipe={recipe}", "debug=tiny", "log_every=1", *overrides))
    return folder / "run"


@pytest.mark.parametrize("head", [pytest.param(h, marks=() if h == "medusa" else pytest.mark.slow) for h in HEADS])
def test_golden_losses(tmp_path: Path, head: str) -> None:
    """Ten steps a phase; regenerate with ``python tests/golden/regenerate.py`` and give a reason in the changelog."""
    settings = ["head.induction_rank=0", *(["head.layers=null"] if head == "eagle3" else [])]
    losses = losses_of(train(tmp_path, f"{head}_smollm2", GOLDEN_TEXT, TRAINED, *settings))
    assert losses == pytest.approx(json.loads((GOLDEN / f"{head}_tiny_losses.json").read_text()), rel=1e-4)


@cases(
    "recipe, options, stops",
    pytest.param(
        "medusa2_smollm2", JOINT, (6, 9), marks=pytest.mark.slow
    ),  # before the phase that trains the base, and in its midst
    ("medusa_smollm2", (*STREAM, "phases.pretrain.optim.name=muon"), (3, 12)),
    pytest.param("mlp_speculator_smollm2", (), (12,), marks=pytest.mark.slow),
    ids=["medusa2", "stream and muon", "mlp_speculator"],
)
def test_resuming_changes_no_bit(tmp_path: Path, recipe: str, options: tuple[str, ...], stops: tuple[int, ...]) -> None:
    """Beside the runs of test_interrupted_runs.py: a base that is trained along, a stream, Muon, another head."""
    options = (*options, TRAINED, "checkpoint.every_steps=3", "checkpoint.keep=20")
    whole = train(tmp_path / "whole", recipe, *options)
    for stop in stops:
        folder = tmp_path / f"part{stop}"
        shutil.copytree(tmp_path / "whole", folder, symlinks=True)
        forget_after(folder / "run", stop)
        # Positions of a stream only save time.
        shutil.rmtree(folder / "corpora" / "stream", ignore_errors=True)
        assert_same_run(train(folder, recipe, *options), whole)
