"""The example head of docs/tutorials/new_head.md goes through the whole pipeline with the files that the page shows."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import EXAMPLE, HEADS, PAGE, example_blocks
from omegaconf import OmegaConf

from drafthead.models.heads.parts.loading import head_types, load_head
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.train.pipeline import run_pipeline
from support import TinyBase, assert_parity, composed, noisy_head, rows_of


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


@pytest.mark.parametrize("variant", [0, 1])
def test_the_reference_of_the_page_is_the_example(tiny_base: TinyBase, variant: int) -> None:
    """The page's lines, added to the module that they name, compute the example's losses."""
    path = Path(__file__).with_name("test_published_heads.py")
    module = runpy.run_path(str(path))
    exec(example_blocks()[f"tests/models/heads/{path.name}"], module)
    reference = module[EXAMPLE]
    config, noise = module["CASES"][reference]
    head = noisy_head(config(**module["VARIANTS"][reference][variant]), tiny_base(), noise, module["EVEN"])
    assert_parity(head, reference(head))


@pytest.mark.parametrize("returned", ["wide", "alone"])
def test_a_wrong_result_of_advance_is_named(tiny_base: TinyBase, returned: str) -> None:
    base = tiny_base()
    head: Any = HEADS[EXAMPLE].build(base, None)
    advance, batch = head.advance, rows_of([[1, 2, 3, 4, 5, 6]])

    def wrong(*arguments: Any) -> Any:
        x, states = advance(*arguments)
        return (torch.cat([x, x], -1), states) if returned == "wide" else x

    head.advance = wrong
    with pytest.raises(TypeError, match=rf"MyHead.advance.*{base.hidden_size}\]"):
        head.loss(batch, base.hidden_states(batch, head.spec), LossConfig())
