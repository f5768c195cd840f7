"""Growing trees by cost (``cost_tree.py``), level by level.

A level is drafted only while it is expected to pay. Drafts that do not exist yet are expected to be accepted as often
as on average (``AcceptanceModel.mean``), so drafting nothing at all is a choice, too. An example for one row::

    root: expected drafts pay          -> draft level 1: "the" 0.8, "a" 0.1, "an" 0.02
    below "the": 0.8 * 0.45 expected   -> draft level 2: "cat" 0.8 * 0.7, "dog" 0.8 * 0.1
    below "cat": 0.56 * 0.45 expected, which is less than the price of the level -> stop
    all drafts in one order: the 0.8, cat 0.56, a 0.1, dog 0.08, an 0.02 -> the first two pay

**Likeliest drafts** (``top_k``) are a function of the text, so any rule may choose among them. The drafts of other
drafters, such as prompt lookup, compete in the same order. Where the head drafts as well, both probabilities of such a
draft are pooled, and the head's other candidates share what is left. The rows of a batch are verified in one rectangle,
so all get as many nodes, and the gains of all rows count together.

**Drawn drafts** stay exact only if the rule never looks at a draft before it decides to verify it. The number of a
node's children is therefore decided before they are drawn, and every drawn child is verified. Scores come from the
node's distribution, never from the drawn token. Every row decides by itself.

Shape legend: B rows, F frontier nodes (nodes of a level that get children), S candidates of a node, N nodes of a tree,
W draft vocabulary, V target vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafthead.models.decoding.candidates import MISSING, LogitsSource, draw_candidates, likelihood_logits, root_only
from drafthead.models.decoding.cost_tree import MOST, AcceptanceModel, CostTree, best_count
from drafthead.models.decoding.coupling import Coupling, chance_of
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, Proposal
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.token_tree import TokenTree, TreeShape

AHEAD = 8  # levels beyond the drafted ones whose expected drafts are considered
SMALL = 0.5  # share of a node's mean price below which a node gets no children
EXPECTED = 4  # nodes of a level that are expected to get children, and children of each


class DraftTree:
    """The drafts of one row. Node 0 is the root; a parent stands before its children."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.scores = [root], [-1], [1.0]
        self.slots = [-1]  # the order in which the drafter runs over the nodes; -1: it does not
        self.laws = [0]  # of drawn drafts: the number of the distribution from which a node's children were drawn
        self._depths, self._levels = [0], [[0]]
        self._known: dict[tuple[int, int], int] = {}

    def add(self, token: int, parent: int, score: float) -> int:
        """Add a draft; return its number."""
        node, depth = len(self.tokens), self._depths[parent] + 1
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.slots.append(-1)
        self.laws.append(0)
        self._depths.append(depth)
        if depth == len(self._levels):
            self._levels.append([])
        self._levels[depth].append(node)
        return node

    def merge(self, token: int, parent: int, score: float) -> int:
        """Add a draft, unless the tree has it: then it gets the larger of both scores. Return its number."""
        node = self._known.get((parent, token))
        if node is None:
            node = self._known[parent, token] = self.add(token, parent, score)
        self.scores[node] = max(self.scores[node], score)
        return node

    def rescale(self, node: int, score: float) -> None:
        """Give a draft another ``score``, and scale those of the drafts below it."""
        factor, below = score / self.scores[node], {node}
        for child in range(node, len(self.scores)):
            if child == node or self.parents[child] in below:
                below.add(child)
                self.scores[child] *= factor

    def level(self, depth: int, parents: Sequence[int]) -> list[int]:
        """Return the nodes of ``depth`` that are children of ``parents``, the best first."""
        nodes = self._levels[depth] if depth < len(self._levels) else []
        return sorted((n for n in nodes if self.parents[n] in parents), key=self.scores.__getitem__, reverse=True)

    def open_scores(self, nodes: Sequence[int]) -> list[float]:
        """Return the scores of ``nodes``, each without those of its children: what further children can gain."""
        left = {node: self.scores[node] for node in nodes}
        for child, parent in enumerate(self.parents):
            if parent in left:
                left[parent] -= self.scores[child]
        return [max(0.0, score) for score in left.values()]

    def best(self, drafts: int) -> list[int]:
        """Return the root and the best ``drafts`` nodes, in their order. Of equal ones, a parent precedes its child."""
        order = sorted(range(1, len(self.scores)), key=self.scores.__getitem__, reverse=True)
        return [0, *sorted(order[:drafts])]


