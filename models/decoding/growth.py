"""Growing token trees from a drafter's logits, level by level: the code that all heads and draft models share.

A ``StepwiseSession`` only returns the logits after the nodes of a frontier, which are the nodes of one level that get
children. This module chooses the children (by their ranks in a static tree, by sampling, or by their scores in a
dynamic tree) and where drafting stops. Every head and draft model therefore supports every kind of tree.

Shape legend: B rows, F frontier nodes, W draft vocabulary, V target vocabulary, N nodes, M nodes of a level.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from drafthead.models.decoding.candidates import MISSING, LogitsSource, draw_candidates, likelihood_logits, root_only
from drafthead.models.decoding.cost_growth import DraftTree, grow_by_cost, price_drafts
from drafthead.models.decoding.cost_tree import CostTree
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, DynamicTree, Proposal, Session
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.token_tree import TokenTree, TreeShape
from drafthead.system.devices import is_host, on_device, wide_dtype


@dataclass(frozen=True)
class TreeLevel:
    """One level of a static tree."""

    nodes: Tensor  # [M] numbers of the level's nodes in the tree, in order
    parents: Tensor  # [M] the index of each node's parent in the previous frontier
    width: int  # candidates that are drawn for each parent
    taken: Tensor  # [M] the index of each node's candidate in the joined list of all parents' candidates, [F * width]
    taken_shared: Tensor  # [M] as ``taken``, if all parents share one distribution: an index in [width] candidates
    inner: Tensor  # [F] the next frontier: indices into ``nodes`` of the nodes that have children
    above: Tensor  # [F] for each node of ``inner``, the index of its parent in the previous frontier
    slots: Tensor
    """[N] each tree node's number in the order in which the drafter runs over nodes; -1 for nodes that it has not run
    over when this level is drafted."""

    def taken_from(self, width: int) -> Tensor:
        """Return ``taken_shared`` if the level has one shared distribution (``width`` 1), else ``taken``."""
        return self.taken_shared if width == 1 else self.taken


@lru_cache(maxsize=512)
def tree_levels(tree: TokenTree, device: torch.device, sampled: bool, vocabulary: int) -> tuple[TreeLevel, ...]:
    """Return the levels of ``tree``, from the root's children on. With ``sampled`` candidates, a node's first child
    takes the first sample, and so on. With top-k candidates, a child takes the candidate of its own rank, or the last
    one if the rank exceeds the draft vocabulary of ``vocabulary`` ids."""
    tensor = partial(on_device, device=device)
    levels = []
    frontier, slots = [0], [-1] * len(tree)
    expanded = 0
    for depth in range(1, tree.depth + 1):
        for node in frontier:
            slots[node], expanded = expanded, expanded + 1
        nodes = [n for n, path in enumerate(tree.paths) if len(path) == depth]
        parents = [frontier.index(tree.parents[n]) for n in nodes]
        if sampled:
            ranks = [parents[:index].count(parent) for index, parent in enumerate(parents)]
        else:
            ranks = [min(tree.ranks[n], vocabulary - 1) for n in nodes]
        width = max(ranks) + 1
        inner = [index for index, n in enumerate(nodes) if n in tree.parents]
        level = TreeLevel(
            nodes=tensor(nodes),
            parents=tensor(parents),
            width=width,
            taken=tensor([parent * width + rank for parent, rank in zip(parents, ranks, strict=True)]),
            taken_shared=tensor(ranks),
            inner=tensor(inner),
            above=tensor([parents[index] for index in inner]),
            slots=tensor(slots),
        )
        levels.append(level)
        frontier = [nodes[index] for index in inner]
    return tuple(levels)


@runtime_checkable
class StepwiseDrafter(Protocol):
    """A drafter whose session computes next-token logits level by level."""

    d2t: Tensor  # [W] int64: the target's token id of every draft id
    depth: int
    vocab_size: int  # size V of the target's vocabulary, the width of ``Proposal.probs``


class StepwiseSession(Session, LogitsSource):
    """Base class of sessions whose trees ``grow`` builds; a subclass defines ``start``, ``expand`` and ``commit``."""

    drafter: StepwiseDrafter

    @property
    def d2t(self) -> Tensor:
        """[W] int64: the target's token id of every draft id in the next proposal."""
        return self.drafter.d2t

    @abstractmethod
    def start(self, last_token: Tensor, draft_config: DraftConfig) -> None:
        """Prepare drafting a tree with the roots ``last_token`` ([B] int64); called before the first ``expand``."""

    @torch.inference_mode()
    def draft(self, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None) -> Proposal:
        draft_config = draft_config.truncate(max(0, self.room))
        if draft_config.depth == 0:
            return self.drafted(root_only(last_token))
        if isinstance(draft_config.tree, CostTree):
            return self.draft_by_cost(last_token, draft_config, rng)
        self.start(last_token, draft_config)
        return self.drafted(grow(self, last_token, draft_config, self.d2t, self.drafter.vocab_size, rng))

    def draft_by_cost(
        self,
        last_token: Tensor,
        draft_config: DraftConfig,
        rng: RandomSource | None = None,
        others: Sequence[DraftTree] = (),
        verified: int = 0,
    ) -> Proposal:
        """Draft a tree by cost, with which drafts of other drafters compete; see ``grow_by_cost``."""
        room, ids = max(0, self.room), (self.d2t, self.drafter.vocab_size)
        config = draft_config.truncate(room) if room else draft_config

        def start(levels: int) -> None:
            self.start(last_token, config.truncate(levels))

        if not room:
            return self.drafted(price_drafts(last_token, config, others) if others else root_only(last_token))
        return self.drafted(grow_by_cost(self, start, last_token, config, *ids, rng, others, verified))


