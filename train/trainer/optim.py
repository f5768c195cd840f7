"""AdamW, and the learning rate of every step and parameter as a pure function."""

import math
from collections.abc import Callable, Iterable

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from drafthead.data.utils.errors import UserError
from drafthead.models.heads.common.contract import DraftHead
from drafthead.models.heads.common.trains_base import TrainsBase
from drafthead.train.config import SCHEDULES, WARMUPS, OptimConfig


def lr_at(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of optimiser step ``step`` (0-based) of a phase of ``steps`` steps.

    Step i has done i + 1 of its schedule, so that no step is spent at a learning rate of 0: the end of the warm-up is
    reached at step ``warmup_steps - 1`` and ``lr * final_lr_ratio`` at the last one. IBM's training script is one step
    later: its first step has a learning rate of 0, and its last is the one before ours.

    Raises:
        ValueError: ``step`` is outside [0, steps).
    """
    if not 0 <= step < steps:
        raise ValueError(f"step must be in [0, {steps}), got {step}")
    done = step + 1
    rise = WARMUPS[config.warmup](done / config.warmup_steps) if done < config.warmup_steps else 1.0
    first = config.warmup_steps if config.decay_from == "warmup" else 0
    if config.schedule == "constant" or done <= first:
        return config.lr * rise
    remaining = SCHEDULES[config.schedule]((done - first) / (steps - first))
    return config.lr * min(rise, config.final_lr_ratio + (1 - config.final_lr_ratio) * remaining)


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    config: OptimConfig,
    lr_mult: Callable[[nn.Parameter], float] = lambda parameter: 1.0,
) -> AdamW:
    """AdamW over the trainable ``parameters``; matrices decay, vectors do not.

    Before every step the loop sets a group's ``lr`` to ``lr_at(...)`` times the group's ``lr_mult``. The state takes
    8 bytes per parameter in float32. Groups come in the order of their factors, matrices first, and parameters in the
    order given, so that a resumed run finds its state where it left it.

    Args:
        parameters: those that do not require a gradient are left out.
        config: AdamW's settings.
        lr_mult: what a parameter's learning rate is multiplied by, > 0.

    Raises:
        UserError: nothing is trainable.
        ValueError: a factor that is not positive and finite.
    """
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        factor = lr_mult(parameter)
        if not 0 < factor < math.inf:
            raise ValueError(f"lr_mult must be > 0 and finite, got {factor} for a {tuple(parameter.shape)} parameter")
        groups.setdefault((factor, parameter.ndim < 2), []).append(parameter)
    if not groups:
        raise UserError("the head has no trainable parameter; unfreeze a part of it in the recipe's head group")
    settings = [
        {"params": group, "weight_decay": 0.0 if vectors else config.weight_decay, "lr_mult": factor}
        for (factor, vectors), group in sorted(groups.items(), key=lambda item: item[0])
    ]
    # No operation on lists takes sharded and whole parameters in one.
    mixed = any(len({isinstance(p, DTensor) for p in group}) > 1 for group in groups.values())
    return AdamW(settings, lr=config.lr, betas=(config.betas[0], config.betas[1]), foreach=False if mixed else None)


def head_optimizer(head: DraftHead, config: OptimConfig) -> AdamW:
    """The optimiser of a head, and of its base's adapters while they are trained."""
    if isinstance(head, TrainsBase):
        return build_optimizer(head.parameters(), config, head.lr_mult)
    return build_optimizer(head.parameters(), config)
