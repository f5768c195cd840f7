"""What ``mode=estimate`` says of sharded runs, against weights that are really sharded."""

from dataclasses import replace

import pytest
from hydra import compose, initialize_config_module
from rich.console import Console
from transformers import LlamaConfig

from drafthead.models.base.shape import ModelShape
from drafthead.models.heads.common.size import HeadSize
from drafthead.train.config import RunConfig, parse_run
from drafthead.train.estimate import GATHERED_LAYERS, PhaseEstimate, Plan, ShardLayout, estimate_of, plan, render, size

SHAPE = ModelShape.from_config(
    LlamaConfig(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=500,
    )
)
HEAD = HeadSize(
    parameters=9000,
    trainable=8000,
    positions=2,
    draft_vocab_size=100,
    projections=6000,
    activations_per_token=1000,
    recomputable_per_token=600,
)
PHASE = PhaseEstimate(name="pretrain", seq_len=64, micro_batch_size=2, grad_accum_steps=1, steps=10)
TOKENS = 128


def memory(spread: ShardLayout | None) -> dict[str, int]:
    return plan(SHAPE, HEAD, [PHASE], spread=spread, devices=8).memory["pretrain"]


def test_a_sharded_head() -> None:
    plain, found = memory(None), memory(ShardLayout(mode="head", shards=8))
    assert found["base weights"] == plain["base weights"] and "gathered layers" not in found
    assert found["head weights"] == 4 * (1000 + 1000)  # what is frozen stays whole
    assert (found["gradients"], found["optimiser"]) == (4 * 1000, 8 * 1000)
    assert found["gathered head"] == 4 * 8000
    assert found["gradients in flight"] == 8 * 8000
    assert found["head activations"] == plain["head activations"] == TOKENS * 1000 * 4


def test_a_sharded_base() -> None:
    tables = 2 * 500 * 64 + 64
    layers = 2 * 6 * SHAPE.layer_parameters
    found = memory(ShardLayout(mode="full", shards=8))
    assert found["base weights"] == 2 * tables + layers // 8
    assert found["gathered layers"] == GATHERED_LAYERS * 2 * SHAPE.layer_parameters
    offloaded = memory(ShardLayout(mode="full", shards=8, offload_base=True))
    assert offloaded["base weights"] == 2 * tables
    assert {k: v for k, v in offloaded.items() if k != "base weights"} == {
        k: v for k, v in found.items() if k != "base weights"
    }


def test_bfloat16_and_recomputing() -> None:
    plain = memory(None)
    found = memory(ShardLayout(compute_bytes=2))
    assert found["head weights"] == plain["head weights"] and found["optimiser"] == plain["optimiser"]
    assert found["gathered head"] == 2 * 8000 and found["gradients in flight"] == 6 * 8000
    assert found["head activations"] == TOKENS * 1000 * 2
    assert memory(ShardLayout(checkpointing=True))["head activations"] == TOKENS * 400 * 4


def test_nothing_is_sharded_by_none() -> None:
    assert memory(ShardLayout(shards=8)) == memory(None)


def load(*overrides: str) -> RunConfig:
    with initialize_config_module("drafthead.recipes", version_base="1.3"):
        return parse_run(compose("train", overrides=list(overrides)))


def shown(found: Plan) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render(found))
    return capture.get()


def test_every_way_to_shard_is_shown() -> None:
    run = load("recipe=medusa_llama3", "shard=full")
    found = estimate_of(run, 8)
    assert {p: found.memory_total(p) for p in found.memory} == found.totals["full"]
    for mode in ("none", "head"):
        other = estimate_of(replace(run, shard=replace(run.shard, mode=mode)), 8)
        assert {p: other.memory_total(p) for p in other.memory} == found.totals[mode] == other.totals[mode]
    assert found.totals["full"]["pretrain"] < found.totals["head"]["pretrain"] < found.totals["none"]["pretrain"]
    text = shown(found)
    for mode, totals in found.totals.items():
        line = next(line for line in text.splitlines() if line.startswith(f"shard={mode}"))
        assert all(size(total) in line for total in totals.values())
    assert "shard=full" not in shown(estimate_of(run, 1))


def test_hybrid_shards_within_a_node() -> None:
    run = load("recipe=medusa_llama3", "shard=hybrid")
    assert estimate_of(run, 32, per_node=8).memory == estimate_of(load("recipe=medusa_llama3", "shard=full"), 8).memory


def test_a_trained_base_has_a_sharded_twin() -> None:
    """Whole, the twin shares the base's layers; sharded, both have their parts."""
    run = load("recipe=medusa2_llama3", "shard=full")
    joint, alone = (
        estimate_of(run, 8).memory["joint"],
        estimate_of(load("recipe=medusa_llama3", "shard=full"), 8).memory,
    )
    config = ModelShape.from_config(run.base.transformers_config())
    layers = 2 * config.num_layers * config.layer_parameters
    assert joint["base weights"] - alone["pretrain"]["base weights"] == pytest.approx(layers / 8, abs=8)


def test_recomputable_is_less_than_all() -> None:
    for head in ("hydra_pp", "kangaroo", "eagle3"):
        run = load(f"recipe={head}_smollm2")
        found = run.head_config().size(run.base.transformers_config())
        assert 0 < found.recomputable_per_token < found.activations_per_token
    run = load("recipe=medusa_smollm2")
    assert run.head_config().size(run.base.transformers_config()).recomputable_per_token == 0


def test_a_part_of_uneven_rows_is_rounded_up() -> None:
    head = replace(HEAD, parameters=15, trainable=15)
    assert (
        plan(SHAPE, head, [PHASE], spread=ShardLayout(mode="head", shards=2)).memory["pretrain"]["head weights"]
        == 4 * 8
    )
