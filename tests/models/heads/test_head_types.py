"""A head's type is the name of its module, in recipes and in saved heads; the names of version 0.1 are still read."""

from pathlib import Path

import pytest
import torch

import drafthead
from drafthead.data.utils.config import update_names
from drafthead.data.utils.files import read_json
from drafthead.models.heads.common.contract import config_class, head_types, parse_head

OLD = Path(__file__).parents[2] / "version_0_1_0"


def test_every_module_is_a_head_of_its_name() -> None:
    assert head_types() == ["draft_lm", "eagle3", "hydra", "kangaroo", "medusa", "medusa2", "mlp_speculator"]
    for name in head_types():
        assert parse_head({"head_type": name}) == config_class(name)() and config_class(name)().head_type == name


def test_old_names_are_read() -> None:
    old = {"_target_": "drafthead.models.kangaroo.KangarooConfig", "num_tokens": 3, "threshold": 0.5}
    new = {"head_type": "kangaroo", "num_draft_tokens": 3, "confidence_threshold": 0.5}
    assert update_names({"head": old}) == {"head": new}
    old = {"_target_": "drafthead.models.mlp_speculator.MLPSpeculatorConfig", "n_predict": 2, "own_projection": False}
    new = {"head_type": "mlp_speculator", "num_draft_tokens": 2, "own_lm_head": False}
    assert update_names(old, "head") == new and parse_head(new).depth == 2


@pytest.mark.parametrize("name", ["medusa", "mlp_speculator"])
def test_saved_by_version_0_1(name: str, tmp_path: Path) -> None:
    """It loads, drafts, and is saved in today's format with the same weights."""
    head = drafthead.load_head(OLD / name)
    prompt = [3, 4, 5, 6]
    found = drafthead.generate(head.base, head, prompt, max_new_tokens=20)
    assert found.tokens == drafthead.generate(head.base, None, prompt, max_new_tokens=20).tokens
    head.save_pretrained(tmp_path)
    saved = read_json(tmp_path / "config.json")
    assert saved["head_type"] == name and "head" not in saved and "drafthead." not in str(saved)
    again, weights = drafthead.load_head(tmp_path, head.base), head.state_dict()
    assert again.config == head.config and again.tree == head.tree
    assert all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())
