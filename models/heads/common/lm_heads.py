"""The vocabulary projections of a head's draft positions, in training and in drafting.

Shape legend: B rows, F nodes, K draft positions, D width, W draft vocabulary.
"""

import torch
from torch import Tensor, nn

from drafthead.models.base.lm_head import LMHead
from drafthead.models.kernels.linear import InferenceWeights, inference_linear


class DraftLMHeads(InferenceWeights):
    """``count`` projections of its own, initialised from the base's and trained; 0: the base's one, frozen and shared.

    Position k (0-based) reads projection k, or the last one there is.
    """

    def __init__(self, target_lm_head: LMHead, count: int, copy_dtype: torch.dtype | None = None) -> None:
        """Initialise ``count`` projections from ``target_lm_head``; drafting reads copies in ``copy_dtype``, if
        given.
        """
        super().__init__()
        self._copy_dtype = copy_dtype
        self.weights = nn.ParameterList(
            nn.Parameter(target_lm_head.weight.detach().float().clone()) for _ in range(count)
        )
        self._teacher = target_lm_head
        self._products: dict[int, nn.Module] = {}

    def invalidate(self) -> None:
        self._products.clear()

    def head(self, k: int) -> LMHead:
        """The projection of draft position k (0-based), with the base's scale and soft-cap."""
        if not len(self.weights):
            return self._teacher
        weight = self.weights[min(k, len(self.weights) - 1)]
        return LMHead(weight=weight, scale=self._teacher.scale, softcap=self._teacher.softcap)

    def logits(self, hidden: Tensor, k: int) -> Tensor:
        """Draft logits of position k (0-based), for inference: [..., D] -> [..., W]."""
        place = min(k, max(0, len(self.weights) - 1))
        if place not in self._products:
            self._products[place] = inference_linear(self.head(place).weight, dtype=self._copy_dtype)
        product = self._products[place]
        return self._teacher.scale_and_cap(product(hidden.to(self.head(place).weight.dtype)))

    @property
    def distinct(self) -> int:
        """Different projections."""
        return max(1, len(self.weights))


def stack_logits(projections: DraftLMHeads, hidden: Tensor) -> Tensor:
    """Draft logits of the first K positions at once: [B, K, D] -> [B, K, W]."""
    if projections.distinct == 1:
        return projections.logits(hidden, 0)
    return torch.stack([projections.logits(hidden[:, k], k) for k in range(hidden.shape[1])], 1)
