"""The key/value caches of drafters: keys and values of the committed tokens, and of the tree that is being drafted.

To *read* an input means to run the model over it, which writes its keys and values. Committed inputs are not read at
once, but together with the root of the next tree, in one pass. Only a prompt is read at once, as a part of the prefill.
A causal LM keeps the keys and values of accepted drafts. The layers of a head read accepted tokens again, because their
inputs change: the base's hidden states replace those that the head predicted.

Shape legend: B rows, T tokens, R inputs of a first pass, F frontier nodes (the nodes of a level that get children),
P pending nodes, D width, W vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.data.batch import HiddenStates
from drafthead.data.utils.devices import on_device
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.cache_shape import CacheShape
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.drafter import DraftConfig, Proposal, last_valid, take_rows
from drafthead.models.decoding.growth import StepwiseDrafter, StepwiseSession
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.token_tree import TreeShape

ROW_BY_ROW = 32
"""Most unread positions that the rows of a batch read together, padded. If there are more, rows are read one by one,
because the masks of a padded pass would cost more."""
INITIAL_CAPACITY = 256
"""Spare positions of a new cache; capacity doubles when they are used up."""


@dataclass(frozen=True)
class PendingNodes:
    """The ancestors of the pending nodes, which were read after the committed inputs and may still be rejected."""

    ancestors: Tensor
    """[B, P, P] bool: [i, j] is true if node j is node i or one of its ancestors."""

    @classmethod
    def none(cls, rows: int, device: torch.device) -> "PendingNodes":
        """Return an object without nodes."""
        return cls(torch.zeros(rows, 0, 0, dtype=torch.bool, device=device))

    def extend(self, rows: int, new: int, above: Tensor | None) -> "PendingNodes":
        """Return an object with ``new`` more nodes per row.

        ``above`` [B, new] int64 has their parents' numbers among the pending nodes. With None, their parents are not
        pending, but stored as committed positions.
        """
        pending, device = self.ancestors.shape[1], self.ancestors.device
        ancestors = torch.zeros(rows, pending + new, pending + new, dtype=torch.bool, device=device)
        ancestors[:, :pending, :pending] = self.ancestors
        if above is not None:
            ancestors[:, pending:, :pending] = self.ancestors.gather(1, above[..., None].expand(-1, -1, pending))
        ancestors[:, pending:, pending:] |= torch.eye(new, dtype=torch.bool, device=device)
        return PendingNodes(ancestors)

    def shape(self) -> TreeShape:
        """Return a ``TreeShape`` for ``BaseModel.verify``, which reads only depths and ancestors."""
        none = self.ancestors.new_zeros(1, 1, 1, dtype=torch.int64)
        depths = self.ancestors.sum(-1) - 1
        return TreeShape(parents=depths, depths=depths, ancestors=self.ancestors, children=none, depth=0)


Pass = Callable[[Tensor, TreeCache, list[int] | None, PendingNodes | None], Tensor]
"""Runs a model or layers over inputs [B, F, ...] with a cache, and returns outputs [B, F, D]. Its other arguments are
counts and pending nodes. Without nodes, the inputs are a chain, and the first ``counts`` (None: all) of each row are
committed to the cache. With nodes, the inputs are the last F of them, and stay pending."""


class NodeCache:
    """Keys and values of a drafter's model or layers, for some rows.

    Drafting reads the root, then one level of nodes after the other. As long as each level has one node (a chain), the
    cache stores the nodes like committed positions, which needs no mask. From the first wider level on, nodes are
    pending. A slot is a node's number in the order of reading. With "a b" committed, the root c, its child d, and d's
    children e and f::

        cache.lengths 4: a b c d    pending: e f    slots: c 0, d 1, e 2, f 3
    """

    def __init__(self, run: Pass, shape: CacheShape, rows: int, new_row: Callable[[int], TreeCache]) -> None:
        """Create an empty cache.

        Args:
            run: runs the model or the layers.
            shape: the shape of their keys and values.
            rows: number of rows.
            new_row: creates the cache of a single row from its capacity, possibly with static shapes.
        """
        self._run, self._shape, self._new_row = run, shape, new_row
        self._cache: TreeCache | None = None
        self._read = [0] * rows  # number of committed inputs that were read
        self._unread: Tensor | None = None  # [B, T, ...] committed inputs that were not read yet
        self._counts = [0] * rows  # number of unread inputs in each row
        self._chain = 0  # number of nodes stored like committed positions
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
        """The committed inputs that were not read yet, [B, T, ...], and their number in each row; None if all were."""
        return None if self._unread is None else (self._unread, self._counts)

    @torch.inference_mode()
    def commit(self, inputs: Tensor, counts: list[int], slots: Tensor | None = None) -> list[int]:
        """Commit the first ``counts`` of ``inputs`` [B, T, ...] in each row, and remove all drafted nodes.

        ``slots`` [B, T] int64 has the slot of each input that drafting has read, and -1 for the others. The leading
        inputs with a slot keep their keys and values; the rest is read later. None: no input has a slot. The first
        commit, of the prompts, is read at once.

        Returns:
            The number of inputs of each row that kept their keys and values.
        """
        kept = [0] * len(counts)
        if slots is not None:
            # Count each row's leading inputs that were read.
            for row, row_slots in enumerate(slots.tolist()):  # the only wait for the device
                kept[row] = next((n for n, slot in enumerate(row_slots[: counts[row]]) if slot < 0), counts[row])
            in_tree = [max(0, keep - self._chain) for keep in kept]
            if max(in_tree):
                # Beyond a row's count, the path lists other nodes, which are written behind the committed length.
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
        """Read the unread inputs of the last ``commit``; return the output at each row's last one, [B, D].

        Call it before ``start``, which reads them, too.
        """
        self._catch_up()
        assert self._last_out is not None
        return self._last_out

    def _catch_up(self) -> None:
        """Remove all drafted nodes, and read the committed inputs that are unread."""
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
        """Return the cache, with all committed inputs read, to a caller that appends up to ``extra`` positions.

        The caller's first ``nodes`` positions are a chain of drafts with slots 0, 1, ..., which ``commit`` may keep.
        """
        self._reserve(extra + (0 if self._unread is None else self._unread.shape[1]))
        self._catch_up()
        self._chain = nodes
        return self.cache

    @torch.inference_mode()
    def start(self, roots: Tensor) -> Tensor:
        """Read the unread inputs and then a chain of nodes ``roots`` in one pass: [B, R, ...] -> [B, R, D].

        Only the outputs at the nodes are returned. A row of the pass has its unread inputs u, the nodes n and padding::

            2 unread inputs, 2 nodes:    u0 u1 n0 n1
            1 unread input, 2 nodes:     u0 n0 n1 --
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
        """Read the next level of nodes, [B, F, ...] -> [B, F, D].

        ``parents`` [B, F] is the index of each node's parent in the previous level.
        """
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
        """Remove all but the first ``lengths`` committed inputs of each row, and all drafted nodes."""
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
        """Create or enlarge the cache so that ``new`` more positions fit."""
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
    """Return an empty cache of a causal LM, whose inputs are token ids. Ids above its vocabulary become its last id."""
    largest = model.vocab_size - 1

    def run(tokens: Tensor, cache: TreeCache, counts: list[int] | None, nodes: PendingNodes | None) -> Tensor:
        tokens = tokens.clamp(max=largest)
        if nodes is None:
            return model.forward(tokens, cache, counts).final
        return model.verify(tokens, nodes.shape(), cache).final

    return NodeCache(run, model.cache_shape, rows, model.new_cache)


class LMSession(StepwiseSession):
    """The session of a causal LM that drafts: it reads each level of the tree in one pass."""

    def __init__(
        self, drafter: StepwiseDrafter, model: BaseModel, rows: int, logits: Callable[[Tensor], Tensor]
    ) -> None:
        """Draft with ``model``; ``logits`` maps its hidden states [B, F, D] to draft logits [B, F, W]."""
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
        """Store the slots of the proposal that was grown from this session's levels, for ``commit``."""
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
