"""The key/value cache of a draft model: reuses the longest prefix that matches the committed tokens.

A drafter's state is the committed tokens alone. Keys and values of what the model has read of them, drafts of earlier
steps included, are kept here and shared by successive states. Drafting first finds how far the cache agrees with the
tokens committed since, keeps that much and reads the rest in one pass. So accepted drafts are not read twice, and an
old state drafts what it always did.

Shape legend: B rows, T tokens, F frontier nodes, P pending nodes, W vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.kv_cache import KVCache, RaggedCache
from drafthead.models.decoding.contract import DraftConfig, DraftState, last_valid
from drafthead.models.token_tree import TokenTree, TreeShape


@dataclass
class TokenBuffer(DraftState):
    """What every row has committed, as a state of its own or a part of one. Never changed in place."""

    tokens: Tensor
    """[B, T] int64, left-aligned; anything past a row's length. T is the longest row's length."""
    lengths: Tensor
    """[B] int64."""

    @classmethod
    def none(cls, rows: int) -> "TokenBuffer":
        """Nothing yet."""
        return cls(tokens=torch.zeros(rows, 0, dtype=torch.int64), lengths=torch.zeros(rows, dtype=torch.int64))

    def append(self, tokens: Tensor, counts: Tensor | None = None) -> "TokenBuffer":
        """With the first ``counts`` ([B], default all) of ``tokens`` ([B, T]) after each row."""
        rows, new = tokens.shape
        known, lengths = self.tokens.to(tokens.device), self.lengths.to(tokens.device)
        if counts is None:
            counts = torch.full_like(lengths, new)
        if rows == 1:
            kept = tokens[:, : int(counts)]
            return TokenBuffer(tokens=torch.cat([known, kept], 1), lengths=lengths + counts)
        wider = torch.cat([known, torch.zeros_like(tokens)], 1)
        # What does not count stands past the row's new length, or is overwritten by the next tokens.
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
    """[B] int64: leading tokens in which the rows of both agree."""
    width = min(left.longest, right.longest)
    same = left.tokens[:, :width] == right.tokens[:, :width]
    agreed = same.cumprod(1, dtype=torch.int32).sum(1)
    return torch.minimum(agreed, torch.minimum(left.lengths, right.lengths))


ROW_BY_ROW = 32
"""Unread tokens from which every row is read by itself: the masks of a padded pass would cost more."""
INITIAL_CAPACITY = 256
"""Positions to begin with, after a prompt; doubled when they run out."""


@dataclass(frozen=True)
class PendingNodes:
    """Which pending nodes are ancestors of each other, themselves included."""

    ancestors: Tensor
    """[B, P, P] bool."""

    @classmethod
    def none(cls, rows: int, device: torch.device) -> "PendingNodes":
        """No node yet."""
        return cls(torch.zeros(rows, 0, 0, dtype=torch.bool, device=device))

    def extend(self, rows: int, new: int, above: Tensor | None) -> "PendingNodes":
        """With ``new`` more nodes, each a child of ``above`` ([B, new] int64); None: of no pending node."""
        pending, device = self.ancestors.shape[1], self.ancestors.device
        ancestors = torch.zeros(rows, pending + new, pending + new, dtype=torch.bool, device=device)
        ancestors[:, :pending, :pending] = self.ancestors
        if above is not None:
            ancestors[:, pending:, :pending] = self.ancestors.gather(1, above[..., None].expand(-1, -1, pending))
        ancestors[:, pending:, pending:] |= torch.eye(new, dtype=torch.bool, device=device)
        return PendingNodes(ancestors)

    def shape(self) -> TreeShape:
        """As far as a pass over the nodes needs it."""
        none = self.ancestors.new_zeros(1, 1, 1, dtype=torch.int64)
        depths = self.ancestors.sum(-1) - 1
        return TreeShape(parents=depths, depths=depths, ancestors=self.ancestors, children=none, depth=0)


class DraftCache:
    """Keys and values of one model for rows of a batch, and their tokens."""

    def __init__(self, model: BaseModel) -> None:
        self.model = model
        self._cache: KVCache | RaggedCache | None = None
        self._read = TokenBuffer.none(0)
        self._nodes = torch.zeros(0, 0, dtype=torch.int64)  # [B, P] tokens of pending nodes
        self._pending_nodes = PendingNodes.none(0, torch.device("cpu"))

    def select(self, rows: list[int]) -> "DraftCache":
        """A copy with these rows only."""
        if isinstance(self._cache, KVCache):
            return self  # there is one row
        chosen = DraftCache(self.model)
        if self._cache is not None:
            self._drop_nodes()
            chosen._cache = self._cache.select(rows)
            chosen._read = self._read.select(rows)
            chosen._drop_nodes()
        return chosen

    @torch.inference_mode()
    def prefill(self, text: TokenBuffer, room: int = 0) -> Tensor:
        """Bring the cache to ``text``, with room for so many nodes after it; [B, D] after every row's last token."""
        self._reserve(text, room)
        cache = self._cache
        assert cache is not None
        self._agree(text)
        counts = text.lengths - self._read.lengths
        start, longest = self._read.lengths, int(counts.max())
        if isinstance(cache, RaggedCache) and longest > ROW_BY_ROW:
            hidden = []
            for row, (length, count) in enumerate(zip(start.tolist(), counts.tolist(), strict=True)):
                lent = cache.slot(row, length)
                unread = text.tokens[row : row + 1, length : length + count]
                hidden.append(self.model.forward(unread, lent).final[:, -1])
            last = torch.cat(hidden)
            rewind(cache, text.lengths)
        else:
            places = start[:, None] + torch.arange(longest, device=start.device)
            unread = text.tokens.gather(1, places.clamp(max=text.longest - 1))
            last = last_valid(self.model.forward(unread, cache, counts).final, counts)
        self._read = text
        return last

    @torch.inference_mode()
    def extend(self, tokens: Tensor, above: Tensor | None) -> Tensor:
        """Read one more level of nodes ([B, F] int64) after what is read; hidden states [B, F, D].

        ``above``: [B, F] int64 pending node above each; None: they follow the text.
        """
        cache = self._cache
        assert cache is not None
        rows, new = tokens.shape
        if new == 1 and self._nodes.shape[1] == 0:
            # A chain so far: the next text either continues it or `_agree` removes it.
            hidden = self.model.forward(tokens, cache).final
            self._read = self._read.append(tokens)
            return hidden
        self._nodes = torch.cat([self._nodes, tokens], 1)
        self._pending_nodes = self._pending_nodes.extend(rows, new, above)
        return self.model.verify(tokens, self._pending_nodes.shape(), cache).final

    def _reserve(self, text: TokenBuffer, room: int) -> None:
        """Make or resize a cache to hold the text and one step's nodes."""
        rows = len(text.lengths)
        # A padded pass writes past the shorter rows too, but never past twice the unread tokens.
        needed = text.longest + room + ROW_BY_ROW
        if self._cache is not None and needed <= self._cache.capacity:
            return
        if self._cache is not None:
            capacity = max(needed + INITIAL_CAPACITY, 2 * self._cache.capacity)
            self._cache = self._cache.resize(self.model.cache_shape, capacity)
        else:
            capacity = needed + INITIAL_CAPACITY
            self._cache = self.model.new_cache(capacity) if rows == 1 else self.model.new_slots(rows, capacity)
            self._read = TokenBuffer(tokens=text.tokens[:, :0], lengths=torch.zeros_like(text.lengths))
        self._drop_nodes()

    def _agree(self, text: TokenBuffer) -> None:
        """Drop what the text contradicts, and commit of the pending nodes the path that it follows.

        The text's last token is always left to read, since drafting needs the hidden state after it.
        """
        cache = self._cache
        assert cache is not None
        rows = len(text.lengths)
        agreed = torch.minimum(common_prefix(self._read, text), text.lengths - 1)
        pending, ancestors = self._nodes.shape[1], self._pending_nodes.ancestors
        if pending and bool((agreed == self._read.lengths).all()):
            places = self._read.lengths[:, None] + ancestors.sum(-1) - 1
            follows = self._nodes == text.tokens.gather(1, places.clamp(max=text.longest - 1))
            follows &= places < text.lengths[:, None] - 1
            depth = torch.where((ancestors & ~follows[:, None]).any(-1), 0, ancestors.sum(-1))
            counts, node = depth.max(1)
            path = ancestors[torch.arange(rows, device=node.device), node]
            order = (~path).sort(dim=1, stable=True).indices[:, : max(1, int(counts.max()))]
            # The rows beyond their own count repeat a kept entry's place, which nothing reads.
            cache.commit_path(order, counts)
            self._read = self._read.append(self._nodes.gather(1, order), counts)
        else:
            rewind(cache, agreed)
            self._read = TokenBuffer(tokens=self._read.tokens[:, : int(agreed.max())], lengths=agreed)
        self._drop_nodes()

    def _drop_nodes(self) -> None:
        if self._cache is not None:
            self._cache.crop()
        rows, device = len(self._read.lengths), self._read.lengths.device
        self._nodes = torch.zeros(rows, 0, dtype=torch.int64, device=device)
        self._pending_nodes = PendingNodes.none(rows, device)


