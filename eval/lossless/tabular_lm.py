"""Targets and drafters as tables: next-token logits for every prefix, small enough to enumerate. Drafts come from the
functions that all stepwise drafters share (``models/decoding/growth.py``).
Shape legend: B rows, N tree nodes, V vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafthead.models.decoding.candidates import LogitsSource, root_only
from drafthead.models.decoding.cost_growth import grow_by_cost
from drafthead.models.decoding.cost_tree import CostTree
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, Proposal
from drafthead.models.decoding.growth import grow
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.combined import combine
from drafthead.models.drafters.experimental.horizontal_cascade import concatenate, drafted_tokens

ROOT_TOKEN = 0  # the last committed token, which precedes every prefix
Draft = Callable[[Tensor, RandomSource], Proposal]  # from the roots ([B] int64) and random numbers to the drafted trees


class TabularLM:
    """Next-token logits as a table over prefixes, which are numbered: 0 is empty, then ``V * prefix + 1 + token``."""

    def __init__(self, logits: Tensor, vocabulary: int | None = None) -> None:
        """Take float64 logits [prefixes, tokens]; a drafter may have fewer tokens than ``vocabulary``."""
        self.logits = logits
        self.vocabulary = vocabulary or logits.shape[1]

    @classmethod
    def random(cls, vocabulary: int, depth: int, seed: int) -> "TabularLM":
        """Return a table for prefixes of up to ``depth`` tokens, with normal logits of standard deviation 1.5."""
        generator = torch.Generator().manual_seed(seed)
        count = sum(vocabulary**level for level in range(depth + 1))
        return cls(1.5 * torch.randn(count, vocabulary, dtype=torch.float64, generator=generator))

    def near(self, seed: int, spread: float) -> "TabularLM":
        """Return a drafter that approximates this target: its logits plus normal noise of deviation ``spread``."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(self.logits.shape, dtype=torch.float64, generator=generator)
        return TabularLM(self.logits + spread * noise)

    def after(self, prefixes: Tensor, tokens: Tensor) -> Tensor:
        """Return the numbers of the ``prefixes`` extended by ``tokens``; 0 if too long for the table."""
        longer = prefixes * self.vocabulary + 1 + tokens
        return torch.where(longer < len(self.logits), longer, 0)

    def of_nodes(self, proposal: Proposal) -> Tensor:
        """Return the numbers [B, N] of the prefixes that end with each node of a tree; 0 for the root."""
        tokens = proposal.tokens
        prefixes = torch.zeros_like(tokens)
        parents = proposal.shape.parents.expand(tokens.shape)
        for depth in range(1, proposal.shape.depth + 1):
            longer = self.after(prefixes.gather(1, parents.clamp(min=0)), tokens)
            prefixes = torch.where(proposal.shape.depths.expand(tokens.shape) == depth, longer, prefixes)
        return prefixes

    def probs(self, sampler: Sampler) -> Tensor:
        """Return ``sampler``'s probabilities [prefixes, V] after the root and each prefix."""
        paths: list[list[int]] = [[ROOT_TOKEN]]
        while len(paths) < len(self.logits):
            parent, token = divmod(len(paths) - 1, self.vocabulary)
            paths.append([*paths[parent], token])
        width = max(map(len, paths))
        context = torch.tensor([path + path[:1] * (width - len(path)) for path in paths])
        return sampler.probs(self.logits, context)


def any_confidence(prefixes: Tensor) -> Tensor:
    """Return confidences in [0.4, 1), one per prefix. Any values will do: exactness does not depend on them."""
    return 0.4 + 0.6 * ((prefixes + 1) * 0.6180339887).frac()


class _ByPrefix(LogitsSource):
    """Source of a tree's logits: each node has its own distribution, as from a model that has read the path to it."""

    def __init__(self, table: TabularLM, prefixes: Tensor) -> None:
        self._table, self._root, self._prefixes = table, True, prefixes[:, None]

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        if not self._root:  # the root's prefix is given
            self._prefixes = self._table.after(self._prefixes.gather(1, parents), tokens)
        self._root = False
        return self._table.logits[self._prefixes]

    def confidence(self) -> Tensor:
        return any_confidence(self._prefixes)


class _ByLevel(LogitsSource):
    """Source of a tree's logits: all nodes of a level share one distribution and its samples, as in Medusa."""

    def __init__(self, table: TabularLM, prefixes: Tensor) -> None:
        self._table, self._rows, self._level = table, len(prefixes), -1

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        return self._table.logits[self._level].expand(self._rows, 1, -1)

    def confidence(self) -> Tensor:
        return any_confidence(torch.full((self._rows, 1), self._level))


@dataclass(frozen=True)
class TableDraft:
    """Drafter that reads its logits from a table and drafts with the functions of ``models/decoding/growth.py``."""

    table: TabularLM
    draft_config: DraftConfig
    shared: bool = False  # all nodes of a level share their candidates or samples
    draft_vocabulary: int | None = None  # number of ids that can be drafted: the last ones of the target's

    def __call__(self, last_token: Tensor, rng: RandomSource, prefixes: Tensor | None = None) -> Proposal:
        """Draft after ``last_token`` [B], which ends ``prefixes`` [B]."""
        prefixes = torch.zeros_like(last_token) if prefixes is None else prefixes
        vocabulary = self.table.vocabulary
        ids = torch.arange(vocabulary)
        if self.draft_vocabulary is not None:
            ids = vocabulary - 1 - ids[: self.draft_vocabulary]
        table = TabularLM(self.table.logits[:, ids], vocabulary)
        config = self.draft_config
        source = (_ByLevel if self.shared else _ByPrefix)(table, prefixes)
        if not isinstance(config.tree, CostTree):
            return grow(source, last_token, config, ids, vocabulary, rng)
        if config.draft_sampling is not DraftSampling.TOP_K:
            return grow_by_cost(source, lambda levels: None, last_token, config, ids, vocabulary, rng)
        # The rows are outcomes of one row, but a tree by cost would share the price of time among them.
        source = (_ByLevel if self.shared else _ByPrefix)(table, prefixes[:1])
        proposal = grow_by_cost(source, lambda levels: None, last_token[:1], config, ids, vocabulary)
        return replace(proposal, tokens=proposal.tokens.expand(len(last_token), -1))


def combined_draft(parts: Sequence[Draft], last_token: Tensor, rng: RandomSource) -> Proposal:
    return combine([draft(last_token, rng) for draft in parts])[0]


def relay_draft(parts: Sequence[TableDraft], last_token: Tensor, rng: RandomSource) -> Proposal:
    """Draft one path after ``last_token`` [B]: each drafter's chain continues after the chain of the drafter before."""
    proposal = root_only(last_token)
    for drafter in parts:
        leaf = drafted_tokens(proposal)[:, None]
        prefixes = drafter.table.of_nodes(proposal).gather(1, leaf)[:, 0]
        proposal = concatenate(proposal, drafter(proposal.tokens.gather(1, leaf)[:, 0], rng, prefixes))
    return proposal
