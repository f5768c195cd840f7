"""A head's attention layer at decode time: read in pieces, in rows of lengths of their own, it is the layer at once."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.draft_cache import INITIAL_CAPACITY, ROW_BY_ROW
from drafthead.models.heads.common.attention_layer import HeadAttention
from drafthead.models.heads.common.layer_cache import LayerKVCache, PendingInputs

TinyBase = Callable[..., BaseModel]
STEPS = {
    "one row": [[4], [1], [2], [1], [3]],
    "ragged": [[4, 2, 3], [1, 3, 1], [2, 1, 1], [1, 1, 4], [3, 2, 1]],
    "row by row": [[ROW_BY_ROW + 5, 2, 3], [1, ROW_BY_ROW + 9, 1], [1, 1, 2]],
    "enlarged": [[3, 1], [INITIAL_CAPACITY, 2], [1, 2 * INITIAL_CAPACITY], [2, 1]],
}
"""How many positions every row gets, step after step."""


class Reader:
    """A layer, a cache for it, and the rows' inputs."""

    def __init__(self, base: BaseModel, rows: int, time: int) -> None:
        torch.manual_seed(0)
        self.attention = HeadAttention(base).requires_grad_(False)
        self.inputs = torch.randn(rows, time, 32, generator=torch.Generator().manual_seed(1))
        shape = self.attention.cache_shape(torch.float32, torch.device("cpu"))
        self.calls: list[int] = []
        layer = self.attention.inference()
        self.cache = LayerKVCache(lambda x, *rest: (self.calls.append(x.shape[1]), layer(x, *rest))[1], shape)  # type: ignore[func-returns-value]
        self.text = PendingInputs.none(self.cache, rows, self.inputs)
        self.done = torch.zeros(rows, dtype=torch.int64)

    def append(self, counts: list[int]) -> None:
        """The next inputs of every row; what lies after a row's count is large, since it must not matter."""
        part = torch.full((len(counts), max(counts), 32), 1000.0)
        for row, count in enumerate(counts):
            part[row, :count] = self.inputs[row, self.done[row] : self.done[row] + count]
        self.done = self.done + torch.tensor(counts)
        self.text = self.text.append(part, torch.tensor(counts))

    def at_once(self, row: int, *more: Tensor) -> Tensor:
        """[D] after the row's text and ``more`` inputs [I], with a plain causal mask."""
        inputs = torch.cat([self.inputs[row, : self.done[row]], *(m[None] for m in more)])[None]
        time = inputs.shape[1]
        mask = torch.full((1, 1, time, time), -torch.inf).triu(1)
        found: Tensor = self.attention(inputs, torch.arange(time)[None], mask)[0, -1]
        return found


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("drafting", [True, False], ids=["read each time", "read at the end"])
@torch.inference_mode()
def test_a_text_in_pieces(tiny_base: TinyBase, kind: str, drafting: bool) -> None:
    """Whether or not drafting has read what was appended before more is appended."""
    steps = STEPS[kind]
    reader = Reader(tiny_base(), len(steps[0]), max(sum(row) for row in zip(*steps, strict=True)))
    for number, counts in enumerate(steps):
        reader.append(counts)
        if drafting or number == len(steps) - 1:
            found = reader.cache.prefill(reader.text)
            assert torch.equal(reader.cache.prefill(reader.text), found)
            for row in range(len(counts)):
                same(found[row], reader.at_once(row))


@pytest.mark.parametrize("kind", ["one row", "ragged"])
@torch.inference_mode()
def test_nodes_of_a_tree(tiny_base: TinyBase, kind: str) -> None:
    """Every node sees the text, the root, its ancestors and itself; no sibling, and nothing of the step before."""
    steps = STEPS[kind]
    rows = len(steps[0])
    reader = Reader(tiny_base(), rows, 20)
    nodes = torch.randn(rows, 8, 32, generator=torch.Generator().manual_seed(2))
    for counts in steps:
        reader.append(counts)
        for _ in range(2):  # a second draft from the same state finds what the first did
            root = reader.cache.prefill_with(reader.text, nodes[:, 0])
            levels = [
                reader.cache.extend(nodes[:, places], torch.tensor([parents]).expand(rows, -1))
                for places, parents in (([1, 2], [0, 0]), ([3, 4, 5], [1, 0, 1]), ([6, 7], [2, 1]))
            ]
            found = torch.cat([root[:, None], *levels], 1)
            paths = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4], [0, 2, 5], [0, 2, 5, 6], [0, 1, 4, 7]]
            for row, path in product(range(rows), paths):
                same(found[row, path[-1]], reader.at_once(row, *nodes[row, path]))


@torch.inference_mode()
def test_nodes_directly_behind_a_text(tiny_base: TinyBase) -> None:
    """Drafted twice from one text, and once more after a draft with a root."""
    reader = Reader(tiny_base(), 2, 20)
    reader.append([5, 3])
    nodes = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(2))
    for draft in range(3):
        if draft == 2:
            reader.cache.prefill_with(reader.text, nodes[:, 2])
        found = reader.cache.prefill(reader.text)
        below = reader.cache.extend(nodes[:, :2], torch.zeros(2, 2, dtype=torch.int64))
        for row in range(2):
            same(found[row], reader.at_once(row))
            for place in range(2):
                same(below[row, place], reader.at_once(row, nodes[row, place]))


@torch.inference_mode()
def test_an_old_text_reads_as_it_did(tiny_base: TinyBase) -> None:
    """A state does not change when another one continues from it."""
    reader = Reader(tiny_base(), 2, 20)
    reader.append([5, 3])
    reader.append([2, 1])
    old, done = reader.text, reader.done
    before = reader.cache.prefill(old)
    reader.append([1, 2])
    reader.cache.prefill(reader.text)
    same(reader.cache.prefill(old), before)
    reader.text, reader.done = old, done
    reader.append([3, 3])  # and it can be gone on from again
    for row in range(2):
        same(reader.cache.prefill(reader.text)[row], reader.at_once(row))


@pytest.mark.parametrize("rows", [[2, 0], [1]])
@torch.inference_mode()
def test_some_rows_go_on(tiny_base: TinyBase, rows: list[int]) -> None:
    """With caches of their own: the others may continue too."""
    reader = Reader(tiny_base(), 3, 24)
    for counts in STEPS["ragged"][:3]:
        reader.append(counts)
    whole = reader.text
    reader.cache.prefill_with(whole, reader.inputs[:, 0])
    reader.cache.extend(reader.inputs[:, :2], torch.zeros(3, 2, dtype=torch.int64))
    chosen = whole.select(rows)
    assert chosen.cache is not reader.cache
    found = chosen.cache.prefill(chosen)
    for place, row in enumerate(rows):
        same(found[place], reader.at_once(row))
    more = torch.stack([reader.inputs[row, reader.done[row] : reader.done[row] + 2] for row in rows])
    longer = chosen.append(more, None)
    after = longer.cache.prefill(longer)
    for place, row in enumerate(rows):
        same(after[place], reader.at_once(row, *more[place]))
    for row in range(3):
        same(reader.cache.prefill(whole)[row], reader.at_once(row))


@torch.inference_mode()
def test_a_prompt_is_read_when_it_comes(tiny_base: TinyBase) -> None:
    """It belongs to the prefill, and not to the first step; what is appended later is read when drafting needs it."""
    reader = Reader(tiny_base(), 1, 8)
    reader.append([4])
    assert reader.calls == [4]
    reader.append([2])
    assert reader.calls == [4]
    reader.cache.prefill(reader.text)
    assert reader.calls == [4, 2]
