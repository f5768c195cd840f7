"""Attention of packed rows by ranges against attention by a dense mask. tests/accelerator has the same on a device."""

import pytest
import torch
from torch import nn

from drafthead.models.kernels import packed
from drafthead.models.kernels.attention import grouped_sdpa
from drafthead.models.kernels.packed import PackedMask

IDS = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2, -1, -1, -1], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2]])
WINDOWS = {"full": None, "window": (3, False), "chunks": (4, True), "wide window": (9, False)}
OPTIONS = {"plain": {}, "sinks, soft cap": {"s_aux": torch.tensor([0.1, 0.5, -1.0, 2.0]), "softcap": 2.0}}


@pytest.mark.parametrize("joined", [0, 8])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("window", WINDOWS)
def test_spans_equal_a_dense_mask(
    window: str, options: str, kv_heads: int, joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients; short documents alone, or several in one span as on a device."""
    monkeypatch.setitem(packed.JOINED, "cpu", joined)
    torch.manual_seed(0)
    mask = PackedMask.of(IDS)
    if (limits := WINDOWS[window]) is not None:
        mask = mask.within(*limits)
    states = [torch.randn(2, heads, 12, 6, requires_grad=True) for heads in (4, kv_heads, kv_heads)]
    outputs = [
        grouped_sdpa(nn.Identity(), *states, attention_mask, scaling=0.3, **OPTIONS[options])[0]
        for attention_mask in (mask, mask.dense(torch.float32))
    ]
    torch.testing.assert_close(*outputs)
    gradients = [torch.autograd.grad(out.square().sum(), states) for out in outputs]
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_dense_mask_is_what_it_says() -> None:
    """Tokens see earlier ones of their document, within the window or the chunk."""
    for limits in WINDOWS.values():
        mask = PackedMask.of(IDS) if limits is None else PackedMask.of(IDS).within(*limits)
        seen = mask.dense(torch.float32)[:, 0] == 0
        for row, documents in enumerate(IDS.tolist()):
            for query, document in enumerate(documents):
                start = documents.index(document)
                if limits is not None and limits[1]:
                    start += (query - start) // limits[0] * limits[0]
                elif limits is not None:
                    start = max(start, query - limits[0] + 1)
                assert seen[row, query].nonzero()[:, 0].tolist() == list(range(start, query + 1)), (limits, row, query)
