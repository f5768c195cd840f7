"""The drafting side of a head: its state for the rows being decoded, and its logits for each level of a tree.

Shape legend: B batch, T time, K draft positions, F frontier nodes, P slots of a block, I input width, D base width, W
draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from drafthead.data.batch import BaseHidden, HiddenStates
from drafthead.models.base.windows import Window
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.cache.layers import CacheShape, Sliding
from drafthead.models.decoding.drafter import DraftConfig, Proposal, SessionPart, last_valid, map_active, take_rows
from drafthead.models.decoding.growth import StepwiseSession
from drafthead.models.decoding.node_cache import NodeCache
from drafthead.models.heads.parts.attention_layer import Layer
from drafthead.models.heads.parts.context_ids import ContextIds
from drafthead.models.heads.parts.draft_head import DraftHead, States
from drafthead.models.heads.parts.induction import InductionContext
from drafthead.models.kernels.cuda_graphs import StaticCalls
from drafthead.models.token_tree import causal_mask

CHAIN = 32
"""Committed positions that layers with a window hold in addition to it. A drafted chain is stored like committed
positions, and its removal must not leave a gap."""
PENDING = 512  # pending nodes of a tree for which layers with a window have memory
PIECE = 1024  # inputs that layers with a window read in one pass; the mask of a whole prompt would need more memory


class LayerCache(NodeCache, SessionPart):
    """Keys and values of a head's own attention layers in drafting (Hydra++, Kangaroo, EAGLE-3, DSpark). The layers
    read committed tokens again, because the base's states replace those that the head predicted. Positions count from
    the start of the context, also where layers with a window have dropped the first ones."""

    def __init__(
        self,
        layers: Sequence[Layer],
        shape: CacheShape,
        rows: int,
        inputs: Callable[[HiddenStates], Tensor] | None = None,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        """``layers`` run one after the other over their inputs [B, F, I]. ``inputs`` returns these inputs at committed
        tokens; a subclass may override ``commit`` instead. ``windows`` has the tokens that a query sees in each layer
        of the cache (None: all)."""
        super().__init__(rows)
        self._layers, self._shape, self._inputs = layers, shape, inputs
        self._windows = tuple(windows or [None] * len(shape.layers))
        if (window := max(filter(None, self._windows), default=None)) is not None:
            sliding = Sliding(window, PENDING, 2 * window + CHAIN + PENDING, spare=CHAIN)
            pairs = zip(shape.layers, self._windows, strict=True)
            trimmed = tuple(layer.trimmed(sliding) if layer and size else layer for layer, size in pairs)
            self._shape = replace(shape, layers=trimmed)

    def commit(self, tokens: Tensor, counts: list[int], base_hidden: BaseHidden, nodes: Tensor | None = None) -> None:
        assert self._inputs is not None and base_hidden is not None
        self.append(map_active(self._inputs, base_hidden, counts), counts)

    @property
    def reads_all_states(self) -> bool:
        return True

    def new_cache(self, capacity: int, rows: int) -> TreeCache:
        return TreeCache.empty(self._shape, capacity, rows)

    def run(self, inputs: Tensor, cache: TreeCache, counts: list[int] | None, ancestors: Tensor | None) -> Tensor:
        new, device = inputs.shape[1], inputs.device
        in_order = ancestors is None and len(inputs) == 1  # all inputs are committed, or a chain of drafts
        if in_order and new > PIECE and any(self._windows):
            pieces = torch.split(inputs, PIECE, 1)
            return torch.cat([self.run(piece, cache, None, None) for piece in pieces], 1)
        nodes = causal_mask(new, device)[None] if ancestors is None else ancestors
        # A node's position after the context is its depth. A node is among its own ancestors, hence the - 1.
        depths = nodes.sum(-1) - 1
        cache.begin(new, committed=in_order)
        positions, masks = cache.positions(depths[:, -new:]).expand(len(inputs), -1), dict[int | None, Tensor]()
        for layer, window in zip(self._layers, self._windows, strict=False):
            if window not in masks:
                masks[window] = _window_mask(cache, nodes[:, -new:], window, positions, depths, self._shape.dtype)
            inputs = layer(inputs, positions, masks[window], cache)
        if ancestors is None:
            cache.commit(counts)
        return inputs

    def read_block(
        self, x: Tensor, seen: Callable[[int | None, torch.device], Tensor], layers: Sequence[Layer]
    ) -> Tensor:
        """Run ``layers`` over a block of P positions after the context, [B, P, D] -> [B, P, D]; store no keys and
        values. ``seen`` returns the mask in a block for layers with a window, [P, P] bool: [i, j] is true if position i
        attends to position j, which may be later."""
        self._catch_up()
        rows, count = x.shape[:2]
        self._reserve(count)
        cache = self.cache
        cache.begin(count)
        depths = torch.arange(count, device=x.device)[None]
        positions, masks = cache.positions(depths).expand(rows, -1), dict[int | None, Tensor]()
        for layer, window in zip(layers, self._windows, strict=True):
            if window not in masks:
                block = seen(window, x.device)[None]
                masks[window] = _window_mask(cache, block, window, positions, depths, x.dtype)
            x = layer(x, positions, masks[window], cache)
        cache.crop()
        return x


def _window_mask(
    cache: TreeCache, seen: Tensor, window: int | None, positions: Tensor, depths: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return ``cache.mask(seen, dtype)``, limited to the keys that layers with a ``window`` hold and see. ``positions``
    [B, T] are those of the queries, and ``depths`` [B or 1, P] those of all pending nodes after the context."""
    mask = cache.mask(seen, dtype)
    if window is None or cache.length + cache.pending <= window:
        return mask
    held, keys = cache.held(mask, cache.key_positions(depths))
    assert held is not None
    return held.masked_fill(~Window(window, chunked=False).sees(positions, keys)[:, None], -torch.inf)