def other_drafts(
    last_token: Tensor, parts: Sequence[tuple[Proposal, AcceptanceModel, Coupling | None]]
) -> list[DraftTree]:
    """Return each row's drafts of several proposals, whose ``likelihoods`` their ``AcceptanceModel`` scores. With a
    ``Coupling``, the likelihoods are those without the random numbers."""
    trees = [DraftTree(token) for token in last_token.tolist()]
    for proposal, model, coupling in parts:
        if len(proposal.shape) == 1:
            continue
        shape, likelihoods = proposal.shape, proposal.likelihoods
        if likelihoods is None:
            likelihoods = torch.full(proposal.tokens.shape, 0.5)
        depths = shape.depths.expand(len(trees), -1)
        known = [None] * len(trees) if coupling is None else coupling.at(proposal.tokens, depths, shape.depth).tolist()
        columns = proposal.tokens, shape.parents.expand(len(trees), -1), depths, likelihoods
        rows = zip(trees, known, *(column.tolist() for column in columns), strict=True)
        for tree, numbers_of, tokens, above, levels, chances in rows:
            numbers = [0] * len(tokens)
            for n, (token, parent, level, chance) in enumerate(zip(tokens, above, levels, chances, strict=True)):
                if parent >= 0:
                    prob = float(model.probs(np.array([chance]), level)[0])
                    prob = prob if numbers_of is None else chance_of(prob, numbers_of[n])
                    numbers[n] = tree.merge(token, numbers[parent], tree.scores[numbers[parent]] * prob)
    return trees


class _Choice(NamedTuple):
    """The best drafts among those that exist and those that are expected."""

    drafts: int  # of each row
    lowest: list[float]  # the lowest score of a draft that pays, by row; infinite if none does
    deepest: int  # levels after which drafting ends; those that exist if no other pays


class _Rule:
    """The choice of drafts for the rows of a batch, which are verified together."""

    def __init__(self, config: DraftConfig, rows: int) -> None:
        assert isinstance(config.tree, CostTree)
        self.tree, self.model, self.pooled = config.tree, config.tree.costs.acceptance, config.tree.costs.pooled
        self.prices = self.tree.costs.prices(rows)
        self.rate = self.prices.rate(config.speedup or self.prices.speedup)
        seconds = self.prices.verify[: self.tree.nodes]
        self.least = SMALL * self.rate * (seconds[-1] - seconds[0]) / max(1, len(seconds) - 1) / rows

    def best(self, scores: Sequence[Sequence[float]], verified: int = 0) -> tuple[int, float]:
        """Return how many drafts of each row pay, if the rows have drafts of ``scores``, and the tokens that they add
        after the price of the step's time. ``verified`` other drafts of each row are verified in any case."""
        ordered = [sorted(row, reverse=True) for row in scores]
        gains = ordered[0] if len(ordered) == 1 else [sum(each) for each in zip_longest(*ordered, fillvalue=0.0)]
        return best_count(gains, self.prices.verify[verified : self.tree.nodes], self.rate)

    def choose(
        self, scores: Sequence[list[float]], frontier: Sequence[list[float]], levels: int, verified: int = 0
    ) -> _Choice:
        """Choose among the drafts of ``scores`` and the further children that nodes of the ``open_scores`` ``frontier``
        are expected to have. ``levels`` levels are drafted."""
        draft, every = self.prices.draft, [list(row) for row in scores]
        count, value = self.best(every, verified)
        deepest, lengths = levels, [len(row) for row in every]
        for level in range(levels + 1, min(self.tree.depth, levels + AHEAD) + 1):
            means = self.model.expected(level)[:EXPECTED]
            frontier = [
                [score * mean for score in sorted(row, reverse=True)[:EXPECTED] for mean in means] for row in frontier
            ]
            if sum(map(sum, frontier)) <= self.rate * (draft[level] - draft[level - 1]):
                break  # the level does not pay, whatever verification costs; nor does a deeper one
            for row, expected in zip(every, frontier, strict=True):
                row += expected
            more, gain = self.best(every, verified)
            gain -= self.rate * (draft[level] - draft[levels])
            if gain > value:
                count, value, deepest = more, gain, level
                lengths = [len(row) for row in every]
        ordered = [sorted(row[:length], reverse=True) for row, length in zip(every, lengths, strict=True)]
        lowest = [row[min(count, len(row)) - 1] if count and row else np.inf for row in ordered]
        return _Choice(count, lowest, deepest)