@dataclass
class PendingTokens(DraftState):
    """The state of a drafter that is a causal LM."""

    text: TokenBuffer
    cache: DraftCache

    def append(self, tokens: Tensor, counts: Tensor | None) -> "PendingTokens":
        """The state with more committed tokens."""
        state = PendingTokens(text=self.text.append(tokens, counts), cache=self.cache)
        if self.text.longest == 0:
            # Reading the prompt belongs to the prefill, and not to the first step.
            state.cache.prefill(state.text)
        return state


class CachedDraftPass:
    """Drafting in progress with a causal LM: every level is one pass over its nodes."""

    def __init__(
        self, cache: DraftCache, text: TokenBuffer, draft_config: DraftConfig, logits: Callable[[Tensor], Tensor]
    ) -> None:
        """``text`` ends with the root; ``logits`` turns hidden states [B, F, D] into draft logits [B, F, W]."""
        self._cache, self._logits = cache, logits
        tree = draft_config.tree
        self._hidden = cache.prefill(text, len(tree) if isinstance(tree, TokenTree) else tree.width * tree.depth)
        self._first: int | None = None  # pending node where the frontier before starts; None: it is in the text
        self._pending = 0

    def root(self) -> Tensor:
        """As ``DraftPass.root``: [B, 1, W]."""
        return self._logits(self._hidden[:, None])

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """As ``DraftPass.grow``: [B, F] int64 each -> [B, F, W]."""
        above = None if self._first is None else parents + self._first
        in_text = tokens.shape[1] == 1 and self._pending == 0
        hidden = self._cache.extend(tokens, above)
        if not in_text:
            self._first = self._pending
            self._pending += tokens.shape[1]
        return self._logits(hidden)


def rewind(cache: KVCache | RaggedCache, lengths: Tensor) -> None:
    """Forget all but the first ``lengths`` ([B] int64) positions of each row, and what is pending."""
    if isinstance(cache, KVCache):
        cache.crop(int(lengths))
    else:
        cache.crop()
        cache.lengths = lengths
