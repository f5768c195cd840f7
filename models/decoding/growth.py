"""Token trees grown from a drafter's next-token logits, level by level, once for all stepwise drafters.

A stepwise drafter only gives logits after the nodes of a frontier. Which candidates become children (the ranks of a
static tree, samples, or the best of a dynamic tree) and where drafting stops is decided here, so that every head
and draft model has every kind of tree.

Shape legend: B rows, F frontier nodes, W draft vocabulary, V target vocabulary, N nodes, M nodes of a level.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from drafthead.models.cache.kv_cache import KVCache, RaggedCache
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, DynamicTree, Proposal, StateT
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.token_tree import TokenTree, TreeShape

MISSING = -1
"""A candidate that does not exist: the distribution has fewer tokens than children are wanted."""


def draw_candidates(probs: Tensor, count: int, kind: DraftSampling, rng: RandomSource) -> Tensor:
    """``count`` samples of every distribution: [B, F, W] -> [B, F, count] int64, ``MISSING`` where it is used up.

    With replacement they are independent (SpecInfer, 2305.09781); without, a drawn token is removed and the rest
    renormalised (Sequoia, 2402.12374). Verification must know which.
    """
    if kind is DraftSampling.WITH_REPLACEMENT:
        rows, parents, _ = probs.shape
        repeated = probs[:, :, None].expand(-1, -1, count, -1).flatten(1, 2)
        return rng.categorical(repeated).view(rows, parents, count)
    remaining, drawn = probs, []
    for _ in range(count):
        token = rng.categorical(remaining)
        exists = remaining.gather(-1, token[..., None])[..., 0] > 0
        drawn.append(torch.where(exists, token, MISSING))
        remaining = remaining.scatter(-1, token[..., None], 0.0)
    return torch.stack(drawn, -1)


@dataclass(frozen=True)
class TreeLevel:
    """One level of a static tree."""

    nodes: Tensor
    """[M] nodes on the level, in order."""
    parents: Tensor
    """[M] place of each one's parent in the frontier above."""
    width: int
    """Candidates needed of a parent."""
    taken: Tensor
    """[M] which of the parents' candidates (or samples), one parent after the other, each node takes."""
    taken_shared: Tensor
    """[M] the same where all parents share one distribution."""
    inner: Tensor
    """[F] those of ``nodes`` that have children, as places on this level: the next frontier."""
    above: Tensor
    """[F] their parents' places in the frontier above."""


@lru_cache(maxsize=512)
def tree_levels(tree: TokenTree, device: torch.device, sampled: bool, most: int) -> tuple[TreeLevel, ...]:
    """The levels of ``tree``, whose ranks name candidates (of ``most``); a sample's counts its earlier siblings."""
    tensor = partial(torch.tensor, dtype=torch.int64, device=device)
    levels = []
    frontier = [0]
    for depth in range(1, tree.depth + 1):
        nodes = [n for n, path in enumerate(tree.paths) if len(path) == depth]
        parents = [frontier.index(tree.parents[n]) for n in nodes]
        if sampled:
            ranks = [parents[:place].count(parent) for place, parent in enumerate(parents)]
        else:
            ranks = [min(tree.ranks[n], most - 1) for n in nodes]
        width = max(ranks) + 1
        inner = [place for place, n in enumerate(nodes) if n in tree.parents]
        levels.append(
            TreeLevel(
                nodes=tensor(nodes),
                parents=tensor(parents),
                width=width,
                taken=tensor([parent * width + rank for parent, rank in zip(parents, ranks, strict=True)]),
                taken_shared=tensor(ranks),
                inner=tensor(inner),
                above=tensor([parents[place] for place in inner]),
            )
        )
        frontier = [nodes[place] for place in inner]
    return tuple(levels)


def kept_nodes(tree: TokenTree, active: Tensor, sampled: bool = False) -> tuple[Tensor, TreeShape]:
    """The nodes of a static tree that are ``active`` ([B, N] bool) in some row, [n] int64, and their trees.

    In other rows they are padding. ``sampled``: nodes keep as many places for children as the tree has.
    """
    device, shape = active.device, tree.shape_on(active.device)
    kept = active.any(0).nonzero()[:, 0]
    if bool(active.all()):
        return kept, shape
    place = torch.zeros(len(tree), dtype=torch.int64, device=device)
    place[kept] = torch.arange(len(kept), device=device)
    parents = place[torch.tensor((0, *tree.parents[1:]), device=device)[kept]]
    parents = torch.where(active[:, kept], parents, -1)
    parents[:, 0] = -1
    return kept, TreeShape.from_parents(parents, width=shape.children.shape[2] if sampled else None)


