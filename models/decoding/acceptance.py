"""Acceptance rules: pure functions from a proposal, the target's distributions and random numbers to an ``Acceptance``.

``speculative`` walks down the tree from the root. Which published rule it computes depends on how the proposal's
candidates (children with the distributions from which they were drawn) were chosen:

- a chain: speculative sampling (Leviathan et al., 2211.17192);
- with replacement: SpecInfer's multi-step sampling (2305.09781), but candidates are tried in the order in which they
  were drawn, not in random order;
- without replacement: Sequoia (2402.12374);
- top-k: EAGLE.

Trees combined from several drafters may mix these. If all candidates are top-k, ``naive_sampling`` accepts as often and
costs less. ``drafthead certify`` enumerates all outcomes of each rule, which proves it lossless or measures its bias.

Shape legend: B rows, N tree nodes (root included), M requested nodes, S candidates at a node, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, Proposal
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.token_tree import NO_CHILD
from drafthead.settings.schema import PositiveShare, settings
from drafthead.system.devices import is_host

Target = Callable[[Tensor], Tensor]
"""Maps nodes of the proposal, [B, M] int64, to the target's distributions after them (with temperature, top-p and so
on), [B, M, V]."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The result of verification. The step commits the accepted drafts and then the bonus, the target's own token."""

    nodes: Tensor  # [B, 1 + D] int64: root and accepted nodes in order, padded with 0
    accepted: Tensor  # [B] int64: accepted drafts, root excluded
    bonus: Tensor  # [B] int64: the target's own token after the last accepted one
    probs: Tensor | None = None  # [B, 1 + D, V] target's distributions after ``nodes``, then zeros
    # Only if requested, and never from ``greedy`` and ``typical``.


@settings(frozen=True, kw_only=True)
class AcceptanceRule:
    """Settings of an acceptance rule."""

    name: Literal["exact", "block", "typical", "lenient"] = "exact"
    """Acceptance rule. ``exact`` and ``block`` keep the target's distribution; ``typical`` and ``lenient`` do not.
    ``block`` verifies a chain as a whole, not token by token. For ``typical`` and ``lenient``, the report gives the
    total variation between output and target, measured on synthetic distributions."""
    epsilon: PositiveShare = 0.09
    """Target probability above which ``typical`` always accepts."""
    delta: PositiveShare = 0.3
    """``typical`` also accepts drafts whose target probability is above this fraction of exp(-entropy)."""
    lenience: PositiveShare = 1.0
    """Lenience l of ``lenient``. A draft is accepted with probability min(1, p / (l q)), from the target's p and the
    drafter's q. 1 is exact."""

    @property
    def lossless(self) -> bool:
        return self.name in ("exact", "block") or (self.name == "lenient" and self.lenience == 1)

    def check(self, draft_config: DraftConfig) -> None:
        if self.name == "block" and not draft_config.is_chain:
            raise UserError("block verification judges a chain as a whole, not a tree that branches; use tree=chain")

    def verify(self, proposal: Proposal, target: Target, rng: RandomSource, return_probs: bool = False) -> Acceptance:
        if self.name == "block":
            return block(proposal, target, rng, return_probs=return_probs)
        if self.name == "typical":
            return typical(proposal, target, rng, epsilon=self.epsilon, delta=self.delta)
        lenience = self.lenience if self.name == "lenient" else 1.0
        if proposal.probs is None and lenience == 1:
            return naive_sampling(proposal, target, rng, return_probs=return_probs)
        return speculative(proposal, target, rng, lenience=lenience, return_probs=return_probs)


