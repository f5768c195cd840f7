"""The product compiled for this CPU: right for every shape, independent of other rows, unused if it fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from drafthead.models.kernels import compiled
from drafthead.models.kernels.compiled import CompiledWeight, skinny_library
from drafthead.system.machine import cpu_info
from support import cases


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path))
    skinny_library.cache_clear()
    yield tmp_path / "kernels"
    skinny_library.cache_clear()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (63, 5), (64, 96), (200, 33)])
def test_product(outputs: int, inputs: int, biased: bool) -> None:
    if (library := skinny_library()) is None:
        pytest.skip("no C++ compiler here")
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs) if biased else None
    layer = CompiledWeight(weight, bias, library)
    assert torch.equal(layer.dense(), weight)
    x = torch.randn(41, inputs)
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


@pytest.mark.parametrize("right, wrong", [("sums[m][v] += weights", "sums[m][v] -= weights"), ("cvtepi8", "cvtepu8")])
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
