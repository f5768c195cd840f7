"""Whole runs and commands on the simulated accelerator, each compared with the CPU. For ``make test-accelerator``."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from accelerator import simulated
from drafthead.eval.engines.served import free_port
from support import forget_after, losses_of, run_together

pytestmark = pytest.mark.slow
PROGRAM = str(Path(simulated.__file__))
SHORT = (
    *("debug=tiny", "phases.pretrain.steps=4", "phases.distill.steps=4", "checkpoint.every_steps=4", "log_every=1"),
    *("checkpoint.keep=9", "validate_every=4", "eval.limit=2", "eval.max_new_tokens=16", "base.prepack=false"),
    "data.text.max_tokens=2500",
)
OPTIONS = {
    "medusa": tuple(
        f"head.{each}"
        for each in ("draft_vocab_size=null", "reads_last_token=false", "induction_rank=0", "own_lm_head=true")
    ),
    "medusa2": ("head.lora_dropout=0.0", "phases.joint.steps=3", "quality_limits.max_perplexity_ratio=null"),
    "hydra_pp": ("head.dropout=0.0",),
    "hydra": ("head.dropout=0.0",),
    "dspark": ("head.places=null",),
}
"""Settings that a published format can hold (Medusa), and without random numbers of the device."""
RECIPES = ("medusa", "medusa2", "hydra", "hydra_pp", "mlp_speculator", "eagle3", "dspark", "kangaroo", "draft_lm")


def drafthead(command: str, *settings: str) -> list[str]:
    return [PROGRAM, command, *settings]


def train(folder: Path, recipe: str, device: str, *more: str) -> list[str]:
    places = (f"out={folder / device / 'run'}", f"data.folder={folder / device / 'corpora'}", f"device={device}")
    return drafthead("train", f"recipe={recipe}_smollm2", *SHORT, *OPTIONS.get(recipe, ()), *places, *more)


def assert_same_results(run: Path, expected: Path) -> None:
    assert losses_of(run) == pytest.approx(losses_of(expected), rel=1e-3)
    weights, reference = (load_file(folder / "head" / "model.safetensors") for folder in (run, expected))
    assert weights.keys() == reference.keys()
    results: list[dict[str, Any]] = []
    for folder in (run, expected):
        path = folder / "eval.json"
        results.append(json.loads(path.read_text())["overall"])
    for result in results:
        same = result["identical_outputs"]
        assert same["same"] + len(same["near_ties"]) == same["of"] > 0
    lengths = [result["mean_accepted_length"] for result in results]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.1)


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("medusa")
    run_together([train(folder, "medusa", device) for device in ("cpu", "cuda")])
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_and_evaluates(recipe: str, medusa: Path, tmp_path: Path) -> None:
    if recipe != "medusa":
        run_together([train(tmp_path, recipe, "cpu"), train(tmp_path, recipe, "cuda")])
    folder = medusa if recipe == "medusa" else tmp_path
    assert_same_results(folder / "cuda" / "run", folder / "cpu" / "run")


def test_a_run_resumes(medusa: Path, tmp_path: Path) -> None:
    expected = medusa / "cuda" / "run"
    commands = []
    for device in ("cpu", "cuda"):
        shutil.copytree(medusa / "cuda", tmp_path / device)
        forget_after(tmp_path / device / "run", 4)
        commands.append(train(tmp_path, "medusa", device, "stages=[corpora,train]"))
    run_together(commands)
    for device in ("cpu", "cuda"):
        assert losses_of(tmp_path / device / "run") == pytest.approx(losses_of(expected), rel=1e-3)


def test_two_processes(medusa: Path, tmp_path: Path) -> None:
    """Two nodes with a device each, half the rows on each."""
    shutil.copytree(medusa / "cuda" / "corpora", tmp_path / "cuda" / "corpora")
    rows = [f"phases.{phase}.micro_batch_size=1" for phase in ("pretrain", "distill")]
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port())}
    command = train(tmp_path, "medusa", "cuda", "stages=[corpora,train]", *rows)
    run_together([command] * 2, *({**common, "RANK": str(rank)} for rank in range(2)))
    assert losses_of(tmp_path / "cuda" / "run") == pytest.approx(losses_of(medusa / "cuda" / "run"), rel=1e-3)


def test_commands(medusa: Path, tmp_path: Path) -> None:
    check = ("suite=builtin", "limit=2", "max_new_tokens=12")
    for device in ("cpu", "cuda"):
        head, out = f"head={medusa / device / 'run' / 'head'}", tmp_path / device
        out.mkdir()
        at = f"device={device}"
        run_together(
            [
                drafthead("replay", head, at, *check, f"save={out / 'replay.jsonl'}"),
                drafthead("adapt", head, at, *check, "interval=2", "optim.lr=0.01", f"out={out / 'adapted'}"),
            ]
        )
        run_together(
            [
                drafthead("eval", head, at, *check, "drafter=head+prompt_lookup:4:2", f"out={out / 'eval'}"),
                drafthead("export", head, at, *check, "to=medusa", f"out={out / 'medusa'}"),
            ]
        )
        tiny = json.loads((medusa / device / "run" / "head" / "config.json").read_text())["base"]["recipe"]
        shape = json.dumps(tiny["shape"]).replace('"', "")
        base = [f"base.shape={shape}", "base.random=true", "base.tokenizer=builtin:tiny", "base.dtype=float32"]
        run_together([drafthead("import", f"from={out / 'medusa'}", at, *base, f"out={out / 'imported'}")])
        run_together([drafthead("generate", head, at, "max_new_tokens=12", "sampler.temperature=0.7", "Hello")])
    for name in ("replay.jsonl", "adapted", "eval/eval.json", "imported/model.safetensors"):
        assert (tmp_path / "cuda" / name).exists() and (tmp_path / "cpu" / name).exists(), name
