"""The vocabulary projections of a head's draft positions, in training and in drafting.

Shape legend: D width, W draft vocabulary.
"""

import torch
from torch import Tensor, nn

from drafthead.models.base.lm_head import LMHead
from drafthead.models.kernels.linear import InferenceWeights, inference_linear


class DraftLMHeads(InferenceWeights):
    """``count`` trained projections that start as the base's, or with 0 the base's own projection, frozen and shared.

    Position k (0-based) uses projection k, or the last one if there are fewer.
    """

    def __init__(
        self, target_lm_head: LMHead, count: int, draft_dtype: torch.dtype | None = None, scaled: bool = True
    ) -> None:
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
        self._packed: dict[int, nn.Module] = {}

    def invalidate(self) -> None:
        self._packed.clear()

    def head(self, k: int) -> LMHead:
        """Return the projection of draft position k (0-based), with the base's scale and soft-cap."""
        shared = self._target_lm_head
        if not len(self.weights):
            return shared
        return LMHead(weight=self.weights[self._index(k)], scale=shared.scale, softcap=shared.softcap)

    def logits(self, hidden: Tensor, k: int = 0) -> Tensor:
        """Return the draft logits of position k (0-based), for inference: [..., D] -> [..., W]."""
        product = self.product(hidden, k)
        return self._target_lm_head.scale_and_cap(product) if self._scaled else product

    def product(self, hidden: Tensor, k: int = 0) -> Tensor:
        """Return the logits before scale and soft-cap: [..., D] -> [..., W]."""
        index, weight = self._index(k), self.head(k).weight
        if index not in self._packed:
            self._packed[index] = inference_linear(weight, dtype=self._draft_dtype)
        product: Tensor = self._packed[index](hidden.to(weight.dtype))
        return product

    def all_logits(self, hidden: Tensor) -> Tensor:
        """Return the draft logits of the first K positions, for inference: [B, K, D] -> [B, K, W]."""
        if len(self.weights) <= 1:
            return self.logits(hidden)
        return torch.stack([self.logits(hidden[:, k], k) for k in range(hidden.shape[1])], 1)

    def _index(self, k: int) -> int:
        return min(k, max(0, len(self.weights) - 1))
