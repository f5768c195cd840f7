"""The interface between the decoder and anything that drafts, with or without training.

Shape legend: B rows, T tokens, D base width.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from drafthead.data.batch import HiddenStates, HiddenStatesSpec
from drafthead.data.utils.devices import on_device
from drafthead.data.utils.settings import NonNegative, Positive, require, settings
from drafthead.models.base.base_model import PartialForward
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.token_tree import TokenTree, TreeShape


class DraftSampling(Enum):
    """The choice of a node's children, which losslessness under sampling depends on."""

    TOP_K = "top_k"
    """The likeliest tokens, a function of the prefix: verified with a one-hot draft distribution."""
    WITH_REPLACEMENT = "with_replacement"
    """Independent samples of q."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Samples of q, renormalised after each."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted token trees, one per row, ready to verify.

    A candidate is a child with the distribution it was drawn from, which losslessness under sampling depends on.
    Distributions belong to candidates, not to nodes: in a tree combined from several drafters, one node may be a
    candidate twice, each time with another distribution.
    """

    tokens: Tensor
    """[B, N] int64. Column 0 is the root, the last committed token. Padding may be any token."""
    shape: TreeShape
    draft_sampling: DraftSampling
    """The way in which candidates with probs were drawn. Candidates without probs are top-k."""
    probs: Tensor | None = None
    """[B, Q, V] float: the drafter's distributions after warping, exactly those that were sampled; None: all
    candidates are top-k."""
    prob_index: Tensor | None = None
    """[R, N, S] int64: row of ``probs`` that a node's s-th candidate was drawn from, -1 for a top-k one."""
    slots: Tensor | None = None
    """[R, N] int64: the place of each node in the order in which the drafter has read nodes, -1 for unread ones. The
    root is the first. None: it reads no nodes."""
    partial_forward: "PartialForward | None" = None
    """The part of the target's pass over these nodes that the drafter has already computed."""

    def __post_init__(self) -> None:
        if (self.probs is None) != (self.prob_index is None):
            raise ValueError("a proposal needs both probs and prob_index, or neither")
        if self.probs is not None and self.draft_sampling is DraftSampling.TOP_K:
            raise ValueError("top-k candidates have no probs; say how the candidates with probs were drawn")


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The result of verification. The step commits the accepted drafts and the bonus."""

    nodes: Tensor
    """[B, 1 + D] int64: root and accepted nodes in order, padded with 0; D is at most the depth of the trees."""
    accepted: Tensor
    """[B] int64: accepted drafts, root excluded."""
    bonus: Tensor
    """[B] int64: the target's own token after the last accepted one."""
    probs: Tensor | None = None
    """[B, 1 + D, V] float: the target's probs after the accepted nodes, then zeros; None unless requested."""


@settings(frozen=True, kw_only=True)
class DynamicTree:
    """A tree chosen in every step from the drafter's probabilities (EAGLE-2, 2406.16858)."""

    nodes: Annotated[int, Field(ge=2)]
    """Nodes to verify, root included."""
    width: Positive = 8
    """Candidates of each expanded node, and nodes expanded per level."""
    depth: Positive = 16
    """Drafts on the longest path. The drafter's own depth bounds it too."""


@settings(frozen=True, kw_only=True)
class AdaptiveLength:
    """Draft length that adapts to acceptance: transformers' ``heuristic`` schedule of assisted generation.

    The length depends on earlier steps only, so the output stays exact. It is reset for every answer. In transformers
    it continues from prompt to prompt, so results depend on their order.
    """

    start: Positive = 5
    """Levels of the first draft."""
    grow: NonNegative = 2
    """Levels added after a step that accepted a whole path."""
    shrink: NonNegative = 1
    """Levels removed after any other step."""

    def next(self, length: int, drafted: int, accepted: int) -> int:
        """Return the levels to draft next, at least 1; ``length`` is the last step's."""
        if drafted == 0:
            return length  # a step without drafts says nothing about the drafter
        return length + self.grow if accepted >= drafted else max(1, length - self.shrink)


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The tree to draft in a step, and the way its candidates are chosen."""

    tree: TokenTree | DynamicTree
    draft_sampling: DraftSampling = DraftSampling.TOP_K
    """``TOP_K``: the likeliest candidates. Otherwise a node gets as many samples as the tree gives it children."""
    sampler: Sampler = Sampler(temperature=1.0)
    """How the drafter's distribution is warped before candidates are sampled; any keeps the output exact."""
    confidence_threshold: float = 0.0
    """Kangaroo's threshold (2404.18911): a draft with less confidence is verified, but nothing is drafted after it.
    For static trees with top-k candidates."""
    prefix_threshold: float = 0.0
    """A node gets children only while the product of the drafter's own confidences along its path, its own included,
    is at least this (DSpark). A confidence reads the node's prefix and never the drafts that it is about, so the output
    stays exact with sampled candidates too. For static trees of drafters that ``says_confidence``."""
    adaptive: AdaptiveLength | None = None
    """Truncate the tree to a length that follows what was accepted (one row only); None: always the whole tree."""

    def __post_init__(self) -> None:
        for key in ("confidence_threshold", "prefix_threshold"):
            require(0 <= getattr(self, key) < 1, key, "at least 0 and below 1", getattr(self, key))
        dynamic, sampled = isinstance(self.tree, DynamicTree), self.draft_sampling is not DraftSampling.TOP_K
        if self.prefix_threshold > 0 and dynamic:
            raise ValueError("prefix_threshold is for static trees; leave one of them out")
        if dynamic and sampled:
            # Keeping the best of sampled nodes looks at the samples, which biases the output.
            raise ValueError("a dynamic tree ranks nodes by their score: its draft_sampling must be top_k")
        if self.confidence_threshold > 0 and (dynamic or sampled):
            raise ValueError(
                "confidence_threshold is for static trees with draft_sampling=top_k; leave one of them out"
            )
        if sampled and self.sampler.temperature == 0:
            raise ValueError("candidates sampled at temperature 0 are all the same token; use draft_sampling=top_k")
        if self.sampler.reads_context:
            raise ValueError("a drafter's sampler takes no repetition penalty; leave it to the target's sampler")

    @property
    def depth(self) -> int:
        """Drafts on the longest path."""
        return self.tree.depth

    @property
    def nodes(self) -> int:
        """Most nodes of a tree, root included."""
        return len(self.tree) if isinstance(self.tree, TokenTree) else self.tree.nodes

    @property
    def is_chain(self) -> bool:
        """True if no node has two children."""
        return isinstance(self.tree, TokenTree) and self.depth == self.nodes - 1

    def at_most(self, depth: int) -> "DraftConfig":
        """Return this config with a tree of at most ``depth`` levels."""
        if depth >= self.depth:
            return self
        if isinstance(self.tree, TokenTree):
            tree: TokenTree | DynamicTree = self.tree.truncate(depth)
        else:
            tree = replace(self.tree, depth=depth) if depth else TokenTree.chain(0)
        return replace(self, tree=tree)


