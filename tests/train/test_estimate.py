"""The estimate of a run against things that exist: published sizes, and the memory that a real step allocates."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile
from transformers import AutoConfig

from drafthead.data.batch import HiddenStates
from drafthead.models.base.base_model import BaseModel, meta_base
from drafthead.models.base.parts import BaseParts
from drafthead.train.config import RunConfig
from drafthead.train.distributed.sharding import Sharding
from drafthead.train.estimate import hours
from drafthead.train.estimate.memory import GATHERED_LAYERS, Estimate, size
from drafthead.train.estimate.server import ServerEstimate
from drafthead.train.trainer.optim import head_optimizers
from drafthead.train.trainer.step import train_step
from support import cases, composed, random_ids, refuses, rows_of

MIXTURES = {
    "qwen3_moe": (
        {
            **{"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_experts": 128},
            **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
            **{"num_experts_per_tok": 8, "tie_word_embeddings": False},
        },
        30_532_122_624,  # Qwen3-30B-A3B
    ),
    "gpt_oss": ({}, 116_829_156_672),  # gpt-oss-120b
    "mixtral": ({}, 46_702_792_704),  # Mixtral-8x7B
}
WEIGHTS = ("base weights", "head weights", "adapter weights")
TINY = ("debug=tiny", "base.dtype=float32")
OWN_LM_HEAD = ("head.own_lm_head=true", "head.induction_rank=0")


@cache
def recipe(*overrides: str) -> RunConfig:
    return composed(Path("unused"), *overrides)[0]


def with_phase(run: RunConfig, **changes: Any) -> RunConfig:
    """Return the run with its last phase only, changed."""
    name, phase = list(run.phases.items())[-1]
    return replace(run, phases={name: replace(phase, **changes)})


@pytest.mark.parametrize("model_type", MIXTURES)
def test_all_experts_are_counted(model_type: str) -> None:
    settings, parameters = MIXTURES[model_type]
    assert meta_base(AutoConfig.for_model(model_type, **settings)).model.num_parameters() == parameters


def test_tokens() -> None:
    lengths = ["data.answers.max_prompt_tokens=300", "data.answers.sampler.max_new_tokens=100"]
    run = recipe("recipe=medusa_llama3", *lengths, "phases.pretrain.grad_accum_steps=4")
    plan, steps = Estimate(run, 8), run.phases["pretrain"].steps
    read = steps * 4 * run.phases["pretrain"].micro_batch_size * run.phases["pretrain"].seq_len * 8
    assert plan.tokens("pretrain") == plan.trained_tokens("pretrain") == read
    assert plan.trained_tokens("distill") == plan.tokens("distill") / 4, "a quarter of prompt and answer"


# Memory of a step --------------------------------------------------------------------------------------------


def allocated(run: RunConfig) -> int:
    """Return the bytes that two real training steps allocate at their peak, without the weights."""
    (phase,) = run.phases.values()
    sharding = Sharding(run.shard, torch.device("cpu"))
    base = BaseModel.load(replace(run.base, prepack=False))
    wanted = run.head_config().draft_vocab_size
    head = run.head_config().build(base, None if wanted is None else torch.arange(min(wanted, base.vocab_size))).train()
    if run.trains_base:
        head.train_base(now=phase.train_base)
    sharding.shard(head)
    batch = rows_of([random_ids(phase.seq_len, seed) for seed in range(phase.micro_batch_size)])
    width = base.hidden_size * (1 + len(head.spec.layers))

    def hidden_states() -> HiddenStates:
        if not phase.store_hidden_states:
            return base.hidden_states(batch, head.spec)
        return HiddenStates.split(torch.zeros(*batch.input_ids.shape, width, dtype=torch.float16), base.hidden_size)

    with profile(profile_memory=True, use_kineto=True) as recorded:
        optimizers = head_optimizers(head, phase.optim)
        for _ in range(2):
            batches = ((batch, hidden_states()) for _ in range(phase.grad_accum_steps))
            train_step(head, optimizers, batches, phase.loss, lr=1e-3, clip_norm=1.0, reduce=lambda tensor: tensor)
    sharding.close()
    live = peak = 0
    for event in recorded.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@cases(
    "name, changes, overrides",
    ("medusa_smollm2", {}, ()),
    ("medusa_smollm2", {"grad_accum_steps": 3}, OWN_LM_HEAD),
    ("medusa_smollm2", {}, ("shard.precision=bfloat16", *OWN_LM_HEAD)),
    ("medusa_smollm2", {"store_hidden_states": True}, ()),
    ("hydra_pp_smollm2", {}, ()),
    ("mlp_speculator_smollm2", {}, ()),
    # Random ids are outside the draft vocabulary more often than an estimate assumes.
    ("kangaroo_smollm2", {}, ("head.context_vocabulary=false",)),
    ("draft_lm_smollm2", {}, ()),
    ("eagle3_smollm2", {}, ("shard.checkpointing=true",)),
    ("dspark_smollm2", {}, ()),
    ("medusa2_smollm2", {}, ()),
)
def test_a_step_needs_what_is_estimated(name: str, changes: dict[str, Any], overrides: tuple[str, ...]) -> None:
    settings = {"seq_len": 256, "store_hidden_states": False, **changes}
    run = with_phase(recipe(f"recipe={name}", *TINY, *overrides), **settings)
    memory = Estimate(run, device="cpu").memory(next(iter(run.phases)))
    estimated = sum(size for purpose, size in memory.items() if purpose not in WEIGHTS)
    assert estimated == pytest.approx(allocated(run), rel=0.1)


def test_what_is_sharded_is_divided() -> None:
    overrides = ["recipe=medusa_smollm2", *TINY, *OWN_LM_HEAD]
    plain, head, full, offloaded = (
        Estimate(recipe(*overrides, *more), 8)
        for more in ((), ("shard=head",), ("shard=full",), ("shard=full", "shard.offload_base=true"))
    )
    trained = 4 * plain.trained
    alone, parts = plain.memory("pretrain"), head.memory("pretrain")
    assert parts["base weights"] == alone["base weights"] == full.base_bytes
    assert parts["head weights"] == parts["gradient shard"] == alone["head weights"] // 8 == trained // 8
    assert parts["optimiser"] == alone["optimiser"] // 8
    assert parts["gathered head"] == trained
    layers = [sum(4 * p.numel() for p in layer.parameters()) for layer in full.base.model.model.layers]
    sharded, elsewhere = full.memory("pretrain"), offloaded.memory("pretrain")
    assert sharded["gathered layers"] == GATHERED_LAYERS * layers[0]
    assert sharded["base weights"] == alone["base weights"] - sum(layers) + sum(layers) // 8
    assert elsewhere == {**sharded, "base weights": alone["base weights"] - sum(layers)}
    hybrid = Estimate(recipe(*overrides, "shard=hybrid"), 32, per_node=8)
    assert hybrid.memory("pretrain") == sharded
    tuned = Estimate(recipe("recipe=medusa2_smollm2", *TINY, "shard=full"), 8).memory("joint")
    assert tuned["base weights"] == alone["base weights"] - sum(layers) + 2 * sum(layers) // 8, "a trained copy"


# Adapters, disk and tables -----------------------------------------------------------------------------------


def test_adapters_of_a_recipe() -> None:
    """Rank 32 on the seven projections of 32 layers: the 83.9 million of Llama 3 8B."""
    plan = Estimate(recipe("recipe=medusa2_llama3"), 8)
    assert plan.adapters == 83_886_080
    assert plan.trained == plan.head_parameters + plan.adapters
    assert plan.disk["one checkpoint"] == 12 * plan.trained
    refuses("no linear layer 'c_attn'", Estimate, recipe("recipe=medusa2_smollm2", *TINY, "head.lora_targets=[c_attn]"))


def test_disk() -> None:
    sizes = ["prompts=900", "self_prompted=100", "max_prompt_tokens=100", "sampler.max_new_tokens=156"]
    settings = ["data.answers.fresh=false", *(f"data.answers.{size}" for size in sizes)]
    state = 256_000 * 64 * 2  # one state of every token

    def disk(name: str, store: bool, *more: str) -> dict[str, int]:
        run = recipe(f"recipe={name}", *TINY, *settings, f"phases.distill.store_hidden_states={store}", *more)
        sizes = Estimate(with_phase(run)).disk
        del sizes["one checkpoint"]
        return sizes

    fixed, layers = {"answers": 256_000 * 4}, 3  # that EAGLE-3 reads
    assert disk("medusa_smollm2", False) == fixed
    assert disk("medusa_smollm2", True) == fixed | {"hidden states of answers": state}, "every state is on disk once"
    stored = {"hidden states of answers": state, "hidden states of distill": layers * state}
    assert disk("eagle3_smollm2", True) == fixed | stored
    copied = disk("eagle3_smollm2", True, "data.answers.precomputed=embedded:smollm2")
    assert copied == fixed | {"hidden states of distill": (1 + layers) * state}


# Hours -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3_llama3", "hydra_pp_vicuna_7b", "dspark_qwen3_8b"])
def test_memory_grows_with_the_length_of_a_row_and_not_with_its_square(name: str) -> None:
    """One document fills the row; masks of all pairs of tokens would add what ``mode=estimate`` says."""
    lengths, plans = (2048, 4096, 8192), []
    for length in lengths:
        changes = {"seq_len": length, "micro_batch_size": 1, "store_hidden_states": False}
        plans.append(Estimate(with_phase(recipe(f"recipe={name}"), **changes)))
    (phase,) = plans[0].phases
    short, middle, long = (plan.steps()[phase].loss for plan in plans)
    assert long - middle < 2.3 * (middle - short)
    dense = 8192**2 * (2 + 4 * (1 + plans[0].head.attends))
    assert plans[-1].dense_masks(phase) == dense


def test_operations_are_those_of_the_matrix_products() -> None:
    """Two per weight and token of the base, four to six per trained weight; attention adds little to short rows."""
    shape = ("hidden_size=256", "intermediate_size=512", "num_hidden_layers=6", "head_dim=64")
    adamw = "phases.distill.optim.name=adamw"  # Muon multiplies matrices, too
    run = recipe("recipe=medusa_smollm2", *TINY, *OWN_LM_HEAD, adamw, *(f"base.shape.{key}" for key in shape))
    plan = Estimate(with_phase(run, seq_len=64, store_hidden_states=False))
    layers, step, tokens = plan.base.model.model.layers, plan.steps()["distill"], 2 * 64
    assert step.base_operations / tokens == pytest.approx(2 * sum(p.numel() for p in layers.parameters()), rel=0.1)
    assert 4 * plan.trained <= (step.operations - step.base_operations) / tokens <= 6 * plan.trained


def test_hours_by_arithmetic_and_the_steps_that_fit() -> None:
    plan = Estimate(recipe("recipe=eagle3_smollm2", *TINY), 8)
    seconds, gpu = hours.gpu_seconds(plan, hours.GPUS["A100"]), hours.GPUS["A100"]
    assert list(seconds) == ["answers", "pretrain", "distill"]
    assert seconds["distill"] == pytest.approx(plan.operations("distill") / (8 * 0.4 * gpu.tera_operations * 1e12))
    whole = sum(seconds.values()) / 3600
    assert hours.steps_that_fit(whole, seconds, plan) == pytest.approx(10, abs=1)
    assert hours.steps_that_fit(whole - seconds["distill"] / 7200, seconds, plan) == pytest.approx(5, abs=1)
    assert hours.steps_that_fit(seconds["answers"] / 3600, seconds, plan) == 0


@pytest.mark.slow
def test_an_estimate_of_servers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and times of a 70B base are those of arithmetic, and nothing is loaded."""
    run = recipe("recipe=eagle3_llama3_70b", "mode=estimate")
    plan = Estimate(run)
    costs = ServerEstimate(plan)
    assert costs.weights == 2 * plan.base.model.num_parameters()
    key_values, states = 2 * 80 * 8 * 128 * 2, 4 * 8192 * 2
    assert (costs.state_bytes, costs.cache_bytes) == (states, key_values + states)
    assert [costs.gpus(gigabytes) for gigabytes in (1, 24, 80, 141, 180)] == [None, 8, 4, 2, 1]
    assert costs.tokens == 10**6 + 8000 * (768 + 256)
    products = 2 * (plan.base.model.num_parameters() - plan.base.embedding.numel()) * costs.tokens
    assert 1.0 < costs.states_s(1e12) * 1e12 / products < 1.1, "of layers and of attention"
    assert costs.answers_s(1e30, 1e12) == pytest.approx(8000 * 256 / 256 * costs.weights / 1e12, rel=1e-3)
    monkeypatch.setattr(BaseModel, "load", lambda *_: pytest.fail("the base was loaded"))
    monkeypatch.setattr(BaseParts, "of_checkpoint", lambda *_: pytest.fail("the base was read"))
    hours.print_estimate(run)
    printed = capsys.readouterr().out
    assert "a server on these GPUs" in printed and re.search(r"hidden states of distill +500.0 GiB", printed)
    assert "before: hidden states" not in printed, "this machine does not compute them"


