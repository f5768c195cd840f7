"""The base's output head as a value: what draft heads are initialised from, share and are taught by."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LMHead:
    """The base's own output head, or some of its rows: logits = softcap(scale * h @ weight.T)."""

    weight: Tensor
    """[V, D], frozen."""
    scale: float = 1.0
    softcap: float | None = None
    low_rank: Tensor | None = None
    """[V, r] trained, or None. It reads the last r columns of the input, the frozen ``weight`` those before."""

    @property
    def trained(self) -> Tensor:
        """The part of the weights that may be trained."""
        return self.weight if self.low_rank is None else self.low_rank

    def at_most(self, dtype: torch.dtype) -> "LMHead":
        """The same with frozen rows no wider than ``dtype``, which a head computes in: products take half the time."""
        if self.trained is self.weight and self.weight.requires_grad or self.weight.itemsize <= dtype.itemsize:
            return self
        return replace(self, weight=self.weight.to(dtype))

    def rows(self, ids: Tensor) -> "LMHead":
        """The head over the draft vocabulary ``ids`` ([W] int64)."""
        return LMHead(weight=self.weight[ids].contiguous(), scale=self.scale, softcap=self.softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]; [..., D + r] with a ``low_rank`` part."""
        return self.scale_and_cap(self.product(hidden))

    def product(self, hidden: Tensor) -> Tensor:
        """The same before it is scaled."""
        if self.low_rank is None:
            return hidden @ self.weight.t()
        width = self.weight.shape[1]
        frozen = hidden[..., :width].to(self.weight.dtype) @ self.weight.t()
        return frozen + hidden[..., width:].to(self.low_rank.dtype) @ self.low_rank.t()

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient [n, D] by the input of ``product``, of the one by what it gives, [n, V]."""
        if self.low_rank is None:
            return gradient @ self.weight
        frozen = gradient.to(self.weight.dtype) @ self.weight
        return torch.cat([frozen.to(gradient.dtype), gradient @ self.low_rank], -1)

    def scale_and_cap(self, product: Tensor) -> Tensor:
        """The logits of a product ``h @ weight.T``."""
        if self.scale != 1.0:
            product = product * self.scale
        if self.softcap is not None:
            product = self.softcap * torch.tanh(product / self.softcap)
        return product
