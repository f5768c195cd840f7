"""AdamW, and the learning rate of every step as a pure function."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import AdamW

from drafthead.data.errors import UserError

SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
}
"""Remaining part of the decay, 1 -> 0, over the part of the steps after the warm-up that is done, 0 -> 1."""

WARMUPS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: done,
    "parabolic": lambda done: 1 - (1 - done) ** 2,
}
"""Part of the peak reached over the part of the warm-up that is done, both 0 -> 1."""


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW and its schedule, one per phase."""

    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    """Decoupled decay of matrices; vectors (biases, norms) never decay."""
    warmup_steps: int = 0
    """Steps that rise to the peak; 0 starts at the peak."""
    schedule: str = "cosine"
    """``cosine``, ``linear`` or ``constant``, from the end of the warm-up to the last step."""
    final_lr_ratio: float = 0.1
    """Learning rate of the last step as a fraction of the peak; ``constant`` ignores it."""
    warmup: str = "linear"
    """``linear``, or ``parabolic``: 1 - (1 - x)^2, steep first (IBM's MLPSpeculator recipe)."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    def __post_init__(self) -> None:
        limits = (
            ("lr", 0 < self.lr < 1, "in (0, 1)", self.lr),
            (
                "betas",
                len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
                "two numbers in [0, 1)",
                self.betas,
            ),
            ("weight_decay", self.weight_decay >= 0, ">= 0", self.weight_decay),
            ("warmup_steps", self.warmup_steps >= 0, ">= 0", self.warmup_steps),
            ("schedule", self.schedule in SCHEDULES, f"one of {list(SCHEDULES)}", self.schedule),
            ("final_lr_ratio", 0 <= self.final_lr_ratio <= 1, "in [0, 1]", self.final_lr_ratio),
            ("warmup", self.warmup in WARMUPS, f"one of {list(WARMUPS)}", self.warmup),
            ("clip_norm", self.clip_norm >= 0, ">= 0 (0 is off)", self.clip_norm),
        )
        for key, holds, limit, value in limits:
            if not holds:
                raise UserError(f"optim.{key} must be {limit}, got {value}")


def lr_at(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of optimiser step ``step`` (0-based) of a phase of ``steps`` steps.

    Step i has done i + 1 of its schedule, so that no step is spent at a learning rate of 0: the peak is reached at
    step ``warmup_steps - 1`` and ``lr * final_lr_ratio`` at the last one. IBM's recipe takes the minimum of warm-up
    and a cosine that starts at step 0, ours starts the cosine where the warm-up ends: for its 5 % of warm-up the two
    are at most 4.2 % of the peak apart.

    Raises:
        ValueError: ``step`` is outside [0, steps).
    """
    if not 0 <= step < steps:
        raise ValueError(f"step must be in [0, {steps}), got {step}")
    if step < config.warmup_steps:
        return config.lr * WARMUPS[config.warmup]((step + 1) / config.warmup_steps)
    if config.schedule == "constant":
        return config.lr
    remaining = SCHEDULES[config.schedule]((step + 1 - config.warmup_steps) / (steps - config.warmup_steps))
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * remaining)


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> AdamW:
    """AdamW over the trainable ``parameters``; matrices decay, vectors do not.

    The loop sets ``group["lr"] = lr_at(...)`` before every step; the state takes 8 bytes per parameter in float32.

    Raises:
        UserError: nothing is trainable.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable:
        raise UserError("the head has no trainable parameter; unfreeze a part of it in the recipe's head group")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([g for g in groups if g["params"]], lr=config.lr, betas=(config.betas[0], config.betas[1]))
