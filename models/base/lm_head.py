"""The base's output head: draft heads share it, start from it, and are trained on its distribution.

Shape legend: n tokens, D width, r rank of ``low_rank``, V vocabulary, W draft vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LMHead:
    """The base's output head, or some of its rows: logits = softcap * tanh(scale * h @ weight.T / softcap). Without
    ``softcap``, logits = scale * h @ weight.T."""

    weight: Tensor  # [V, D]; the base's own weight is frozen
    scale: float = 1.0
    softcap: float | None = None
    low_rank: Tensor | None = None  # [V, r], trained; multiplies the last r columns of the input

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """Weights to train: ``weight``; with ``low_rank``, both, or only ``low_rank`` if ``weight`` is frozen."""
        if self.low_rank is None:
            return (self.weight,)
        return (self.weight, self.low_rank) if self.weight.requires_grad else (self.low_rank,)

    @property
    def trained_columns(self) -> tuple[slice, ...]:
        """Columns of the input that multiply each weight of ``trained``."""
        if self.low_rank is None:
            return (slice(None),)
        width = self.weight.shape[1]
        return (slice(width), slice(width, None))[-len(self.trained) :]

    def cast_frozen(self, dtype: torch.dtype) -> "LMHead":
        """Cast a frozen ``weight`` to ``dtype`` if that is smaller."""
        if self.weight.requires_grad or self.weight.itemsize <= dtype.itemsize:
            return self
        return replace(self, weight=self.weight.to(dtype))

    def rows(self, ids: Tensor) -> "LMHead":
        """Return a copy with only the rows of the draft vocabulary ``ids`` ([W] int64), without ``low_rank``."""
        return LMHead(weight=self.weight[ids].contiguous(), scale=self.scale, softcap=self.softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [..., D] to logits [..., V]; with ``low_rank``, the input is [..., D + r]."""
        return self.scale_and_cap(self.product(hidden))

    def product(self, hidden: Tensor) -> Tensor:
        """Return the logits before scale and soft-cap."""
        if self.low_rank is None:
            return hidden @ self.weight.t()
        width = self.weight.shape[1]
        frozen = hidden[..., :width].to(self.weight.dtype) @ self.weight.t()
        return frozen + hidden[..., width:].to(self.low_rank.dtype) @ self.low_rank.t()

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient [n, D or D + r] of ``product``'s input from the gradient [n, V] of its output."""
        if self.low_rank is None:
            return gradient @ self.weight
        frozen = gradient.to(self.weight.dtype) @ self.weight
        return torch.cat([frozen.to(gradient.dtype), gradient @ self.low_rank], -1)

    def scale_and_cap(self, product: Tensor) -> Tensor:
        if self.scale != 1.0:
            product = product * self.scale
        if self.softcap is not None:
            product = self.softcap * torch.tanh(product / self.softcap)
        return product
