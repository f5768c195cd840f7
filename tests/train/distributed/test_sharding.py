"""Two processes train as one does, however the weights are sharded, in steps and in whole runs."""

import shutil
import sys
from collections.abc import Callable
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafthead.eval.engines.served import free_port
from drafthead.files.local import read_json_lines
from drafthead.models.base import base_model
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.layers import first_layers
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.kernels.linear import KernelTable
from drafthead.train import pipeline
from drafthead.train.distributed.sharding import ShardConfig, Sharding

sys.path.insert(0, str(Path(__file__).parent))
import spread

from support import TINY, TinyBase, cases, composed, forget_after, losses_of, random_base, refuses, run_together

LOSS_TOLERANCE = 1e-5
"""Relative. Sums over processes are taken in another order than sums over micro-batches, in float32."""
WEIGHT_TOLERANCE = 2e-5
"""Absolute, after 3 steps at 1e-3. AdamW divides a gradient by its own size, so rounding matters where terms cancel."""
BFLOAT16_TOLERANCE = 0.03
"""Relative, for losses and gradient norms: products of a few dozen terms, each rounded to 8 bits."""
Results = Callable[[str], list[dict[str, Any]]]
"""Function that returns each process's result for the name of a case."""


FAST = (
    "medusa whole", "medusa head", "medusa full, accumulated", "medusa hybrid", "medusa shared and tied",
    "medusa, one part empty", "medusa2 full", "hydra++ recomputed", "eagle3 full", "medusa bf16",
    "families",
)  # fmt: skip
"""Every sharding mode, and the heads with the most unusual weights."""


