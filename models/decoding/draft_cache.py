"""The key/value caches of drafters. A draft model's cache reuses the longest prefix that matches the committed tokens.

A draft model's state consists of the committed tokens alone. Successive states share the cache, which also holds drafts
of earlier steps. Drafting keeps the prefix of the cache that agrees with the committed tokens and reads the rest in one
pass. Accepted drafts are therefore not read twice, and an old state still drafts the same tokens.

Shape legend: B rows, T tokens, F frontier nodes, P pending nodes, W vocabulary.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.kv_cache import CacheShape, TreeCache
from drafthead.models.decoding.drafter import DraftConfig, DraftState, last_valid
from drafthead.models.token_tree import TokenTree, TreeShape


@dataclass
class TokenBuffer(DraftState):
    """The committed tokens of every row. Never changed in place."""

    tokens: Tensor
    """[B, T] int64, left-aligned; anything past a row's length. T is the longest row's length."""
    lengths: Tensor
    """[B] int64."""

    @classmethod
    def none(cls, rows: int) -> "TokenBuffer":
        """Return a buffer without tokens."""
        return cls(tokens=torch.zeros(rows, 0, dtype=torch.int64), lengths=torch.zeros(rows, dtype=torch.int64))

    def append(self, tokens: Tensor, counts: Tensor | None = None) -> "TokenBuffer":
        """Append the first ``counts`` ([B], default all) of ``tokens`` ([B, T]) to each row."""
        rows, new = tokens.shape
        known, lengths = self.tokens.to(tokens.device), self.lengths.to(tokens.device)
        if counts is None:
            counts = torch.full_like(lengths, new)
        if rows == 1:
            counted = tokens[:, : int(counts)]
            return TokenBuffer(tokens=torch.cat([known, counted], 1), lengths=lengths + counts)
        wider = torch.cat([known, torch.zeros_like(tokens)], 1)
        # Tokens that do not count end up past the row's new length, and the next tokens overwrite them.
        wider.scatter_(1, lengths[:, None] + torch.arange(new, device=tokens.device), tokens)
        total = lengths + counts
        return TokenBuffer(tokens=wider[:, : int(total.max())], lengths=total)

    @property
    def longest(self) -> int:
        """Length of the longest row."""
        return self.tokens.shape[1]

    def select(self, rows: list[int]) -> "TokenBuffer":
        lengths = self.lengths[rows]
        return TokenBuffer(tokens=self.tokens[rows, : int(lengths.max())], lengths=lengths)


def common_prefix(left: TokenBuffer, right: TokenBuffer) -> Tensor:
    """Return the number of equal leading tokens of every row, [B] int64."""
    width = min(left.longest, right.longest)
    same = left.tokens[:, :width] == right.tokens[:, :width]
    agreed = same.cumprod(1, dtype=torch.int32).sum(1)
    return torch.minimum(agreed, torch.minimum(left.lengths, right.lengths))


ROW_BY_ROW = 32
"""Most unread positions of a padded pass. Above, rows are read one by one, because masks would cost more."""
INITIAL_CAPACITY = 256
"""Spare positions of a new cache; capacity doubles when they are used up."""


@dataclass(frozen=True)
class PendingNodes:
    """The ancestors of each pending node, itself included."""

    ancestors: Tensor
    """[B, P, P] bool."""

    @classmethod
    def none(cls, rows: int, device: torch.device) -> "PendingNodes":
        """Return a state without nodes."""
        return cls(torch.zeros(rows, 0, 0, dtype=torch.bool, device=device))

    def extend(self, rows: int, new: int, above: Tensor | None) -> "PendingNodes":
        """Return the nodes and ``new`` children of ``above`` ([B, new] int64); None: they have no pending parent."""
        pending, device = self.ancestors.shape[1], self.ancestors.device
        ancestors = torch.zeros(rows, pending + new, pending + new, dtype=torch.bool, device=device)
        ancestors[:, :pending, :pending] = self.ancestors
        if above is not None:
            ancestors[:, pending:, :pending] = self.ancestors.gather(1, above[..., None].expand(-1, -1, pending))
        ancestors[:, pending:, pending:] |= torch.eye(new, dtype=torch.bool, device=device)
        return PendingNodes(ancestors)

    def shape(self) -> TreeShape:
        """Return a tree shape with the fields that a pass over the nodes reads."""
        none = self.ancestors.new_zeros(1, 1, 1, dtype=torch.int64)
        depths = self.ancestors.sum(-1) - 1
        return TreeShape(parents=depths, depths=depths, ancestors=self.ancestors, children=none, depth=0)


Pass = Callable[[Tensor, TreeCache, Tensor | None, PendingNodes | None], Tensor]
"""Runs a model or a layer over inputs [B, F, ...] with a cache -> [B, F, D]. Without nodes, the inputs are a
chain, whose first counts ([B]; None: all) are committed. With nodes, they are the last F nodes and stay pending."""


class NodeCache:
    """Keys and values of a model or a layer: of each row's context, and of the nodes being drafted."""

    def __init__(self, run: Pass, shape: CacheShape, new_row: Callable[[int], TreeCache]) -> None:
        """Cache the passes of ``run``; ``new_row`` creates the cache of a single row of a given capacity."""
        self._run, self._shape, self._new_row = run, shape, new_row
        self._cache: TreeCache | None = None
        self._nodes = PendingNodes.none(0, shape.device)
        self._width = 0  # nodes of the last pending level

    @property
    def cache(self) -> TreeCache:
        """The cache. It exists after the first read."""
        assert self._cache is not None
        return self._cache

    def select(self, rows: list[int]) -> Self:
        """Return a copy of these rows, or self if there is only one row."""
        if self._cache is not None and self._cache.rows == 1:
            return self
        chosen = copy(self)
        if self._cache is not None:
            chosen._cache = self._cache.select(rows)
            chosen._drop_nodes(len(rows))
        return chosen

    @torch.inference_mode()
    def extend(self, inputs: Tensor, parents: Tensor) -> Tensor:
        """Read one more level of nodes, [B, F, ...] -> [B, F, D]; ``parents`` [B, F] index the level before."""
        (rows, new), pending = inputs.shape[:2], self._nodes.ancestors.shape[1]
        above = parents + (pending - self._width) if pending else None
        self._nodes, self._width = self._nodes.extend(rows, new, above), new
        return self._run(inputs, self.cache, None, self._nodes)

    def _reserve(self, rows: int, needed: int) -> None:
        """Make or enlarge the cache to hold ``needed`` positions."""
        if self._cache is None:
            capacity = needed + INITIAL_CAPACITY
            self._cache = self._new_row(capacity) if rows == 1 else TreeCache.empty(self._shape, capacity, rows)
            self._drop_nodes(rows)
        elif needed > self._cache.capacity:
            self._cache.grow(max(needed + INITIAL_CAPACITY, 2 * self._cache.capacity))

    def _read_chain(self, inputs: Tensor, start: Tensor, counts: Tensor) -> Tensor:
        """Read the first ``counts`` of ``inputs`` [B, T, ...] after ``start`` positions; return last states."""
        cache = self.cache
        if cache.rows == 1 or inputs.shape[1] <= ROW_BY_ROW:
            return last_valid(self._run(inputs, cache, counts, None), counts)
        last = []
        for row, count in enumerate(counts.tolist()):
            unread = inputs[row : row + 1, : max(1, count)]  # a row may have nothing to read yet
            last.append(self._run(unread, cache.row(row), None, None)[:, -1])
        cache.crop((start + counts).tolist())
        return torch.cat(last)

    def _drop_nodes(self, rows: int) -> None:
        self.cache.crop()
        self._nodes, self._width = PendingNodes.none(rows, self._shape.device), 0


