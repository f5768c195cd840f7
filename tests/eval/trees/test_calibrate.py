"""What was measured is kept and found again; step costs on a base with a short context; logs cut off by a kill."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import write_checksummed_json, write_json
from drafthead.eval.trees import calibrate
from drafthead.eval.trees.cost_model import CostModel, measure_costs
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead

TinyBase = Callable[..., BaseModel]
COSTS = CostModel(verify={1: 0.01, 8: 0.011, 64: 0.05}, draft=0.001, overhead=0.0005, context=200)


@pytest.fixture
def head(tiny_base: TinyBase) -> MedusaHead:
    return MedusaConfig(num_draft_tokens=3).build(tiny_base())


def chosen() -> calibrate.Calibration:
    ranks = np.random.default_rng(0).integers(0, 4, size=(300, 3))
    return calibrate.calibrate([ranks], COSTS)


def test_a_kept_calibration_is_found_again(head: MedusaHead, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    assert calibrate.load_calibration(path, head) is None
    calibrate.save_calibration(path, head, COSTS, chosen())
    assert calibrate.load_calibration(path, head) == (COSTS, chosen())


def test_other_weights_or_another_machine_are_measured_again(
    head: MedusaHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calibration.json"
    calibrate.save_calibration(path, head, COSTS, chosen())
    with monkeypatch.context() as patched:
        patched.setattr(calibrate, "hardware", lambda: {"cpu": "another"})
        assert calibrate.load_calibration(path, head) is None
    with torch.no_grad():
        head.projections.weights[0][0, 0] += 1
    assert calibrate.load_calibration(path, head) is None


def test_a_foreign_file_is_refused(head: MedusaHead, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    for content in ([], {}, {"measured_with": calibrate.measured_with(head), "costs": {}}):
        write_checksummed_json(path, content)
        with pytest.raises(UserError, match=r"is no calibration .*; remove it to measure again"):
            calibrate.load_calibration(path, head)
        write_json(path, content)
        with pytest.raises(UserError, match=r"is damaged: it does not have the checksum .*; restore or remove it"):
            calibrate.load_calibration(path, head)


def test_answers_without_a_step_are_refused() -> None:
    with pytest.raises(UserError, match=r"too few to choose a tree by; raise data.generations"):
        calibrate.calibrate([], COSTS)
    with pytest.raises(UserError, match="no method 'grid' to calibrate a tree; choose one of greedy, sequoia"):
        calibrate.calibrate([], COSTS, method="grid")


def test_costs_on_a_short_context(head: MedusaHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head.base, "max_context", 16)
    costs = measure_costs(head.base, head, repeats=1)
    assert costs.context == 8 and sorted(costs.verify) == [1, 2, 3, 4, 5, 6, 8]
    assert CostModel.from_json(replace(costs).to_json()) == costs
