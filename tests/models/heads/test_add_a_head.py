"""The example head of docs/tutorials/new_head.md goes through the whole pipeline with the files that the page shows."""

import json
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import EXAMPLE, HEADS, PAGE, example_blocks
from omegaconf import OmegaConf

from drafthead.errors import UserError
from drafthead.models.heads.parts.loading import head_types, load_head
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.train.pipeline import run_pipeline
from support import TinyBase, assert_parity, cases, composed, noisy_head, refuses, rows_of


def test_the_example_trains_and_evaluates(tmp_path: Path) -> None:
    """Discovered by its file's name alone: corpora, training, calibration, decoding, evaluation and loading."""
    recipe = tmp_path / "recipes" / "head" / f"{EXAMPLE}.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(example_blocks()[f"recipes/head/{EXAMPLE}.yaml"])
    (command,) = [line for line in PAGE.read_text().splitlines() if "debug=tiny" in line]
    overrides = command.partition("#")[0].split()[2:]
    assert f"head={EXAMPLE}" in overrides
    short = ("tree_prompts=1", "eval.limit=1", "eval.max_new_tokens=8")
    run_pipeline(*composed(tmp_path, f"hydra.searchpath=[file://{tmp_path / 'recipes'}]", *overrides, *short))
    evaluation = json.loads((tmp_path / "run" / "eval.json").read_text())["overall"]
    assert evaluation["identical_outputs"] == {**evaluation["identical_outputs"], "same": 1, "of": 1}
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


@cases(
    "returned, says",
    ("wide", r"returned tensor \[\d+, \d+\], tuple"),
    ("alone", r"returned tensor \[\d+, \d+\]$"),
    ("bare", ""),
)
def test_a_wrong_result_of_advance_is_named(tiny_base: TinyBase, returned: str, says: str) -> None:
    base = tiny_base()
    head: Any = HEADS[EXAMPLE].build(base, None)
    advance, batch = head.advance, rows_of([[1, 2, 3, 4, 5, 6]])

    def wrong(*arguments: Any) -> Any:
        x, states = advance(*arguments)
        return {"wide": (torch.cat([x, x], -1), states), "alone": x, "bare": (x, *states)}[returned]

    head.advance = wrong
    with pytest.raises(UserError, match=rf"MyHead.advance.*{base.hidden_size}\].*{says}"):
        head.loss(batch, base.hidden_states(batch, head.spec), LossConfig())


@cases(
    "line, says",
    ("    session_class = HeadSession", "session_class = HeadSession"),
    ("        self.projections = self.lm_heads(0)", r"self.projections = self.lm_heads\(...\) in __init__"),
    ("def advance", "the method advance"),
)
def test_what_a_head_lacks_is_named_before_training(
    tiny_base: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, says: str
) -> None:
    code = example_blocks()[f"models/heads/{EXAMPLE}.py"]
    assert line in code
    (tmp_path / "lacking.py").write_text(code.replace(line, "def other" if line.startswith("def") else ""))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lacking", raising=False)
    with pytest.raises(UserError, match=f"MyHead must define {says}; docs/tutorials/new_head.md"):
        import_module("lacking").MyHeadConfig().build(tiny_base())


def test_output_layers_have_the_rows_of_the_draft_vocabulary(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head: Any = HEADS[EXAMPLE].build(base, torch.arange(100))
    refuses(f"has {base.vocab_size} rows, but the draft vocabulary has 100", head.lm_heads, 1, base.lm_head)