def greedy(proposal: Proposal, target_BN: Tensor) -> Acceptance:
    """Accept the longest path on which every draft is the target's greedy choice. Lossless for any draft sampling. A
    node is accepted if it and all its ancestors equal the target's argmax at their parents. Of equal children, the
    first is taken. ``target_BN`` [B, N] int64 has the argmax after every node."""
    parents = proposal.shape.parents.expand(target_BN.shape)
    if is_host(parents.device):
        # A loop takes a tenth of the time of the operations on small tensors below, a quarter of a millisecond.
        targets = target_BN.tolist()
        rows = zip(proposal.tokens.tolist(), targets, parents.tolist(), strict=True)
        paths = [_accepted_path(*row) for row in rows]
        depth = min(proposal.shape.depth, len(proposal.shape) - 1)
        return Acceptance(
            nodes=torch.tensor([path + [0] * (depth + 1 - len(path)) for path in paths]),
            accepted=torch.tensor([len(path) - 1 for path in paths]),
            bonus=torch.tensor([choices[path[-1]] for path, choices in zip(paths, targets, strict=True)]),
        )
    # A draft must equal the argmax after its parent. Padding (parent -1) never matches.
    matches = (proposal.tokens == target_BN.gather(1, parents.clamp(min=0))) & (parents >= 0)
    matches[:, 0] = True
    nodes, accepted, node = _longest(proposal, matches)
    return Acceptance(nodes=nodes, accepted=accepted, bonus=target_BN.gather(1, node[:, None])[:, 0])


def _accepted_path(tokens: list[int], choices: list[int], parents: list[int]) -> list[int]:
    """Return a row's path of nodes for ``greedy``, the root included."""
    depths, last = [0], 0  # -1: a node that is not accepted
    for node, parent in enumerate(parents[1:], start=1):
        accepted = parent >= 0 and depths[parent] >= 0 and tokens[node] == choices[parent]
        depths.append(depths[parent] + 1 if accepted else -1)
        last = node if depths[node] > depths[last] else last
    path = [last]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


