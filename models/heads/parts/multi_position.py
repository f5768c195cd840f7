"""Heads with a separate prediction for every draft position: Medusa, Hydra, MLP speculators, EAGLE-3, DSpark.

``MultiPositionHead`` derives the loss and the ranks from them. ``CopyingHead`` can have an induction head.
``RecurrentHead`` drafts from a state per node, and has one forward pass for training and drafting.

Shape legend: B batch, T time, K draft positions, F frontier nodes, P nodes of the level above, n targets, D base width,
W draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from drafthead.data.batch import HiddenStates, LossOutput, TrainBatch
from drafthead.data.utils.settings import settings
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lm_head import LMHead
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.drafter import DraftConfig, last_valid, take_rows
from drafthead.models.decoding.growth import StepwiseSession
from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig
from drafthead.models.heads.parts.induction import InductionContext, InductionHead
from drafthead.models.heads.parts.layer_cache import LayerCache
from drafthead.models.heads.parts.lm_heads import DraftLMHeads
from drafthead.models.heads.parts.losses import LossConfig, heads_loss, loss_output
from drafthead.models.heads.parts.targets import DraftTargets, rank_of
from drafthead.models.kernels.cuda_graphs import StaticCalls


class HeadSession(StepwiseSession):
    """A session of a :class:`MultiPositionHead`: the base's last state, and the context of the induction head.

    Subclasses give the logits of a level without the induction head.
    """

    def __init__(self, head: "MultiPositionHead", rows: int) -> None:
        self.drafter: MultiPositionHead = head
        self.lengths = [0] * rows
        self.model = head.inference()
        """The inference copy of the head."""
        self.hidden = head.target_lm_head.weight.new_full((rows, head.base.hidden_size), torch.nan)
        """[B, D] the base's ``h`` at the last position it has read."""
        self.copied = None if self.model.induction is None else InductionContext(self.model.induction, rows)
        self.context: LayerCache | None = None
        """Keys and values of the head's own attention layers, if it has any."""

    @torch.inference_mode()
    def commit(
        self, tokens: Tensor, counts: list[int], base_hidden: HiddenStates | None, nodes: Tensor | None = None
    ) -> None:
        assert base_hidden is not None
        self.hidden = last_valid(base_hidden.final, counts)
        if self.copied is not None:
            self.copied.append(tokens, counts)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: list[int]) -> None:
        self.lengths, self.hidden = [self.lengths[row] for row in rows], take_rows(self.hidden, rows)
        for context in (self.copied, self.context):
            if context is not None:
                context.select(rows)


