"""The interface between the decoder and anything that drafts, with or without training.

Shape legend: B rows, T tokens, N tree nodes (root included), S children of a node, V vocabulary.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from drafthead.data.batch import BaseHidden, HiddenStates, HiddenStatesSpec
from drafthead.models.base.base_model import PartialForward
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.cost_tree import CostTree, Forecast, TreeCosts
from drafthead.models.decoding.coupling import Coupling
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.token_tree import TokenTree, TreeShape
from drafthead.settings.schema import NonNegative, Positive, require, settings
from drafthead.system.devices import on_device


class DraftSampling(Enum):
    """The way in which a node's children are drawn from the drafter's distribution q; verification must know it."""

    TOP_K = "top_k"  # the likeliest tokens: not random, so verification takes q as one-hot at each of them
    WITH_REPLACEMENT = "with_replacement"  # independent samples
    WITHOUT_REPLACEMENT = "without_replacement"  # after each sample, its token is removed and q renormalised


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted token trees, one per row, ready to verify.

    A candidate is a child together with the distribution from which it was drawn. Sampled verification is only lossless
    with exactly these distributions. They belong to candidates, not to nodes: in a tree combined from several drafters,
    a node may be a candidate twice, with two distributions.
    """

    tokens: Tensor  # [B, N] int64; column 0 is the root, the last committed token; padding has any token
    shape: TreeShape
    draft_sampling: DraftSampling  # of candidates with ``probs``; the others are top-k
    probs: Tensor | None = None  # [B, Q, V]: the Q distributions, after warping, from which candidates were sampled
    prob_index: Tensor | None = None  # [B or 1, N, S] int64: each child's distribution in ``probs``; -1: top-k
    slots: Tensor | None = None
    """[B or 1, N] int64: each node's number in the order in which the drafter's model ran over the nodes, by which
    ``NodeCache`` finds keys and values; -1 for nodes that it did not run over."""
    partial_forward: PartialForward | None = None  # the target's first layers over these nodes (early exit)
    likelihoods: Tensor | None = None
    """[B, N] the drafter's probability of each node after its parent (1 for the root); None unless
    ``DraftConfig.likelihoods`` asks for it."""
    forecast: Forecast | None = None  # only of trees by cost

    def __post_init__(self) -> None:
        if (self.probs is None) != (self.prob_index is None):
            raise ValueError("a proposal needs both probs and prob_index, or neither")
        if self.probs is not None and self.draft_sampling is DraftSampling.TOP_K:
            raise ValueError("top-k candidates have no probs; set draft_sampling to how the candidates were drawn")


@settings(frozen=True, kw_only=True)
class DynamicTree:
    """A tree chosen in every step from the drafter's probabilities (EAGLE-2, 2406.16858)."""

    nodes: Annotated[int, Field(ge=2)]
    """Nodes to verify, root included."""
    width: Positive = 8
    """Candidates of each expanded node, and number of nodes that are expanded on each level."""
    depth: Positive = 16
    """Largest number of drafts on a path. If the drafter has fewer positions, their number is the limit."""