class DraftCache(NodeCache):
    """Keys and values of a causal LM, and the tokens that they are of."""

    def __init__(self, model: BaseModel) -> None:
        def run(tokens: Tensor, cache: TreeCache, counts: Tensor | None, nodes: PendingNodes | None) -> Tensor:
            if nodes is None:
                return model.forward(tokens, cache, None if counts is None else counts.tolist()).final
            return model.verify(tokens, nodes.shape(), cache).final

        super().__init__(run, model.cache_shape, model.new_cache)
        self._read = TokenBuffer.none(0)
        self._tokens = torch.zeros(0, 0, dtype=torch.int64)  # [B, P] of pending nodes

    def select(self, rows: list[int]) -> Self:
        chosen = super().select(rows)
        if chosen is not self and self._cache is not None:
            chosen._read = self._read.select(rows)
        return chosen

    @torch.inference_mode()
    def prefill(self, text: TokenBuffer, room: int = 0) -> Tensor:
        """Read ``text``, keep room for ``room`` nodes, and return the hidden states [B, D] after each last token."""
        if self._cache is None:
            self._read = TokenBuffer(tokens=text.tokens[:, :0], lengths=torch.zeros_like(text.lengths))
        # A padded pass also writes past the shorter rows, by up to ROW_BY_ROW tokens.
        self._reserve(len(text.lengths), text.longest + room + ROW_BY_ROW)
        self._agree(text)
        start, counts = self._read.lengths, text.lengths - self._read.lengths
        positions = start[:, None] + torch.arange(int(counts.max()), device=start.device)
        self._read = text
        return self._read_chain(text.tokens.gather(1, positions.clamp(max=text.longest - 1)), start, counts)

    @torch.inference_mode()
    def extend(self, inputs: Tensor, parents: Tensor) -> Tensor:
        if inputs.shape[1] == 1 and self._tokens.shape[1] == 0:
            # A chain so far is read as committed. If the target rejects it, `_agree` removes it later.
            self._read = self._read.append(inputs)
            return self._run(inputs, self.cache, None, None)
        self._tokens = torch.cat([self._tokens, inputs], 1)
        return super().extend(inputs, parents)

    def _agree(self, text: TokenBuffer) -> None:
        """Drop the positions that differ from ``text``, and commit the pending path that it follows.

        With "a b" read and pending nodes c -> d and e, ``text`` = "a b c x" commits c and drops d and e. The last token
        of ``text`` always stays unread, because drafting needs the hidden state after it.
        """
        rows = len(text.lengths)
        agreed = torch.minimum(common_prefix(self._read, text), text.lengths - 1)
        ancestors = self._nodes.ancestors
        if self._tokens.shape[1] and bool((agreed == self._read.lengths).all()):
            positions = self._read.lengths[:, None] + ancestors.sum(-1) - 1
            follows = self._tokens == text.tokens.gather(1, positions.clamp(max=text.longest - 1))
            follows &= positions < text.lengths[:, None] - 1
            depth = torch.where((ancestors & ~follows[:, None]).any(-1), 0, ancestors.sum(-1))
            counts, node = depth.max(1)
            path = ancestors[torch.arange(rows, device=node.device), node]
            order = (~path).sort(dim=1, stable=True).indices[:, : max(1, int(counts.max()))]
            # Past a row's count, ``order`` lists other nodes; they land behind the committed length, where nothing
            # reads.
            self.cache.commit_path(order, counts.tolist())
            self._read = self._read.append(self._tokens.gather(1, order), counts)
        else:
            self.cache.crop(agreed.tolist())
            self._read = TokenBuffer(tokens=self._read.tokens[:, : int(agreed.max())], lengths=agreed)
        self._drop_nodes(rows)

    def _drop_nodes(self, rows: int) -> None:
        super()._drop_nodes(rows)
        self._tokens = torch.zeros(rows, 0, dtype=torch.int64, device=self._shape.device)


@dataclass
class PendingTokens(DraftState):
    """The state of a drafter that is a causal LM."""

    text: TokenBuffer
    cache: DraftCache

    def append(self, tokens: Tensor, counts: Tensor | None) -> Self:
        state = replace(self, text=self.text.append(tokens, counts))
        if self.text.longest == 0:
            # Reading the prompt belongs to the prefill, and not to the first step.
            state.cache.prefill(state.text)
        return state


class CachedDraftPass:
    """Drafting in progress with a causal LM: every level is one pass over its nodes."""

    def __init__(
        self, cache: DraftCache, text: TokenBuffer, draft_config: DraftConfig, logits: Callable[[Tensor], Tensor]
    ) -> None:
        """Start after ``text``, which ends with the root; ``logits`` maps hidden states [B, F, D] to [B, F, W]."""
        self._cache, self._logits = cache, logits
        tree = draft_config.tree
        room = len(tree) if isinstance(tree, TokenTree) else tree.width * tree.depth
        self._root: Tensor | None = cache.prefill(text, room)[:, None]

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Run ``DraftPass.step``: [B, F] int64 each -> [B, F, W]."""
        root, self._root = self._root, None
        return self._logits(self._cache.extend(tokens, parents) if root is None else root)
