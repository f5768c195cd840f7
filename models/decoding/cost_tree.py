"""Trees by cost: in every step, the tree with the most expected tokens after the price of its time.

A step with a tree of n nodes, the root included, commits ``G = 1 + sum of s`` tokens on average. The score ``s`` of a
draft is the probability that it and all drafts above it are accepted. The step takes ``C`` seconds: of drafting, of a
pass over n tokens, and the loop. Many steps together commit ``sum G`` tokens in ``sum C`` seconds. This ratio is
largest if every step maximises ``G - rate * C``, where ``rate`` is the ratio itself (Dinkelbach): the tokens per second
so far. A step that maximised its own ``G / C`` (CaDDTree, 2606.01813) would stop too early where text is easy, and
spend too much where it is hard. The pass over n tokens is a staircase, so every n is tried.

Seconds are those of a ``CostModel``, also in the tokens per second so far. The tree therefore depends on earlier steps,
but not on the clock, and a seed gives the same answer again.

Shape legend: K depths, S candidates of a node.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from drafthead.models.decoding.cost_model import CostModel
from drafthead.settings.schema import Positive, PositiveFloat, Share, require, settings

Floats = npt.NDArray[np.float64]
LARGEST = 32  # nodes of a row's tree at most, root included
DEEPEST = 256  # levels at most
WIDTH = 8  # candidates of each expanded node, and nodes that are expanded on each level
LEAST, MOST = 1e-6, 1 - 1e-6  # bounds of probabilities, whose logits are finite
PRIOR = 32.0  # tokens of plain decoding for which the expected speedup counts as much as what a row has shown
MEAN = [[0.55, 0.12, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01], [0.45, 0.1, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01]]


def best_count(gains: Sequence[float], seconds: Sequence[float], rate: float) -> tuple[int, float]:
    """Return the number n of drafts for which ``sum(gains[:n]) - rate * seconds[n]`` is largest, and that value. Of
    equally good numbers, the smallest is returned.

    ``gains`` are the drafts' scores in descending order, ``seconds[n]`` is the time of a step with n drafts, and
    ``rate`` is the price of a second, in tokens."""
    best, value, total = 0, -rate * seconds[0], 0.0
    for count, gain in enumerate(gains[: len(seconds) - 1], start=1):
        total += gain
        if total - rate * seconds[count] > value:
            best, value = count, total - rate * seconds[count]
    return best, value


@settings(frozen=True, kw_only=True)
class AcceptanceModel:
    """Probability that a draft is accepted if its parent was: ``logit P = weight * logit q + bias[depth][rank]``, where
    q is the drafter's probability. The defaults trust the drafter."""

    weight: PositiveFloat = 1.0
    """Weight of the logit of the drafter's probability."""
    bias: Annotated[list[Annotated[list[float], Field(min_length=1)]], Field(min_length=1)] = field(
        default_factory=lambda: [[0.0]]
    )
    """Bias by depth (from 1) and rank (from 0). Deeper and later drafts have the last one."""
    mean: Annotated[list[Annotated[list[Share], Field(min_length=1)]], Field(min_length=1)] = field(
        default_factory=lambda: MEAN
    )
    """Mean of P by depth and rank, expected of drafts that are not drafted yet."""

    @cached_property
    def _biases(self) -> Floats:
        return _table(self.bias)

    @cached_property
    def _means(self) -> list[list[float]]:
        means: list[list[float]] = _table(self.mean).tolist()
        return means

    def probs(self, q: Floats, depth: int) -> Floats:
        """Return P [..., S] of candidates of ``depth`` (from 1) whose drafter's probabilities are ``q`` [..., S]."""
        bias, q = self._biases, q.clip(LEAST, MOST)
        logits = self.weight * np.log(q / (1 - q)) + bias[min(depth, len(bias)) - 1, : q.shape[-1]]
        probs: Floats = 1 / (1 + np.exp(-logits))
        return probs

    def expected(self, depth: int) -> list[float]:
        """Return the mean of P by rank of candidates of ``depth`` (from 1)."""
        return self._means[min(depth, len(self._means)) - 1]


