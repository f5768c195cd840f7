"""Arithmetic against things that exist: transformers' models, an optimiser's state, published sizes."""

from dataclasses import replace

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, LlamaConfig

from drafthead.models.base.shape import ModelShape
from drafthead.train.config import OptimConfig
from drafthead.train.estimate import GenerationPlan, HeadSize, PhaseEstimate, plan, render, size
from drafthead.train.trainer.optim import build_optimizer

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
PHASE = PhaseEstimate(name="pretrain", seq_len=4096, micro_batch_size=2, grad_accum_steps=1, steps=100)


def test_llama3_8b_is_the_published_8_03_billion() -> None:
    assert LLAMA3_8B.base_parameters == 8_030_261_248


@pytest.mark.parametrize("gate", [True, False])
def test_the_widest_point_of_a_layer(gate: bool) -> None:
    """``2 D + 3 I`` with a gate, ``2 D + 2 I`` without: D 64, I 256."""
    family, inner = ("llama", {"intermediate_size": 256}) if gate else ("gpt_bigcode", {"n_inner": 256})
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    shape = ModelShape.from_config(AutoConfig.for_model(family, **sizes, **inner))
    assert shape.layer_width() == 2 * 64 + (3 if gate else 2) * 256


def test_tokens_of_the_llama_recipe() -> None:
    found = plan(
        LLAMA3_8B,
        MEDUSA_5,
        [replace(PHASE, grad_accum_steps=4), replace(PHASE, name="d", trained_share=0.25)],
        devices=8,
    )
    assert found.tokens == {"pretrain": 100 * 4 * 2 * 4096 * 8, "d": 100 * 2 * 4096 * 8}
    assert found.trained_tokens == {"pretrain": 100 * 4 * 2 * 4096 * 8, "d": 100 * 2 * 4096 * 2}


def test_parameters_per_position() -> None:
    found = plan(LLAMA3_8B, MEDUSA_5, [PHASE])
    assert found.head_parameters_per_position * 5 == found.head_parameters == MEDUSA_5.parameters


def test_memory_of_the_llama_recipe() -> None:
    memory = plan(LLAMA3_8B, MEDUSA_5, [PHASE]).memory["pretrain"]
    trained, tokens = MEDUSA_5.trainable, 2 * 4096
    assert memory == {
        "base weights": 8_030_261_248 * 2,
        "head weights": trained * 4,
        "gradients": trained * 4,
        "optimiser": trained * 8,
        "base activations": tokens * (4096 + 2 * 4096 + 3 * 14336) * 2 + 2 * 4096 * 4096 * 3,
        "head activations": tokens * 5 * 4096 * 6 * 4,
        "loss chunk": 4 * 130 * 128256 * 4,
        "gradients in flight": 5 * 128256 * 4096 * 4,
    }


def test_the_logits_never_stand_whole_in_memory() -> None:
    """Twice the tokens: the loss part stays, unless it is smaller than one chunk."""
    loss = [plan(LLAMA3_8B, MEDUSA_5, [replace(PHASE, micro_batch_size=rows)]).memory["pretrain"] for rows in (2, 4)]
    assert loss[0]["loss chunk"] == loss[1]["loss chunk"] < 2 * 4096 * 128256
    tiny = replace(PHASE, seq_len=16, micro_batch_size=1)
    assert plan(LLAMA3_8B, MEDUSA_5, [tiny]).memory["pretrain"]["loss chunk"] == 4 * 16 * 128256 * 4


def test_a_cpu_takes_smaller_chunks() -> None:
    on = {d: plan(LLAMA3_8B, MEDUSA_5, [PHASE], device=d).memory["pretrain"]["loss chunk"] for d in ("cpu", "cuda")}
    assert on["cpu"] < on["cuda"]


def test_accumulation_holds_a_second_set_of_gradients() -> None:
    memory = plan(LLAMA3_8B, MEDUSA_5, [replace(PHASE, grad_accum_steps=2)]).memory["pretrain"]
    assert memory["gradients in flight"] == 2 * 5 * 128256 * 4096 * 4


def test_frozen_parts_of_a_head_cost_weights_only() -> None:
    memory = plan(LLAMA3_8B, replace(MEDUSA_5, trainable=10), [PHASE]).memory["pretrain"]
    assert (memory["gradients"], memory["optimiser"]) == (40, 80)
    assert memory["head weights"] == MEDUSA_5.parameters * 4


def test_gradients_and_optimiser_equal_adamw() -> None:
    module = torch.nn.Linear(30, 20)
    optimizer = build_optimizer(module.parameters(), OptimConfig())
    module(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    moments = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
    count = sum(p.numel() for p in module.parameters())
    head = HeadSize(parameters=count, trainable=count, positions=1, draft_vocab_size=64)
    memory = plan(LLAMA3_8B, head, [PHASE]).memory["pretrain"]
    assert memory["optimiser"] == sum(t.numel() * t.element_size() for t in moments)
    assert memory["gradients"] == sum(p.grad.numel() * 4 for p in module.parameters() if p.grad is not None)


def test_a_cached_phase_trades_activations_for_disk() -> None:
    cached = replace(PHASE, cached_features=True, corpus_tokens=1000)
    plain, found = plan(LLAMA3_8B, MEDUSA_5, [PHASE]), plan(LLAMA3_8B, MEDUSA_5, [cached])
    assert found.memory["pretrain"]["base activations"] == 2 * 4096 * 4096 * 2
    assert found.memory_total("pretrain") < plain.memory_total("pretrain")
    assert found.disk["feature cache of pretrain"] == 1000 * 4096 * 2
    assert "feature cache of pretrain" not in plain.disk


def test_disk_of_generations() -> None:
    generations = GenerationPlan(prompts=1000, max_prompt_tokens=100, max_new_tokens=156)
    assert plan(LLAMA3_8B, MEDUSA_5, [PHASE]).disk == {"one checkpoint": MEDUSA_5.trainable * 12}
    assert plan(LLAMA3_8B, MEDUSA_5, [PHASE], generations).disk["generations"] == 256_000 * 4
    kept = plan(LLAMA3_8B, MEDUSA_5, [PHASE], replace(generations, keep_hidden_states=True)).disk
    assert kept["features of generations"] == 256_000 * 4096 * 2


def test_the_rendering_shows_every_number() -> None:
    found = plan(LLAMA3_8B, MEDUSA_5, [PHASE, replace(PHASE, name="distill", micro_batch_size=1)], devices=8)
    console = Console(width=100)
    with console.capture() as capture:
        console.print(render(found))
    text = capture.get()
    for expected in ("8,030,261,248", f"{MEDUSA_5.parameters:,}", "6,553,600", "base activations", "one checkpoint"):
        assert expected in text
    total = next(line for line in text.splitlines() if line.startswith("total"))
    assert size(found.memory_total("pretrain")) in total and size(found.memory_total("distill")) in total


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**30, "3.0 GiB"), (2**52, "4096.0 TiB")]
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text
