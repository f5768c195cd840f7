"""The key/value caches of drafters: keys and values of the committed tokens, and of the tree that is being drafted.

To *read* an input means to run the model over it, which writes its keys and values. Committed inputs are not read at
once, but together with the root of the next tree. Only a prompt is read at once, as a part of the prefill. A causal LM
keeps the keys and values of accepted drafts. The layers of a head read accepted tokens again, because their inputs
change: the base's hidden states replace those that the head predicted.

Shape legend: B rows, T tokens, R nodes of a first pass, F frontier nodes (the nodes of a level that get children), P
pending nodes, D width, W vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from drafthead.data.batch import BaseHidden
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.drafter import DraftConfig, Proposal, last_valid, take_rows
from drafthead.models.decoding.growth import StepwiseDrafter, StepwiseSession
from drafthead.models.token_tree import TreeShape, causal_mask
from drafthead.system.devices import on_device

ROW_BY_ROW = 32
"""Unread positions per row up to which a batch is read in one padded pass. With more, rows are read one by one, because
the masks of a padded pass would cost more."""
INITIAL_CAPACITY = 256  # spare positions of a new cache; capacity doubles when they are used up


def add_nodes(ancestors: Tensor | None, parents: Tensor) -> Tensor:
    """Return the mask ``ancestors`` of pending tree nodes with F more nodes per row: [B, P, P] -> [B, P + F, P + F].
    [i, j] is true if node j is node i or one of its ancestors. ``parents`` [B, F] int64 are the new nodes' parents as
    numbers from 0 to P - 1. With ``ancestors`` None, P is 0, and ``parents`` is not used."""
    new = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    if ancestors is None:
        return new
    inherited = ancestors.gather(1, parents[..., None].expand(-1, -1, ancestors.shape[1]))
    before = torch.nn.functional.pad(ancestors, (0, parents.shape[1]))
    return torch.cat([before, torch.cat([inherited, new], 2)], 1)


def pending_shape(ancestors: Tensor) -> TreeShape:
    """Return a ``TreeShape`` for ``BaseModel.verify``, which reads only depths and the mask ``ancestors`` [B, P, P]."""
    none = ancestors.new_zeros(1, 1, 1, dtype=torch.int64)
    depths = ancestors.sum(-1) - 1
    return TreeShape(parents=depths, depths=depths, ancestors=ancestors, children=none, depth=0)


class NodeCache(ABC):
    """Keys and values of a drafter's model or layers, for some rows; a subclass defines ``new_cache`` and ``run``.

    Drafting reads the root, then one level of nodes after the other. As long as each level has one node (a chain), the
    cache stores the nodes like committed positions, which needs no mask. From the first wider level on, nodes are
    pending. A slot is a node's number in the order of reading. With "a b" committed, the root c, its child d, and d's
    children e and f::

        cache.lengths 4: a b c d    pending: e f    slots: c 0, d 1, e 2, f 3

    With recurrent layers (not ``goes_back``), which cannot drop committed positions, all nodes are pending.
    """

    def __init__(self, rows: int, goes_back: bool = True) -> None:
        self._goes_back = goes_back
        self._cache: TreeCache | None = None
        self._read = [0] * rows  # number of committed inputs that were read
        self._unread: Tensor | None = None  # [B, T, ...] committed inputs that were not read yet
        self._counts = [0] * rows  # number of unread inputs in each row
        self._chain = 0  # number of nodes stored like committed positions
        self._ancestors: Tensor | None = None  # [B, P, P] of the pending nodes
        self._width = 0  # nodes of the last pending level
        self._last_out: Tensor | None = None

    @abstractmethod
    def new_cache(self, capacity: int, rows: int) -> TreeCache:
        """Return an empty cache for ``rows`` rows of up to ``capacity`` positions."""

    @abstractmethod
    def run(self, inputs: Tensor, cache: TreeCache, counts: list[int] | None, ancestors: Tensor | None) -> Tensor:
        """Run the model or the layers over ``inputs`` [B, F, ...] after those in ``cache``; return outputs [B, F, D].
        Without ``ancestors``, the inputs are a chain, and the first ``counts`` (None: all) of each row are committed.
        With the mask ``ancestors`` [B, P, P] of all pending nodes, the inputs are the last F of them and stay
        pending."""

    @property
    def lengths(self) -> list[int]:
        return [read + unread for read, unread in zip(self._read, self._counts, strict=True)]

    @property
    def cache(self) -> TreeCache:
        assert self._cache is not None
        return self._cache

    @property
    def unread(self) -> tuple[Tensor, list[int]] | None:
        """Committed inputs [B, T, ...] that the model has not run over yet, and their number per row."""
        return None if self._unread is None else (self._unread, self._counts)

    @torch.inference_mode()
    def append(self, inputs: Tensor, counts: list[int], slots: Tensor | None = None) -> list[int]:
        """Commit the first ``counts[b]`` of ``inputs`` [B, T, ...] in each row b, and remove all drafted nodes.

        ``slots`` [B, T] int64: number of the drafted node that became each input, in the order of drafting; -1: none.
        Leading inputs with a slot keep their keys and values; return their number in each row. The model runs over the
        others at the next ``start``, but over prompts (the first inputs of a row) at once. None: all are -1.
        """
        has_prompt = any(count and not length for count, length in zip(counts, self.lengths, strict=True))
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
        if self._unread is not None and not has_prompt and max(self._counts) < ROW_BY_ROW:
            self._wait(inputs, counts)  # nothing was drafted since the last append
            return kept
        self._catch_up()
        self._counts = [count - keep for count, keep in zip(counts, kept, strict=True)]
        width = max(self._counts)
        if len(counts) == 1:
            self._unread = inputs[:, kept[0] : kept[0] + width]
        else:
            offsets = on_device(kept, inputs.device)[:, None] + torch.arange(width, device=inputs.device)
            rows = torch.arange(len(counts), device=inputs.device)[:, None]
            self._unread = inputs[rows, offsets.clamp(max=inputs.shape[1] - 1)]
        if has_prompt:
            self._catch_up()
        return kept

    def _wait(self, inputs: Tensor, counts: list[int]) -> None:
        """Append to the unread inputs, which one pass reads at the next ``start``."""
        assert self._unread is not None
        before, known = self._counts, self._unread
        self._counts = [old + new for old, new in zip(before, counts, strict=True)]
        if len(counts) == 1:
            self._unread = torch.cat([known[:, : before[0]], inputs[:, : counts[0]]], 1)
            return
        # Inputs beyond a row's count are written behind its new end, and the next ones overwrite them.
        joined = torch.cat([known, torch.zeros_like(inputs)], 1)
        rows = torch.arange(len(counts), device=inputs.device)[:, None]
        at = on_device(before, inputs.device)[:, None] + torch.arange(inputs.shape[1], device=inputs.device)
        joined[rows, at] = inputs
        self._unread = joined[:, : max(self._counts)]

    @torch.inference_mode()
    def read_all(self) -> Tensor:
        """Run the model over the inputs of the last ``append``; return its output at each row's last input, [B, D].
        Call this before ``start``, which runs the model over them, too, but does not return these outputs."""
        self._catch_up()
        assert self._last_out is not None
        return self._last_out

    def _catch_up(self) -> None:  # drops drafted nodes and reads the unread inputs
        self._drop_nodes()
        if self._unread is None:
            return
        unread, counts, self._unread = self._unread, self._counts, None
        self._reserve(unread.shape[1])
        rows = [row for row, count in enumerate(counts) if count]
        if rows and self.cache.rows > 1 and (len(rows) == 1 or unread.shape[1] > ROW_BY_ROW):
            last = torch.cat(
                [
                    self.run(unread[row : row + 1, : counts[row]], self.cache.row(row), [counts[row]], None)[:, -1]
                    for row in rows
                ]
            )
            before = last.new_zeros(len(counts), last.shape[1]) if self._last_out is None else self._last_out
            self._last_out = before.index_copy(0, on_device(rows, last.device), last)
        elif rows:
            out = self.run(unread, self.cache, counts, None)
            before = torch.zeros_like(out[:, 0]) if self._last_out is None else self._last_out
            self._last_out = last_valid(out, counts, before)
        self._advance(counts)

    def shared_cache(self, extra: int, nodes: int) -> TreeCache:
        """Return the cache with all committed inputs, for a caller that appends up to ``extra`` drafted positions. The
        first ``nodes`` of them are a chain of drafts with slots 0, 1, ..., which ``append`` may keep."""
        if not self._goes_back:
            what = "this combination of drafters drops positions of a model with recurrent layers"
            raise UserError(f"{what}, whose state cannot go back; choose another drafter")
        self._reserve(extra + (0 if self._unread is None else self._unread.shape[1]))
        self._catch_up()
        self._chain = nodes
        return self.cache

    @torch.inference_mode()
    def start(self, roots: Tensor) -> Tensor:
        """Run the model over a chain of R nodes per row, ``roots`` [B, R, ...]; return its outputs there, [B, R, D].

        The same pass first covers the committed inputs u that the model has not read yet. With nodes n and padding --::

            2 unread inputs, 2 nodes:    u0 u1 n0 n1
            1 unread input, 2 nodes:     u0 n0 n1 --
        """
        if not self._goes_back:
            self._catch_up()
            self._reserve(roots.shape[1])
            chain = causal_mask(roots.shape[1], roots.device)
            self._ancestors, self._width = chain.expand(len(roots), -1, -1), roots.shape[1]
            return self.run(roots, self.cache, None, self._ancestors)
        if len(self._counts) > 1 and max(self._counts) > ROW_BY_ROW:
            self._catch_up()
        size, counts, inputs = roots.shape[1], self._counts, roots
        self._reserve(size + (0 if self._unread is None else self._unread.shape[1]))
        self._drop_nodes()
        if self._unread is None or not self._unread.shape[1]:
            out = self.run(roots, self.cache, [size] * len(counts), None)
        elif len(counts) == 1:
            inputs = torch.cat([self._unread[:, : counts[0]], roots], 1)
            out = self.run(inputs, self.cache, [inputs.shape[1]], None)[:, counts[0] :]
        else:
            rows = torch.arange(len(counts), device=roots.device)[:, None]
            offsets = on_device(counts, roots.device)[:, None] + torch.arange(size, device=roots.device)
            inputs = torch.cat([self._unread, torch.zeros_like(roots)], 1)
            inputs[rows, offsets] = roots
            out = self.run(inputs, self.cache, [count + size for count in counts], None)[rows, offsets]
        self._unread, self._last_out, self._chain = None, None, size
        self._advance(counts)
        return out

    @torch.inference_mode()
    def expand(self, inputs: Tensor, parents: Tensor) -> Tensor:
        """Run the model over the tree's next level, F nodes per row: inputs [B, F, ...] -> outputs [B, F, D].
        ``parents`` [B, F] int64 is the index of each node's parent in the previous level, from 0."""
        new = inputs.shape[1]
        self._reserve(new)
        if new == 1 and self._ancestors is None:  # never without ``goes_back``, where ``start`` sets it
            self._chain += 1
            return self.run(inputs, self.cache, None, None)
        before = 0 if self._ancestors is None else self._ancestors.shape[1] - self._width
        self._ancestors, self._width = add_nodes(self._ancestors, parents + before), new
        return self.run(inputs, self.cache, None, self._ancestors)

    def rollback(self, lengths: list[int]) -> None:
        known = zip(lengths, self._read, self._counts, strict=True)
        self._counts = [min(count, max(0, n - read)) for n, read, count in known]
        self._read = [min(n, read) for n, read in zip(lengths, self._read, strict=True)]
        if not any(self._counts):
            self._unread = None
        self._drop_nodes()

    def select(self, rows: list[int]) -> None:
        self._drop_nodes()
        self._read, self._counts = [self._read[row] for row in rows], [self._counts[row] for row in rows]
        self._unread = None if self._unread is None else take_rows(self._unread, rows)
        self._last_out = None if self._last_out is None else take_rows(self._last_out, rows)
        if self._cache is not None:
            self._cache.select(rows)

    def _advance(self, counts: list[int]) -> None:
        self._read = [read + count for read, count in zip(self._read, counts, strict=True)]
        self._counts = [0] * len(counts)

    def _reserve(self, new: int) -> None:  # positions per row
        pending = 0 if self._ancestors is None else self._ancestors.shape[1]
        needed = max(self.lengths) + self._chain + pending + new
        if self._cache is None:
            self._cache = self.new_cache(needed + INITIAL_CAPACITY, len(self._read))
        elif needed > self._cache.capacity:
            self._cache.grow(max(needed + INITIAL_CAPACITY, 2 * self._cache.capacity))

    def _drop_nodes(self) -> None:
        if self._cache is not None:
            self._cache.crop(self._read)
        self._ancestors, self._width, self._chain = None, 0, 0


