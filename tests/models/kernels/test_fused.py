"""Fused modules against the stock modules they replace, and attention of packed rows against a dense mask."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drafthead.data.batch import HiddenStatesSpec
from drafthead.models.base.base_model import BaseModel, fuse_for_cpu
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.parts.draft_head import DraftHeadConfig
from drafthead.models.kernels import packed
from drafthead.models.kernels.attention import grouped_sdpa
from drafthead.models.kernels.fused import FusedAttention, FusedMLP, FusedRMSNorm, fuse_modules
from drafthead.models.kernels.packed import PackedMask
from drafthead.models.token_tree import TokenTree
from support import TinyBase, cases, row_of, stacked

RELATIVE = 1e-4  # of the largest logit: float32 rounding through three layers is two orders below
TREE = TokenTree(parents=(-1, 0, 0, 1, 1, 2), ranks=(0, 0, 1, 0, 1, 0))


class _Pair:
    """The same random weights in stock modules and in fused ones."""

    def __init__(self, tiny: BaseModel) -> None:
        shape = replace(tiny.config, prepack=False)
        self.stock = BaseModel.load(shape)
        generator = torch.Generator().manual_seed(1)
        for weight in self.stock.model.parameters():
            # Fresh norms are all ones (Gemma: zeros) and fresh biases zeros: mistakes with them would not show.
            if weight.ndim == 1:
                weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
        self.fused = self.fuse()

    def fuse(self) -> BaseModel:
        config = replace(self.stock.config, prepack=True)
        fused = BaseModel(copy.deepcopy(self.stock.model), self.stock.tokenizer, config)
        fuse_for_cpu(fused)
        return fused

    def assert_equal(self, work: Callable[[BaseModel], Tensor]) -> None:
        stock, fused = work(self.stock), work(self.fused)
        assert stock.shape == fused.shape
        assert float((stock - fused).abs().max()) < RELATIVE * float(stock.abs().max())


@pytest.fixture(params=["llama", "mistral", "qwen2", "qwen3", "gemma"])
def pair(request: pytest.FixtureRequest, tiny_base: TinyBase) -> _Pair:
    return _Pair(tiny_base(request.param))


def test_every_layer_is_fused(pair: _Pair) -> None:
    kinds = [type(module) for module in pair.fused.model.modules()]
    assert [kinds.count(kind) for kind in (FusedAttention, FusedMLP)] == [3, 3]
    assert kinds.count(FusedRMSNorm) == (12 if pair.stock.model.config.model_type == "qwen3" else 6)
    assert pair.fused.prepacked == 3 * 7 + 1


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tree", [TokenTree.chain(0), TokenTree.chain(1), TokenTree.chain(3), TREE], ids=len)
def test_passes(pair: _Pair, batch: int, tree: TokenTree) -> None:
    pair.fused = pair.fuse()
    ids = torch.randint(1, 250, (batch, 9 + len(tree)), generator=torch.Generator().manual_seed(0))

    def logits(base: BaseModel) -> Tensor:
        cache = base.new_cache(32, rows=batch)
        first = base.forward(ids[:, :9], cache).final
        return base.logits(torch.cat([first, base.verify(ids[:, 9:], tree.shape, cache).final], 1))

    pair.assert_equal(logits)


def test_training_hidden_states(pair: _Pair) -> None:
    rows = row_of([[3, 4, 5], [6, 7, 8]], padding=0), row_of([[9, 10, 11, 12, 13, 14]], padding=0)

    def states(base: BaseModel) -> Tensor:
        hidden = base.hidden_states(stacked(rows), HiddenStatesSpec(layers=(0, 1, 3)))
        return torch.cat([hidden.final, hidden.layers], -1)

    pair.assert_equal(states)


def test_what_is_not_an_exact_stock_module_is_left(tiny_base: TinyBase) -> None:
    stock = BaseModel.load(replace(tiny_base().config, prepack=False))
    layers = stock.model.model.layers
    for layer in layers:
        layer.mlp.__class__ = type("Changed", (type(layer.mlp),), {})
    stock.model.config._attn_implementation = "eager"
    assert fuse_modules(layers) == 0
    assert type(layers[0].input_layernorm) is FusedRMSNorm
    half = BaseModel.load(replace(tiny_base().config, dtype="bfloat16"))
    assert half.prepacked == 0


class Record(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum("_linear_pointwise" in call for call in self.calls)


@cases("config, products", (HydraConfig(prefix_layer=True), 4), (Eagle3Config(), 4), (KangarooConfig(exit_layer=1), 2))
def test_heads_draft_with_them(tiny_base: TinyBase, config: DraftHeadConfig, products: int) -> None:
    """Else their costs would not compare: each norm by its length, and few products a layer."""
    base = tiny_base()
    session = config.build(base).eval().open(1)
    width = base.hidden_size * (2 if isinstance(config, Eagle3Config) else 1)
    with torch.inference_mode(), Record() as record:
        session.context.append(torch.randn(1, 3, width), [3])
    assert record.products == products
    assert not any("rms_norm" in call for call in record.calls)


# Packed rows; tests/accelerator has the same on a device --------------------------------------------------------------


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
