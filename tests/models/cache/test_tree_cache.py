"""The cache against a model of it made of lists: every pass must see the tokens and positions that the lists say."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.cache.layers import CacheShape, KeyValueShape
from drafthead.models.token_tree import TokenTree, TreeShape

WINDOW, ROOM, CAPACITY, LAYERS = 4, 8, 48, 5
WINDOWS = {"full": (0,) * LAYERS, "mixed": (0, WINDOW, WINDOW, 0, 0), "sliding": (WINDOW,) * LAYERS}
SHAPE = KeyValueShape((2, 3), (2, 3))
SHAPES = (SHAPE, KeyValueShape((1, 4), (2, 2)), None, SHAPE, KeyValueShape((3, 2), (1, 5)))


@dataclass
class ListRow:
    """The tokens of one row, and its pending nodes as tokens and parents (-1: none)."""

    tokens: list[int] = field(default_factory=list)
    nodes: list[tuple[int, int]] = field(default_factory=list)

    def path(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.path(self.nodes[node][1]), node]

    def commit(self, path: Sequence[int]) -> None:
        self.tokens += [self.nodes[node][0] for node in path]
        self.nodes = []

    def seen(self, node: int) -> list[tuple[int, int]]:
        """Return the tokens and positions that ``node`` attends to."""
        tokens = self.tokens + [self.nodes[n][0] for n in self.path(node)]
        return [(token, position) for position, token in enumerate(tokens)]


class CacheMachine(RuleBasedStateMachine):
    """Passes, commits, rollbacks and views in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.names = count(1)
        self.rows: list[ListRow] = []

    @initialize(
        rows=st.integers(1, 3),
        kind=st.sampled_from(sorted(WINDOWS)),
        alike=st.booleans(),
        surplus=st.none() | st.just(0),
    )
    def start(self, rows: int, kind: str, alike: bool, surplus: int | None) -> None:
        self.layers = SHAPES[:1] * LAYERS if alike else SHAPES
        self.shape = CacheShape(layers=self.layers, dtype=torch.float32, device=torch.device("cpu"))
        self.windows = WINDOWS[kind]
        shape = self.shape if kind == "full" else self.shape.trimmed(self.windows, CAPACITY, ROOM, surplus)
        assert (shape == self.shape) == (kind == "full")
        self.cache, self.rows = TreeCache.empty(shape, CAPACITY, rows), [ListRow() for _ in range(rows)]

    # Passes ----------------------------------------------------------------------------------------------------

    def read(
        self,
        cache: TreeCache,
        rows: list[ListRow],
        parents: list[list[int]],
        layers: Sequence[int] = range(LAYERS),
        committed: bool = False,
        chain: bool = False,
    ) -> None:
        """Add a node per parent to every row, and compare what each sees in every layer."""
        first, new = len(rows[0].nodes), len(parents[0])
        for row, above in zip(rows, parents, strict=True):
            row.nodes += [(next(self.names) % 900, parent) for parent in above]
        all_parents = [[parent for _, parent in row.nodes] for row in rows]
        shape = TokenTree.chain(new - 1).shape if chain else TreeShape.from_parents(torch.tensor(all_parents))
        depths, ancestors = shape.depths.expand(len(rows), -1), shape.ancestors
        cache.begin(new, committed, shape=None if committed else shape)
        positions = cache.positions(depths[:, first:])
        assert positions.tolist() == [[row.seen(first + n)[-1][1] for n in range(new)] for row in rows]
        mask, keys_at = cache.mask(ancestors[:, first:], torch.float32), cache.key_positions(depths)
        tokens = torch.tensor([[token for token, _ in row.nodes[first:]] for row in rows])
        for layer in layers:
            sizes = self.layers[layer]
            if sizes is None:
                continue
            code = (layer * 1_000_000 + tokens * 1000 + positions).float()[:, None, :, None]
            key, value = (
                sign * code.expand(-1, heads, -1, width)
                for sign, (heads, width) in ((1, sizes.keys), (-1, sizes.values))
            )
            keys, values = cache.update(key, value, layer)
            size = self.windows[layer]
            layer_mask, layer_keys_at = cache.held(mask, keys_at) if size else (mask, keys_at)
            sees = layer_mask.expand(len(rows), -1, -1, -1)[:, 0] == 0
            if size:
                sees = sees & (positions[:, :, None] - layer_keys_at[:, None] < size)
            for n, row in enumerate(rows):
                for node in range(new):
                    expected = [layer * 1_000_000 + t * 1000 + p for t, p in row.seen(first + node)][-size or None :]
                    assert keys[n, 0, sees[n, node], 0].tolist() == expected
                    assert values[n, -1, sees[n, node], -1].tolist() == [-code for code in expected]

    def parents(self, data: st.DataObject, new: int, rows: int) -> list[list[int]]:
        first = len(self.rows[0].nodes)
        return [[data.draw(st.integers(-1, first + n - 1)) for n in range(new)] for _ in range(rows)]

    def chain(self, data: st.DataObject, cache: TreeCache, rows: list[ListRow]) -> None:
        most = min(CAPACITY - max(len(row.tokens) for row in rows), ROOM if len(rows) > 1 else 30)
        if most < 1:
            return
        new = data.draw(st.integers(1, most))
        self.read(cache, rows, [list(range(-1, new - 1))] * len(rows), committed=True)
        if new > ROOM or data.draw(st.booleans()):
            counts = [new] * len(rows)
            cache.commit()
        else:
            counts = [data.draw(st.integers(0, new)) for _ in rows]
            cache.commit(counts)
        for row, counted in zip(rows, counts, strict=True):
            row.commit(range(counted))

    @property
    def fits(self) -> int:
        """The number of nodes that may still follow."""
        return min(ROOM - self.cache.pending, CAPACITY - self.cache.length - self.cache.pending)

    @precondition(lambda self: not self.cache.pending)
    @rule(data=st.data())
    def read_a_chain(self, data: st.DataObject) -> None:
        self.chain(data, self.cache, self.rows)

    @precondition(lambda self: not self.cache.pending)
    @rule(data=st.data())
    def read_one_row(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.rows) - 1))
        self.chain(data, self.cache.row(row), [self.rows[row]])

    @precondition(lambda self: self.fits > 0)
    @rule(data=st.data(), chain=st.booleans())
    def read_a_level(self, data: st.DataObject, chain: bool) -> None:
        new, chain = data.draw(st.integers(1, min(4, self.fits))), chain and not self.cache.pending
        parents = [list(range(-1, new - 1))] * len(self.rows) if chain else self.parents(data, new, len(self.rows))
        self.read(self.cache, self.rows, parents, chain=chain)

    # Commits ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.cache.pending)
    @rule(data=st.data(), padding=st.integers(0, 2))
    def commit_a_path(self, data: st.DataObject, padding: int) -> None:
        paths = [row.path(data.draw(st.integers(-1, self.cache.pending - 1))) for row in self.rows]
        width = max(map(len, paths)) + padding
        self.cache.commit_path(padded(paths, width), [len(path) for path in paths])
        for row, path in zip(self.rows, paths, strict=True):
            row.commit(path)

    @rule(data=st.data(), back=st.booleans())
    def crop(self, data: st.DataObject, back: bool) -> None:
        lengths = []
        held = self.cache.kinds[0].rows
        for row, dropped in zip(self.rows, (each.dropped for each in held), strict=True):
            least = 0 if not any(self.windows) or not dropped else dropped + WINDOW - 1
            lengths.append(data.draw(st.just(0) | st.integers(least, len(row.tokens))) if back else len(row.tokens))
            row.tokens, row.nodes = row.tokens[: lengths[-1]], []
        self.cache.crop(lengths if back else None)

    @precondition(lambda self: not self.cache.pending)
    @rule(data=st.data(), length=st.integers(1, 40))
    def copy_a_prefix(self, data: st.DataObject, length: int) -> None:
        prefix, row = ListRow(), data.draw(st.integers(0, len(self.rows) - 1))
        whole, view = TreeCache.empty(self.shape, length), self.cache.row(row)
        windows, self.windows = self.windows, WINDOWS["full"]
        self.read(whole, [prefix], [list(range(-1, length - 1))], committed=True)
        self.windows = windows
        whole.commit()
        prefix.commit(range(length))
        view.crop([0])
        view.append(whole)
        self.rows[row].tokens = prefix.tokens

    # Views -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.cache.pending and self.fits > 0)
    @rule(data=st.data())
    def begin_with_the_first_layers(self, data: st.DataObject) -> None:
        """Read a tree in the first layers, order its nodes by depth, and continue in the others."""
        new, rows = data.draw(st.integers(1, min(4, self.fits))), deepcopy(self.rows)
        view = self.cache.first_layers(2)
        self.read(view, rows, self.parents(data, new, len(rows)), range(2))
        orders = [sorted(range(new), key=lambda node, row=row: len(row.path(node))) for row in rows]
        view.commit_path(padded(orders, new), [new] * len(rows))
        parents = [
            [-1 if (above := row.nodes[n][1]) < 0 else order.index(above) for n in order]
            for row, order in zip(rows, orders, strict=True)
        ]
        names, self.names = (
            self.names,
            iter([row.nodes[n][0] for row, order in zip(rows, orders, strict=True) for n in order]),
        )
        self.read(self.cache, self.rows, parents, range(2, LAYERS))
        self.names = names

    @precondition(lambda self: not self.cache.pending and len(self.rows) > 1)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, unique=True))
        self.cache.select(chosen)
        self.rows = [self.rows[n] for n in chosen]

    @precondition(lambda self: self.cache.shape == self.shape and self.cache.capacity < 200)
    @rule(more=st.integers(0, 20))
    def grow(self, more: int) -> None:
        self.cache.grow(self.cache.capacity + more)

    @invariant()
    def lengths_agree(self) -> None:
        if self.rows:
            assert self.cache.lengths == [len(row.tokens) for row in self.rows]
            assert [self.cache.pending] * len(self.rows) == [len(row.nodes) for row in self.rows]


def padded(paths: list[list[int]], width: int) -> Tensor:
    return torch.tensor([path + [0] * (width - len(path)) for path in paths], dtype=torch.int64)


CacheMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestCache = CacheMachine.TestCase
