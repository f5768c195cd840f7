"""Learning rates are checked at the steps that matter, and against IBM's own formulas."""

import math

import pytest
import torch
from torch import nn

from drafthead.data.errors import UserError
from drafthead.train.optim import OptimConfig, build_optimizer, lr_at


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


def test_midpoints() -> None:
    """Half of the warm-up: 1/2 linear, 3/4 parabolic. Half of the decay: halfway between peak and floor."""
    assert lr_at(OptimConfig(lr=0.1, warmup_steps=10), 4, 100) == pytest.approx(0.05)
    assert lr_at(OptimConfig(lr=0.1, warmup_steps=10, warmup="parabolic"), 4, 100) == pytest.approx(0.075)
    for schedule in ("cosine", "linear"):
        config = OptimConfig(lr=0.1, warmup_steps=20, schedule=schedule, final_lr_ratio=0.5)
        assert lr_at(config, 20 + 40 - 1, 100) == pytest.approx(0.075)


def test_quarter_of_the_cosine_is_not_linear() -> None:
    config = OptimConfig(lr=0.1, final_lr_ratio=0.0)
    assert lr_at(config, 24, 100) == pytest.approx(0.1 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_constant_keeps_the_peak() -> None:
    assert curve(OptimConfig(lr=0.1, warmup_steps=2, schedule="constant"), 5) == pytest.approx([0.05] + [0.1] * 4)


@pytest.mark.parametrize("warmup_steps", [5, 9])
def test_a_phase_no_longer_than_its_warmup_still_works(warmup_steps: int) -> None:
    rates = curve(OptimConfig(lr=0.1, warmup_steps=warmup_steps), 5)
    assert rates[-1] == pytest.approx(0.1 * 5 / warmup_steps)


def test_one_step() -> None:
    assert curve(OptimConfig(lr=0.1, final_lr_ratio=0.5), 1) == pytest.approx([0.05])


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_outside_the_phase_is_our_bug(step: int) -> None:
    with pytest.raises(ValueError, match=r"step must be in \[0, 10\), got"):
        lr_at(OptimConfig(), step, 10)


def ibm(step: int, steps: int, warmup: int, peak: float, floor: float) -> float:
    """fms-fsdp's stages: min(parabolic warm-up, cosine over the whole stage from ``peak`` to ``floor``)."""
    rise = peak * (1 - (1 - min(step, warmup) / warmup) ** 2)
    fall = floor + 0.5 * (peak - floor) * (1 + math.cos(step / steps * math.pi))
    return min(rise, fall)


@pytest.mark.parametrize(
    ("steps", "warmup", "peak", "floor"), [(15000, 750, 1e-3, 1e-4), (6000, 300, 1e-4, 1e-5)], ids=["stage1", "stage2"]
)
def test_the_two_stage_shape_of_ibm(steps: int, warmup: int, peak: float, floor: float) -> None:
    config = OptimConfig(lr=peak, warmup_steps=warmup, warmup="parabolic", final_lr_ratio=floor / peak)
    for step in range(0, steps, 50):
        assert lr_at(config, step, steps) == pytest.approx(ibm(step + 1, steps, warmup, peak, floor), abs=0.042 * peak)
    assert lr_at(config, steps - 1, steps) == pytest.approx(floor)


def test_only_trainable_matrices_decay() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    module[2].weight.requires_grad_(False)
    matrices, vectors = build_optimizer(module.parameters(), OptimConfig(weight_decay=0.3)).param_groups
    assert [p is module[0].weight for p in matrices["params"]] == [True]
    assert len(vectors["params"]) == 4
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert matrices["betas"] == (0.9, 0.95)


def test_decay_alone_shrinks_a_matrix() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer([weight], OptimConfig(lr=0.1, weight_decay=0.5))
    weight.grad = torch.zeros(2, 2)
    optimizer.step()
    assert torch.allclose(weight, torch.full((2, 2), 0.95))


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(UserError, match="no trainable parameter"):
        build_optimizer([nn.Parameter(torch.ones(1), requires_grad=False)], OptimConfig())


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("lr", -1.0, r"optim.lr must be in \(0, 1\), got -1.0"),
        ("lr", float("nan"), "optim.lr must be in"),
        ("betas", (0.9, 1.0), r"optim.betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ("betas", (0.9,), "optim.betas must be two numbers"),
        ("weight_decay", -0.1, "optim.weight_decay must be >= 0, got -0.1"),
        ("warmup_steps", -1, "optim.warmup_steps must be >= 0, got -1"),
        ("schedule", "cosin", r"optim.schedule must be one of \['cosine', 'linear', 'constant'\], got cosin"),
        ("final_lr_ratio", 1.5, r"optim.final_lr_ratio must be in \[0, 1\], got 1.5"),
        ("warmup", "fast", r"optim.warmup must be one of \['linear', 'parabolic'\], got fast"),
        ("clip_norm", -1.0, "optim.clip_norm must be >= 0 .*, got -1.0"),
    ],
)
def test_a_value_out_of_its_limits_says_so(key: str, value: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        OptimConfig(**{key: value})
