"""The residual blocks of Medusa and Hydra heads."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResBlock(nn.Module):
    """Residual block ``x + SiLU(W [x; condition] + b)``, or without the condition. W and b start at zero."""

    def __init__(self, width: int, conditioned: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width if conditioned else width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        """Map ``x`` [..., D] to [..., D]; pass ``condition`` [..., D] if the block was created with ``conditioned``."""
        return x + F.silu(self.linear(x if condition is None else torch.cat([x, condition], -1)))


class Blocks(nn.ModuleList):
    """``count`` residual blocks of one head. With ``conditioned``, the first reads a condition too; with ``tied``, one
    block is applied ``count`` times."""

    def __init__(self, width: int, count: int, conditioned: bool = False, tied: bool = False) -> None:
        super().__init__(ResBlock(width, conditioned and i == 0) for i in range(1 if tied else count))
        self._order = [0] * count if tied else list(range(count))

    def in_order(self) -> list["ResBlock"]:
        """Return the blocks in the order of application."""
        return [cast(ResBlock, self[index]) for index in self._order]

    def inference(self, dtype: torch.dtype | None = None) -> "Blocks":
        """Return the blocks unchanged, because ``MedusaHead`` packs the blocks of all heads together."""
        return self

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        """Apply all blocks to ``x`` [..., D]; only the first one reads ``condition``."""
        for i, block in enumerate(self.in_order()):
            x = block(x, condition if i == 0 else None)
        return x
