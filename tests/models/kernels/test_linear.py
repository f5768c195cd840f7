"""Linear layers give what ``F.linear`` gives, prepacked or compiled for this CPU, for every number of rows."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import sleep
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drafthead.data.batch import HiddenStatesSpec
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.layers import reading_copy
from drafthead.models.decoding.loop import decode
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.kernels import attention, choice, compiled, linear
from drafthead.models.kernels.choice import choose_draft_dtype, choose_kernels
from drafthead.models.kernels.compiled import MOST_QUERIES, CompiledWeight, attend, skinny_library
from drafthead.models.kernels.linear import MEASURED_ROWS, Kernel, KernelTable, PrepackedLinear, inference_linear
from drafthead.models.kernels.packed import PackedMask
from drafthead.system.machine import cpu_info
from support import TinyBase, cases, random_ids, row_of


@pytest.fixture(autouse=True)
def every_test_looks_for_the_compiler() -> Iterator[None]:
    yield
    skinny_library.cache_clear()


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    skinny_library.cache_clear()


SHAPES = [(), (1, 1), (1, 2), (2, 1), (1, 3), (1, 8), (3, 1), (3, 5), (1,), (2,), (7,), (0, 4), (1, 0)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", SHAPES, ids=str)
def test_product_equals_f_linear(rows: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    stock = nn.Linear(24, 40, bias=bias).requires_grad_(False)
    x = torch.randn(*rows, 24)
    product = PrepackedLinear(stock.weight, stock.bias)(x)
    assert product.shape == (*rows, 40)
    torch.testing.assert_close(product, F.linear(x, stock.weight, stock.bias))


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_weights_in_8_bits_round_no_input(rows: int) -> None:
    """The first token's states are a hundred times larger than the others, which must not be rounded away."""
    if skinny_library() is None:
        pytest.skip("no C++ compiler here")
    torch.manual_seed(0)
    weight, bias, x = torch.randn(70, 96), torch.randn(70), torch.randn(rows, 96)
    weight[3] = 0.0
    x[0] *= 100
    layer = inference_linear(weight, bias, torch.int8)
    product, expected = layer(x), F.linear(x, weight, bias)
    assert float(((product - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 0.015
    assert torch.equal(product[-1:], layer(x[-1:])), "a row's result depends on the rows beside it"
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_loaded_weights_are_the_ones_that_draft(tiny_base: TinyBase) -> None:
    first, second = (MedusaConfig(num_draft_tokens=2).build(tiny_base(seed=seed)).eval() for seed in (0, 1))
    inputs = torch.randn(1, 32), torch.tensor([5]), 2
    with torch.inference_mode():
        before, expected = (head.projections.logits(head.all_inputs(*inputs), None) for head in (first, second))
        assert not torch.equal(before, expected)
        first.load_state_dict(second.state_dict())
        torch.testing.assert_close(first.projections.logits(first.all_inputs(*inputs), None), expected)


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("kernel", list(Kernel))
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 40])
def test_every_kernel_is_a_product(kernel: Kernel, rows: int, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiles:
        without_compiler(monkeypatch)
    weight, bias, x = torch.randn(2048, 256), torch.randn(2048), torch.randn(1, rows, 256)
    table = KernelTable()
    table.by_rows = dict.fromkeys(MEASURED_ROWS, kernel)
    layer = PrepackedLinear(weight, bias, table=table)
    torch.testing.assert_close(layer(x), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    layer.keep({kernel})
    torch.testing.assert_close(layer(x), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    assert torch.equal(layer.dense(), weight)
    expected = F.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16()).float()
    torch.testing.assert_close(layer.inference(torch.bfloat16)(x), expected, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("compiles", [True, False])
def test_the_fastest_kernel_is_chosen_once(compiles: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path))
    default, other = (Kernel.COMPILED, Kernel.PACKED) if compiles else (Kernel.PACKED, Kernel.PLAIN)
    if not compiles:
        without_compiler(monkeypatch)
    elif skinny_library() is None:
        pytest.skip("no C++ compiler here")
    table = KernelTable()
    layer = PrepackedLinear(torch.randn(64, 64), None, table=table)

    def run(rows: int, table: KernelTable, best_at_1: Kernel) -> None:
        sleep(0.001 if table.kernel(rows) is (best_at_1 if rows == 1 else default) else 0.006)

    def stored() -> set[Kernel]:
        kernels = set()
        for table.by_rows in [dict.fromkeys(MEASURED_ROWS, kernel) for kernel in Kernel]:
            kernels.add(layer.kernel(1))
        return kernels

    choose_kernels(table, layer, lambda rows: run(rows, table, other), "a base")
    assert [table.kernel(n) for n in (1, 3, 8, 32)] == [other, default, default, default]
    again = KernelTable()
    choose_kernels(again, layer, lambda rows: pytest.fail("measured again"), "a base")
    assert vars(again) == vars(table)
    assert stored() == {default, other}
    assert str(again).startswith("1 packed, 2-32 compiled" if compiles else "1 plain, 2-32 packed; a faster")
    same = KernelTable()
    monkeypatch.setattr(choice, "COPY_SHARE", 0.0)
    choose_kernels(same, layer, lambda rows: run(rows, same, default), "another base")
    assert set(same.by_rows.values()) == {default}
    assert stored() == {default}, "nothing is faster, and without room for both the compiled form serves all rows"
    torch.testing.assert_close(layer(x := torch.randn(50, 64)), F.linear(x, layer.dense()), rtol=1e-4, atol=1e-4)


def test_the_fastest_dtype_to_draft_in_is_chosen_without_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {None: 0.004, torch.bfloat16: 0.001, torch.int8: 0.0038}
    monkeypatch.setattr(linear, "packs_bfloat16", lambda: True)
    monkeypatch.setattr(PrepackedLinear, "inference", lambda layer, dtype: lambda x: sleep(seconds[dtype]))
    table, lm_head = KernelTable(), torch.randn(64, 32)
    choose_draft_dtype(table, lm_head)
    assert table.draft_dtype is None, "small bases are not measured"
    monkeypatch.setattr(choice, "WORTH_MEASURING", 1)
    choose_draft_dtype(table, lm_head)
    assert table.draft_dtype == torch.bfloat16


@pytest.fixture
def measured_base(tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> BaseModel:
    config = tiny_base().config  # with the fixed kernels of small bases
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path))
    monkeypatch.setattr(choice, "WORTH_MEASURING", 1)
    return BaseModel.load(config)


def test_a_large_base_chooses_and_answers_alike(tiny_base: TinyBase, measured_base: BaseModel, tmp_path: Path) -> None:
    fixed, chosen, config = tiny_base(), measured_base, measured_base.config
    assert fixed.kernels is None and chosen.kernels is not None and len(list(tmp_path.glob("kernels/*.json"))) == 1
    assert BaseModel.load(replace(config, kernels="packed")).kernels is None
    answers = [decode(base, None, [5, 9, 11], max_new_tokens=24).tokens for base in (fixed, chosen)]
    assert answers[0] == answers[1]


@pytest.mark.skipif(not linear.packs_bfloat16(), reason="this CPU multiplies no bfloat16")
def test_hidden_states_to_train_on_may_be_read_in_bfloat16(measured_base: BaseModel) -> None:
    base = measured_base
    batch = row_of([random_ids(20), random_ids(7, seed=1)])
    exact = base.hidden_states(batch, HiddenStatesSpec(layers=(1,)))
    base.kernels.bfloat16_reads = False
    assert reading_copy(base) is base
    base.kernels.bfloat16_reads = True
    rounded = reading_copy(base).hidden_states(batch, HiddenStatesSpec(layers=(1,)))
    for expected, actual in ((exact.final, rounded.final), (exact.layers, rounded.layers)):
        assert expected is not None and actual is not None and not torch.equal(expected, actual)
        torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.1)
    torch.testing.assert_close(base.hidden_states(batch, HiddenStatesSpec()).final, exact.final, rtol=0, atol=0)


# The product compiled for this CPU ------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path))
    skinny_library.cache_clear()
    yield tmp_path / "kernels"
    skinny_library.cache_clear()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (63, 5), (64, 96), (200, 33), (40, 300)])