def grow(
    source: LogitsSource,
    last_token: Tensor,
    draft_config: DraftConfig,
    d2t: Tensor,
    vocabulary: int,
    rng: RandomSource | None,
) -> Proposal:
    """Return the tree that ``draft_config`` asks for, with its tokens.

    Every level takes one call of ``source.expand``. Its candidates are chosen first (``_likeliest`` or ``_sampled``),
    and then ``_Stopping`` decides which of them get children. On a CPU, drafting ends when no node of any row gets
    children; on other devices it continues with padding. An example with five nodes::

        root -+- 1 -+- 3        level 1: nodes 1, 2 take the root's candidates 0, 1; the next frontier is node 1
              |     +- 4        level 2: nodes 3, 4 take candidates 0, 1 of node 1
              +- 2

    The logits after the root give "the" (0.6) and "a" (0.3); those after "the" give "cat" and "dog". With
    ``confidence_threshold=0.7``, "the" is verified but gets no children. Drafting then ends, without nodes 3 and 4. If
    a second row of the batch is confident of its node 1, its nodes 3 and 4 exist, and are padding in the first row.

    ``d2t`` [W] int64 has the target id of each draft id, and ``vocabulary`` is the size V of the target's vocabulary.
    """
    if isinstance(tree := draft_config.tree, DynamicTree):
        return grow_dynamic(source, last_token, draft_config, tree, d2t)
    assert isinstance(tree, TokenTree)
    device, rows = last_token.device, len(last_token)
    sampled = draft_config.draft_sampling is not DraftSampling.TOP_K
    tokens = last_token.new_zeros(rows, len(tree))
    tokens[:, 0] = last_token
    stopping = _Stopping(draft_config, tokens)
    likelihoods = torch.ones(tokens.shape, device=device) if draft_config.likelihoods else None
    probs: list[Tensor] = []
    frontier = last_token[:, None], torch.zeros_like(last_token[:, None])
    levels = tree_levels(tree, device, sampled, min(len(d2t), len(tree)))  # cached: d2t may grow with the context
    for depth, level in enumerate(levels, start=1):
        logits = source.expand(*frontier)
        slots = level.slots
        if not stopping.has_parents(source):
            break
        exists = likelihood = None
        if sampled:
            candidates, exists, dist = _sampled(logits, level, draft_config, stopping.drawing(logits.shape[1]), rng)
            # Copied even if draft ids equal target ids, because testing that would wait for the device.
            probs.append(dist.new_zeros(*dist.shape[:2], vocabulary).index_copy_(2, d2t, dist))
        else:
            wanted = likelihoods is not None or draft_config.confidence_threshold > 0
            logits = likelihood_logits(logits, draft_config, d2t, depth)
            candidates, likelihood = _likeliest(logits, level, wanted)
            if likelihoods is not None and likelihood is not None:
                likelihoods.index_copy_(1, level.nodes, likelihood.expand(rows, -1))
        drafted = d2t.take(candidates)
        tokens.index_copy_(1, level.nodes, drafted)
        if not stopping.continues(level, exists, likelihood):
            break
        frontier = drafted.index_select(1, level.inner), level.above.expand(rows, -1)
    nodes, shape = stopping.kept_nodes(tree, sampled=bool(probs))
    proposal = Proposal(
        tokens=tokens[:, nodes],
        shape=shape,
        draft_sampling=DraftSampling.TOP_K,
        slots=slots[None, nodes],
        likelihoods=None if likelihoods is None else likelihoods[:, nodes],
    )
    if not probs:
        return proposal
    prob_index = _drawn_from(probs, tree, slots)[None, nodes, None].expand(1, -1, shape.children.shape[2])
    kind, joined = draft_config.draft_sampling, torch.cat(probs, 1)
    return replace(proposal, draft_sampling=kind, probs=joined, prob_index=prob_index)


