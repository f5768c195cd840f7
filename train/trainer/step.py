"""One optimiser step: gradients of summed losses, divided once by the global count of trained tokens. Its calls are::

Trainer._step                    trainer.py     passes the step's micro-batches, not yet read, to ``train_step``
  train_step                     step.py        runs the step and returns its ``StepResult``
    PhaseData.stream             batches.py     yields a batch and the base's hidden states, stored or computed now
    DraftHead.loss               draft_head.py  the summed loss of a micro-batch; its backward pass follows
    Trainer._reduce              trainer.py     sums tokens, gradients and losses over the processes
    clip_gradients               step.py        scales the mean loss's gradients and returns their norm
    skip_reason                  loss_spikes.py returns None, or the reason to skip the update
    Optimizer.step               optim.py       updates the weights, at the rate that ``lr_at`` gave the trainer
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drafthead.data.batch import HiddenStates, LossOutput, TrainBatch
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.losses import LossConfig


@dataclass(frozen=True)
class StepResult:
    """The result of one or more steps. Tensors stay on the device until they are logged."""

    total: LossOutput  # summed over the steps, their micro-batches and all processes
    grad_norm: Tensor  # of the latest step, before clipping
    skip_reason: str | None = None  # None if the update was applied, and always in a sum of results

    def __add__(self, other: "StepResult") -> "StepResult":
        return StepResult(_added([self.total, other.total]), other.grad_norm)

    def metrics(self) -> dict[str, float]:
        """Return the results as floats: mean ``loss`` per trained token, ``grad_norm``, and the head's own metrics."""
        return {**mean_metrics([self.total]), "grad_norm": float(self.grad_norm)}


def mean_metrics(outputs: Sequence[LossOutput]) -> dict[str, float]:
    """Return the mean ``loss`` per trained token (nan without any) and the head's metrics by name, each a ratio."""
    total = _added(outputs)
    ratios = {name: ratio.value for name, ratio in total.ratios().items()}
    return {"loss": float(total.loss_sum / total.tokens), **ratios}


def _added(outputs: Sequence[LossOutput]) -> LossOutput:
    return LossOutput(
        loss_sum=torch.stack([out.loss_sum.detach() for out in outputs]).sum(),
        tokens=torch.stack([out.tokens for out in outputs]).sum(),
        sums=torch.stack([out.sums for out in outputs]).sum(0),
        names=outputs[0].names,
    )


def train_step(
    head: DraftHead,
    optimizers: Sequence[torch.optim.Optimizer],
    micro_batches: Iterable[tuple[TrainBatch, HiddenStates]],
    loss: LossConfig,
    *,
    lr: float,
    clip_norm: float,
    share_done: float = 1.0,
    reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    should_skip: Callable[[float, float], str | None] = lambda loss, grad_norm: None,
    profile_hook: Callable[[str], None] = lambda part: None,
) -> StepResult:
    """Train the head on the micro-batches with one optimiser step, and return the loss, metrics and gradient norm.

    Gradients of summed losses are accumulated, summed over the processes, divided by the number of trained tokens and
    clipped. The step waits for the device once, for the numbers that ``should_skip`` gets. If no token is trained, the
    optimisers still take a step, with gradients of 0.

    Args:
        micro_batches: Batches and the base's hidden states at their tokens, at least one.
        lr: Learning rate of this step; a parameter group multiplies it by its ``lr_mult``.
        clip_norm: Largest norm of the mean loss's gradient; 0 turns clipping off.
        share_done: Share of the phase that is done after this step, in (0, 1]. The loss of Medusa-2 depends on it.
        reduce: Function that returns a tensor's sum over processes; by default there is one process. Sharded gradients
            are not passed to ``reduce``, because the backward pass has summed them.
        should_skip: Function of (mean loss, gradient norm before clipping) that returns the reason to skip the update,
            or None to apply it. It is not called if no token is trained.
        profile_hook: Function called with "head" after each backward pass, and with "optimiser" at the step's end.
    """
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    outputs = []
    for batch, base_hidden in micro_batches:
        out = head.loss(batch, base_hidden, loss, share_done)
        if out.loss_sum.requires_grad:
            torch.autograd.backward(out.loss_sum)
        outputs.append(replace(out, loss_sum=out.loss_sum.detach()))  # its graph holds the projections' gradients
        del out, batch, base_hidden  # free them before the next micro-batch is made
        profile_hook("head")
    total = _added(outputs)
    tokens = reduce(total.tokens)
    parameters = [p for p in head.parameters() if p.requires_grad]
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = (gradient if isinstance(gradient, DTensor) else reduce(gradient)) / tokens.clamp(min=1)
    norm = clip_gradients(parameters, clip_norm or torch.inf)
    loss_sum = reduce(total.loss_sum)
    trained, mean, grad_norm = torch.stack([tokens, loss_sum / tokens, norm]).tolist()
    skip_reason = should_skip(mean, grad_norm) if trained else None
    if skip_reason is None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_mult", 1.0)
            optimizer.step()
    profile_hook("optimiser")
    reduced = replace(total, loss_sum=loss_sum, tokens=tokens, sums=reduce(total.sums))
    return StepResult(reduced, norm, skip_reason)


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients in place to a total norm of at most ``max_norm``; return the norm before scaling, a scalar.
    ``max_norm=inf`` leaves finite gradients unchanged. ``parameters`` may mix sharded and replicated ones."""
    # torch's functions take either sharded or replicated tensors, so each group has its own call.
    groups = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (False, True)]
    norms = []
    for group in filter(None, groups):
        norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for group in filter(None, groups):
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


@torch.no_grad()
def evaluate_loss(head: DraftHead, batch: TrainBatch, base_hidden: HiddenStates, loss: LossConfig) -> LossOutput:
    """Return the loss of a batch without gradients, in host memory."""
    out = head.loss(batch, base_hidden, loss)
    return replace(out, loss_sum=out.loss_sum.cpu(), tokens=out.tokens.cpu(), sums=out.sums.cpu())
