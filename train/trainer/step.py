"""One optimiser step: gradients of summed losses, divided once by the global count of trained tokens.

An update whose loss is not finite or far above the latest ones is skipped (``LossSpikeFilter``).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drafthead.data.batch import HiddenStates, LossOutput, TrainBatch
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.train.config import HISTORY, LossSpikeConfig


@dataclass(frozen=True)
class StepResult:
    """What a step did; on the device until it is logged."""

    total: LossOutput
    """Over micro-batches and processes."""
    grad_norm: Tensor
    skip_reason: str | None = None
    """Why the update was skipped; None when it was done."""

    def __add__(self, other: "StepResult") -> "StepResult":
        return StepResult(_added([self.total, other.total]), other.grad_norm)

    def metrics(self) -> dict[str, float]:
        """Host values: ``loss`` a trained token, ``grad_norm`` of the latest step, and every named ratio."""
        ratios = {name: ratio.value for name, ratio in self.total.ratios().items()}
        return {"loss": float(self.total.loss_sum / self.total.tokens), "grad_norm": float(self.grad_norm), **ratios}


def _added(parts: Sequence[LossOutput]) -> LossOutput:
    return LossOutput(
        loss_sum=torch.stack([p.loss_sum.detach() for p in parts]).sum(),
        tokens=torch.stack([p.tokens for p in parts]).sum(),
        sums=torch.stack([p.sums for p in parts]).sum(0),
        names=parts[0].names,
    )


def train_step(
    head: DraftHead,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[tuple[TrainBatch, HiddenStates]],
    loss: LossConfig,
    *,
    lr: float,
    clip_norm: float,
    reduce: Callable[[Tensor], Tensor],
    should_skip: Callable[[float, float], str | None] = lambda loss, grad_norm: None,
    profile_hook: Callable[[str], None] = lambda part: None,
) -> StepResult:
    """Accumulate, reduce, divide, clip, update. It waits for the device once, for the numbers ``should_skip`` reads.

    ``reduce`` sums over processes; sharded gradients are summed by their backward pass. ``clip_norm`` is the largest
    norm of the mean loss's gradient, 0 is off. ``should_skip`` gets mean loss and gradient norm and gives the reason to
    skip the update, or None; it is not called for a step without trained tokens. ``profile_hook`` is called when a part
    of the step is done: with ``head`` after a backward pass, ``optimiser`` after the update.
    """
    optimizer.zero_grad(set_to_none=True)
    parts = []
    for batch, base_hidden in micro_batches:
        out = head.loss(batch, base_hidden, loss)
        if out.loss_sum.requires_grad:
            torch.autograd.backward(out.loss_sum)
        parts.append(out)
        profile_hook("head")
    total = _added(parts)
    tokens = reduce(total.tokens)
    parameters = [p for p in head.parameters() if p.requires_grad]
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = (gradient if isinstance(gradient, DTensor) else reduce(gradient)) / tokens.clamp(min=1)
    norm = clip_gradients(parameters, clip_norm or torch.inf)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
    loss_sum = reduce(total.loss_sum)
    trained, mean, grad_norm = torch.stack([tokens, loss_sum / tokens, norm]).tolist()
    skip_reason = should_skip(mean, grad_norm) if trained else None
    if skip_reason is None:
        optimizer.step()
    profile_hook("optimiser")
    reduced = replace(total, loss_sum=loss_sum, tokens=tokens, sums=reduce(total.sums))
    return StepResult(reduced, norm, skip_reason)


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients to a norm of at most ``max_norm``; returns the norm they had, over all of them.

    ``inf`` only measures. Sharded and replicated parameters may be mixed.
    """
    kinds = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (False, True)]
    norms = []
    for kind in filter(None, kinds):
        norm = nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for kind in filter(None, kinds):
        nn.utils.clip_grads_with_norm_(kind, max_norm, total)
    return total


@torch.no_grad()
def evaluate_loss(
    head: DraftHead, batches: Iterable[tuple[TrainBatch, HiddenStates]], loss: LossConfig
) -> dict[str, float]:
    """The training metrics on held-out batches, without an update."""
    total = _added([head.loss(batch, base_hidden, loss) for batch, base_hidden in batches])
    metrics = StepResult(total, torch.zeros(())).metrics()
    del metrics["grad_norm"]
    return metrics


class LossSpikeFilter:
    """Decides for each step of a phase whether its update is skipped.

    Every process sees the same reduced numbers, so all of them agree.
    """

    def __init__(self, config: LossSpikeConfig, losses: Iterable[float | None] = ()) -> None:
        """``losses`` are those that a checkpoint in the phase has."""
        self.config = config
        self._losses: deque[float | None] = deque(losses, maxlen=config.window)

    @property
    def losses(self) -> list[float | None]:
        """Losses of the latest steps, None for a skipped one: all that a resumed run needs."""
        return list(self._losses)

    @property
    def skipped(self) -> int:
        """Skipped updates among the latest steps."""
        return sum(loss is None for loss in self._losses)

    def skip_reason(self, loss: float, grad_norm: float) -> str | None:
        """The reason to skip the step's update; None to do it. Call it once a step. ``loss`` is a trained token's."""
        found = None
        usual = [kept for kept in self._losses if kept is not None]
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            found = f"the loss is {loss:.4g} and the gradient norm {grad_norm:.4g}"
        elif self.config.spike and len(usual) >= HISTORY and loss > self.config.spike * median(usual) > 0:
            found = f"the loss is {loss:.4g}, over {self.config.spike:g} times the median of {median(usual):.4g}"
        self._losses.append(loss if found is None else None)
        return found