@pytest.mark.slow
def test_an_estimate_runs_real_steps_here_or_names_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ("phases.pretrain.seq_len=64", "data.answers.max_prompt_tokens=32", "phases.distill.seq_len=64")
    tiny = ("recipe=medusa_smollm2", *TINY, "base.dtype=auto", *lengths, "mode=estimate", "hours=2")
    hours.print_estimate(recipe(*tiny))
    printed = " ".join(capsys.readouterr().out.split())
    assert "pretrain: 2 rows per step (2 per process x 1 x 1 accumulated), 128 tokens" in printed
    assert "measuring steps of pretrain on this machine: 0/24" in printed
    assert "from 3 real steps of each phase" in printed and re.search(r"in 2 h here: phases.distill.steps=\d+", printed)
    plan = Estimate(recipe(*tiny), device="cpu")  # in float32, unlike a GPU's base
    assert 1.9 < plan.base_bytes / Estimate(recipe(*tiny)).base_bytes < 2.1
    weights = f"{size(plan.base_bytes)} of base weights in float32"
    assert re.search(rf"memory on this machine: [\d.]+ .iB at the peak of these steps, with {weights}", printed)
    hours.print_estimate(recipe(*tiny, "phases.pretrain.store_hidden_states=true"))
    stored = r"[\d.]+ .iB while training on stored hidden states, at most [\d.]+ .iB while the base computes them"
    assert re.search(f"memory on this machine: {stored}", " ".join(capsys.readouterr().out.split()))
    plan = Estimate(recipe(*tiny))
    for name in ("org/absent", "/models/mine"):
        absent = recipe("recipe=medusa_smollm2", "base=custom", f"base.name={name}")
        assert f"{name} is not on this machine" in hours.why_not_measured(absent, plan)
    assert "several devices" in hours.why_not_measured(absent, Estimate(recipe(*tiny), 2))
    refuses("hours needs mode=estimate", recipe, "recipe=medusa_smollm2", "hours=2")


@pytest.mark.parametrize("machine", ["gpu24", "gpu48", "gpu80"])
@pytest.mark.parametrize("budget", ["minutes", "hour", "night"])
def test_one_gpu_keeps_the_recipes_batch(machine: str, budget: str) -> None:
    chosen = recipe("recipe=eagle3_llama3", f"machine={machine}", f"budget={budget}")
    assert {p.rows(1) for p in chosen.phases.values()} == {16} and chosen.phases["distill"].steps <= 10_000