def cases_in(precision: str) -> list[Any]:
    """Return the cases of this precision as parameters of a test."""
    names = [name for name, case in spread.CASES.items() if case.shard.precision == precision]
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def results(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Each process's result for any case. The fast cases, and the others, run in one start of the processes each."""
    folder = tmp_path_factory.mktemp("spread")
    node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    @cache
    def run(is_fast: bool) -> None:
        (folder / "meeting").unlink(missing_ok=True)
        names = [name for name in (*spread.CASES, "families") if (name in FAST) == is_fast]
        script = (spread.__file__, str(folder), *names)
        assert runs.script(folder, *script, processes=spread.PROCESSES, environment=node) == [0, 0], runs.output(folder)

    def of_case(name: str) -> list[dict[str, Any]]:
        run(name in FAST)
        return [torch.load(folder / f"{name}.{rank}.pt") for rank in range(spread.PROCESSES)]

    return of_case


@pytest.mark.parametrize("name", cases_in("float32"))
def test_two_processes_train_as_one(name: str, results: Results) -> None:
    expected, by_rank = spread.one_process(name), results(name)
    assert by_rank[0]["validated"] == by_rank[1]["validated"] and by_rank[0]["metrics"] == by_rank[1]["metrics"]
    for step, (metrics, want) in enumerate(zip(by_rank[0]["metrics"], expected["metrics"], strict=True)):
        for key in want:
            assert metrics[key] == pytest.approx(want[key], rel=LOSS_TOLERANCE, nan_ok=True), (step, key)
    weights = by_rank[0]["weights"]
    assert weights.keys() == expected["weights"].keys()
    for key, tensor in expected["weights"].items():
        assert weights[key].shape == tensor.shape and weights[key].dtype == tensor.dtype
        torch.testing.assert_close(weights[key], tensor, rtol=0, atol=WEIGHT_TOLERANCE)
    moments = by_rank[0]["moments"]
    assert moments.keys() == expected["moments"].keys()
    for key, values in expected["moments"].items():
        torch.testing.assert_close(moments[key], values, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", cases_in("bfloat16"))
def test_bfloat16_computes_about_the_same_and_saves_float32(name: str, results: Results) -> None:
    expected, result = spread.one_process(name), results(name)[0]
    for want, metrics in zip(expected["metrics"], result["metrics"], strict=True):
        assert metrics["loss"] != want["loss"], "the head did not compute in bfloat16"
        for key, tolerance in (("loss", BFLOAT16_TOLERANCE), ("grad_norm", 2 * BFLOAT16_TOLERANCE)):
            assert metrics[key] == pytest.approx(want[key], rel=tolerance), key
    start = spread.build_head(spread.CASES[name]).state_dict()
    for key, tensor in expected["weights"].items():
        assert result["weights"][key].dtype == tensor.dtype
        change = (tensor - start[key]).abs().max()
        # A step moves a weight by at most the learning rate, whatever its gradient, and mostly in the same direction.
        assert (result["weights"][key] - tensor).float().abs().mean() <= 0.3 * change.float(), key


@pytest.mark.parametrize(
    ("name", "head", "layers"),
    [
        ("medusa whole", 1.0, 1),
        ("medusa head", 0.5, 1),
        ("medusa full, accumulated", 0.5, 2),
        ("medusa hybrid", 1.0, 1),  # each of the two is a node
        ("medusa bf16", 1.0, 1),
    ],
)
def test_each_process_holds_its_shards(name: str, head: float, layers: int, results: Results) -> None:
    plain = spread.build_head(spread.CASES[name])
    count = sum(p.numel() for p in plain.parameters())
    rows, width = next(plain.base.model.model.layers[0].parameters()).shape
    for result in results(name):
        assert sum(result["held"].values()) == pytest.approx(head * count, rel=0.01)
        assert result["layer"] == (rows // layers, width)


def test_every_process_reads_its_share_of_any_family(results: Results) -> None:
    for kind, settings in spread.FAMILIES.items():
        layers = random_base(TINY | {"model_type": kind} | settings, prepack=False).model.model.layers
        count = sum(parameter.numel() for parameter in layers.parameters())
        first, second = (result[kind] for result in results("families"))
        assert first + second == count and abs(first - second) < 0.05 * count, kind


def test_adapters_stay_whole_and_tied_tables_one(results: Results) -> None:
    plain = dict(spread.build_head(spread.CASES["medusa2 full"]).named_parameters())
    held = results("medusa2 full")[0]["held"]
    adapters = {name for name in plain if name.startswith("adapter.")}
    assert adapters and all((held[n] == plain[n].numel()) == (n in adapters) for n in plain if plain[n].numel() > 1)
    assert all(result["tied"] for result in results("medusa shared and tied"))
    assert not any(result["tied"] for result in results("medusa head"))


@pytest.mark.parametrize("name", ["medusa full, accumulated", "medusa2 full", "eagle3 full"])
def test_one_process_resumes_from_a_state_of_two(name: str, results: Results) -> None:
    first, second = (result["saved"] for result in results(name))
    for key, value in first["weights"].items():
        assert type(value) is torch.Tensor and torch.equal(value, second["weights"][key])
    assert "d2t" in first["weights"]
    (last,) = spread.one_process(name, first)["metrics"]
    for key, want in results(name)[0]["metrics"][-1].items():
        assert last[key] == pytest.approx(want, rel=LOSS_TOLERANCE, nan_ok=True), key


def test_hooks_of_a_view_are_its_own() -> None:
    """Sharding hooks the base's decoder; a head's own layers run in a view of it."""
    base = spread.load_base()
    view = first_layers(base, 1)
    handle = base.model.model.register_forward_hook(lambda *_: pytest.fail("the view ran the base's hook"))
    view.model.model(torch.tensor([[3, 4]]))
    handle.remove()


@pytest.mark.parametrize("settings", [{"hybrid": True}, {"offload_base": True, "mode": "head"}])
def test_bad_settings(settings: dict[str, Any]) -> None:
    refuses(f"{next(iter(settings))} must be false unless shard.mode", ShardConfig, **settings)


def test_hybrid_needs_to_know_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    sharding = Sharding(ShardConfig(mode="head", hybrid=True), torch.device("cpu"))
    try:
        refuses("shard.hybrid=true.*LOCAL_WORLD_SIZE", sharding.shard, spread.build_head(spread.CASES["medusa head"]))
    finally:
        sharding.close()
    assert not torch.distributed.is_initialized()


# Whole runs: one process as a mesh of one, two as ``accelerate launch`` starts them, two nodes ------------------------


ROOT = Path(__file__).parents[3]
SHORT = (
    *("phases.pretrain.steps=4", "phases.distill.steps=3", "checkpoint.every_steps=2", "checkpoint.keep=20"),
    *("log_every=1", "validate_every=4", "eval.limit=1", "eval.max_new_tokens=8"),
)
STOCK = "base.prepack=false"
"""A sharded base has stock layers, which round differently from packed ones."""
TRAINED = "stages=[corpora,train]"
JOINT = (
    "phases.joint.steps=3",
    "head.lora_dropout=0.0",
    "quality_limits.max_perplexity_ratio=null",
    "quality_limits.min_greedy_match_rate=null",
)


def overrides_of(recipe: str, *more: str) -> list[str]:
    return [f"recipe={recipe}", "debug=tiny", *SHORT, *more]


def train(folder: Path, recipe: str, *more: str) -> Path:
    pipeline.run_pipeline(*composed(folder, *overrides_of(recipe, *more)))
    return folder / "run"


def stored_base(folder: Path) -> list[str]:
    """Save the tiny base, so that a process can read its share; return settings that name it."""
    run, _ = composed(folder, *overrides_of("medusa_smollm2", STOCK))
    BaseModel.load(run.base).model.save_pretrained(folder / "base")
    return [f"base.name={folder / 'base'}", "base.random=false"]


def places(folder: Path, corpora: str = "corpora") -> list[str]:
    return [f"out={folder / 'run'}", f"data.folder={folder / corpora}"]


def assert_same(found: Path, wanted: Path) -> None:
    """Losses, held-out measurements and weights of two runs."""
    assert losses_of(found) == pytest.approx(losses_of(wanted), rel=LOSS_TOLERANCE)
    theirs, ours = ([r for r in read_json_lines(run / "metrics.jsonl") if "loss" not in r] for run in (wanted, found))
    for want, got in zip(theirs, ours, strict=True):
        assert got["held_out_loss_1"] == pytest.approx(want["held_out_loss_1"], rel=10 * LOSS_TOLERANCE)
    files = ["head/model.safetensors"] + [str(p.relative_to(wanted)) for p in wanted.glob("head/adapter/*.safetensors")]
    for name in files:
        weights, expected = load_file(found / name), load_file(wanted / name)
        assert weights.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=WEIGHT_TOLERANCE)


def test_a_sharded_run_of_one_process_is_a_run(tmp_path: Path) -> None:
    """Also if it resumes with another sharding, because checkpoints do not depend on the sharding."""
    stock = [STOCK, *stored_base(tmp_path)]
    plain = train(tmp_path / "plain", "medusa_smollm2", *stock, TRAINED)
    sharded = train(tmp_path / "sharded", "medusa_smollm2", "shard=full", *stock)
    assert_same(sharded, plain)
    assert not torch.distributed.is_initialized()
    load_base_and_head(sharded / "head")

    forget_after(sharded, 5)
    assert_same(train(tmp_path / "sharded", "medusa_smollm2", "shard=head", *stock, TRAINED), plain)


@pytest.mark.slow
def test_no_process_loads_a_whole_base_to_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the answers are there. Also with the hidden states of early layers, which all processes compute together."""
    stock = [STOCK, *stored_base(tmp_path), "phases.distill.store_hidden_states=true"]
    plain = train(tmp_path / "plain", "eagle3_smollm2", *stock, TRAINED)
    shutil.copytree(tmp_path / "plain" / "corpora", tmp_path / "sharded" / "corpora")
    shutil.rmtree(tmp_path / "sharded" / "corpora" / "states", ignore_errors=True)
    monkeypatch.setattr(base_model, "load_weights", lambda *_, **__: pytest.fail("it loads the whole base"))
    assert_same(train(tmp_path / "sharded", "eagle3_smollm2", "shard=full", *stock, TRAINED), plain)


def test_automatic_precision_is_what_was_measured(tiny_base: TinyBase) -> None:
    sharding, base = Sharding(ShardConfig(precision="auto"), torch.device("cpu")), copy(tiny_base())
    assert base.kernels is None and sharding.precision(base) == torch.float32, "too small to be measured"
    base.kernels = table = KernelTable()
    assert sharding.precision(base) == torch.float32
    table.bfloat16_reads = True
    assert sharding.precision(base) == torch.bfloat16
    assert Sharding(ShardConfig(), torch.device("cpu")).precision(base) == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="brings layers from host memory to a GPU")
def test_a_base_whose_layers_wait_in_host_memory(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", "medusa_smollm2", STOCK)
    shutil.copytree(tmp_path / "plain" / "corpora", tmp_path / "sharded" / "corpora")
    ways = ("shard=full", "shard.offload_base=true", "shard.precision=bfloat16")
    sharded = train(tmp_path / "sharded", "medusa_smollm2", *ways, STOCK)
    assert losses_of(sharded) != losses_of(plain), "this was no bfloat16"
    assert losses_of(sharded) == pytest.approx(losses_of(plain), rel=BFLOAT16_TOLERANCE)
    assert all(value.dtype != torch.bfloat16 for value in load_file(sharded / "head" / "model.safetensors").values())


def rows(count: int, recipe: str) -> list[str]:
    """So many of each micro-batch on a process."""
    phases = ["pretrain", "distill", *(["joint"] if recipe.startswith("medusa2") else [])]
    return [f"phases.{phase}.micro_batch_size={count}" for phase in phases]


@pytest.mark.slow
@cases(
    "recipe, options, shard",
    ("medusa_smollm2", (), "shard=head"),
    ("hydra_pp_smollm2", ("head.dropout=0.0",), "shard.checkpointing=true"),
    ("medusa2_smollm2", JOINT, "shard.offload_base=true"),
)
def test_accelerate_launches_two_processes(recipe: str, options: tuple[str, ...], shard: str, tmp_path: Path) -> None:
    """Half the rows on each."""
    options = (*options, *stored_base(tmp_path))
    plain = train(tmp_path / "plain", recipe, STOCK, *options, *rows(2, recipe))
    shutil.copytree(tmp_path / "plain" / "corpora", tmp_path / "two" / "corpora")
    # With --cpu, accelerate starts a single process. Without a GPU, our run takes the CPU anyway.
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--main_process_port", str(free_port())]
    ways = ["shard=full", shard] if shard != "shard=head" else [shard]
    overrides = overrides_of(recipe, *ways, STOCK, *options, *rows(1, recipe), *places(tmp_path / "two"))
    run_together([[*launch, str(ROOT / "train" / "run.py"), *overrides]])
    assert_same(tmp_path / "two" / "run", plain)
    load_base_and_head(tmp_path / "two" / "run" / "head")


@pytest.mark.slow
def test_two_nodes_with_data_of_their_own(tmp_path: Path) -> None:
    """Processes started as by SLURM, on one machine: each makes its corpora, and one writes the run."""
    recipe = "medusa_smollm2"
    plain = train(tmp_path / "plain", recipe, STOCK, *rows(2, recipe))
    port, commands = free_port(), []
    for node in range(2):
        launch = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
        launch += ["--master-addr", "127.0.0.1", "--master-port", str(port), str(ROOT / "train" / "run.py")]
        settings = overrides_of(recipe, "shard=hybrid", "per_node_data=true", STOCK, *rows(1, recipe))
        commands.append([*launch, *settings, *places(tmp_path / "two", f"../node{node}")])
    run_together(commands)
    assert_same(tmp_path / "two" / "run", plain)
    nodes = [tmp_path / f"node{node}" for node in range(2)]
    corpora = [sorted(str(path.relative_to(node)) for path in node.rglob("*.safetensors")) for node in nodes]
    assert corpora[0] and corpora[0] == corpora[1]