@settings(frozen=True, kw_only=True)
class AdaptiveLength:
    """Draft length that follows the acceptance so far: transformers' ``heuristic`` schedule of assisted generation.

    The length depends only on earlier steps, so the output stays exact. Every answer starts with ``start``. In
    transformers, the length continues from prompt to prompt, so results depend on the order of prompts.
    """

    start: Positive = 5
    """Tree levels to draft in an answer's first step."""
    grow: NonNegative = 2
    """Levels added after a step whose longest path was accepted completely."""
    shrink: NonNegative = 1
    """Levels removed after any other step that drafted."""

    def next(self, length: int, drafted: int, accepted: int) -> int:
        """Return the levels to draft after a step with ``length`` levels, whose longest path had ``drafted`` drafts."""
        if drafted == 0:
            return length  # a step without drafts says nothing about the drafter
        return length + self.grow if accepted >= drafted else max(1, length - self.shrink)


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The tree to draft in a step, and the way its candidates are chosen."""

    tree: TokenTree | DynamicTree | CostTree
    draft_sampling: DraftSampling = DraftSampling.TOP_K
    """``TOP_K`` takes a node's likeliest candidates. The other values sample as many as the node has children."""
    sampler: Sampler = Sampler(temperature=1.0)
    """Temperature, top-p and so on of the drafter when candidates are sampled. The output is exact with any sampler."""
    confidence_threshold: float = 0.0
    """Kangaroo's threshold (2404.18911): a draft of lower probability is verified, but nothing is drafted after it. For
    static trees with top-k candidates. 0 turns it off."""
    prefix_threshold: float = 0.0
    """DSpark's threshold: a node gets children only if the product of the confidences along its path, its own included,
    is at least this. A confidence, predicted by a confidence head, depends only on tokens before the drafts that it
    rates, so the output stays exact with sampled candidates too. For static trees of drafters with
    ``has_confidence``. 0 turns it off."""
    likelihoods: bool = False
    """Return ``Proposal.likelihoods``; only for static trees with top-k candidates."""
    adaptive: AdaptiveLength | None = None
    """Truncate the tree to a draft length that follows the acceptance so far; refused for batches. None: draft the
    whole tree."""
    speedup: float | None = None
    """Speedup so far, which decides the price of time in a tree by cost. None: the one that its costs expect."""
    coupling: Coupling | None = None
    """What is known of the step's draws; only with top-k candidates."""

    def __post_init__(self) -> None:
        for key in ("confidence_threshold", "prefix_threshold"):
            require(0 <= getattr(self, key) < 1, key, "at least 0 and below 1", getattr(self, key))
        dynamic, sampled = isinstance(self.tree, DynamicTree), self.draft_sampling is not DraftSampling.TOP_K
        if isinstance(self.tree, CostTree) and (self.prefix_threshold or self.confidence_threshold or self.likelihoods):
            raise ValueError("a tree by cost decides itself where to stop; set both thresholds to 0")
        if self.prefix_threshold > 0 and dynamic:
            raise ValueError("prefix_threshold is for static trees; leave it out")
        if dynamic and sampled:
            # Keeping the best of the sampled nodes selects among samples, which biases the output.
            raise ValueError("a dynamic tree ranks nodes by their score: its draft_sampling must be top_k")
        if self.confidence_threshold > 0 and (dynamic or sampled):
            raise ValueError("confidence_threshold is for static trees with draft_sampling=top_k; set it to 0")
        if sampled and self.sampler.temperature == 0:
            raise ValueError("candidates sampled at temperature 0 are all the same token; use draft_sampling=top_k")
        if self.sampler.reads_context:
            raise ValueError("a drafter's sampler cannot have a repetition penalty; set it in the target's sampler")

    @property
    def depth(self) -> int:
        """Drafts on the longest path; of a tree that is chosen in each step, the limit."""
        return self.tree.depth

    @property
    def nodes(self) -> int:
        """Largest number of nodes of a row's tree, root included."""
        return len(self.tree) if isinstance(self.tree, TokenTree) else self.tree.nodes

    @property
    def is_chain(self) -> bool:
        """True for a static tree in which no node has two children."""
        return isinstance(self.tree, TokenTree) and self.depth == self.nodes - 1

    def truncate(self, depth: int) -> "DraftConfig":
        if depth >= self.depth:
            return self
        if isinstance(self.tree, TokenTree):
            tree: TokenTree | DynamicTree | CostTree = self.tree.truncate(depth)
        else:
            tree = replace(self.tree, depth=depth) if depth else TokenTree.chain(0)
        return replace(self, tree=tree)


class SessionPart(ABC):
    """Base class of what a drafter keeps of the rows being decoded: a session or a part of one."""

    @property
    def reads_all_states(self) -> bool:
        """True if drafts depend on the base's states at all committed tokens, not only at the last one."""
        return False

    @property
    def room(self) -> int:
        """Largest number of drafts on a path that fits the drafter's own context."""
        return sys.maxsize

    @abstractmethod
    def commit(self, tokens: Tensor, counts: list[int], base_hidden: BaseHidden, nodes: Tensor | None = None) -> None:
        """Add committed tokens that the base has read: the prompts, then each step's root and accepted drafts.

        Args:
            tokens: [B, T] int64.
            counts: number of committed tokens in each row (0: the row stays as it is); the others are padding.
            base_hidden: [B, T, ...] the base's hidden states after these tokens, as ``Drafter.spec`` asks for; None
                without a base.
            nodes: [B, T] int64: node of the latest proposal that became each token, root first; -1 for other tokens.
                None: -1 for all. To be ignored if ``draft`` was not called since the last commit. Only sessions that
                can keep the keys and values of drafted nodes need it.
        """

    @abstractmethod
    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch, in this order. A row may be repeated, which copies it. Called between
        steps."""

    @abstractmethod
    def rollback(self, lengths: list[int]) -> None:
        """Remove all but the first ``lengths[b]`` committed tokens of each row b. If the drafter has ``reads_base``,
        ``lengths[b]`` is 0 or the row's length, and states of removed tokens may be kept."""

    def drafted(self, proposal: Proposal) -> Proposal:
        """Take note of a tree drafted with this part; return it, possibly with more fields set."""
        return proposal