class ModelCache(NodeCache):
    """The cache of a causal LM that drafts. Its inputs are token ids; ids above its vocabulary become its last id."""

    def __init__(self, model: BaseModel, rows: int) -> None:
        super().__init__(rows, goes_back=not model.cache_shape.states)
        self.model = model

    def new_cache(self, capacity: int, rows: int) -> TreeCache:
        return self.model.new_cache(capacity, rows=rows)

    def run(self, inputs: Tensor, cache: TreeCache, counts: list[int] | None, ancestors: Tensor | None) -> Tensor:
        tokens = inputs.clamp(max=self.model.vocab_size - 1)
        if ancestors is None:
            return self.model.forward(tokens, cache, counts).final
        return self.model.verify(tokens, pending_shape(ancestors), cache).final


class LMSession(StepwiseSession):
    """The session of a causal LM that drafts: it reads each level of the tree in one pass."""

    def __init__(
        self, drafter: StepwiseDrafter, model: BaseModel, rows: int, logits: Callable[[Tensor], Tensor]
    ) -> None:
        """``logits`` maps hidden states [B, F, D] to draft logits [B, F, W]."""
        self.drafter, self._logits = drafter, logits
        self.context = ModelCache(model, rows)
        self._slots: Tensor | None = None
        self._starts = False

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self.context.lengths

    @property
    def room(self) -> int:
        return self.context.model.max_context - max(self.lengths) - 1

    def commit(self, tokens: Tensor, counts: list[int], base_hidden: BaseHidden, nodes: Tensor | None = None) -> None:
        slots, self._slots = self._slots, None
        if nodes is not None and slots is not None:
            drafted = slots.expand(len(nodes), -1).gather(1, nodes.clamp(min=0))
            slots = torch.where(nodes < 0, -1, drafted)
        self.context.append(tokens, counts, None if nodes is None else slots)

    def drafted(self, proposal: Proposal) -> Proposal:
        self._slots = proposal.slots
        return proposal

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
