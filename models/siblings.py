"""Sampled siblings: the children of a node as draws of the drafter's law.

Shape legend: B rows, F parents, C children of each, W vocabulary.
"""

import torch
from torch import Tensor

from drafthead.data.contracts import Siblings
from drafthead.models.coins import Coins

MISSING = -1
"""A sibling that does not exist: the law has fewer tokens than children are wanted."""


def draw_siblings(laws: Tensor, count: int, kind: Siblings, coins: Coins) -> Tensor:
    """``count`` draws of every law: [B, F, W] -> [B, F, count] int64, ``MISSING`` where the law is used up.

    With replacement the draws are independent (SpecInfer, 2305.09781); without, a token that was drawn is removed
    and the rest renormalised (Sequoia, 2402.12374). Verification must know which.

    Raises:
        ValueError: siblings that are not drawn.
    """
    if kind is Siblings.DETERMINISTIC:
        raise ValueError("deterministic siblings are ranked, not drawn")
    if kind is Siblings.WITH_REPLACEMENT:
        rows, parents, _ = laws.shape
        repeated = laws[:, :, None].expand(-1, -1, count, -1).flatten(1, 2)
        return coins.draw(repeated).view(rows, parents, count)
    remaining, drawn = laws, []
    for _ in range(count):
        token = coins.draw(remaining)
        exists = remaining.gather(-1, token[..., None])[..., 0] > 0
        drawn.append(torch.where(exists, token, MISSING))
        remaining = remaining.scatter(-1, token[..., None], 0.0)
    return torch.stack(drawn, -1)
