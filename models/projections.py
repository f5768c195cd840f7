"""The vocabulary projections of a head's draft positions, in training and in drafting.

Shape legend: B rows, F nodes, K draft positions, D width, W draft vocabulary.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from drafthead.models.linear import PrepackedLinear, can_prepack
from drafthead.models.output_head import OutputHead


class Projections(nn.Module):
    """``count`` projections of its own, initialised from the base's and trained; 0: the base's one, frozen and shared.

    Position k (0-based) reads projection k, or the last one there is.
    """

    def __init__(self, teacher: OutputHead, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(teacher.weight.detach().float().clone()) for _ in range(count))
        self._teacher = teacher
        self._products: dict[int, nn.Module] = {}

    def train(self, mode: bool = True) -> "Projections":
        self._products.clear()
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._products.clear()
        moved: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return moved

    def head(self, k: int) -> OutputHead:
        """The projection of draft position k (0-based), with the base's scale and soft-cap."""
        if not len(self.weights):
            return self._teacher
        weight = self.weights[min(k, len(self.weights) - 1)]
        return OutputHead(weight=weight, scale=self._teacher.scale, softcap=self._teacher.softcap)

    def logits(self, hidden: Tensor, k: int) -> Tensor:
        """Draft logits of position k (0-based), for inference: [..., D] -> [..., W]."""
        place = min(k, max(0, len(self.weights) - 1))
        if place not in self._products:
            self._products[place] = inference_linear(self.head(place).weight.detach())
        product = self._products[place]
        return self._teacher.finish(product(hidden.to(self.head(place).weight.dtype)))

    @property
    def distinct(self) -> int:
        """Different projections."""
        return max(1, len(self.weights))


def inference_linear(weight: Tensor) -> nn.Module:
    """A layer with this weight, packed for few rows where that is possible."""
    if can_prepack(weight):
        return PrepackedLinear(weight, None)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def stack_logits(projections: Projections, hidden: Tensor) -> Tensor:
    """Draft logits of the first K positions at once: [B, K, D] -> [B, K, W]."""
    if projections.distinct == 1:
        return projections.logits(hidden, 0)
    return torch.stack([projections.logits(hidden[:, k], k) for k in range(hidden.shape[1])], 1)