def grow_by_cost(
    source: LogitsSource,
    start: Callable[[int], object],
    last_token: Tensor,
    config: DraftConfig,
    d2t: Tensor,
    vocabulary: int,
    rng: RandomSource | None = None,
    others: Sequence[DraftTree] = (),
    verified: int = 0,
) -> Proposal:
    """Return the trees that pay.

    ``start(levels)`` is called before the first call of ``source.expand``, if any level pays. ``d2t`` and
    ``vocabulary`` are those of ``growth.grow``. The likeliest drafts compete with ``others``, one item per row. If
    drafts are drawn, ``verified`` other drafts of each row are verified in any case."""
    if config.draft_sampling is not DraftSampling.TOP_K:
        if rng is None:
            raise ValueError("sampled candidates need random numbers; give rng to draft")
        return _draw(source, start, last_token, config, d2t, vocabulary, rng, verified)
    rule, trees = _Rule(config, len(last_token)), others or [DraftTree(token) for token in last_token.tolist()]
    levels, last = 0, rule.tree.depth
    frontier = _Frontier.of_roots(trees)
    while levels < last:
        if levels == 0 or not source.drafts_at_once:
            above = frontier.nodes if levels == 0 else frontier.below(trees, levels)
            left = [tree.open_scores(nodes) for tree, nodes in zip(trees, above, strict=True)]
            choice = rule.choose([tree.scores[1:] for tree in trees], left, levels)
            if choice.deepest == levels:
                break
        if levels == 0:
            last = choice.deepest if source.drafts_at_once else last
            start(last)
        else:
            chance = rule.model.expected(levels + 1)[0]
            # If all levels are drafted already, a further node costs only its own candidates.
            lowest = [rule.least] * len(trees) if source.drafts_at_once else choice.lowest
            frontier = frontier.next(trees, levels, chance, lowest, rule.tree.width)
            if not frontier.size:
                break
        levels += 1
        logits = frontier.read(source, trees, d2t.device)
        logits = likelihood_logits(logits, config, d2t, levels)
        values, candidates = logits.topk(min(rule.tree.width, logits.shape[-1]), dim=-1)
        chances = (values - logits.logsumexp(-1, keepdim=True)).exp().cpu().numpy()
        probs, tokens = rule.model.probs(chances, levels).tolist(), d2t.take(candidates).tolist()
        for row, (tree, nodes) in enumerate(zip(trees, frontier.nodes, strict=True)):
            for at, node in enumerate(nodes):
                law = min(at, len(probs[row]) - 1)  # all nodes of a level may share one distribution
                _add_candidates(tree, node, dict(zip(tokens[row][law], probs[row][law], strict=True)), rule, levels)
    return _likeliest(rule, last_token, trees, last if levels and source.drafts_at_once else levels)


def _add_candidates(tree: DraftTree, node: int, chances: dict[int, float], rule: _Rule, depth: int) -> None:
    """Add a head's candidates of ``depth`` below ``node``; ``chances`` has the probability P of each token. Children
    that other drafters gave to the node get pooled scores."""
    parent, least = tree.scores[node], min(chances.values())
    for copied in tree.level(depth, [node]):
        own = chances.pop(tree.tokens[copied], None)
        chance = rule.pooled.prob(tree.scores[copied] / parent, least if own is None else own, depth)
        tree.rescale(copied, parent * chance)
        left = (1 - chance) / (1 - min(own or 0.0, MOST))  # of the probability, for the other candidates
        chances = {token: p * left for token, p in chances.items()}
    for token, chance in chances.items():
        tree.add(token, node, parent * chance)


def price_drafts(last_token: Tensor, config: DraftConfig, others: Sequence[DraftTree]) -> Proposal:
    """Return the trees of those drafts of ``others``, one item per row, that pay."""
    return _likeliest(_Rule(config, len(last_token)), last_token, others, 0)