class DraftPass(Protocol):
    """One step's drafting in progress: gives logits for ever deeper nodes."""

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Draft logits after the nodes of the next level; the first one is the root alone.

        Args:
            tokens: [B, F] int64 target ids of the nodes to expand.
            parents: [B, F] int64, each node's parent as its place in the frontier before; the root's is 0.

        Returns:
            [B, F, W], or [B, 1, W] when all nodes of the level have the same distribution: then its candidates are
            found once and shared. Sharing samples between parents is exact, since a walk passes one of them only and
            arrives there by what happened on the levels above.
        """
        ...


class ConfidentPass(DraftPass, Protocol):
    """A pass that says how likely drafts are accepted."""

    def confidence(self) -> Tensor:
        """[B, F] (or [B, 1]): P(a child is accepted) of the nodes whose logits were given last.

        It may depend on these nodes and on what stands before them, and on nothing after.
        """
        ...


class UsesTargetCache(ABC):
    """What a drafter adds to the contract when it reads or writes the target's keys and values."""

    @abstractmethod
    def extra_cache_slots(self, draft_config: DraftConfig) -> int:
        """Positions that drafting needs in the target's cache besides the nodes of the tree."""

    @abstractmethod
    def attach(self, state: Any, cache: KVCache | RaggedCache) -> Any:
        """The same state over the target's ``cache``; again each time that decoding continues with fewer rows."""


class EarlyExit(UsesTargetCache):
    """A drafter that begins the target's own pass while it drafts."""

    early_exit_layers: int
    """Layers of the target's pass that it does, once attached to the target's cache."""

    @abstractmethod
    def finish(self, draft_pass: DraftPass, proposal: Proposal) -> Proposal:
        """The proposal with what drafting has computed of the target's pass over its nodes."""


class StepwiseDrafter(Drafter[StateT]):
    """A drafter with next-token logits of its own."""

    d2t: Tensor
    """[W] int64: target id of every draft id."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Size V of the target's vocabulary, over which probs are given."""

    @abstractmethod
    def start(self, state: StateT, last_token: Tensor, draft_config: DraftConfig) -> DraftPass:
        """Start drafting after ``last_token`` ([B])."""

    def draft(
        self, state: StateT, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None
    ) -> Proposal:
        if draft_config.depth > self.depth:
            raise ValueError(f"the tree is {draft_config.depth} deep, but the head drafts {self.depth} positions")
        if draft_config.depth == 0:
            return root_only(last_token)
        with torch.inference_mode():
            draft_pass = self.start(state, last_token, draft_config)
            proposal = grow(draft_pass, last_token, draft_config, self.d2t, self.vocab_size, rng)
            return self.finish(draft_pass, proposal) if isinstance(self, EarlyExit) else proposal


def root_only(last_token: Tensor) -> Proposal:
    """Nothing drafted: the target reads ``last_token`` ([B]) alone."""
    shape = TokenTree.chain(0).shape_on(last_token.device)
    return Proposal(tokens=last_token[:, None], shape=shape, draft_sampling=DraftSampling.TOP_K)


