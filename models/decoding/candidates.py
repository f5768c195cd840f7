"""The source of a tree's logits, and the drawing of candidates from them: what all ways to grow a tree share.

Shape legend: B rows, F frontier nodes, W draft vocabulary.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from drafthead.models.decoding.cost_tree import Forecast
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, Proposal
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.token_tree import TokenTree

MISSING = -1  # stands for a child that cannot be drawn: the distribution has fewer tokens than the node has children


def draw_candidates(
    probs: Tensor, count: int, kind: DraftSampling, rng: RandomSource, counts: Tensor | None = None
) -> Tensor:
    """Draw ``count`` samples from each distribution: [B, F, W] -> [B, F, count] int64. With replacement, samples are
    independent (SpecInfer, 2305.09781). Without replacement, each drawn token is removed and the rest renormalised
    (Sequoia, 2402.12374); when no token is left, the samples are ``MISSING``. ``counts`` [B, F] are smaller numbers of
    samples, after which no random numbers are used and samples are arbitrary; None: ``count``."""
    rows, parents, _ = probs.shape
    wanted = None
    if counts is not None:
        wanted = torch.arange(count, device=probs.device) < counts[..., None]  # [B, F, count]
    if kind is DraftSampling.WITH_REPLACEMENT:
        repeated = probs[:, :, None].expand(-1, -1, count, -1)
        if wanted is not None:
            repeated = torch.where(wanted[..., None], repeated, 0.0)
        return rng.categorical(repeated.flatten(1, 2)).view(rows, parents, count)
    remaining, drawn = probs, []
    for n in range(count):
        if wanted is not None:
            remaining = torch.where(wanted[..., n, None], remaining, 0.0)
        token = rng.categorical(remaining)
        exists = remaining.gather(-1, token[..., None])[..., 0] > 0
        drawn.append(torch.where(exists, token, MISSING))
        remaining = remaining.scatter(-1, token[..., None], 0.0)
    return torch.stack(drawn, -1)


def likelihood_logits(logits: Tensor, config: DraftConfig, d2t: Tensor, level: int) -> Tensor:
    """Return the logits [B, F, W], float32, by which top-k candidates of a ``level`` (from 1) are chosen. They are the
    drafter's ``logits`` [B, F, W], or those of a race with the output's random numbers."""
    return logits.float() if config.coupling is None else config.coupling.logits(logits, d2t, level)


def root_only(last_token: Tensor, forecast: Forecast | None = None) -> Proposal:
    shape = TokenTree.chain(0).shape_on(last_token.device)
    tokens = last_token[:, None]
    return Proposal(tokens=tokens, shape=shape, draft_sampling=DraftSampling.TOP_K, forecast=forecast)


class LogitsSource(ABC):
    """Base class of sources of the logits of a step's tree, level by level; a subclass defines ``expand``."""

    @property
    def drafts_at_once(self) -> bool:
        """True if all levels are computed before the first ``expand``."""
        return False

    @abstractmethod
    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return the draft logits [B, F, W] after the nodes of the next level, in the first call after the root alone.

        ``tokens`` [B, F] int64 are target ids. ``parents`` [B, F] int64 is the index of each node's parent among the
        nodes of the previous call. A result [B, 1, W] means that all nodes of the level have the same distribution.
        They then get the same candidates, also if these are sampled. That is exact, because verification visits at most
        one node of the level, and which one does not depend on the samples below it.
        """

    def confidence(self) -> Tensor:
        """Return a confidence head's probability, [B, F] or [B, 1], that a single child of each last expanded node is
        accepted (not that any of several siblings is). It may depend on these nodes and the tokens before them, but not
        on their children."""
        raise NotImplementedError
