"""Every recipe composes for its real base, fits the GPUs it names, and runs whole with debug=tiny."""

import json
import re
from itertools import takewhile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.errors import UserError
from drafthead.models.formats import all_formats
from drafthead.train.config import RunConfig
from drafthead.train.estimate.memory import Estimate
from drafthead.train.pipeline import run_pipeline
from support import composed

ROOT = Path(__file__).parent.parent.parent / "recipes"
RECIPES = sorted(path.stem for path in (ROOT / "recipe").glob("*.yaml") if not path.stem.startswith("adapt_"))
"""Recipes of one kind of head; tests/commands/test_adapt_head.py has the others."""
NAMED = """llama3: medusa medusa2 hydra hydra_pp mlp_speculator kangaroo eagle3 dspark
    smollm2 qwen3_8b qwen3_32b: dspark
    llama3_70b llama3_vllm: eagle3
    qwen3_5_9b lfm2_1b: medusa
    llama2_13b granite_7b codellama_13b granite_20b_code: mlp_speculator
    vicuna_7b vicuna_13b: medusa medusa2 hydra_pp kangaroo"""


def groups(name: str) -> dict[str, str]:
    """Return the groups that a recipe chooses, with those of the recipe that it extends."""
    chosen: dict[str, str] = {}
    for default in OmegaConf.load(ROOT / "recipe" / f"{name}.yaml").defaults:
        if isinstance(default, str):
            chosen |= {} if default == "_self_" else groups(default)
        else:
            chosen |= {key.removeprefix("override /"): choice for key, choice in default.items()}
    return chosen


def traits(name: str) -> set[str]:
    """Return the architecture of a recipe's base, and its head unless another fast test runs that head's recipe."""
    chosen = groups(name)
    base = OmegaConf.load(ROOT / "base" / f"{chosen['base']}.yaml")
    return {f"base {base.shape.model_type}"} | {f"head {chosen['head']}" for _ in range(chosen["head"] not in COVERED)}


def fast_recipes() -> list[str]:
    """Return few recipes that have all traits. All others run as slow tests."""
    by_name, chosen = {name: traits(name) for name in RECIPES}, []
    missing = set.union(*by_name.values())
    while missing:
        chosen.append(max(RECIPES, key=lambda name: len(by_name[name] & missing)))
        missing -= by_name[chosen[-1]]
    return chosen


COVERED = {"medusa", "medusa2", "hydra", "hydra_pp", "eagle3"}
"""Heads in other fast runs; that of Hydra++ contains Hydra."""
FAST = fast_recipes()


def load(name: str, folder: Path, *overrides: str) -> RunConfig:
    return composed(folder, f"recipe={name}", *overrides)[0]


def header(name: str) -> str:
    """Return the comment at the start of a recipe."""
    first, *lines = (ROOT / "recipe" / f"{name}.yaml").read_text().splitlines()
    assert first == "# @package _global_"
    return " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))


def test_the_recipes_that_are_promised_exist() -> None:
    for line in NAMED.splitlines():
        bases, heads = line.split(":")
        missing = {f"{head}_{base}" for base in bases.split() for head in heads.split()} - set(RECIPES)
        assert not missing, missing


def all_recipes(fast: list[str]) -> pytest.MarkDecorator:
    marked = [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in RECIPES]
    return pytest.mark.parametrize("name", marked)


@pytest.mark.parametrize("name", RECIPES)
def test_it_composes_for_its_real_base(name: str, tmp_path: Path) -> None:
    run = load(name, tmp_path)
    config = run.base.transformers_config()
    assert config.hidden_size > 500
    assert run.head_config().num_draft_tokens >= 1
    assert [p.corpus for p in run.phases.values()][:2] == ["text", "answers"]
    tiny = load(name, tmp_path, "debug=tiny").phases
    assert list(tiny) == list(run.phases)
    sizes = {(p.steps, p.seq_len, p.micro_batch_size, p.grad_accum_steps) for p in tiny.values()}
    assert sizes == {(10, 512, 2, 1)}, "debug=tiny shrinks every phase"
    assert f"recipe={name}" in header(name).split(), "the header has the command"


