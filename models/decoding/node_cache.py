"""The key/value caches of drafters: of the committed tokens, and of the nodes being drafted.

Committed inputs are read late, in one pass with the root of the next step. Only a prompt is read at once, because that
belongs to the prefill. A causal LM keeps the nodes that were accepted. A head's layer reads them again, because their
inputs change: the base's own states replace those that the head predicted.

Shape legend: B rows, T tokens, R roots, F frontier nodes, P pending nodes, W vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.data.batch import HiddenStates
from drafthead.data.utils.devices import on_device
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.kv_cache import CacheShape, TreeCache
from drafthead.models.decoding.drafter import DraftConfig, Proposal, last_valid, take_rows
from drafthead.models.decoding.growth import StepwiseDrafter, StepwiseSession
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.token_tree import TreeShape

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


Pass = Callable[[Tensor, TreeCache, list[int] | None, PendingNodes | None], Tensor]
"""Runs a model or a layer over inputs [B, F, ...] with a cache -> [B, F, D]. Without nodes, the inputs are a
chain, whose first counts (None: all) are committed to the cache. With nodes, they are the last F nodes, which stay
pending."""


class NodeCache:
    """Keys and values of a model or a layer for some rows.

    Drafting reads the root, then one level of nodes after the other. As long as levels have one node, the cache holds
    them like committed positions, without a mask. From the first wider level on, nodes stay pending. With "a b"
    committed, the root c, its child d and d's children e and f::

        cache.lengths 4: a b c d    pending: e f    order of reading ("slots"): c 0, d 1, e 2, f 3
    """

    def __init__(self, run: Pass, shape: CacheShape, rows: int, new_row: Callable[[int], TreeCache]) -> None:
        """Cache the passes of ``run``; ``new_row`` creates the cache of a single row of a given capacity."""
        self._run, self._shape, self._new_row = run, shape, new_row
        self._cache: TreeCache | None = None
        self._read = [0] * rows  # committed positions that were read
        self._unread: Tensor | None = None  # [B, T, ...] committed inputs that were not, by their counts
        self._counts = [0] * rows
        self._chain = 0
        self._nodes: PendingNodes | None = None
        self._width = 0  # nodes of the last pending level
        self._last_out: Tensor | None = None

    @property
    def lengths(self) -> list[int]:
        """Committed positions of every row."""
        return [read + unread for read, unread in zip(self._read, self._counts, strict=True)]

    @property
    def cache(self) -> TreeCache:
        """The cache. It exists after the first read."""
        assert self._cache is not None
        return self._cache

    @property
    def unread(self) -> tuple[Tensor, list[int]] | None:
        """The committed inputs [B, T, ...] that were not read, by their counts; None if all were."""
        return None if self._unread is None else (self._unread, self._counts)

    @torch.inference_mode()
    def commit(self, inputs: Tensor, counts: list[int], slots: Tensor | None = None) -> list[int]:
        """Add the first ``counts`` of ``inputs`` [B, T, ...] to the committed positions and drop all other nodes.

        ``slots`` [B, T] int64 are their places in the order of reading, -1 for what was not read. Leading inputs that
        were read keep their keys and values. None: all are read again. The result is how many were kept in each row.
        """
        kept = [0] * len(counts)
        if slots is not None:
            # Of each row's leading inputs, those that were read up to its count.
            for row, row_slots in enumerate(slots.tolist()):  # the only wait for the device
                kept[row] = next((n for n, slot in enumerate(row_slots[: counts[row]]) if slot < 0), counts[row])
            in_tree = [max(0, keep - self._chain) for keep in kept]
            if max(in_tree):
                # Past a row's count, the path lists other nodes; they land behind the committed length.
                path = slots[:, self._chain : self._chain + max(in_tree)] - self._chain
                self.cache.commit_path(path.clamp(min=0), in_tree)
            self._read = [read + keep for read, keep in zip(self._read, kept, strict=True)]
        self._catch_up()
        self._counts = [count - keep for count, keep in zip(counts, kept, strict=True)]
        width = max(self._counts)
        if len(counts) == 1:
            self._unread = inputs[:, kept[0] : kept[0] + width]
        else:
            offsets = on_device(kept, inputs.device)[:, None] + torch.arange(width, device=inputs.device)
            rows = torch.arange(len(counts), device=inputs.device)[:, None]
            self._unread = inputs[rows, offsets.clamp(max=inputs.shape[1] - 1)]
        self._last_out = None
        if self._cache is None:
            self._catch_up()
        return kept

    @torch.inference_mode()
    def read_all(self) -> Tensor:
        """Read all committed inputs; return the output after the last one of every row, [B, D]."""
        self._catch_up()
        assert self._last_out is not None
        return self._last_out

    def _catch_up(self) -> None:
        """Drop all nodes and read all committed inputs."""
        self._drop_nodes()
        if self._unread is None:
            return
        unread, counts, self._unread = self._unread, self._counts, None
        self._reserve(unread.shape[1])
        if unread.shape[1] > ROW_BY_ROW and self.cache.rows > 1:
            last = []
            for row, count in enumerate(counts):
                inputs = unread[row : row + 1, : max(1, count)]  # a row may have nothing to read yet
                last.append(self._run(inputs, self.cache.row(row), [count], None)[:, -1])
            self._last_out = torch.cat(last)
        elif unread.shape[1]:
            self._last_out = last_valid(self._run(unread, self.cache, counts, None), counts)
        self._advance(counts)

    def lend(self, extra: int, nodes: int) -> TreeCache:
        """Return the cache with all committed inputs read, to be extended by up to ``extra`` positions.

        The first ``nodes`` of them will be a chain of drafts, for ``commit``.
        """
        self._reserve(extra + (0 if self._unread is None else self._unread.shape[1]))
        self._catch_up()
        self._chain = nodes
        return self.cache

    @torch.inference_mode()
    def start(self, roots: Tensor) -> Tensor:
        """Read what is unread and a chain of draft nodes in one pass: [B, R, ...] -> their outputs [B, R, D].

        Row b of the pass is its ``counts[b]`` unread inputs, then the nodes, then padding::

            counts 2, 1; 2 nodes:    u0 u1 n0 n1
                                     u0 n0 n1 --
        """
        size, counts, inputs = roots.shape[1], self._counts, roots
        self._reserve(size + (0 if self._unread is None else self._unread.shape[1]))
        self._drop_nodes()
        if self._unread is None or not self._unread.shape[1]:
            out = self._run(roots, self.cache, [size] * len(counts), None)
        elif len(counts) == 1:
            inputs = torch.cat([self._unread[:, : counts[0]], roots], 1)
            out = self._run(inputs, self.cache, [inputs.shape[1]], None)[:, counts[0] :]
        else:
            rows = torch.arange(len(counts), device=roots.device)[:, None]
            offsets = on_device(counts, roots.device)[:, None] + torch.arange(size, device=roots.device)
            inputs = torch.cat([self._unread, torch.zeros_like(roots)], 1)
            inputs[rows, offsets] = roots
            out = self._run(inputs, self.cache, [count + size for count in counts], None)[rows, offsets]
        self._unread, self._last_out, self._chain = None, None, size
        self._advance(counts)
        return out

    @torch.inference_mode()
    def expand(self, inputs: Tensor, parents: Tensor) -> Tensor:
        """Read one more level of nodes, [B, F, ...] -> [B, F, D]; ``parents`` [B, F] index the level before."""
        rows, new = inputs.shape[:2]
        self._reserve(new)
        if new == 1 and self._nodes is None:
            self._chain += 1
            return self._run(inputs, self.cache, None, None)
        above = None
        if self._nodes is None:
            self._nodes = PendingNodes.none(rows, inputs.device)
        else:
            above = parents + (self._nodes.ancestors.shape[1] - self._width)
        self._nodes, self._width = self._nodes.extend(rows, new, above), new
        return self._run(inputs, self.cache, None, self._nodes)

    def rollback(self, lengths: list[int]) -> None:
        """Forget all but the first ``lengths`` committed positions of each row."""
        self._counts = [max(0, n - read) for n, read in zip(lengths, self._read, strict=True)]
        self._read = [min(n, read) for n, read in zip(lengths, self._read, strict=True)]
        if not any(self._counts):
            self._unread = None
        self._last_out = None
        self._drop_nodes()

    def select(self, rows: list[int]) -> None:
        """Keep these rows only."""
        self._drop_nodes()
        self._read, self._counts = [self._read[row] for row in rows], [self._counts[row] for row in rows]
        self._unread = None if self._unread is None else take_rows(self._unread, rows)
        self._last_out = None if self._last_out is None else take_rows(self._last_out, rows)
        if self._cache is not None:
            self._cache.select(rows)

    def _advance(self, counts: list[int]) -> None:
        self._read = [read + count for read, count in zip(self._read, counts, strict=True)]
        self._counts = [0] * len(counts)

    def _reserve(self, new: int) -> None:
        """Make or enlarge the cache to hold ``new`` positions after all others."""
        pending = 0 if self._nodes is None else self._nodes.ancestors.shape[1]
        needed = max(self.lengths) + self._chain + pending + new
        if self._cache is None:
            capacity = needed + INITIAL_CAPACITY
            rows = len(self._read)
            self._cache = self._new_row(capacity) if rows == 1 else TreeCache.empty(self._shape, capacity, rows)
        elif needed > self._cache.capacity:
            self._cache.grow(max(needed + INITIAL_CAPACITY, 2 * self._cache.capacity))

    def _drop_nodes(self) -> None:
        if self._cache is not None:
            self._cache.crop(self._read)
        self._nodes, self._width, self._chain = None, 0, 0


def model_cache(model: BaseModel, rows: int) -> NodeCache:
    """Return an empty cache of a causal LM over token ids; ids that it does not know become its last id."""
    largest = model.vocab_size - 1

    def run(tokens: Tensor, cache: TreeCache, counts: list[int] | None, nodes: PendingNodes | None) -> Tensor:
        tokens = tokens.clamp(max=largest)
        if nodes is None:
            return model.forward(tokens, cache, counts).final
        return model.verify(tokens, nodes.shape(), cache).final

    return NodeCache(run, model.cache_shape, rows, model.new_cache)


class LMSession(StepwiseSession):
    """A session of a drafter that is a causal LM: every level is one pass over its nodes."""

    def __init__(
        self, drafter: StepwiseDrafter, model: BaseModel, rows: int, logits: Callable[[Tensor], Tensor]
    ) -> None:
        """Draft with ``model``; ``logits`` maps its hidden states [B, F, D] to [B, F, W]."""
        self.drafter, self._model, self._logits = drafter, model, logits
        self.context = model_cache(model, rows)
        self._slots: Tensor | None = None
        self._starts = False

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self.context.lengths

    def commit(
        self, tokens: Tensor, counts: list[int], base_hidden: HiddenStates | None, nodes: Tensor | None = None
    ) -> None:
        slots, self._slots = self._slots, None
        if nodes is not None and slots is not None:
            drafted = slots.expand(len(nodes), -1).gather(1, nodes.clamp(min=0))
            slots = torch.where(nodes < 0, -1, drafted)
        self.context.commit(tokens, counts, None if nodes is None else slots)

    def draft(self, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None) -> Proposal:
        deepest = self._model.max_context - max(self.lengths) - 1
        proposal = super().draft(last_token, draft_config.at_most(max(0, deepest)), rng)
        self.drafted(proposal)
        return proposal

    def drafted(self, proposal: Proposal) -> None:
        """Take note of the proposal that was made of this session's levels."""
        self._slots = proposal.slots

    def start(self, last_token: Tensor, draft_config: DraftConfig) -> None:
        self._starts = True

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        starts, self._starts = self._starts, False
        return self._logits(self.context.start(tokens) if starts else self.context.expand(tokens, parents))

    def select(self, rows: list[int]) -> None:
        self.context.select(rows)
        self._slots = None

    def rollback(self, lengths: list[int]) -> None:
        self.context.rollback(lengths)
        self._slots = None