def grow(
    draft_pass: DraftPass,
    last_token: Tensor,
    draft_config: DraftConfig,
    d2t: Tensor,
    vocabulary: int,
    rng: RandomSource | None,
) -> Proposal:
    """The tree that ``draft_config`` asks for; ``vocabulary`` is V, and ``rng`` is for sampled candidates.

    In a static one a node takes its parent's candidate of the node's rank, or one of the parent's samples. Samples are
    of the drafter's warped distribution, which goes with them: every parent's is one row of ``probs``, in the order of
    the parents. One that does not exist (the distribution has fewer tokens than children are wanted) becomes padding.
    With ``confidence_threshold``, a node whose probability is lower is kept, but gets no children; with
    ``prefix_threshold``, a node gets none where the drafter is not confident of its path: whether it does is known
    before they are drawn. Drafting ends when no node of any row has children. Then the trees of the rows differ.
    """
    if isinstance(tree := draft_config.tree, DynamicTree):
        return grow_dynamic(draft_pass, last_token, tree, d2t)
    kind, device, rows = draft_config.draft_sampling, last_token.device, len(last_token)
    threshold, prefix = draft_config.confidence_threshold, draft_config.prefix_threshold
    cuts = threshold > 0 or prefix > 0 or kind is DraftSampling.WITHOUT_REPLACEMENT
    tokens = last_token.new_zeros(rows, len(tree))
    tokens[:, 0] = last_token
    active = torch.zeros(tokens.shape, dtype=torch.bool, device=device)
    active[:, 0] = True
    expandable = active[:, :1]  # of the frontier, whose nodes these are:
    places = torch.zeros(1, dtype=torch.int64, device=device)
    reached = torch.ones(rows, 1, device=device)  # products of the confidences along the frontier's paths
    probs: list[Tensor] = []
    prob_index = torch.zeros(len(tree), dtype=torch.int64, device=device)
    frontier = last_token[:, None], torch.zeros_like(last_token[:, None])
    for level in tree_levels(tree, device, kind is not DraftSampling.TOP_K, most=len(d2t)):
        logits = draft_pass.step(*frontier)
        if prefix > 0:
            reached = reached * draft_pass.confidence()  # type: ignore[attr-defined]
            if not (expandable := expandable & (reached >= prefix)).any():
                break
        width = logits.shape[1]  # 1 where all parents share one distribution
        taken = level.taken_shared if width == 1 else level.taken
        exists: Tensor | None = None
        if kind is DraftSampling.TOP_K:
            logits = logits.float()
            values, candidates = logits.topk(level.width, dim=-1)
        elif rng is None:
            raise ValueError("sampled candidates need a random source")
        else:
            wanted = dist = draft_config.sampler.probs(logits.flatten(0, 1)).view(logits.shape)
            if prefix > 0:  # a parent that gets no children draws none
                drawing = expandable if width == expandable.shape[1] else expandable.any(1, keepdim=True)
                wanted = torch.where(drawing[..., None], dist, 0.0)
            candidates = draw_candidates(wanted, level.width, kind, rng)
            exists = candidates.flatten(1).index_select(1, taken) != MISSING
            candidates = candidates.clamp(min=0)
            count = sum(part.shape[1] for part in probs)
            prob_index[places] = torch.arange(count, count + width, device=device)
            # Always, also where draft ids are the target's own: to find that out would wait for the device.
            probs.append(dist.new_zeros(rows, width, vocabulary).index_copy_(2, d2t, dist))
        drafted = d2t.take(candidates.flatten(1).index_select(1, taken))
        tokens.index_copy_(1, level.nodes, drafted)
        if cuts:
            found = expandable[:, level.parents]
            found = found if exists is None else found & exists
            active[:, level.nodes] = found
            if threshold > 0:
                log_probs = (values - logits.logsumexp(-1, keepdim=True)).flatten(1)
                found = found & (log_probs.index_select(1, taken).exp() >= threshold)
            expandable, reached = found[:, level.inner], reached[:, level.above]
            if threshold > 0 and not expandable.any():
                break
        frontier = drafted.index_select(1, level.inner), level.above.expand(rows, -1)
        if probs:
            places = level.nodes.index_select(0, level.inner)
    shape = tree.shape_on(device)
    if cuts:
        kept, shape = kept_nodes(tree, active, sampled=bool(probs))
        tokens, prob_index = tokens[:, kept], prob_index[kept]
    return Proposal(
        tokens=tokens,
        shape=shape,
        draft_sampling=kind if probs else DraftSampling.TOP_K,
        probs=torch.cat(probs, 1) if probs else None,
        prob_index=prob_index[None, :, None].expand(1, -1, shape.children.shape[2]) if probs else None,
    )


def grow_dynamic(draft_pass: DraftPass, last_token: Tensor, tree: DynamicTree, d2t: Tensor) -> Proposal:
    """EAGLE-2's tree: expand the likeliest nodes of every level, then keep the likeliest of all that were scored.

    A node's score is the product of the drafter's probabilities along its path, so every parent scores above its
    children and the kept nodes form a tree. All rows get the same number of nodes.
    """
    rows, device = last_token.shape[0], last_token.device
    scores: list[Tensor] = []
    tokens, parents = [last_token[:, None]], [torch.full_like(last_token[:, None], -1)]
    frontier_score = torch.zeros(rows, 1, dtype=torch.float64, device=device)
    frontier_node = torch.zeros_like(tokens[0])
    frontier = tokens[0], frontier_node
    count = 1
    for _ in range(tree.depth):
        logits = draft_pass.step(*frontier).float()
        width = min(tree.width, logits.shape[-1])
        values, candidates = logits.topk(width, dim=-1)
        # A certain child must still score below its parent, or the best nodes would be no tree.
        values = (values - logits.logsumexp(-1, keepdim=True)).double().clamp(max=-1e-9) + frontier_score[..., None]
        scores.append(values.flatten(1))
        tokens.append(d2t[candidates].expand(values.shape).flatten(1))
        parents.append(frontier_node.repeat_interleave(width, 1))
        frontier_score, best = scores[-1].topk(min(tree.width, scores[-1].shape[1]), dim=1)
        frontier = tokens[-1].gather(1, best), best // width
        frontier_node = count + best
        count += scores[-1].shape[1]
    best = torch.cat(scores, 1).topk(min(tree.nodes - 1, count - 1), dim=1).indices + 1
    kept = torch.nn.functional.pad(best.sort(1).values, (1, 0))  # the root, and parents before their children
    place = torch.zeros(rows, count, dtype=torch.int64, device=device)
    place.scatter_(1, kept, torch.arange(kept.shape[1], device=device).expand(rows, -1))
    above = torch.cat(parents, 1).gather(1, kept)
    return Proposal(
        tokens=torch.cat(tokens, 1).gather(1, kept),
        shape=TreeShape.from_parents(torch.where(above < 0, -1, place.gather(1, above.clamp(min=0)))),
        draft_sampling=DraftSampling.TOP_K,
    )
