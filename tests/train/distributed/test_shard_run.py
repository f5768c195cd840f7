"""Whole runs with sharding: one process as a mesh of one, two as ``accelerate launch`` starts them, two nodes."""

import shutil
from copy import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafthead.eval.engines.served import free_port
from drafthead.files.local import read_json_lines
from drafthead.models.base import base_model
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.kernels.linear import KernelTable
from drafthead.train import pipeline
from drafthead.train.distributed.sharding import ShardConfig, Sharding
from support import TinyBase, cases, composed, forget_after, losses_of, run_together

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
LOSS_TOLERANCE, WEIGHT_TOLERANCE, BFLOAT16_TOLERANCE = 1e-5, 2e-5, 0.03
"""As in test_sharding.py."""


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

    for mode in ("full", "head"):
        forget_after(sharded, 5)
        assert_same(train(tmp_path / "sharded", "medusa_smollm2", f"shard={mode}", *stock, TRAINED), plain)


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
