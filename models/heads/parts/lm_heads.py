"""The vocabulary projections of a head's draft positions, in training and in drafting.

Shape legend: D width, W draft vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from drafthead.models.base.lm_head import LMHead
from drafthead.models.kernels.linear import PackedCopies, inference_linear


class DraftLMHeads(nn.Module):
    """``count`` trained projections that start as the base's, or with 0 the base's own projection, frozen and shared.

    Position k (0-based) uses projection k, or the last one if there are fewer.
    """

    def __init__(self, target_lm_head: LMHead, count: int, draft_dtype: torch.dtype | None, scaled: bool) -> None:
        """Create the projections.

        Args:
            target_lm_head: the base's projection over the draft vocabulary.
            count: number of trained projections.
            draft_dtype: dtype of the packed copies for drafting; None: as trained.
            scaled: False if more is added to the products before scale and soft-cap.
        """
        super().__init__()
        self._draft_dtype, self._scaled = draft_dtype, scaled
        self.weights = nn.ParameterList(
            nn.Parameter(target_lm_head.weight.detach().float().clone()) for _ in range(count)
        )
        self._target_lm_head = target_lm_head
        self.packed = PackedCopies()

    def head(self, k: int) -> LMHead:
        """Return the projection of draft position k (0-based), with the base's scale and soft-cap."""
        if not len(self.weights):
            return self._target_lm_head
        return replace(self._target_lm_head, weight=self.weights[min(k, len(self.weights) - 1)])

    def logits(self, hidden: Tensor, k: int | None = 0) -> Tensor:
        """Return the draft logits of position k (0-based), for inference: [..., D] -> [..., W].

        With None, ``hidden`` [B, K, D] has the inputs of the first K positions.
        """
        if k is None and len(self.weights) > 1:
            return torch.stack([self.logits(hidden[:, n], n) for n in range(hidden.shape[1])], 1)
        index, weight = max(0, min(k or 0, len(self.weights) - 1)), self.head(k or 0).weight
        linear = self.packed.get(index, lambda: inference_linear(weight, dtype=self._draft_dtype))
        product: Tensor = linear(hidden.to(weight.dtype))
        return self._target_lm_head.scale_and_cap(product) if self._scaled else product
