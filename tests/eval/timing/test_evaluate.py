"""What an evaluation measures again: whatever was drafted with something else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafthead.eval.config import EvalConfig
from drafthead.eval.evaluate import evaluate
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.contract import Drafter
from drafthead.models.drafters.draft_model import early_exit
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from support import TinyBase

CONFIG = EvalConfig(suite="builtin", limit=2, max_new_tokens=4)


def resumed(folder: Path, drafter: Drafter, base: BaseModel, *baselines: str) -> list[int]:
    """Turns that were taken from an earlier evaluation in ``folder``, and all."""
    found: list[int] = evaluate(base, drafter, replace(CONFIG, baselines=list(baselines)), folder, lambda *_: None)[
        "resumed"
    ]
    return found


def test_a_baseline_that_was_trained_again_is_timed_again(tiny_base: TinyBase, tmp_path: Path) -> None:
    """With all it is compared with; a baseline in the same folder with the same weights is not."""
    base, baseline = tiny_base(), MedusaConfig(num_draft_tokens=2).build(tiny_base())
    head = MedusaConfig(num_draft_tokens=1).build(base)
    baseline.save_pretrained(tmp_path / "baseline")
    baselines = ["prompt_lookup", f"head:{tmp_path / 'baseline'}"]
    assert resumed(tmp_path, head, base, *baselines) == [0, 2]
    assert resumed(tmp_path, head, base, *baselines) == [2, 2]
    with torch.no_grad():
        baseline.blocks[1][0].linear.bias += 1.0
    baseline.save_pretrained(tmp_path / "baseline")
    assert resumed(tmp_path, head, base, *baselines) == [0, 2]
    assert resumed(tmp_path, head, base, *baselines) == [2, 2]
    assert resumed(tmp_path, head, base) == [2, 2], "the others are known without it"


@pytest.mark.parametrize("change", ["threshold", "layers"])
def test_what_is_measured_is_known_by_more_than_its_name(tiny_base: TinyBase, tmp_path: Path, change: str) -> None:
    base = tiny_base()
    head = KangarooConfig(exit_layer=1, num_draft_tokens=3).build(base)
    assert resumed(tmp_path, head if change == "threshold" else early_exit(base, 1), base) == [0, 2]
    head.confidence_threshold = 0.1
    other = head if change == "threshold" else early_exit(base, 2)
    assert resumed(tmp_path, other, base) == [0, 2]
    assert resumed(tmp_path, other, base) == [2, 2]
