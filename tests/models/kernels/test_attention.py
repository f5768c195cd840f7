"""Attention within the documents of packed rows."""

import pytest
import torch
from torch import nn

from drafthead.models.kernels.attention import document_mask, grouped_sdpa

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1], [0, 1, 1, 1, 1, 1, 1, 2]])


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_by_lengths_equals_attention_by_the_mask(kv_heads: int) -> None:
    """Outputs and gradients; a clone of the mask has lost the lengths, as it has after a model changed it."""
    torch.manual_seed(0)
    by_lengths = document_mask(IDS, torch.float32)
    by_mask = by_lengths.clone()
    assert not vars(by_mask)
    states = [torch.randn(2, heads, 8, 6, requires_grad=True) for heads in (4, kv_heads, kv_heads)]
    actual, expected = (grouped_sdpa(nn.Identity(), *states, mask, scaling=0.3)[0] for mask in (by_lengths, by_mask))
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(out.square().sum(), states) for out in (actual, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
