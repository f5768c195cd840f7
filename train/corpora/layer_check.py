"""Comparison of hidden states that something else has computed with those of the base's layers.

Shape legend: T tokens, D width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ERRORS = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}
"""Largest relative error of a layer, the median over tokens, by dtype of the states. Layer 2 of SmolLM2
has errors of 6e-7, 0.002 (bfloat16) and 0.03 (FP8), and differs from layers 1 and 3 by 0.9 and 0.3."""


def layer_error(given: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the median over the tokens of all texts of the relative error of states [T, D]."""
    errors = []
    for states, own in zip(given, expected, strict=True):
        own = own.float().cpu()
        errors.append((states.float().cpu() - own).norm(dim=-1) / own.norm(dim=-1))
    return float(torch.cat(errors).median())