def _longest(proposal: Proposal, passes: Tensor, score: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the path to each row's deepest node that passes ([B, N] bool) with all its ancestors, [B, 1 + depth]
    padded with 0, its depth [B], and the node [B]; all int64. Of equally deep nodes, the one with the highest ``score``
    [B, N] is taken; None: the first one."""
    shape = proposal.shape
    rows, count = passes.shape
    ancestors = shape.ancestors.expand(rows, count, count)
    # A node survives when none of its ancestors fails: no Python loop over nodes or depths.
    failures = (ancestors & ~passes[:, None, :]).any(-1)
    reached = torch.where(failures, -1, shape.depths.expand(rows, count))
    accepted, node = reached.max(1)
    if score is not None:
        node = torch.where(reached == accepted[:, None], score, -torch.inf).argmax(1)
    on_path = ancestors.gather(1, node[:, None, None].expand(-1, 1, count))[:, 0]  # nodes are ordered along a path
    index = torch.arange(count, device=passes.device)
    width = min(shape.depth, count - 1) + 1
    order = torch.where(on_path, index, count).sort(1).values[:, :width]
    return order.masked_fill(order == count, 0), accepted, node


def naive_sampling(proposal: Proposal, target: Target, rng: RandomSource, *, return_probs: bool = False) -> Acceptance:
    """Draw the target's own token after each node, and continue while it is one of the drafts.

    SpecInfer's naive sampling (2305.09781, section 4.3). It is lossless for any drafts, because the target draws every
    token. A top-k candidate x is accepted with probability p(x), as by ``speculative``. The n-th token of an answer has
    the same random number as without drafts, so the same seed gives the same answer with any drafter (in float32, up to
    ties of rounding).
    """
    shape, tokens = proposal.shape, proposal.tokens
    levels = min(shape.depth, len(shape) - 1) + 1
    if is_host(tokens.device):
        return _naive_on_host(proposal, target, rng, levels, return_probs)
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    children = shape.children.expand(len(rows), -1, -1)
    node, active = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    bonus, path, probs = torch.zeros_like(rows), [node], []
    for level in range(levels):
        dist = torch.where(active[:, None], target(node[:, None])[:, 0], 0.0)
        probs.append(dist)
        drawn = rng.categorical(dist[:, None], offset=level)[:, 0]
        bonus = torch.where(active, drawn, bonus)
        candidates = children[rows, node]  # [B, S]
        # The walk continues if one of the candidates is the token that the target drew.
        drafted = (candidates != NO_CHILD) & (tokens.gather(1, candidates.clamp(min=0)) == drawn[:, None])
        active = active & drafted.any(1)
        chosen = candidates.gather(1, drafted.int().argmax(1, keepdim=True))[:, 0]
        node = torch.where(active, chosen, 0)
        path.append(node)
    nodes = torch.stack(path[: len(probs)], 1)
    joined = torch.stack(probs, 1) if return_probs else None
    return Acceptance(nodes=nodes, accepted=(nodes != 0).sum(1), bonus=bonus, probs=joined)


def _naive_on_host(
    proposal: Proposal, target: Target, rng: RandomSource, levels: int, return_probs: bool
) -> Acceptance:
    """Compute ``naive_sampling`` on a CPU, where most walks end early, and loops are faster than operations on small
    tensors."""
    tokens, rows = proposal.tokens.tolist(), len(proposal.tokens)
    children = proposal.shape.children.expand(rows, -1, -1).tolist()
    paths, bonus, active, probs = [[0] for _ in tokens], [0] * rows, [True] * rows, []
    for level in range(levels):
        dist = target(torch.tensor([path[-1:] for path in paths]))[:, 0]
        if not all(active):
            dist = torch.where(torch.tensor(active)[:, None], dist, 0.0)
        probs.append(dist)
        drawn = rng.categorical(dist[:, None], offset=level)[:, 0].tolist()
        for row, path in enumerate(paths):
            if not active[row]:
                continue
            bonus[row] = drawn[row]
            # The walk continues if one of the candidates is the token that the target drew.
            same = (c for c in children[row][path[-1]] if c != NO_CHILD and tokens[row][c] == drawn[row])
            child = next(same, NO_CHILD)
            active[row] = child != NO_CHILD
            if active[row]:
                path.append(child)
        if not any(active):
            break
    nodes = torch.tensor([path + [0] * (len(probs) - len(path)) for path in paths])
    joined = torch.stack(probs, 1) if return_probs else None
    accepted = torch.tensor([len(path) - 1 for path in paths])
    return Acceptance(nodes=nodes, accepted=accepted, bonus=torch.tensor(bonus), probs=joined)


def speculative(
    proposal: Proposal, target: Target, rng: RandomSource, *, lenience: float = 1.0, return_probs: bool = False
) -> Acceptance:
    """Walk down the tree from the root: try the children of a node in turn, and go to the first that is accepted.

    A candidate x drawn from q is accepted with probability min(1, p(x) / q(x)). After a rejection, p becomes the
    normalised positive part of p - q (or stays p if that is empty). The bonus is drawn from the last p. ``lenience`` 1
    is lossless. Below 1, the probability is min(1, p(x) / (lenience q(x))), which is not.
    """
    shape = proposal.shape
    tokens = proposal.tokens
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    children = shape.children.expand(len(rows), -1, -1)
    node = torch.zeros_like(rows)
    active = torch.ones_like(rows, dtype=torch.bool)
    dist = target(node[:, None])[:, 0]
    path, probs = [node], [dist]
    on_host = is_host(tokens.device)  # reading a CPU tensor is free, and most walks end early
    for _ in range(min(shape.depth, len(shape) - 1)):
        moved, chosen = torch.zeros_like(active), node
        for candidate in range(children.shape[2]):
            child = children[rows, node, candidate]
            live = active & ~moved & (child != NO_CHILD)
            if on_host and not live.any():
                break
            token = tokens[rows, child]
            q = _candidate_probs(proposal, node, candidate, rows, token)
            p = dist[rows, token]
            q_token = torch.ones_like(p) if q is None else q[rows, token]
            # Bernoulli(min(1, p / q)), in the rows that still try candidates at this node.
            accepted = rng.bernoulli(p, q_token * lenience, live)
            moved, chosen = moved | accepted, torch.where(accepted, child, chosen)
            rejected = live & ~accepted
            if not on_host or rejected.any():
                # Later candidates and the bonus must make up the difference: p becomes norm(max(0, p - q)).
                left = dist.scatter(1, token[:, None], 0.0) if q is None else (dist - q).clamp(min=0)
                dist = torch.where(rejected[:, None], _residual(left, dist), dist)
        active, node = moved, chosen
        if on_host and not active.any():
            break
        dist = torch.where(active[:, None], target(node[:, None])[:, 0], dist)
        path.append(torch.where(active, node, 0))
        probs.append(torch.where(active[:, None], dist, 0.0))
    nodes = torch.stack(path, 1)
    return Acceptance(
        nodes=nodes,
        accepted=(nodes != 0).sum(1),
        bonus=rng.categorical(dist[:, None])[:, 0],
        probs=torch.stack(probs, 1) if return_probs else None,
    )


def _candidate_probs(proposal: Proposal, node: Tensor, candidate: int, rows: Tensor, token: Tensor) -> Tensor | None:
    """Return the distribution [B, V] from which child number ``candidate`` of each row's ``node`` [B] was drawn, or
    None if all are top-k. ``token`` [B] is that child's token, and ``rows`` is 0 to B - 1."""
    if proposal.probs is None or proposal.prob_index is None:
        return None
    prob_index = proposal.prob_index.expand(len(rows), -1, -1)[rows, node]  # [B, S]
    source = prob_index[:, candidate]
    probs = proposal.probs[rows, source.clamp(min=0)]
    if proposal.draft_sampling is DraftSampling.WITHOUT_REPLACEMENT and candidate:
        children = proposal.shape.children.expand(len(rows), -1, -1)[rows, node]
        # Without replacement, q is renormalised over what earlier siblings from the same distribution left.
        for earlier in range(candidate):
            same = (prob_index[:, earlier] == source) & (children[:, earlier] != NO_CHILD)
            drawn = proposal.tokens[rows, children[:, earlier]]
            left = torch.where(same, 0.0, probs[rows, drawn])
            probs = probs.scatter(1, drawn[:, None], left[:, None])
        probs = probs / probs.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where((source < 0)[:, None], _one_hot(probs, token), probs)


def _one_hot(like: Tensor, token: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(1, token[:, None], 1.0)


def _residual(left: Tensor, dist: Tensor) -> Tensor:  # ``left``: positive part of p - q; ``dist``: p
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, dist)


def block(proposal: Proposal, target: Target, rng: RandomSource, *, return_probs: bool = False) -> Acceptance:
    """Verify a chain as one block (Sun et al., 2403.10444).

    Lossless; accepts on average at least as many drafts as ``speculative``. Let w_0 = 1 and
    w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)), and s_i the sum of the positive part of w_i p_{i+1} - q_{i+1}.
    The prefix of i drafts passes with probability s_i / (s_i + 1 - w_i), the whole chain of n drafts with probability
    w_n. The longest prefix that passes is accepted. If it has i < n drafts, the bonus is drawn from the normalised
    positive part of w_i p_{i+1} - q_{i+1}; else from p_{n+1}.
    """
    tokens = proposal.tokens
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    children = proposal.shape.children.expand(len(rows), -1, -1)[..., 0]  # [B, N]: one child per node of a chain
    node, accepted = torch.zeros_like(rows), torch.zeros_like(rows)
    dist = target(node[:, None])[:, 0]
    weight = torch.ones_like(dist[:, 0])
    drafted = _chain_probs(proposal, node, dist)
    path, probs, bonus = [node], [dist], _residual((dist - drafted).clamp(min=0), dist)
    for level in range(1, min(proposal.shape.depth, len(proposal.shape) - 1) + 1):
        child = children[rows, node]
        exists = child != NO_CHILD
        token = tokens[rows, child]
        ratio = weight * dist[rows, token] / drafted[rows, token].clamp(min=torch.finfo(torch.float32).tiny)
        weight = torch.where(exists, ratio.clamp(max=1), weight)
        node = torch.where(exists, child, node)
        dist = target(node[:, None])[:, 0]
        drafted = _chain_probs(proposal, node, dist)
        ends = children[rows, node] == NO_CHILD
        left = (weight[:, None] * dist - drafted).clamp(min=0)
        rest = left.sum(-1)
        # A longer prefix may pass even if a shorter one failed, so a failure does not end the loop.
        accepts = rng.bernoulli(
            torch.where(ends, weight, rest), torch.where(ends, torch.ones_like(weight), rest + 1 - weight), exists
        )
        accepted = torch.where(accepts, level, accepted)
        bonus = torch.where(accepts[:, None], _residual(left, dist), bonus)
        path.append(torch.where(exists, node, 0))
        probs.append(dist)
    within = torch.arange(len(path), device=tokens.device) <= accepted[:, None]
    return Acceptance(
        nodes=torch.where(within, torch.stack(path, 1), 0),
        accepted=accepted,
        bonus=rng.categorical(bonus[:, None])[:, 0],
        probs=torch.where(within[..., None], torch.stack(probs, 1), 0.0) if return_probs else None,
    )


def _chain_probs(proposal: Proposal, node: Tensor, dist: Tensor) -> Tensor:
    """Return the distribution [B, V] of the draft after each row's ``node``; zeros after the last."""
    rows = torch.arange(len(node), device=node.device)
    child = proposal.shape.children.expand(len(node), -1, -1)[rows, node, 0]
    token = proposal.tokens[rows, child]
    drawn = _candidate_probs(proposal, node, 0, rows, token)
    drawn = _one_hot(dist, token) if drawn is None else drawn
    return torch.where((child == NO_CHILD)[:, None], 0.0, drawn)


def typical(
    proposal: Proposal, target: Target, rng: RandomSource, *, epsilon: float = 0.09, delta: float = 0.3
) -> Acceptance:
    """Accept typical drafts (Medusa, 2401.10774). NOT lossless.

    A draft passes if its probability under the target is above min(epsilon, delta * exp(-entropy)), with the entropy of
    the target's distribution p after the parent. The longest path that passes is accepted; of equally long paths, the
    likeliest. The bonus is sampled from p restricted to the tokens that would pass and the likeliest token. The
    reference code always takes the likeliest token; sampling stays nearer to p.
    """
    shape = proposal.shape
    rows, count = proposal.tokens.shape
    parents = shape.parents.expand(rows, count)
    probs = target(torch.arange(count, device=parents.device).expand(rows, count))  # [B, N, V]
    entropy = torch.special.entr(probs).sum(-1)
    threshold = torch.clamp(delta * torch.exp(-entropy), max=epsilon)
    above = parents.clamp(min=0)
    draft_probs = probs.gather(1, above[..., None].expand(-1, -1, probs.shape[-1]))
    draft_probs = draft_probs.gather(2, proposal.tokens[..., None])[..., 0]  # [B, N] of each node after its parent
    # The target's entropy after the parent sets the threshold.
    passes = (draft_probs > threshold.gather(1, above)) & (parents >= 0)
    passes[:, 0] = True
    surprise = torch.where(parents >= 0, draft_probs, 1.0).clamp(min=torch.finfo(torch.float32).tiny).log()
    likelihood = (shape.ancestors.to(surprise.dtype) @ surprise[..., None])[..., 0].expand(rows, count)
    nodes, accepted, node = _longest(proposal, passes, likelihood)
    index = torch.arange(rows, device=node.device)
    dist = probs[index, node]
    likely = (dist > threshold[index, node][:, None]) | (dist == dist.max(-1, keepdim=True).values)
    return Acceptance(nodes=nodes, accepted=accepted, bonus=rng.categorical((dist * likely)[:, None])[:, 0])