class HeadSession(StepwiseSession):
    """State of a head for the rows being decoded: the base's last hidden state, and parts such as the head's caches.
    Methods named ``draft_...`` compute in drafting what the head's method of a similar name computes in training."""

    drafter: DraftHead  # the trained head
    context: LayerCache  # of heads with attention layers

    def __init__(self, head: DraftHead, rows: int, *parts: SessionPart) -> None:
        self.drafter, self.lengths = head, [0] * rows
        self.inference_head = head.inference()
        """The head's inference copy, which all computations use. It shares ``packed``, where packed copies of weights
        are stored, with the trained head."""
        self.hidden: Tensor = head.target_lm_head.weight.new_zeros(rows, head.base.hidden_size)
        """[B, D] the base's final hidden state at the last token that it has read; zeros in an empty row."""
        induction = self.inference_head.induction
        self.copied = None if induction is None else InductionContext(induction, rows)
        self.parts = parts if self.copied is None else (*parts, self.copied)
        self.seen: ContextIds | None = None
        if head.config.drafts_context:
            self.seen = ContextIds(head.t2d, rows, self.inference_head.context_rows)
            self.parts = *self.parts, self.seen

    @property
    def reads_all_states(self) -> bool:
        return any(part.reads_all_states for part in self.parts)

    @property
    def room(self) -> int:
        return min((part.room for part in self.parts), default=super().room)

    @torch.inference_mode()
    def commit(self, tokens: Tensor, counts: list[int], base_hidden: BaseHidden, nodes: Tensor | None = None) -> None:
        if base_hidden is not None:
            self.hidden = last_valid(base_hidden.final, counts, self.hidden)
        for part in self.parts:
            part.commit(tokens, counts, base_hidden, nodes)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def drafted(self, proposal: Proposal) -> Proposal:
        for part in self.parts:
            proposal = part.drafted(proposal)
        return proposal

    def select(self, rows: list[int]) -> None:
        self.lengths, self.hidden = [self.lengths[row] for row in rows], take_rows(self.hidden, rows)
        for part in self.parts:
            part.select(rows)

    def rollback(self, lengths: list[int]) -> None:
        self.lengths = lengths
        for part in self.parts:
            part.rollback(lengths)

    @property
    def d2t(self) -> Tensor:
        head_ids = self.drafter.d2t
        return head_ids if self.seen is None else torch.cat([head_ids, self.seen.current.ids])

    @property
    def drafts_at_once(self) -> bool:
        return not self.inference_head.reads_drafts

    def draft_hidden(self) -> Tensor:
        """Return the state [B, D] from which the head drafts in each row."""
        return self.hidden

    def start(self, last_token: Tensor, draft_config: DraftConfig) -> None:
        self._level = 0
        self.start_levels(last_token, draft_config)
        if self.copied is not None and (sinks := self.draft_sinks()) is not None:
            self.copied.start(sinks.to(self.inference_head.dtype))

    def draft_sinks(self) -> Tensor | None:
        """Return the states from which the induction head decides whether to copy: [B, levels, D], or [B, 1, D] for all
        levels. With None, ``level`` passes them to ``copied.start`` later."""
        return self.hidden[:, None]

    def start_levels(self, last_token: Tensor, draft_config: DraftConfig) -> None:
        """Start a tree after ``last_token`` [B]; compute all levels in one pass if the head does not read its
        drafts."""
        head, depth = self.inference_head, draft_config.depth
        hidden = self.draft_hidden().to(head.dtype)
        if head.reads_drafts:
            self._states = head.first_states(hidden[:, None])
            return

        def read(hidden: Tensor, last_token: Tensor) -> States:
            inputs = (self.block_inputs if head.attends else head.all_inputs)(hidden, last_token, depth)
            return inputs, self.draft_logits(inputs, None)

        self._inputs, self._logits = self._graph(depth, read, hidden, last_token)

    def block_inputs(self, hidden: Tensor, last_token: Tensor, depth: int) -> Tensor:
        """Return the inputs of the projections of ``depth`` = K draft positions, [B, K, D], from ``draft_hidden()``
        [B, D]. Heads that attend but do not read drafts need it, because ``all_inputs`` cannot attend to
        ``context``."""
        raise NotImplementedError

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        k, self._level = self._level, self._level + 1
        self._input, logits = self.level(k, tokens, parents)
        self._added: Tensor | None = None
        head = self.inference_head
        if head.low_rank is None:
            return logits
        hidden = self._input.expand(-1, tokens.shape[1], -1)
        added = [head.markov_inputs(tokens, hidden)] if head.config.markov_rank else []
        if self.copied is not None:
            added.append(self.copied.read(tokens, parents))
        self._added = added[0] if len(added) == 1 else torch.cat(added, -1)
        logits = logits + head.low_rank(self._added)
        if self.seen is None or not len((seen := self.seen.current).ids):
            return head.scaling.scale_and_cap(logits)
        context = seen.projection.product(torch.cat([hidden, self._added], -1))
        logits = head.scaling.scale_and_cap(torch.cat([logits, context], -1))
        if seen.missing is not None:
            logits[..., -len(seen.ids) :].masked_fill_(seen.missing, -torch.inf)
        return logits

    def level(self, k: int, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Compute draft position k (from 0): return its projection's inputs [B, F, D] and logits [B, F, W], without
        optional parts. If the head does not read its drafts, all nodes of a level share one distribution, and F = 1."""
        if not self.inference_head.reads_drafts:
            return self._inputs[:, k, None], self._logits[:, k, None]

        def attend(x: Tensor) -> Tensor:
            return self.context.start(x) if k == 0 else self.context.expand(x, parents)

        def read(tokens: Tensor, parents: Tensor, *states: Tensor) -> States:
            if k:
                states = tuple(s.gather(1, parents[..., None].expand(-1, -1, s.shape[-1])) for s in states)
            x, below = self.inference_head.advance(k, states, tokens, attend)
            return (x, self.draft_logits(x, k), *below)

        x, logits, *states = self._graph(k, read, tokens, parents, *self._states)
        self._states = tuple(states)
        return x, logits

    def draft_logits(self, x: Tensor, k: int | None) -> Tensor:
        """Return the logits [..., W] of draft position k (from 0) from ``x`` [..., D]; with k None, of positions 0 to K
        - 1 from [B, K, D]. With a Markov correction or an induction head, ``expand`` applies scale and soft-cap."""
        return self.inference_head.projections.logits(x, k)

    def confidence(self) -> Tensor:
        x = self._input
        if self._added is not None:
            x = torch.cat([x.expand(-1, self._added.shape[1], -1), self._added], -1)
        assert self.inference_head.confidence is not None
        return cast(Tensor, self.inference_head.confidence(x)[..., 0].sigmoid())

    def _graph(self, key: int, function: Callable[..., States], *inputs: Tensor) -> States:
        """Return ``function(*inputs)``, computed by a CUDA graph if the base uses graphs.

        The graph of a ``key`` and the inputs' shapes is captured once and replayed for all later sessions of the head.
        ``function`` must therefore read the rows' state from ``inputs``, never from ``self``: a replay would read the
        state of the first session. A head that attends reads a growing context, so it has no graphs.
        """
        head = self.inference_head
        if not head.base.uses_graphs or head.attends:
            return function(*inputs)
        calls = head.packed.get("graphs", lambda: StaticCalls(head.base.device))
        return calls(key, function, *inputs)