@settings(frozen=True, kw_only=True)
class PooledAcceptance:
    """Probability that a draft of two drafters is accepted, from both drafters' probabilities of it (a log-linear
    opinion pool): ``logit P = copied * logit P_lookup + drafted * logit P_head + bias[depth]``. A draft that is none of
    the head's candidates counts as the least likely one. The default weights are rounded from a fit on a Medusa head of
    SmolLM2."""

    copied: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the probability of prompt lookup."""
    drafted: Annotated[float, Field(ge=0)] = 0.3
    """Weight of the probability of the head."""
    bias: Annotated[list[float], Field(min_length=1)] = field(default_factory=lambda: [0.0])
    """Bias by depth, from 1. Deeper drafts have the last one."""

    def prob(self, lookup: float, head: float, depth: int) -> float:
        """Return P of a draft of ``depth`` (from 1) that prompt lookup expects with P ``lookup``, the head with
        ``head``."""
        logits = (math.log(p / (1 - p)) for p in (min(max(p, LEAST), MOST) for p in (lookup, head)))
        total = sum(w * x for w, x in zip((self.copied, self.drafted), logits, strict=True))
        return 1 / (1 + math.exp(-total - self.bias[min(depth, len(self.bias)) - 1]))


def _table(values: Sequence[Sequence[float]]) -> Floats:
    """Return lists as an array [K, WIDTH]; shorter ones repeat their last value."""
    return np.array([[row[min(rank, len(row) - 1)] for rank in range(WIDTH)] for row in values], np.float64)


@settings(frozen=True, kw_only=True)
class TreeCosts:
    """Measurements from which trees by cost are chosen; ``tree.json`` stores them with a head."""

    costs: Annotated[dict[Positive, CostModel], Field(min_length=1)]
    """Costs of a step by batch size. Other batches have those of the next smaller size, adjusted to their tokens."""
    speedup: dict[Positive, PositiveFloat] = field(default_factory=dict)
    """Expected speedup by batch size, before an answer has shown its own."""
    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    """Acceptance of the head's drafts."""
    lookup: AcceptanceModel = field(default_factory=AcceptanceModel)
    """Acceptance of drafts of prompt lookup, whose q depends on the length of the match."""
    pooled: PooledAcceptance = field(default_factory=PooledAcceptance)
    """Acceptance of drafts of prompt lookup where the head drafts, too."""

    def with_rows(self, rows: int, costs: CostModel, speedup: float) -> "TreeCosts":
        """Return these measurements with those of batches of ``rows``."""
        return replace(self, costs={**self.costs, rows: costs}, speedup={**self.speedup, rows: speedup})

    def pays(self, rows: int) -> bool:
        """Return False if drafts were not expected to pay in batches of ``rows``; of other sizes, in the next smaller
        measured one, or else the smallest. Reading the prompts with the drafter is wasted time there."""
        measured = max((n for n in self.speedup if n <= rows), default=min(self.speedup, default=0))
        return self.speedup.get(measured, 1.0) >= 1

    @cached_property
    def _prices(self) -> dict[int, "StepPrices"]:
        return {}

    def prices(self, rows: int) -> "StepPrices":
        """Return the costs of steps of ``rows`` rows."""
        if rows not in self._prices:
            measured = max((n for n in self.costs if n <= rows), default=min(self.costs))
            costs, share = self.costs[measured], rows / measured
            plain = costs.overhead if costs.plain_overhead is None else costs.plain_overhead
            # Drafting for more rows is assumed to scale as verifying a token of each does.
            scale = costs.verify_at(share) / costs.verify_at(1)
            speedup = self.speedup.get(measured, 1.0) if measured == rows else 1.0
            self._prices[rows] = StepPrices(
                rows=rows,
                verify=[costs.verify_at(share * (n + 1)) + (costs.overhead if n else plain) for n in range(LARGEST)],
                draft=[scale * costs.draft_at(depth) for depth in range(DEEPEST + 1)],
                speedup=max(1.0, speedup),
            )
        return self._prices[rows]


@dataclass(frozen=True, kw_only=True)
class StepPrices:
    """Seconds of steps of a batch."""

    rows: int
    verify: list[float]  # with n drafts in every row: the pass over all nodes, and the loop
    draft: list[float]  # of drafting d levels
    speedup: float  # expected over plain decoding

    def rate(self, speedup: float) -> float:
        """Return the tokens per second of the whole batch at a ``speedup`` over decoding without drafts."""
        return speedup * self.rows / self.verify[0]

    def forecast(self, tokens: list[float], drafts: int, levels: int) -> "Forecast":
        """Return the forecast of a step that commits ``tokens``, with ``drafts`` nodes in every row and ``levels``
        drafted levels."""
        seconds = self.verify[drafts] + self.draft[levels]
        return Forecast(tokens, seconds, seconds * self.rate(1.0))


@dataclass(frozen=True, kw_only=True)
class CostTree:
    """A tree chosen in every step by expected tokens and cost (``grow_by_cost``)."""

    costs: TreeCosts = field(repr=False)  # measured again, they differ in noise: no part of what identifies a method
    nodes: int = LARGEST  # of a row at most, root included
    width: int = WIDTH  # candidates of each expanded node, and nodes that are expanded on each level
    depth: int = 16  # drafts on a path at most; a drafter with fewer positions limits it

    def __post_init__(self) -> None:
        require(2 <= self.nodes <= LARGEST, "nodes", f"at least 2 and at most {LARGEST}", self.nodes)
        require(1 <= self.depth <= DEEPEST, "depth", f"at least 1 and at most {DEEPEST}", self.depth)
        require(1 <= self.width <= WIDTH, "width", f"at least 1 and at most {WIDTH}", self.width)


@dataclass(frozen=True)
class Forecast:
    """What a tree by cost expects of its step."""

    tokens: list[float]  # committed, of each row
    seconds: float  # of the whole batch
    cost: float  # the same time, in tokens that the batch commits without drafts


class Pace:
    """The speedup so far, by which a second is priced."""

    def __init__(self, expected: float, memory: float = math.inf) -> None:
        """Start with an ``expected`` speedup; forget what is older than ``memory`` tokens of plain decoding."""
        self._tokens, self._cost, self._memory = PRIOR * expected, PRIOR, memory

    @property
    def speedup(self) -> float:
        """At least 1, because decoding without drafts is always a choice."""
        return max(1.0, self._tokens / self._cost)

    def count(self, tokens: float, cost: float) -> None:
        """Count a step that committed ``tokens`` in all rows in the time in which plain decoding commits ``cost``."""
        kept = min(1.0, self._memory / (self._cost + cost))
        self._tokens, self._cost = kept * (self._tokens + tokens), kept * (self._cost + cost)