def test_product(outputs: int, inputs: int, biased: bool) -> None:
    if (library := skinny_library()) is None:
        pytest.skip("no C++ compiler here")
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs) if biased else None
    layer = CompiledWeight(weight, bias, library)
    assert torch.equal(layer.dense(), weight)
    x = torch.randn(60, inputs)
    for rows in range(len(x) + 1):
        product = layer(x[:rows])
        torch.testing.assert_close(product, F.linear(x[:rows], weight, bias), rtol=1e-4, atol=1e-4)
        assert torch.equal(product, layer(x)[:rows]), "a row's result depends on the rows beside it"
    threads = torch.get_num_threads()
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        again = layer(x)
        torch.set_num_threads(threads)
        assert torch.equal(again, product), "the result depends on how blocks are dealt to threads"
    strided = torch.randn(2, inputs, 3).transpose(1, 2)
    torch.testing.assert_close(layer(strided), F.linear(strided, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [16, 64, 80, 128, 256])
@pytest.mark.parametrize(("batch", "keys"), [(1, 1), (1, 16), (3, 45), (1, 100)])
def test_attention_of_a_few_queries(batch: int, keys: int, width: int) -> None:
    if skinny_library() is None:
        pytest.skip("no C++ compiler here")
    most = min(keys, MOST_QUERIES)
    query = torch.randn(batch, most, 8, width).transpose(1, 2)[:, :6]
    key, value = (3 * torch.randn(batch, 3, keys + 20, width)[:, :, :keys] for _ in range(2))
    hidden = torch.ones(most, most).triu(1).bool()
    mask = torch.zeros(batch, 1, most, keys)
    mask[..., -most:].masked_fill_(hidden, -torch.inf)
    mask[-1, 0, :, : (keys - most) // 2] = -torch.inf  # padding
    if (whole := attend(query, key, value, mask, 0.2)) is None:
        assert width not in (16, 64, 128), "widths of most models are compiled for every CPU"
        pytest.skip("this width is not compiled for this CPU")
    for queries in range(1, most + 1):
        given = query[:, :, :queries], key, value, mask[:, :, :queries]
        out = attend(*given, 0.2)
        expected = F.scaled_dot_product_attention(*given, scale=0.2, enable_gqa=True)
        torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(out, whole[:, :queries]), "a query's result depends on the others"
    one = attend(query[:, :, -1:], key, value, None, 0.2)
    torch.testing.assert_close(
        one.transpose(1, 2),
        F.scaled_dot_product_attention(query[:, :, -1:], key, value, scale=0.2, enable_gqa=True),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("heads, groups, width", [(9, 3, 64), (4, 4, 16), (6, 2, 80), (8, 1, 128), (2, 1, 256)])
def test_causal_attention_equals_torch(heads: int, groups: int, width: int) -> None:
    """Also of tensors that are not contiguous, and of every prefix alike."""
    if skinny_library() is None:
        pytest.skip("no C++ compiler here")
    torch.manual_seed(0)
    states = torch.randn(2, 131, heads + 2 * groups, width).transpose(1, 2)
    query, key, value = states.split([heads, groups, groups], 1)
    if (whole := attend(query, key, value, None, 0.2)) is None:
        assert width not in (16, 64, 128), "widths of most models are compiled for every CPU"
        pytest.skip("this width is not compiled for this CPU")
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(whole.transpose(1, 2), expected, rtol=1e-4, atol=1e-4)
    for tokens in (2, 12, 24, 25, 32, 33, 64, 97, 130):
        part = attend(*(each[:, :, :tokens] for each in (query, key, value)), None, 0.2)
        assert torch.equal(part, whole[:, :tokens]), "a token's result depends on later ones"


def test_packed_rows_are_compiled_document_by_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three documents in two rows, and one of a single token. Windows are left to torch, chunks are not."""
    if skinny_library() is None:
        pytest.skip("no C++ compiler here")
    torch.manual_seed(0)
    ids = torch.tensor([[0] * 40 + [1] * 60, [2] * 99 + [3]])
    query, key, value = torch.randn(2, 100, 8, 64).transpose(1, 2).split([4, 2, 2], 1)
    for mask in (PackedMask.of(ids), PackedMask.of(ids).within(70, False), PackedMask.of(ids).within(30, True)):
        with monkeypatch.context() as patched:
            patched.setattr(attention, "attend", counted := Mock(side_effect=attend))
            compiled_out = attention.packed_attention(query, key, value, mask, compiled=True)
        assert (counted.call_count >= 2) is (mask.window is None)
        expected = attention.packed_attention(query, key, value, mask)
        torch.testing.assert_close(compiled_out, expected, rtol=1e-4, atol=1e-4)


def test_attention_that_is_left_to_torch() -> None:
    query, key = torch.randn(1, 4, 2, 16), torch.randn(1, 2, 40, 16)
    mask = torch.zeros(1, 1, 2, 40)
    assert skinny_library() is None or attend(query, key, key, mask, 1.0) is not None
    many = torch.randn(1, 4, MOST_QUERIES + 1, 16), key, key, torch.zeros(1, 1, MOST_QUERIES + 1, 40)
    for given in (
        (query, key, key, None),  # causal, but not of the keys' tokens
        (query, key, key, mask == 0),
        (query.double(), key.double(), key.double(), mask.double()),
        (query, key, torch.randn(1, 2, 40, 32), mask),
        (query.requires_grad_(), key, key, mask),
        (torch.randn(1, 4, 2, 12), key[..., :12].clone(), key[..., :12].clone(), mask),
        many,
    ):
        assert attend(*given, 1.0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@cases(
    "x", torch.ones(1, 32), torch.tensor(1.0), torch.ones(1, 16, dtype=torch.float64), torch.ones(1, 16, device="meta")
)
def test_inputs_that_do_not_fit_are_refused(x: torch.Tensor, dtype: torch.dtype) -> None:
    """The library gets addresses and would write past the end of its output: [1, 32] as two rows of 16."""
    if (library := skinny_library()) is None:
        pytest.skip("no C++ compiler here")
    layer = CompiledWeight(torch.ones(32, 16), None, library, dtype)
    with pytest.raises(RuntimeError, match="expected an input of dtype float32"):
        layer(x)


@cases(
    "weight, bias",
    (torch.ones(4, 0), None),
    (torch.ones(4, 4).double(), None),
    (torch.ones(4, 4, device="meta"), None),
    (torch.ones(4, 4), torch.ones(1)),
)
def test_weights_that_do_not_fit_are_refused(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if (library := skinny_library()) is None:
        pytest.skip("no C++ compiler here")
    with pytest.raises(RuntimeError, match="weight"):
        CompiledWeight(weight, bias, library)


def test_it_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", " ")  # counts as unset
    before = torch.random.get_rng_state()
    if skinny_library() is None:
        pytest.skip("no C++ compiler here")
    assert torch.equal(torch.random.get_rng_state(), before), "a run's random numbers depend on a compiler"
    (library,) = fresh.iterdir()  # and no unfinished file
    built = library.stat()
    skinny_library.cache_clear()
    assert skinny_library() is not None
    assert library.stat().st_ino == built.st_ino, "compiled again"


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false -v"])
def test_none_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert skinny_library() is None
    assert not fresh.exists() or not list(fresh.iterdir())


@cases(
    "right, wrong",
    ("values[m][v] += weights", "values[m][v] -= weights"),
    pytest.param("* weights[m * stride + j]", "* weights[j]", marks=pytest.mark.slow),
    pytest.param("cvtepi8", "cvtepu8", marks=pytest.mark.slow),
)
def test_none_if_built_wrong(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: str, wrong: str
) -> None:
    if wrong == "cvtepu8" and "avx2" not in cpu_info("flags"):
        pytest.skip("the source has no such instruction for this CPU")
    if skinny_library() is None:
        pytest.skip("no C++ compiler here")
    source = tmp_path / "skinny.cpp"
    source.write_text(compiled.SOURCE.read_text().replace(right, wrong))
    monkeypatch.setattr(compiled, "SOURCE", source)
    skinny_library.cache_clear()
    assert skinny_library() is None