class _Frontier:
    """The nodes of each row that get children on the next level."""

    def __init__(self, nodes: list[list[int]], above: list[list[int]], read: int) -> None:
        self.nodes = nodes
        self._above = above  # the index of each node's parent in the previous frontier
        self._read = read  # number of nodes that the drafter has run over before
        self.size = max(map(len, nodes))

    @classmethod
    def of_roots(cls, trees: Sequence[DraftTree]) -> "_Frontier":
        return cls([[0] for _ in trees], [[0] for _ in trees], 0)

    def below(self, trees: Sequence[DraftTree], depth: int) -> list[list[int]]:
        """Return the children of these nodes, which have ``depth``; the best first."""
        return [tree.level(depth, nodes) for tree, nodes in zip(trees, self.nodes, strict=True)]

    def next(
        self, trees: Sequence[DraftTree], depth: int, chance: float, lowest: Sequence[float], width: int
    ) -> "_Frontier":
        """Return up to ``width`` children of these nodes, of ``depth``, of which the likeliest child, accepted with
        ``chance`` on average, would be among the best drafts, whose lowest scores by row are ``lowest``."""
        nodes, above = [], []
        for tree, parents, level, least in zip(trees, self.nodes, self.below(trees, depth), lowest, strict=True):
            nodes.append([n for n in level[:width] if tree.scores[n] * chance >= least])
            above.append([parents.index(tree.parents[n]) for n in nodes[-1]])
        return _Frontier(nodes, above, self._read + self.size)

    def read(self, source: LogitsSource, trees: Sequence[DraftTree], device: torch.device) -> Tensor:
        """Return the logits [B, F, W] after the nodes, and note the order in which the drafter runs over them. Rows
        with fewer nodes are padded by their roots."""
        tokens = []
        for tree, nodes in zip(trees, self.nodes, strict=True):
            for at, node in enumerate(nodes):
                tree.slots[node] = self._read + at
            tokens.append(_padded([tree.tokens[n] for n in nodes], self.size, tree.tokens[0]))
        above = [_padded(row, self.size, 0) for row in self._above]
        return source.expand(torch.tensor(tokens, device=device), torch.tensor(above, device=device))


def _likeliest(rule: _Rule, last_token: Tensor, trees: Sequence[DraftTree], levels: int) -> Proposal:
    """Return the trees of the drafts that pay, after the drafter has drafted ``levels`` levels."""
    count = rule.best([tree.scores[1:] for tree in trees])[0]
    kept = [tree.best(count) for tree in trees]
    gains = [sum(tree.scores[n] for n in nodes) for tree, nodes in zip(trees, kept, strict=True)]
    shape, tokens, slots = _nodes(trees, kept)
    device = last_token.device
    return Proposal(
        tokens=tokens.to(device),
        shape=shape.to(device),
        draft_sampling=DraftSampling.TOP_K,
        slots=slots.to(device) if levels else None,
        forecast=rule.prices.forecast(gains, tokens.shape[1] - 1, levels),
    )


def _nodes(trees: Sequence[DraftTree], kept: list[list[int]]) -> tuple[TreeShape, Tensor, Tensor]:
    """Return the shape of the ``kept`` nodes of each row, their tokens and slots [B, N]; padding stands last."""
    size = max(map(len, kept))
    parents = []
    for tree, nodes in zip(trees, kept, strict=True):
        number = {node: n for n, node in enumerate(nodes)}
        parents.append(_padded([-1, *(number[tree.parents[n]] for n in nodes[1:])], size, -1))
    columns = [
        [_padded([values[n] for n in nodes], size, fill) for values, nodes in zip(column, kept, strict=True)]
        for column, fill in (([tree.tokens for tree in trees], 0), ([tree.slots for tree in trees], -1))
    ]
    alike = all(row == parents[0] for row in parents)
    shape = _shape_of(tuple(parents[0])) if alike else TreeShape.from_parents(torch.tensor(parents))
    tokens, slots = map(torch.tensor, columns)
    return shape, tokens, slots


def _padded(values: list[int], size: int, fill: int) -> list[int]:
    return values + [fill] * (size - len(values))


@lru_cache(maxsize=1024)
def _shape_of(parents: tuple[int, ...]) -> TreeShape:
    """Return the shape of a tree that all rows have. Few trees are frequent, and a shape takes many operations."""
    chain = TokenTree.chain(len(parents) - 1)
    return chain.shape if parents == chain.parents else TreeShape.from_parents(torch.tensor([parents]))


