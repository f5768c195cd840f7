"""AdamW and Muon, and the learning rate as a function of the step."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from drafthead.errors import UserError
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.settings.schema import BelowOne, NonNegative, NonNegativeFloat, Share, require, settings

SCHEDULES: dict[str, Callable[[float], float]] = {  # decay progress (0 to 1) to decay factor
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
}
WARMUPS: dict[str, Callable[[float], float]] = {  # warm-up progress (0 to 1) to share of the peak rate
    "linear": lambda done: done,
    "parabolic": lambda done: 1 - (1 - done) ** 2,
}


@settings(kw_only=True)
class OptimConfig:
    """Optimiser and learning-rate schedule of a phase."""

    name: Literal["adamw", "muon"] = "adamw"
    """Optimiser of the trained weights. ``muon`` uses torch's Muon for the matrices of layers and AdamW for the rest
    (vectors, tables, projections to the vocabulary). Muon's updates are scaled to the size of AdamW's, so one learning
    rate serves both."""
    momentum: BelowOne = 0.95
    """Momentum of Muon; AdamW ignores it."""
    lr: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moment estimates, each in [0, 1)."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices. Vectors (biases, norms) never decay."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises to its peak. 0 starts at the peak."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate's decay from the peak to the last step."""
    decay_from: Literal["warmup", "start"] = "warmup"
    """Start of the decay: at the end of the warm-up (``warmup``), or at step 0 (``start``). With ``start``, warm-up and
    decay overlap, and the lower of their two learning rates is used (IBM's MLPSpeculator recipe)."""
    final_lr_ratio: Share = 0.1
    """Learning rate of the last step, as a fraction of the peak. ``schedule=constant`` ignores it."""
    warmup: Literal["linear", "parabolic"] = "linear"
    """Shape of the warm-up. ``parabolic`` follows 1 - (1 - x)^2, steep at first (IBM's MLPSpeculator recipe)."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm; larger gradients are scaled down. 0 turns clipping off."""

    def __post_init__(self) -> None:
        betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(betas, "betas", "two numbers in [0, 1)", self.betas)


def lr_at(config: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of optimiser step ``step`` (0-based) in a phase of ``steps`` steps. Step i has the rate
    at point i + 1 of the schedule, so that the first step's rate is not 0. The warm-up ends at step
    ``warmup_steps - 1``. If the phase is longer than its warm-up, a decaying schedule ends with ``lr * final_lr_ratio``
    at the last step. IBM's training script is one step later: its first step has a learning rate of 0."""
    done = step + 1
    rise = WARMUPS[config.warmup](done / config.warmup_steps) if done < config.warmup_steps else 1.0
    first = config.warmup_steps if config.decay_from == "warmup" else 0
    if config.schedule == "constant" or done <= first:
        return config.lr * rise
    remaining = SCHEDULES[config.schedule]((done - first) / (steps - first))
    return config.lr * min(rise, config.final_lr_ratio + (1 - config.final_lr_ratio) * remaining)


class Muon(torch.optim.Muon):
    """torch's Muon, also for sharded parameters: every process orthogonalises whole updates. On CPUs, it does so in
    float32. torch always takes bfloat16, for which CPUs without such instructions need four times as long (0.70 s
    instead of 0.17 s for a matrix of 2,304 x 576)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(average, group["momentum"])  # Nesterov's momentum
                if isinstance(update, DTensor):
                    whole = _orthogonalised(update.full_tensor(), group)
                    update = distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)
                else:
                    update = _orthogonalised(update, group)
                # As large as updates of AdamW (2502.16982).
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


def _orthogonalised(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """Return ``matrix`` with singular values near 1, by the iteration of Newton and Schulz that torch uses."""
    a, b, c = group["ns_coefficients"]
    tall = matrix.shape[0] > matrix.shape[1]
    matrix = matrix.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    matrix = matrix.T if tall else matrix
    matrix = matrix / matrix.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    return matrix.T if tall else matrix


def head_optimizers(head: DraftHead, config: OptimConfig) -> list[Optimizer]:
    """Return the optimisers of a head's trainable parameters, which include the base's adapters if these are trained.
    ``config.name="muon"`` uses Muon for the weights of linear layers, except projections to the vocabulary, and AdamW
    for all other parameters. A head without trainable parameters is a ``UserError``. The training step sets each
    group's ``lr`` to ``lr_at(...)`` times the group's ``lr_mult``."""
    muon_ids = set[int]()
    if config.name == "muon":
        projections = {id(weight) for k in range(head.depth) for weight in head.output_head(k).trained}
        weights = [module.weight for module in head.modules() if isinstance(module, nn.Linear)]
        muon_ids = {id(weight) for weight in weights if min(weight.shape) > 1} - projections
    adamw_groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    muon_groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for parameter in head.parameters():
        if parameter.requires_grad:
            groups = muon_groups if id(parameter) in muon_ids else adamw_groups
            groups.setdefault((head.lr_mult(parameter), parameter.ndim < 2), []).append(parameter)
    optimizers: list[Optimizer] = []
    if muon_groups:
        matrices, momentum = _torch_groups(muon_groups, config), config.momentum
        optimizers.append(Muon(matrices, lr=config.lr, momentum=momentum))
    if adamw_groups:
        # torch's multi-tensor operations cannot mix sharded and whole parameters.
        mixed = any(len({isinstance(p, DTensor) for p in group}) > 1 for group in adamw_groups.values())
        foreach, betas = False if mixed else None, (config.betas[0], config.betas[1])
        optimizers.append(AdamW(_torch_groups(adamw_groups, config), lr=config.lr, betas=betas, foreach=foreach))
    if not optimizers:
        raise UserError(
            "the head has no trainable parameter; unfreeze a part (head.*), or register layers as attributes"
        )
    return optimizers


def _torch_groups(groups: dict[tuple[float, bool], list[nn.Parameter]], config: OptimConfig) -> list[dict[str, Any]]:
    """Return ``groups`` in torch's format; keys are (learning-rate multiplier, True for vectors, which never decay)."""
    return [
        {"params": group, "weight_decay": 0.0 if is_vector else config.weight_decay, "lr_mult": mult}
        for (mult, is_vector), group in sorted(groups.items(), key=lambda item: item[0])
    ]