class MultiPositionHead(DraftHead):
    """A head that gives the projection's input at every position; loss and ranks follow."""

    def __init__(self, config: DraftHeadConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self.induction: InductionHead | None = None

    @abstractmethod
    def position_hidden(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        """Return the input of every position's projection for every target, [K, n, width].

        It may be any finite value where ``draft_targets.valid`` is false.
        """

    def confidence_logits(self, hidden: Tensor) -> Tensor | None:
        """Return logits [K, n] of the drafts' acceptance from ``position_hidden``; None without a confidence head."""
        return None

    def trained_targets(self, draft_targets: DraftTargets) -> DraftTargets:
        """Return the targets of a training step; all by default."""
        return draft_targets

    def loss(self, batch: TrainBatch, base_hidden: HiddenStates, config: LossConfig) -> LossOutput:
        weights = config.weights_of(self.config.trained_positions)
        depth = len(weights) if torch.is_grad_enabled() else self.depth  # untrained positions are only measured
        decay = config.decay if config.depth_weights is None else 1.0  # explicit weights do not decay
        config = replace(config, depth_weights=weights + [0.0] * (depth - len(weights)), decay=decay)
        draft_targets = self.trained_targets(DraftTargets.of(batch, depth))
        targets = draft_targets.loss_targets(batch, base_hidden, self.t2d, self.target_lm_head)
        hidden = self.position_hidden(batch, base_hidden, draft_targets)
        heads = [self.output_head(k) for k in range(depth)]
        loss_sum, stats = heads_loss(hidden, heads, targets, config, confidence=self.confidence_logits(hidden))
        return loss_output(loss_sum, stats, training=torch.is_grad_enabled())

    @torch.no_grad()
    def candidate_ranks(self, batch: TrainBatch, base_hidden: HiddenStates, top: int) -> Tensor:
        draft_targets = DraftTargets.of(batch, self.depth)
        hidden = self.position_hidden(batch, base_hidden, draft_targets)
        target_ids = self.t2d[batch.input_ids.flatten()[draft_targets.target_idx]]
        ranks = torch.full((batch.input_ids.numel(), self.depth), -1, dtype=torch.int64, device=target_ids.device)
        for k in range(self.depth):
            valid = (draft_targets.host or draft_targets).valid[k].nonzero()[:, 0].to(ranks.device, non_blocking=True)
            position_ranks = rank_of(hidden[k, valid], self.output_head(k), target_ids[valid], top)
            ranks[draft_targets.source_idx[k, valid], k] = position_ranks
        return ranks.view(*batch.input_ids.shape, self.depth)


@settings(kw_only=True)
class CopyingConfig(DraftHeadConfig):
    """Settings of heads that can have an induction head."""

    own_lm_head: bool = True
    """Train a projection to the vocabulary at each position. It starts as a copy of the base's (MLP speculators: one of
    their width). With false, all positions share the base's, frozen (MLP speculators: over ``h`` and a trained matrix
    of the state, our addition)."""
    induction_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rank of an induction head that all positions share (our addition; no format has it). 0 turns it off. Needs
    ``own_lm_head=false``."""

    def __post_init__(self) -> None:
        if self.induction_rank and self.own_lm_head:
            raise ValueError("head.induction_rank adds to the base's projection; set head.own_lm_head=false")


class CopyingHead(MultiPositionHead):
    """A head that drafts from the base's last state, and can have an induction head.

    Codes of the induction head are added to the base's projection. ``hidden_at_positions`` and ``projection`` leave
    them out.
    """

    config: CopyingConfig
    projections: DraftLMHeads

    def __init__(self, config: CopyingConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self.static_calls = StaticCalls(base.device) if base.uses_graphs else None
        if config.induction_rank:
            self.induction = InductionHead(base, config.induction_rank)
            self.induction_out = nn.Linear(config.induction_rank, len(self.d2t), bias=False, device=base.device)
            with torch.no_grad():
                self.induction_out.weight.copy_(self.induction.start_projection(self.d2t, self.target_lm_head.scale))

    def shared_projection(self) -> DraftLMHeads:
        """Return the base's projection, frozen, for all positions."""
        config = self.config
        return DraftLMHeads(self.target_lm_head, 0, config.inference_dtype(self.base), scaled=not config.induction_rank)

    @abstractmethod
    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        """Return ``position_hidden`` without the induction head, [K, n, width]."""

    def projection(self, k: int) -> LMHead:
        """Return the projection of position k (0-based) without the induction head."""
        return self.projections.head(k)

    def invalidate(self) -> None:
        super().invalidate()
        if self.static_calls is not None:
            self.static_calls.clear()

    def output_head(self, k: int) -> LMHead:
        head = self.projection(k)
        return head if self.induction is None else replace(head, low_rank=self.induction_out.weight)

    def position_hidden(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        hidden = self.hidden_at_positions(batch, base_hidden, draft_targets)
        if self.induction is None:
            return hidden
        copied = self.induction.at_targets(batch, base_hidden.final, draft_targets)
        return torch.cat([hidden, copied.to(hidden.dtype)], -1)


class CopyingSession(HeadSession):
    """A session that adds the induction head's logits to every level."""

    model: "CopyingHead"

    def start(self, last_token: Tensor, draft_config: DraftConfig) -> None:
        if self.copied is not None:
            self.copied.start(self.hidden[:, None].to(self.model.dtype))
        self.start_levels(last_token, draft_config)

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        logits = self.level(tokens, parents)
        if self.copied is None:
            return logits
        copied = self.model.induction_out(self.copied.read(tokens, parents))
        return self.model.target_lm_head.scale_and_cap(logits + copied)

    @abstractmethod
    def start_levels(self, last_token: Tensor, draft_config: DraftConfig) -> None:
        """Run ``start`` without the induction head."""

    @abstractmethod
    def level(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Run ``expand`` without the induction head; if there is one, before scale and soft-cap."""


States = tuple[Tensor, ...]
"""State that a node passes on to its children: tensors [..., width], [B, F, width] while drafting."""


class RecurrentHead(CopyingHead):
    """A head defined by its first state and by how one more token changes a state.

    ``advance`` is its only forward pass: training runs it along the true tokens of all anchors, drafting along a tree.
    """

    reads_drafts = True
    """False: no position depends on drafts, so that all nodes of a level share one distribution."""

    def first_states(self, hidden: Tensor) -> States:
        """Return the state before any token is read, from the base's ``h`` [..., D]."""
        return (hidden,)

    @abstractmethod
    def advance(self, k: int, states: States, tokens: Tensor) -> tuple[Tensor, States]:
        """Return the projection's input of position k (0-based), and the states after it.

        Args:
            k: draft position, from 0.
            states: states of the nodes' parents, [..., width].
            tokens: [...] int64 target ids; the last committed token for k = 0, then drafts.
        """

    def all_inputs(self, hidden: Tensor, last_token: Tensor, depth: int) -> Tensor:
        """Return the projection's inputs of the first ``depth`` positions, [B, K, D], if none reads drafts.

        Args:
            hidden: [B, D] the base's ``h``.
            last_token: [B] int64.
            depth: K.
        """
        states, inputs, model = self.first_states(hidden), [], self.inference()
        for k in range(depth):
            x, states = model.advance(k, states, last_token)
            inputs.append(x)
        return torch.stack(inputs, 1)

    def sources(self, batch: TrainBatch, base_hidden: HiddenStates) -> Tensor:
        """Return the inputs [B, T, D] of ``first_states``."""
        return base_hidden.final

    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        ids, hidden = batch.input_ids.flatten(), self.sources(batch, base_hidden).flatten(0, 1)
        # Each anchor is computed once, although the targets of up to K positions read it.
        anchors = draft_targets.anchors
        index = torch.zeros_like(ids)
        index[anchors] = torch.arange(len(anchors), device=ids.device)
        states, outputs = self.first_states(hidden[anchors].to(self.dtype)), []
        for k in range(len(draft_targets.valid)):
            x, states = self.advance(k, states, ids[(anchors + k + 1).clamp(max=len(ids) - 1)])
            outputs.append(x[index[draft_targets.source_idx[k]]])
        return torch.stack(outputs)

    def open(self, rows: int, cache: TreeCache | None = None) -> "RecurrentSession":
        return RecurrentSession(self, rows)


class RecurrentSession(CopyingSession):
    """A session that keeps the states of the level read last, or the logits of all levels if they are shared."""

    drafter: RecurrentHead
    model: RecurrentHead

    def source(self) -> Tensor:
        """Return the input [B, D] of ``first_states``."""
        return self.hidden

    def start_levels(self, last_token: Tensor, draft_config: DraftConfig) -> None:
        head, hidden, depth = self.drafter, self.source().to(self.model.dtype), draft_config.depth
        self._position = 0
        if head.reads_drafts:
            self._states = head.first_states(hidden[:, None])
        else:
            (self._shared,) = self._graph(
                depth, lambda h, x: (head.projections.all_logits(head.all_inputs(h, x, depth)),), hidden, last_token
            )

    def level(self, tokens: Tensor, parents: Tensor) -> Tensor:
        k, self._position = self._position, self._position + 1
        if not self.drafter.reads_drafts:
            return self._shared[:, k, None]

        def read(tokens: Tensor, parents: Tensor, *states: Tensor) -> States:
            of_parents = tuple(s.gather(1, parents[..., None].expand(-1, -1, s.shape[-1])) for s in states)
            x, below = self.model.advance(k, of_parents, tokens)
            return (self.drafter.projections.logits(x, k), *below)

        logits, *states = self._graph(k, read, tokens, parents, *self._states)
        self._states = tuple(states)
        return logits

    def _graph(self, key: int, function: Callable[..., States], *inputs: Tensor) -> States:
        """Call ``function``, as a CUDA graph if the base uses graphs."""
        calls = self.drafter.static_calls
        return function(*inputs) if calls is None else calls(key, function, *inputs)