def _draw(
    source: LogitsSource,
    start: Callable[[int], object],
    last_token: Tensor,
    config: DraftConfig,
    d2t: Tensor,
    vocabulary: int,
    rng: RandomSource,
    others: int,
) -> Proposal:
    """Return trees of drawn drafts. ``others`` drafts of each row are verified in any case."""
    rule, trees = _Rule(config, 1), [DraftTree(token) for token in last_token.tolist()]
    choice = rule.choose([[]], [[1.0]], 0, others)
    if choice.deepest == 0:
        return root_only(last_token, rule.prices.forecast([1.0] * len(trees), others, 0))
    last = choice.deepest if source.drafts_at_once else rule.tree.depth
    start(last)
    frontier, probs, level = _Frontier.of_roots(trees), list[Tensor](), 0
    while level < last:
        level += 1
        logits = frontier.read(source, trees, d2t.device)
        dist = config.sampler.probs(logits.flatten(0, 1)).view(logits.shape)
        first = sum(each.shape[1] for each in probs)
        probs.append(dist.new_zeros(*dist.shape[:2], vocabulary).index_copy_(2, d2t, dist))
        likeliest = dist.topk(min(rule.tree.width, dist.shape[-1]), dim=-1).values.cpu().numpy()
        # A child is expected to be accepted as often as the token of its rank, but not more often than the one before.
        chances = (np.minimum.accumulate(rule.model.probs(likeliest, level), -1) * (likeliest > 0)).tolist()
        choices = [
            _children(rule, tree, nodes, row, level, others)
            for tree, nodes, row in zip(trees, frontier.nodes, chances, strict=True)
        ]
        counts = torch.tensor([_padded(count, frontier.size, 0) for count, _ in choices], device=dist.device)  # [B, F]
        if not counts.any():
            break
        drawn = counts if dist.shape[1] > 1 else counts.amax(1, keepdim=True)
        samples = draw_candidates(dist, int(counts.max()), config.draft_sampling, rng, drawn)
        tokens, exists = d2t.take(samples.clamp(min=0)).tolist(), (samples != MISSING).tolist()
        for row, (tree, nodes, (children, _)) in enumerate(zip(trees, frontier.nodes, choices, strict=True)):
            for at, (node, count) in enumerate(zip(nodes, children, strict=True)):
                law = min(at, dist.shape[1] - 1)
                tree.laws[node] = first + law
                for n in range(count):
                    if exists[row][law][n]:
                        tree.add(tokens[row][law][n], node, tree.scores[node] * chances[row][law][n])
        if max(choice.deepest for _, choice in choices) == level:
            break
        # A row's drafts must not depend on other rows: it stops alone.
        lowest = [choice.lowest[0] if choice.deepest > level else np.inf for _, choice in choices]
        frontier = frontier.next(trees, level, rule.model.expected(level + 1)[0], lowest, rule.tree.width)
        if not frontier.size:
            break
    levels = last if source.drafts_at_once else level
    return _drawn(rule, last_token, trees, config.draft_sampling, probs, levels, others)


def _children(
    rule: _Rule, tree: DraftTree, nodes: list[int], chances: list[list[float]], level: int, others: int
) -> tuple[list[int], _Choice]:
    """Return the number of children that each frontier node of a row gets on ``level``, and the choice behind it.
    ``chances`` are the expected ones of the children of each node, or those of all nodes."""
    scores = [
        (tree.scores[node] * chance, -at)
        for at, node in enumerate(nodes)
        for chance in chances[min(at, len(chances) - 1)]
    ]
    own = [score for score, _ in scores]
    choice, counts = rule.choose([own], [own], level, others + len(tree.tokens) - 1), [0] * len(nodes)
    for score, at in sorted(scores, reverse=True)[: choice.drafts]:
        counts[-at] += score >= choice.lowest[0]
    return counts, choice


def _drawn(
    rule: _Rule,
    last_token: Tensor,
    trees: list[DraftTree],
    draft_sampling: DraftSampling,
    probs: list[Tensor],
    levels: int,
    others: int,
) -> Proposal:
    """Return all drafts of ``trees``, of which every one is verified."""
    drafts = max(len(tree.tokens) for tree in trees) - 1
    forecast = rule.prices.forecast([sum(tree.scores) for tree in trees], others + drafts, levels)
    if drafts == 0:
        return root_only(last_token, forecast)
    shape, tokens, slots = _nodes(trees, [[*range(len(tree.tokens))] for tree in trees])
    laws = torch.tensor([_padded(tree.laws, drafts + 1, 0) for tree in trees])
    device = last_token.device
    return Proposal(
        tokens=tokens.to(device),
        shape=shape.to(device),
        draft_sampling=draft_sampling,
        probs=torch.cat(probs, 1),
        prob_index=laws[..., None].expand(-1, -1, shape.children.shape[2]).to(device),
        slots=slots.to(device),
        forecast=forecast,
    )
