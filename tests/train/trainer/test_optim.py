"""Learning rates are checked at the steps that matter, and against IBM's own formulas at every step."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from drafthead.data.batch import LossOutput
from drafthead.models.heads.dspark import DSparkConfig
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.train.trainer.optim import OptimConfig, head_optimizers, lr_at
from drafthead.train.trainer.step import train_step
from support import random_base, refuses


def curve(config: OptimConfig, steps: int) -> list[float]:
    return [lr_at(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", ["linear", "parabolic"])
def test_rises_to_the_peak_then_falls_to_the_floor(schedule: str, warmup: str) -> None:
    config = OptimConfig(lr=0.01, warmup_steps=10, schedule=schedule, warmup=warmup, final_lr_ratio=0.2)
    rates = curve(config, 100)
    assert rates[9] == pytest.approx(0.01)
    assert rates[-1] == pytest.approx(0.002)
    assert 0 < rates[0] < 0.01
    assert all(a < b for a, b in zip(rates[:9], rates[1:10], strict=True))
    assert all(a > b for a, b in zip(rates[9:-1], rates[10:], strict=True))


def test_short_curves() -> None:
    assert curve(OptimConfig(lr=0.1, final_lr_ratio=0.5), 1) == pytest.approx([0.05])
    for start in ("warmup", "start"):
        constant = OptimConfig(lr=0.1, warmup_steps=2, schedule="constant", decay_from=start)
        assert curve(constant, 5) == pytest.approx([0.05] + [0.1] * 4)
    for warmup_steps in (5, 9):  # a phase that is no longer than its warm-up
        assert curve(OptimConfig(lr=0.1, warmup_steps=warmup_steps), 5)[-1] == pytest.approx(0.1 * 5 / warmup_steps)


def ibm(x: int, steps: int = 21000, second: int = 15000) -> float:
    """fms-fsdp's factor of the learning rate after ``x`` steps: two stages, each min(parabolic warm-up, cosine)."""

    def stage(x: int, steps: int, peak: float, floor: float) -> float:
        warmup = min(2000, steps // 20)
        rise = peak * (1 - (1 - min(x, warmup) / warmup) ** 2)
        return min(rise, floor + 0.5 * (peak - floor) * (1 + math.cos(x / steps * math.pi)))

    return stage(x, second, 1.0, 0.1) if x <= second else stage(x - second, steps - second, 0.1, 0.01)


def test_the_two_stages_of_ibm_at_every_step() -> None:
    """Ours at step i is theirs after i + 1: theirs spends its first step at a learning rate of 0."""
    shape = {"warmup": "parabolic", "decay_from": "start", "final_lr_ratio": 0.1}
    first = curve(OptimConfig(lr=1e-3, warmup_steps=750, **shape), 15000)
    second = curve(OptimConfig(lr=1e-4, warmup_steps=300, **shape), 6000)
    expected = [1e-3 * ibm(x) for x in range(1, 21001)]
    assert first + second == pytest.approx(expected, rel=1e-12, abs=0)
    assert (ibm(0), ibm(15000), ibm(21000)) == pytest.approx((0.0, 0.1, 0.01))


class Joint(nn.Module):
    """Heads and an adapter of the base: as much of a head as ``head_optimizers`` needs."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(3, 2)
        self.adapter = nn.Linear(3, 2)
        self.frozen = nn.Linear(3, 2).requires_grad_(False)

    def lr_mult(self, parameter: nn.Parameter) -> float:
        return 4.0 if any(parameter is p for p in self.heads.parameters()) else 1.0


def test_a_factor_for_some_parameters_and_decay_of_trainable_matrices_only() -> None:
    module: Any = Joint()
    (optimizer,) = head_optimizers(module, OptimConfig(weight_decay=0.3))
    groups = optimizer.param_groups
    expected = [module.adapter.weight, module.adapter.bias, module.heads.weight, module.heads.bias]
    assert [group["params"] for group in groups] == [[p] for p in expected]
    assert [(g["lr_mult"], g["weight_decay"]) for g in groups] == [(1, 0.3), (1, 0), (4, 0.3), (4, 0)]
    assert groups[0]["betas"] == (0.9, 0.95)
    refuses("no trainable parameter", head_optimizers, module.requires_grad_(False), OptimConfig())


class _Quadratic:
    """The least that ``train_step`` asks of a head: every weight has the gradient 1."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.parameters = module, module.parameters

    def loss(self, *_: object) -> LossOutput:
        total = torch.stack([p.sum() for p in self.parameters() if p.requires_grad]).sum()
        return LossOutput(loss_sum=total, tokens=torch.tensor(1), sums=torch.ones(1, 2), names=("a",))


def test_a_step_takes_the_factor_into_account() -> None:
    module: Any = Joint()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizers = head_optimizers(module, OptimConfig())
    batch: list[Any] = [(None, None)]
    train_step(_Quadratic(module), optimizers, batch, LossConfig(), lr=0.01, clip_norm=0.0)
    for name, parameter in module.named_parameters():  # Adam's first step is the learning rate, whatever the gradient
        moved = {"heads": 0.04, "adapter": 0.01, "frozen": 0.0}[name.split(".")[0]]
        torch.testing.assert_close(
            before[name] - parameter.detach(), torch.full_like(parameter, moved), atol=1e-6, rtol=0
        )


# Muon --------------------------------------------------------------------------------------------------------


def muon_head() -> DraftHead:
    shape = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
    return DSparkConfig(num_draft_tokens=2, markov_rank=4).build(random_base({**shape, "vocab_size": 300}))


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest() -> None:
    """One step of each, by hand: Muon's is orthogonal, of the size of AdamW's."""
    head = muon_head()
    muon, adamw = head_optimizers(head, OptimConfig(name="muon", weight_decay=0.0))
    matrices = {name for name, p in head.named_parameters() if any(p is q for q in muon.param_groups[0]["params"])}
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    layers = {f"layers.{n}.self_attn.{p}.weight" for n in (0, 1) for p in projections if p[1:2] == "_"}
    assert layers <= matrices and {"fc.weight", "markov_in.weight"} <= matrices
    assert "markov_out.weight" not in matrices and not any("norm" in name for name in matrices)
    groups = [*muon.param_groups, *adamw.param_groups]
    assert sum(len(group["params"]) for group in groups) == len(list(head.parameters()))
    generator = torch.Generator().manual_seed(0)
    before = {name: p.detach().clone() for name, p in head.named_parameters()}
    for parameter in head.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()
    change = (head.get_parameter("fc.weight") - before["fc.weight"]).detach()
    values = torch.linalg.svdvals(change) / (0.01 * 0.2 * max(change.shape) ** 0.5)
    assert 0.6 < float(values.min()) and float(values.max()) < 1.3  # Newton and Schulz stop early
    vector = (head.get_parameter("norm.weight") - before["norm.weight"]).detach()
    torch.testing.assert_close(vector.abs(), torch.full_like(vector, 0.01), rtol=1e-3, atol=0)
