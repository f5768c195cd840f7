"""The example head of docs/tutorials/new_head.md goes through the whole pipeline with the files that the page shows."""

import json
from pathlib import Path

import pytest
import torch
from head_cases import EXAMPLE, HEADS, PAGE, example_blocks
from omegaconf import OmegaConf

from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import all_formats
from drafthead.models.heads.parts.loading import head_types, load_head
from drafthead.train.pipeline import run_pipeline
from support import composed


def test_the_example_trains_and_evaluates(tmp_path: Path) -> None:
    """Discovered by its file's name alone: corpora, training, calibration, decoding, evaluation and loading."""
    recipe = tmp_path / "recipes" / "head" / f"{EXAMPLE}.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(example_blocks()[f"recipes/head/{EXAMPLE}.yaml"])
    (command,) = [line for line in PAGE.read_text().splitlines() if "debug=tiny" in line]
    overrides = command.partition("#")[0].split()[2:]
    assert f"head={EXAMPLE}" in overrides
    run_pipeline(*composed(tmp_path, f"hydra.searchpath=[file://{tmp_path / 'recipes'}]", *overrides))
    evaluation = json.loads((tmp_path / "run" / "eval.json").read_text())["overall"]
    assert evaluation["identical_outputs"] == {**evaluation["identical_outputs"], "same": 3, "of": 3}
    assert load_head(tmp_path / "run" / "head").config.head_type == EXAMPLE


def test_the_example_is_among_the_tested_heads() -> None:
    assert set(head_types()) == {config.head_type for config in HEADS.values()} >= {EXAMPLE, "medusa"}
    documented = OmegaConf.create(example_blocks()[f"recipes/head/{EXAMPLE}.yaml"])
    assert set(documented) == {"head_type", *vars(HEADS[EXAMPLE])}


@pytest.mark.parametrize(("recipe", "form"), [("eagle3_llama3", "eagle3"), ("dspark_llama3", "dspark")])
def test_tiny_heads_read_layers_that_engines_can_join(tmp_path: Path, recipe: str, form: str) -> None:
    """A tiny run rehearses the path to an engine, so what it trains must have the form of an export."""
    run, _ = composed(tmp_path, f"recipe={recipe}", "debug=tiny")
    base, config = BaseModel.load(run.base), run.head_config()
    head = config.build(base, torch.arange(config.drafted_ids(base.vocab_size)))
    all_formats()[form].checkpoint(head, None, None)
    with pytest.raises(UserError, match="layers"):  # the default of a base of four layers
        all_formats()[form].checkpoint(type(config)(layers=None).build(base), None, None)