class Session(ABC):
    """State of a drafter for the rows being decoded, from their prompts to the end of their answers.

    ``commit`` tells it which tokens were committed. Nothing is inferred by comparing tokens.
    """

    lengths: list[int]
    """Committed tokens of every row, without the last one, which the base has not read yet."""

    @abstractmethod
    def commit(
        self, tokens: Tensor, counts: list[int], base_hidden: HiddenStates | None, nodes: Tensor | None = None
    ) -> None:
        """Add committed tokens that the base has read: the prompts, then each step's root and accepted drafts.

        Args:
            tokens: [B, T] int64.
            counts: how many of the T tokens count in each row.
            base_hidden: [B, T, ...] the base's hidden states that ``spec`` names; None from a source that has none.
            nodes: [B, T] int64 nodes of the latest proposal that became these tokens, from its root on; -1 for tokens
                that it did not propose. None if ``draft`` was not called since the last commit.
        """

    @abstractmethod
    def draft(self, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None) -> Proposal:
        """Propose trees after ``last_token`` ([B] int64), which is committed and not yet read by the base.

        Args:
            last_token: the root of every row.
            draft_config: the shape; a drafter may return fewer nodes, but no deeper ones.
            rng: for sampled candidates; top-k needs none.
        """

    @abstractmethod
    def select(self, rows: list[int]) -> None:
        """Keep these rows only, between steps."""

    def rollback(self, lengths: list[int]) -> None:
        """Forget all but the first ``lengths`` committed tokens of each row; for drafters with ``reads_base`` false."""
        raise NotImplementedError


class Drafter(ABC):
    """Drafts token trees after the last committed token of every row."""

    tree: TokenTree | None = None
    """The tree to draft by default, calibrated for it; None: a chain over all its positions."""
    batch_trees: Mapping[int, TokenTree] = MappingProxyType({})
    """Trees by batch size, if calibrated: in a batch a node costs more to verify. A batch uses the tree of the largest
    size that it reaches, and ``tree`` below all sizes."""
    spec: HiddenStatesSpec = HiddenStatesSpec()
    """Hidden states of the base that it reads in addition to the final one."""
    confidence_threshold: float = 0.0
    """The confidence threshold to draft with by default (``DraftConfig.confidence_threshold``)."""
    reads_base: bool = False
    """True if it needs the base's hidden states. It then cannot continue drafts that the base has not read."""
    early_exit_layers: int = 0
    """First layers of the target that it runs in the target's own cache; verification runs the others."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """The most drafts on a path."""

    @property
    def says_confidence(self) -> bool:
        """True if it estimates the acceptance of a node's children (``StepwiseSession.confidence``)."""
        return False

    @property
    def vocab_size(self) -> int | None:
        """Ids that it may draft lie below; None: only ids that it has read."""
        return None

    @property
    def base_fingerprint(self) -> str | None:
        """Fingerprint of the only base that it drafts for; None: any."""
        return None

    @abstractmethod
    def identity(self) -> tuple[object, ...]:
        """Return all settings and weights (as a hash) that decide what it drafts, with a stable ``repr``.

        An interrupted evaluation resumes only if the identity is unchanged.
        """

    @abstractmethod
    def open(self, rows: int, cache: TreeCache | None = None) -> Session:
        """Return a session for ``rows`` rows without tokens; ``cache`` is the target's, if the drafter may use it."""

    def cache_slots(self, draft_config: DraftConfig) -> int:
        """Return the positions that drafting needs in the target's cache in addition to the nodes of the tree."""
        return 0

    def remember(self, tokens: list[int]) -> None:
        """Store a finished prompt with its answer, if the drafter searches earlier answers."""
        return


def last_valid(values: Tensor, counts: list[int]) -> Tensor:
    """Return the last counted entry of every row: [B, T, ...] -> [B, ...]."""
    if len(counts) == 1:
        return values[:, counts[0] - 1]
    index = on_device(counts, values.device) - 1
    return values[torch.arange(len(counts), device=values.device), index]


def take_rows(values: Tensor, rows: list[int]) -> Tensor:
    """Return some rows of ``values`` [B, ...] without waiting for the device."""
    return values.index_select(0, on_device(rows, values.device))