class Session(SessionPart):
    """Base class of the state of a drafter for a fixed number of rows, whose answers may change (``reset``)."""

    lengths: list[int]  # number of committed tokens of every row that the base has read: all but the last committed one

    @abstractmethod
    def draft(self, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None) -> Proposal:
        """Propose a token tree for every row; a proposal may have fewer nodes than ``draft_config``, but not more
        levels. The roots ``last_token`` [B] int64 are committed, but not yet read by the base. ``rng`` may be None for
        top-k candidates."""

    def reset(self, rows: list[int]) -> None:
        self.rollback([0 if row in rows else length for row, length in enumerate(self.lengths)])


class Drafter(ABC):
    """Base class of drafters of token trees. A subclass defines ``depth``, ``identity`` and ``open``."""

    tree: TokenTree | None = None  # the calibrated tree; None: a chain over all draft positions
    batch_trees: Mapping[int, TokenTree] = MappingProxyType({})
    """Calibrated trees by batch size, because a node costs more to verify in a batch. A batch uses the tree of the
    largest size that is not above its own, else ``tree``."""
    spec: HiddenStatesSpec = HiddenStatesSpec()
    confidence_threshold: float = 0.0  # default of ``DraftConfig.confidence_threshold``
    tree_costs: TreeCosts | None = None  # for trees by cost; None: not measured
    drafts_by_cost: bool = False  # the session can draft a ``CostTree``
    prefers_cost: bool = False  # in calibration, trees by cost were expected to be faster than ``tree``
    is_certain: bool = False  # the target cannot choose other tokens
    reads_base: bool = False  # needs the base's hidden states, so it cannot continue tokens that the base has not read
    early_exit_layers: int = 0
    """The target's first layers, which the drafter runs itself in the target's cache. Verification runs only the
    others."""
    depth: int  # largest number of drafts on a path
    has_confidence: bool = False  # ``StepwiseSession.confidence`` predicts the acceptance of a single child
    vocab_size: int | None = None  # bound of proposed ids; None: ids are copied from the context, so none is needed
    base_fingerprint: str | None = None  # of the base that the drafter belongs to; None: any base

    @property
    def by_cost(self) -> bool:
        """True if trees by cost are the default. A confidence threshold is for static trees."""
        return self.prefers_cost and self.tree_costs is not None and self.confidence_threshold == 0

    @abstractmethod
    def identity(self) -> tuple[object, ...]:
        """Return everything that decides the drafts: settings and a hash of the weights. An interrupted evaluation
        resumes only if the ``repr`` of the result is the stored one."""

    @abstractmethod
    def open(self, rows: int, cache: TreeCache | None = None) -> Session:
        """Return a session for ``rows`` rows without tokens. Drafters with ``early_exit_layers`` write the target's
        ``cache``; None: no target."""

    def cache_slots(self, draft_config: DraftConfig) -> int:
        """Return the positions per row that drafting needs in the target's cache beyond the tree's nodes."""
        return 0

    def remember(self, tokens: list[int]) -> None:
        """Store ``tokens``, a prompt and its answer, if the drafter searches earlier answers."""
        return


def last_valid(values: Tensor, counts: list[int], before: Tensor) -> Tensor:
    """Return each row's last valid entry, ``values[b, counts[b] - 1]``: [B, T, ...] -> [B, ...]. A row without valid
    entries gets its entry of ``before`` [B, ...]."""
    if len(counts) == 1:
        return values[:, counts[0] - 1] if counts[0] else before
    index = on_device(counts, values.device)
    last = values[torch.arange(len(counts), device=values.device), index - 1]
    return last if all(counts) else torch.where((index > 0).view(-1, *[1] * (last.ndim - 1)), last, before)


def map_active(function: Callable[[HiddenStates], Tensor], states: HiddenStates, counts: list[int]) -> Tensor:
    """Return ``function(states)``, computed for the rows whose count is above 0; the others get zeros."""
    active = [row for row, count in enumerate(counts) if count]
    if len(active) == len(counts):
        return function(states)
    values = function(states.map(lambda value: take_rows(value, active)))
    return values.new_zeros(len(counts), *values.shape[1:]).index_copy_(0, on_device(active, values.device), values)


def take_rows(values: Tensor, rows: list[int]) -> Tensor:
    """Return ``values[rows]`` without waiting for the device."""
    return values.index_select(0, on_device(rows, values.device))
