"""Prepacked linear layers give what ``F.linear`` gives, for every number of rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drafthead.models.kernels import linear
from drafthead.models.kernels.linear import PrepackedLinear, can_prepack, joined_linear, pad_rows, prepack_linears

SHAPES = [(), (1, 1), (1, 2), (2, 1), (1, 3), (1, 8), (3, 1), (3, 5), (1,), (2,), (7,), (0, 4), (1, 0)]


@pytest.fixture(params=[0, 2**60], ids=["padded", "as_is"])
def padding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights with and without the padding of large ones."""
    monkeypatch.setattr(linear, "PAD_FROM", request.param)


@pytest.mark.usefixtures("padding")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", SHAPES, ids=str)
def test_product_equals_f_linear(rows: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    stock = nn.Linear(24, 40, bias=bias).requires_grad_(False)
    x = torch.randn(*rows, 24)
    found = PrepackedLinear(stock.weight, stock.bias)(x)
    assert found.shape == (*rows, 40)
    torch.testing.assert_close(found, F.linear(x, stock.weight, stock.bias))


@pytest.mark.parametrize("bias", [False, True])
def test_joined_layers_stand_side_by_side(bias: bool) -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(16, width, bias=bias).requires_grad_(False) for width in (32, 8, 8)]
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(joined_linear(parts)(x), torch.cat([part(x) for part in parts], -1))


def test_only_plain_float32_layers_are_prepacked() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()))
    assert prepack_linears(module) == 2
    assert not can_prepack(torch.zeros(4, 4, dtype=torch.bfloat16))
    assert not can_prepack(torch.zeros(4))


def test_padding_makes_exactly_full_rows() -> None:
    assert [pad_rows(torch.zeros(*rows, 8)).shape[:-1].numel() for rows in [(1, 1), (2, 1), (1, 2), (1,)]] == [4] * 4
