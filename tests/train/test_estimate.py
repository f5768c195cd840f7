"""The estimate of a run against things that exist: transformers' models, an optimiser's state, autograd, adapters."""

from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, LlamaConfig

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.batch import TrainBatch
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lora import LoraBase, LoraSettings
from drafthead.models.base.shape import ModelShape
from drafthead.models.heads.parts.size import HeadSize
from drafthead.train.config import AnswersConfig, DataConfig, OptimConfig, PhaseConfig, RunConfig, ShardConfig
from drafthead.train.estimate.memory import GATHERED_LAYERS, Estimate, render, size
from drafthead.train.trainer.optim import build_optimizer
from support import composed

LLAMA3_8B = ModelShape.from_config(
    LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
    )
)
MEDUSA_5 = HeadSize(
    parameters=5 * (128256 * 4096 + 4097 * 4096),
    trainable=5 * (128256 * 4096 + 4097 * 4096),
    positions=5,
    draft_vocab_size=128256,
    projections=5 * 128256 * 4096,
    activations_per_token=5 * 4096 * 6,
)
SMALL = ModelShape.from_config(
    LlamaConfig(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=500,
    )
)
SMALL_HEAD = HeadSize(
    parameters=9000,
    trainable=8000,
    positions=2,
    draft_vocab_size=100,
    projections=6000,
    activations_per_token=1000,
    recomputable_per_token=600,
)
SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {"model_type": "llama", **SIZES, "head_dim": 16, "intermediate_size": 80, "vocab_size": 300}
BIGCODE = {"model_type": "gpt_bigcode", **SIZES, "n_inner": 80, "vocab_size": 300, "max_position_embeddings": 512}
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = LoraSettings(rank=4, alpha=8.0, dropout=0.05, targets=SEVEN, checkpointing=False)


@cache
def of_one_device() -> Estimate:
    return Estimate(recipe("recipe=medusa_llama3"))


def made(**parts: Any) -> Estimate:
    """An estimate of these parts; the others are those of a run without sharding."""
    estimate = copy(of_one_device())
    vars(estimate).update({"data": DataConfig(), **parts})
    return estimate


def phase(**changes: Any) -> PhaseConfig:
    return PhaseConfig(**{"corpus": "text", "seq_len": 4096, "micro_batch_size": 2, "steps": 100, **changes})


def llama(head: HeadSize = MEDUSA_5, *, device: str = "cuda", **changes: Any) -> Estimate:
    return made(shape=LLAMA3_8B, head=head, phases={"pretrain": phase(**changes)}, device=device)


def small(head: HeadSize = SMALL_HEAD, shards: int = 8, **shard: Any) -> dict[str, int]:
    phases = {"pretrain": phase(seq_len=64)}
    estimate = made(shape=SMALL, head=head, phases=phases, shard=ShardConfig(**shard), shards=shards, devices=8)
    return estimate.memory("pretrain")


def shown(found: Estimate) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render(found))
    return capture.get()


def recipe(*overrides: str) -> RunConfig:
    return composed(Path("unused"), *overrides)[0]


MIXTURES = {
    "qwen3_moe": (
        {
            **{"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_experts": 128},
            **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
            **{"num_experts_per_tok": 8, "tie_word_embeddings": False},
        },
        *(30_532_122_624, 2 * 2048 + 8 * (2 * 2048 + 3 * 768)),  # Qwen3-30B-A3B
    ),
    "gpt_oss": ({}, 116_829_156_672, 2 * 2880 + 4 * (2 * 2880 + 3 * 2880)),  # gpt-oss-120b
    "mixtral": ({}, 46_702_792_704, 2 * 4096 + 2 * (2 * 4096 + 3 * 14336)),  # Mixtral-8x7B
}


@pytest.mark.parametrize("model_type", MIXTURES)
def test_all_experts_are_counted(model_type: str) -> None:
    """Parameters as published; values per token of the experts that it is sent to."""
    settings, parameters, width = MIXTURES[model_type]
    shape = ModelShape.from_config(AutoConfig.for_model(model_type, **settings))
    assert shape.base_parameters == parameters
    assert width <= shape.layer_width() <= width + 256  # a router