@all_recipes(fast=["eagle3_llama3", "dspark_llama3", "hydra_pp_vicuna_7b"])
def test_a_tiny_head_can_be_exported_like_the_real_one(name: str, tmp_path: Path) -> None:
    """``debug=tiny`` rehearses the whole path to an engine."""

    def formats(*overrides: str) -> set[str]:
        head = Estimate(load(name, tmp_path, *overrides)).head
        head.base.tokenizer = tiny_tokenizer()
        held = (form for form in all_formats().values() if isinstance(head.config, form.head_config))
        return {form.name for form in held if not list(form.unsupported(form.fitted(head)))}

    assert formats() <= formats("debug=tiny")
    assert name != "eagle3_llama3" or formats() == {"eagle3", "gguf", "speculators"}


@all_recipes(fast=["eagle3_llama3"])
def test_it_fits_its_hardware(name: str, tmp_path: Path) -> None:
    run = load(name, tmp_path)
    if hardware := re.search(r"(\d+) GPUs of (\d+) GB", header(name)):
        devices, size = (int(number) for number in hardware.groups())
        plan = Estimate(run, devices)
        for phase in plan.phases:
            assert 2**30 < plan.total(phase) < 0.9 * size * 10**9 - 2**30, f"{phase} does not fit {hardware[0]}"


@all_recipes(FAST)
def test_it_runs_tiny(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All phases, generation, calibration and evaluation, offline; hidden states are stored if a phase says so."""
    phases = composed(tmp_path, f"recipe={name}", "debug=tiny")[0].phases
    steps = [f"phases.{phase}.steps=2" for phase in phases]
    short = ["tree_prompts=1", "eval.limit=1", "eval.max_new_tokens=8"]
    config, resolved = composed(tmp_path, f"recipe={name}", "debug=tiny", *steps, *short)
    run_pipeline(config, resolved)
    # The final states are stored with the answers, so only early layers are computed.
    storing = {name for name, phase in config.phases.items() if phase.store_hidden_states}
    assert all(config.phases[name].corpus == "answers" for name in storing)
    stored = {path.name.rpartition("-")[0] for path in (tmp_path / "corpora" / "states").glob("*")}
    assert stored == ({"answers"} if storing and Estimate(config).head.spec.layers else set())
    assert ("without its threshold of" in capsys.readouterr().out) == name.startswith("kangaroo")
    run = tmp_path / "run"
    evaluation = json.loads((run / "eval.json").read_text())
    metrics = {"mean_accepted_length", "acceptance_per_depth", "ctar", "tokens_per_second", "speedup", "tasks"}
    assert metrics | {"hardware", "versions"} <= evaluation.keys() | evaluation["overall"].keys()
    same = evaluation["overall"]["identical_outputs"]
    assert same["same"] == same["of"] == 1
    for path in ("head/model.safetensors", "head/config.json", "head/tree.json", "report.html"):
        assert (run / path).stat().st_size > 0


@pytest.mark.parametrize(("name", "positions"), [("kangaroo_smollm2", 1), ("eagle3_smollm2", 3), ("hydra_smollm2", 4)])
def test_weights_by_depth_must_fit_the_head(name: str, positions: int, tmp_path: Path) -> None:
    """Before anything is loaded."""
    weights = ",".join(["1.0"] * (positions + 1))
    with pytest.raises(UserError, match=f"phases.distill: .* {positions} draft positions are trained"):
        load(name, tmp_path, f"phases.distill.loss.depth_weights=[{weights}]")
    weights = ",".join(["1.0"] * positions)
    run = load(name, tmp_path, f"phases.distill.loss.depth_weights=[{weights}]")
    assert run.phases["distill"].loss.depth_weights == [1.0] * positions
