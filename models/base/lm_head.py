"""The base's output head as a value: what draft heads are initialised from, share and are taught by."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LMHead:
    """The base's own output head, or some of its rows: logits = softcap(scale * h @ weight.T)."""

    weight: Tensor
    """[V, D], frozen."""
    scale: float = 1.0
    softcap: float | None = None

    def rows(self, ids: Tensor) -> "LMHead":
        """The head over the draft vocabulary ``ids`` ([W] int64)."""
        return LMHead(weight=self.weight[ids].contiguous(), scale=self.scale, softcap=self.softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return self.scale_and_cap(hidden @ self.weight.t())

    def scale_and_cap(self, product: Tensor) -> Tensor:
        """The logits of a product ``h @ weight.T``."""
        if self.scale != 1.0:
            product = product * self.scale
        if self.softcap is not None:
            product = self.softcap * torch.tanh(product / self.softcap)
        return product