def test_tokens() -> None:
    data = DataConfig(answers=AnswersConfig(max_prompt_tokens=300, sampler=SamplerConfig(max_new_tokens=100)))
    phases = {"pretrain": phase(grad_accum_steps=4), "d": phase(corpus="answers")}
    estimate = made(shape=LLAMA3_8B, head=MEDUSA_5, phases=phases, data=data, devices=8)
    assert estimate.tokens("pretrain") == estimate.trained_tokens("pretrain") == 100 * 4 * 2 * 4096 * 8
    assert (estimate.tokens("d"), estimate.trained_tokens("d")) == (100 * 2 * 4096 * 8, 100 * 2 * 4096 * 2)


# Memory and disk ---------------------------------------------------------------------------------------------


def test_memory_of_a_llama_run() -> None:
    trained, tokens = MEDUSA_5.trainable, 2 * 4096
    assert llama().memory("pretrain") == {
        "base weights": 8_030_261_248 * 2,
        "head weights": trained * 4,
        "gradients": trained * 4,
        "optimiser": trained * 8,
        "base activations": tokens * (4096 + 2 * 4096 + 3 * 14336) * 2 + 2 * 4096 * 4096 * 3,
        "head activations": tokens * 5 * 4096 * 6 * 4,
        "loss chunk": 4 * 130 * 128256 * 4,
        "gradients in flight": 5 * 128256 * 4096 * 4,
    }
    assert llama(grad_accum_steps=2).memory("pretrain")["gradients in flight"] == 2 * 5 * 128256 * 4096 * 4


