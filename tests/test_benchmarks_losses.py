"""benchmarks/losses.py trains a head once per loss, alike but for the loss."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from drafthead.data.utils.errors import UserError


@pytest.fixture
def losses(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("losses")


def overrides(folder: Path) -> list[str]:
    steps = ["phases.pretrain.steps=2", "phases.distill.steps=4"]
    return ["debug=tiny", f"out={folder / 'run'}", f"data.folder={folder / 'corpora'}", *steps]


def test_every_loss_is_trained_and_measured(
    losses: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "losses.json"
    losses.main(["--seeds", "2", "--losses", "ce,lk,ce", "--json", str(out), *overrides(tmp_path)])
    record = json.loads(out.read_text())
    assert {"benchmark", "date", "arguments", "hardware", "versions"} <= record.keys()
    assert record["budget"] == "steps x positions: pretrain 2 x 1024, distill 4 x 1024"
    assert list(record["results"]) == ["ce", "lk"]
    for result in record["results"].values():
        assert len(result["accept"]) == len(result["overlap"]) == 3
        assert all(0 <= share <= 1 for share in (*result["accept"], *result["overlap"]))
        assert result["seconds"] > 0 and len(result["by_seed"]) == 2
        assert result["mean_accepted_tokens"] == pytest.approx(sum(result["by_seed"]) / 2)
    assert record["results"]["ce"]["overlap"] != record["results"]["lk"]["overlap"]
    said = capsys.readouterr().out
    assert "ce, seed 0" in said and "lk, seed 1" in said and "tokens a step" in said


def test_runs_differ_in_the_loss_alone(losses: ModuleType, tmp_path: Path) -> None:
    run = losses.load_recipe("medusa_smollm2", overrides(tmp_path))
    assert {phase.features for phase in run.phases.values()} == {"cached"}
    for name, weights in losses.LOSSES.items():
        for key, phase in losses.with_loss(run, name, seed=3).phases.items():
            found = {term: getattr(phase.loss, term) for term in losses.TERMS}
            assert {term: weight for term, weight in found.items() if weight} == weights
            assert (phase.loss.decay, phase.optim, phase.steps) == (0.8, run.phases[key].optim, run.phases[key].steps)


def test_seconds_are_those_of_the_steps(losses: ModuleType) -> None:
    rows = [
        {"total_step": 20, "step_ms": 100.0},
        {"total_step": 40, "step_ms": 50.0},
        {"total_step": 40, "held_out_tokens_a_step": 1.5},
        {"total_step": 45, "step_ms": 200.0},
    ]
    assert losses._training_seconds(rows) == pytest.approx(2.0 + 1.0 + 1.0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--losses", "ce,mse"], "--losses knows ce, kl, .*, got mse"),
        (["--losses", ""], "got nothing"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--recipe", "nowhere"], "nowhere"),
        (["phases.distill.stepz=1"], "stepz"),
    ],
)
def test_bad_input_fails_before_anything_loads(losses: ModuleType, given: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        losses.main(given)