def _drawn_from(probs: list[Tensor], tree: TokenTree, slots: Tensor) -> Tensor:
    """Return, for each node of ``tree``, the index [N] int64 in the joined ``probs`` of its children's distribution.

    Each level has a tensor [B, F, V] in the order ``slots`` in which the drafter ran over the nodes, or [B, 1, V] if
    all nodes of a level share one distribution.
    """
    count = sum(level.shape[1] for level in probs)
    order = slots if count > len(probs) else tree.shape_on(slots.device).depths[0]
    return order.clamp(0, count - 1)


def _likeliest(logits: Tensor, level: TreeLevel, with_likelihood: bool) -> tuple[Tensor, Tensor | None]:
    """Return the draft ids [B, M] of a level's nodes, by rank, and on request their probabilities [B, M]."""
    values, candidates = logits.topk(level.width, dim=-1)
    taken = level.taken_from(logits.shape[1])
    likelihood = None
    if with_likelihood:
        log_probs = (values - logits.logsumexp(-1, keepdim=True)).flatten(1)
        likelihood = log_probs.index_select(1, taken).exp()
    return candidates.flatten(1).index_select(1, taken), likelihood


def _sampled(
    logits: Tensor, level: TreeLevel, draft_config: DraftConfig, drawing: Tensor | None, rng: RandomSource | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sampled draft ids [B, M], a mask [B, M] bool of those that exist, and the distributions [B, F, W].
    ``drawing`` [B, F] bool marks the parents whose children are sampled; None: all."""
    if rng is None:
        raise ValueError("sampled candidates need random numbers; give rng to draft")
    dist = draft_config.sampler.probs(logits.flatten(0, 1)).view(logits.shape)
    drawn_from = dist if drawing is None else torch.where(drawing[..., None], dist, 0.0)
    samples = draw_candidates(drawn_from, level.width, draft_config.draft_sampling, rng).flatten(1)
    samples = samples.index_select(1, level.taken_from(logits.shape[1]))
    return samples.clamp(min=0), samples != MISSING, dist


class _Stopping:
    """Decides which nodes exist in each row, and which frontier nodes get children. ``cuts`` is true if there is a
    threshold, or if candidates are sampled without replacement. If it is false, every node exists, and drafting never
    stops early."""

    def __init__(self, draft_config: DraftConfig, tokens: Tensor) -> None:
        self._threshold, self._prefix = draft_config.confidence_threshold, draft_config.prefix_threshold
        without = draft_config.draft_sampling is DraftSampling.WITHOUT_REPLACEMENT  # may use up a distribution
        self.cuts = self._threshold > 0 or self._prefix > 0 or without
        self.active = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)  # [B, N]: nodes that exist
        self.active[:, 0] = True
        self._expandable = self.active[:, :1]  # [B, F]
        self._path_confidence = torch.ones(len(tokens), 1, device=tokens.device)  # [B, F]: products along paths

    def has_parents(self, source: LogitsSource) -> bool:
        """Apply ``prefix_threshold`` to the nodes expanded last; return False if none of them may get children. Except
        on a CPU, the result is always True, because reading the nodes from the device would wait."""
        if self._prefix == 0:
            return True
        self._path_confidence = self._path_confidence * source.confidence()
        self._expandable = self._expandable & (self._path_confidence >= self._prefix)
        return self._any_expandable()

    def drawing(self, width: int) -> Tensor | None:  # 1 if all parents share one distribution
        """Return the mask [B, width] of distributions from which children are sampled; None if all are."""
        if self._prefix == 0:
            return None
        return self._expandable if width == self._expandable.shape[1] else self._expandable.any(1, keepdim=True)

    def continues(self, level: TreeLevel, exists: Tensor | None, likelihood: Tensor | None) -> bool:
        """Add a level's nodes, apply ``confidence_threshold``, and return False if it leaves no node to draft after.
        ``exists`` marks the sampled nodes that exist, and ``likelihood`` has the drafter's probabilities of top-k
        nodes, [B, M] each. Without ``likelihood``, and on devices other than CPUs, the result is always True."""
        if not self.cuts:
            return True
        children = self._expandable[:, level.parents]
        children = children if exists is None else children & exists
        self.active[:, level.nodes] = children  # a node below the threshold exists, but has no children
        if likelihood is not None:
            children = children & (likelihood >= self._threshold)
        self._expandable, self._path_confidence = children[:, level.inner], self._path_confidence[:, level.above]
        return likelihood is None or self._any_expandable()

    def kept_nodes(self, tree: TokenTree, sampled: bool) -> tuple[Tensor | slice, TreeShape]:
        """Return an index of the nodes of ``tree`` that exist in at least one row, and the shape of the trees. A node
        that does not exist in a row is padding there. Except on a CPU, the index has all nodes, because reading
        ``active`` would wait. With ``sampled``, ``children`` has the width of ``Proposal.prob_index``."""
        active, device = self.active, self.active.device
        shape = tree.shape_on(device)
        if not self.cuts or (is_host(device) and bool(active.all())):
            return slice(None), shape
        if is_host(device):
            nodes = active.any(0).nonzero()[:, 0]
        else:
            nodes, sampled = torch.arange(len(tree), device=device), True
        new_number = torch.zeros(len(tree), dtype=torch.int64, device=device)
        new_number[nodes] = torch.arange(len(nodes), device=device)
        parents = new_number[shape.parents[0].clamp(min=0)[nodes]]
        parents = torch.where(active[:, nodes], parents, -1)
        parents[:, 0] = -1
        return nodes, TreeShape.from_parents(parents, width=shape.children.shape[2] if sampled else None)

    def _any_expandable(self) -> bool:
        return not is_host(self._expandable.device) or bool(self._expandable.any())


def grow_dynamic(
    source: LogitsSource, last_token: Tensor, config: DraftConfig, tree: DynamicTree, d2t: Tensor
) -> Proposal:
    """Return EAGLE-2's tree: expand the likeliest nodes of every level, then keep the likeliest of all scored nodes.

    ``last_token`` [B] are the roots; ``d2t`` [W] maps draft ids to target ids. A node's score is the logarithm of the
    product of the drafter's probabilities along its path, so a parent scores above its children and the kept nodes form
    a tree. All rows get the same number of nodes.
    """
    rows, device = last_token.shape[0], last_token.device
    scores: list[Tensor] = []
    tokens, parents = [last_token[:, None]], [torch.full_like(last_token[:, None], -1)]
    read: list[Tensor] = []  # [B, F] each: the nodes, in the order in which the drafter reads them
    frontier_score = torch.zeros(rows, 1, dtype=wide_dtype(device), device=device)
    frontier_node = torch.zeros_like(tokens[0])
    frontier = tokens[0], frontier_node
    count = 1
    for level in range(1, tree.depth + 1):
        logits = likelihood_logits(source.expand(*frontier), config, d2t, level)
        read.append(frontier_node)
        width = min(tree.width, logits.shape[-1])
        values, candidates = logits.topk(width, dim=-1)
        # A child of probability 1 or 0 must still score below its parent, or a kept node could miss its parent.
        values = (values - logits.logsumexp(-1, keepdim=True)).to(frontier_score.dtype).clamp(-1e4, -1e-9)
        values = values + frontier_score[..., None]
        scores.append(values.flatten(1))
        tokens.append(d2t[candidates].expand(values.shape).flatten(1))
        parents.append(frontier_node.repeat_interleave(width, 1))
        frontier_score, best = scores[-1].topk(min(tree.width, scores[-1].shape[1]), dim=1)
        frontier = tokens[-1].gather(1, best), best // width
        frontier_node = count + best
        count += scores[-1].shape[1]
    best = torch.cat(scores, 1).topk(min(tree.nodes - 1, count - 1), dim=1).indices + 1
    nodes = torch.nn.functional.pad(best.sort(1).values, (1, 0))  # the root, and parents before their children
    new_number = torch.zeros(rows, count, dtype=torch.int64, device=device)
    new_number.scatter_(1, nodes, torch.arange(nodes.shape[1], device=device).expand(rows, -1))
    above = torch.cat(parents, 1).gather(1, nodes)
    order = torch.cat(read, 1)
    slots = torch.full((rows, count), -1, device=device)
    slots.scatter_(1, order, torch.arange(order.shape[1], device=device).expand(rows, -1))
    return Proposal(
        tokens=torch.cat(tokens, 1).gather(1, nodes),
        shape=TreeShape.from_parents(
            torch.where(above < 0, -1, new_number.gather(1, above.clamp(min=0))),
            width=None if is_host(device) else tree.width,
        ),
        draft_sampling=DraftSampling.TOP_K,
        slots=slots.gather(1, nodes),
    )