def test_gradients_and_optimiser_equal_adamw() -> None:
    module = torch.nn.Linear(30, 20)
    optimizer = build_optimizer(module.parameters(), OptimConfig())
    module(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    moments = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
    count = sum(p.numel() for p in module.parameters())
    # Frozen parts of a head cost weights only.
    head = HeadSize(parameters=count + 7, trainable=count, positions=1, draft_vocab_size=64)
    memory = llama(head).memory("pretrain")
    assert memory["optimiser"] == sum(t.numel() * t.element_size() for t in moments)
    assert memory["gradients"] == sum(p.grad.numel() * 4 for p in module.parameters() if p.grad is not None)
    assert memory["head weights"] == (count + 7) * 4


def test_a_cached_phase_trades_activations_for_disk() -> None:
    plain, stored = llama(), llama(store_hidden_states=True)
    assert stored.memory("pretrain")["base activations"] == 2 * 4096 * 4096 * 2
    assert stored.total("pretrain") < plain.total("pretrain")
    assert stored.disk["hidden states of pretrain"] == DataConfig().text.max_tokens * 4096 * 2
    assert "hidden states of pretrain" not in plain.disk


def test_disk() -> None:
    sampler = SamplerConfig(max_new_tokens=156)
    answers = AnswersConfig(prompts=900, self_prompted=100, max_prompt_tokens=100, sampler=sampler)
    state = 256_000 * 4096 * 2  # one state of every token
    fixed = {"answers": 256_000 * 4, "one checkpoint": MEDUSA_5.trainable * 12}

    def disk(store: bool, layers: int = 0, **settings: Any) -> dict[str, int]:
        phases = {"distill": phase(corpus="answers", store_hidden_states=store)}
        data = DataConfig(answers=replace(answers, **settings))
        head = replace(MEDUSA_5, feature_layers=layers)
        return made(shape=LLAMA3_8B, head=head, phases=phases, data=data).disk

    assert disk(False) == fixed
    assert disk(True) == fixed | {"hidden states of answers": state}, "every state is on disk once"
    assert disk(True, 3) == fixed | {"hidden states of answers": state, "hidden states of distill": 3 * state}
    assert disk(True, 3, precomputed="embedded:smollm2") == fixed | {"hidden states of distill": 4 * state}


def test_a_sharded_head() -> None:
    plain, sharded = small(), small(mode="head")
    assert sharded["base weights"] == plain["base weights"] and "gathered layers" not in sharded
    assert sharded["head weights"] == 4 * (1000 + 1000)  # what is frozen is replicated
    assert (sharded["gradients"], sharded["optimiser"]) == (4 * 1000, 8 * 1000)
    assert sharded["gathered head"] == 4 * 8000
    assert sharded["gradients in flight"] == 8 * 8000
    assert sharded["head activations"] == plain["head activations"] == 128 * 1000 * 4
    uneven = replace(SMALL_HEAD, parameters=15, trainable=15)
    assert small(uneven, 2, mode="head")["head weights"] == 4 * 8
    assert small(shards=1) == plain


def test_a_sharded_base() -> None:
    tables, layers = 2 * 500 * 64 + 64, 2 * 6 * SMALL.layer_parameters
    sharded, offloaded = small(mode="full"), small(mode="full", offload_base=True)
    assert sharded["base weights"] == 2 * tables + layers // 8
    assert sharded["gathered layers"] == GATHERED_LAYERS * 2 * SMALL.layer_parameters
    assert offloaded == {**sharded, "base weights": 2 * tables}


def test_bfloat16_and_checkpointing() -> None:
    plain, rounded = small(), small(precision="bfloat16")
    assert rounded["head weights"] == plain["head weights"] and rounded["optimiser"] == plain["optimiser"]
    assert rounded["gathered head"] == 2 * 8000 and rounded["gradients in flight"] == 6 * 8000
    assert rounded["head activations"] == 128 * 1000 * 2
    assert small(checkpointing=True)["head activations"] == 128 * 400 * 4


# A trained base ----------------------------------------------------------------------------------------------


def base_of(shape: dict[str, Any], dtype: str = "float32") -> BaseModel:
    config = BaseConfig(random=True, shape=shape, tokenizer="builtin:tiny", dtype=dtype, prepack=False)
    return BaseModel.load(config)


def joint(lora: LoraSettings | None, shape: dict[str, Any] = LLAMA, head: HeadSize = SMALL_HEAD) -> Estimate:
    shape_of_config = ModelShape.from_config(base_of(shape).config.transformers_config())
    phases = {"pretrain": phase(seq_len=64), "joint": phase(seq_len=64, train_base=True)}
    return made(shape=shape_of_config, head=head, phases=phases, lora=lora)


@pytest.mark.parametrize(
    ("shape", "targets"),
    [
        (LLAMA, SEVEN),
        (LLAMA, ("q_proj", "down_proj")),
        ({**LLAMA, "tie_word_embeddings": False}, (*SEVEN, "lm_head")),
        (BIGCODE, ("c_attn", "c_proj", "c_fc")),
    ],
    ids=["seven", "two", "lm_head", "bigcode"],
)
def test_adapters_are_as_many_as_are_built(shape: dict[str, Any], targets: tuple[str, ...]) -> None:
    lora = replace(LORA, targets=targets)
    parameters = LoraBase(base_of(shape), lora).parameters().values()
    count = sum(parameter.numel() for parameter in parameters)
    assert all(parameter.dtype == torch.float32 for parameter in parameters)
    estimate = joint(lora, shape)
    assert estimate.adapters == count and estimate.trained == 8000 + count
    assert estimate.disk["one checkpoint"] == 4 * 1000 + 12 * (8000 + count)
    before, after = estimate.memory("pretrain"), estimate.memory("joint")
    assert before["adapter weights"] == after["adapter weights"] == 4 * count
    assert after["gradients"] - before["gradients"] == 4 * count
    assert after["optimiser"] - before["optimiser"] == 8 * count


def kept_by(base: BaseModel, lora: LoraSettings) -> int:
    """Bytes that autograd keeps of a pass through the trained base, without weights, mask and rotation."""
    trained = LoraBase(base, lora)
    trained.train(True)
    weights = {tensor.untyped_storage().data_ptr() for tensor in trained.model.state_dict().values()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape[-2:] != (64, 64):
            storages[storage.data_ptr()] = storage
        return tensor

    rows = torch.arange(64).repeat(2, 1)
    mask = torch.ones_like(rows, dtype=torch.bool)
    batch = TrainBatch(input_ids=rows, position_ids=rows, document_ids=torch.zeros_like(rows), loss_mask=mask)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trained.hidden_states(batch)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_backpropagation_keeps_is_what_autograd_keeps(dtype: str) -> None:
    base, tokens, layers = base_of(LLAMA, dtype), 2 * 64, SIZES["num_hidden_layers"]
    shape = ModelShape.from_config(base.config.transformers_config())
    a_layer = tokens * shape.kept_bytes(LORA, base.dtype.itemsize)
    # A CPU's dropout keeps its noise in float32, a GPU's one byte of it.
    noise = 3 * tokens * sum(inputs for _, inputs, _ in shape.linears)
    assert 0.85 < kept_by(base, LORA) / (layers * a_layer + noise) < 1
    inputs = layers * tokens * SIZES["hidden_size"] * base.dtype.itemsize
    states = tokens * SIZES["hidden_size"] * 4
    assert inputs <= kept_by(base, replace(LORA, checkpointing=True)) <= inputs + 2 * states


def test_activations_of_a_phase_that_trains_the_base() -> None:
    """With checkpointing two of the three layers keep their inputs alone."""
    stored, recomputed = (joint(replace(LORA, checkpointing=on)) for on in (False, True))
    layer, tokens, width = stored.shape.kept_bytes(LORA, 2), 2 * 64, 48 * 2
    difference = stored.memory("joint")["base activations"] - recomputed.memory("joint")["base activations"]
    assert difference == tokens * (2 * layer - 3 * width)
    assert stored.memory("pretrain") == recomputed.memory("pretrain")


def test_the_whole_vocabulary() -> None:
    """An adapter on the output head makes whole matrices, and the base's loss is over all ids."""
    with_head = joint(replace(LORA, targets=(*SEVEN, "lm_head"))).memory("joint")
    without = joint(LORA).memory("joint")
    assert with_head["base activations"] - without["base activations"] == 300 * 48 * (3 * 2 + 4)
    estimate = joint(LORA, head=replace(SMALL_HEAD, draft_vocab_size=50))
    assert estimate.memory("joint")["loss chunk"] == 6 * estimate.memory("pretrain")["loss chunk"]


def test_a_target_that_the_base_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match="no linear layer 'c_attn' .*q_proj"):
        joint(replace(LORA, targets=("c_attn",))).memory("joint")


# Recipes -----------------------------------------------------------------------------------------------------


def test_adapters_of_a_recipe() -> None:
    """Rank 32 on the seven projections of 32 layers: the 83.9 million of Llama 3 8B."""
    estimate = Estimate(recipe("recipe=medusa2_llama3"), 8)
    assert estimate.adapters == 83_886_080
    text = shown(estimate)
    for entry in ("adapters of the base", "83,886,080", "adapter weights", f"{estimate.trained:,}"):
        assert entry in text
    assert "base, frozen" not in text


def test_every_number_is_shown() -> None:
    run = recipe("recipe=medusa_llama3", "shard=full")
    plan = Estimate(run, 8)
    text = shown(plan)
    for entry in ("8,030,261,248", f"{plan.head.parameters:,}", f"{plan.tokens('pretrain'):,}", "one checkpoint"):
        assert entry in text
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    for name in plan.phases:
        assert size(plan.total(name)) in lines["total"]
        assert plan.total(name, "full") == plan.total(name) < plan.total(name, "head") < plan.total(name, "none")
        for mode in ("none", "head", "full"):
            alone = Estimate(replace(run, shard=replace(run.shard, mode=mode)), 8)
            assert alone.total(name) == plan.total(name, mode)
            assert size(alone.total(name)) in lines[f"shard={mode}"]
    assert "shard=full" not in shown(Estimate(run, 1))


def test_hybrid_shards_within_a_node() -> None:
    hybrid = Estimate(recipe("recipe=medusa_llama3", "shard=hybrid"), 32, per_node=8)
    full = Estimate(recipe("recipe=medusa_llama3", "shard=full"), 8)
    assert hybrid.memory("pretrain") == full.memory("pretrain")


def test_a_trained_base_has_a_second_copy_of_sharded_layers() -> None:
    """Without sharding, the copy shares the base's layers."""
    tuned, alone = (Estimate(recipe(f"recipe={name}_llama3", "shard=full"), 8) for name in ("medusa2", "medusa"))
    layers = 2 * tuned.shape.num_layers * tuned.shape.layer_parameters
    difference = tuned.memory("joint")["base weights"] - alone.memory("pretrain")["base weights"]
    assert difference == pytest.approx(layers / 8, abs=8)
