"""AdamW and Muon, and the learning rate of every step and parameter as a pure function."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from drafthead.data.utils.errors import UserError
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.train.config import SCHEDULES, WARMUPS, OptimConfig


def lr_at(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of optimiser step ``step`` (0-based) of a phase of ``steps`` steps.

    Step i has done i + 1 of its schedule, so that no step is spent at a learning rate of 0: the end of the warm-up is
    reached at step ``warmup_steps - 1`` and ``lr * final_lr_ratio`` at the last one. IBM's training script is one step
    later: its first step has a learning rate of 0, and its last is the one before ours.
    """
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
    matrices: Collection[Tensor] = (),
) -> Optimizer:
    """AdamW over the trainable ``parameters``, and Muon over ``matrices``; matrices decay, vectors do not.

    Before every step the loop sets a group's ``lr`` to ``lr_at(...)`` times the group's ``lr_mult``. Groups come in the
    order of their factors, matrices first, and parameters in the order given, so that a resumed run finds its state
    where it left it.
    """
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    orthogonal: dict[float, list[nn.Parameter]] = {}
    chosen = {id(matrix) for matrix in matrices}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        factor = lr_mult(parameter)
        if id(parameter) in chosen:
            orthogonal.setdefault(factor, []).append(parameter)
        else:
            groups.setdefault((factor, parameter.ndim < 2), []).append(parameter)
    if not groups and not orthogonal:
        raise UserError("the head has no trainable parameter; unfreeze a part of it in the recipe's head group")
    settings = [
        {"params": group, "weight_decay": 0.0 if vectors else config.weight_decay, "lr_mult": factor}
        for (factor, vectors), group in sorted(groups.items(), key=lambda item: item[0])
    ]
    # No operation on lists takes sharded and whole parameters in one.
    mixed = any(len({isinstance(p, DTensor) for p in group}) > 1 for group in groups.values())
    betas = (config.betas[0], config.betas[1])
    parts: list[Optimizer] = []
    if orthogonal:
        muon = [
            {"params": group, "weight_decay": config.weight_decay, "lr_mult": factor}
            for factor, group in sorted(orthogonal.items())
        ]
        # Scaled to the size of AdamW's updates (2502.16982).
        parts.append(torch.optim.Muon(muon, lr=config.lr, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"))
    if settings:
        parts.append(AdamW(settings, lr=config.lr, betas=betas, foreach=False if mixed else None))
    return parts[0] if len(parts) == 1 else JoinedOptimizer(parts)


class JoinedOptimizer(Optimizer):
    """Several optimisers as one: groups and state in one list and one dictionary, saved and loaded together."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each; ``closure`` must be None."""
        assert closure is None
        groups = iter(self.param_groups)
        for part in self._parts:  # loading a state has put other objects in the place of these
            part.state, part.param_groups = self.state, list(islice(groups, len(part.param_groups)))
            part.step()


def head_optimizer(head: DraftHead, config: OptimConfig) -> Optimizer:
    """The optimiser of a head, and of its base's adapters while they are trained.

    Muon's matrices are the weights of the head's linear layers, without projections to the vocabulary.
    """
    projections = {id(head.output_head(k).trained) for k in range(head.depth)}
    linears = (module for module in head.modules() if isinstance(module, nn.Linear) and config.name == "muon")
    matrices = [m.weight for m in linears if id(m.weight) not in projections and min(m.weight.shape) > 1]
    return build_optimizer(head.parameters(), config, head.lr_mult, matrices)
