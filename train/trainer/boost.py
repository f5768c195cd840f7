"""Boosting of drafters (SpecInfer, 2305.09781): a second head learns the tokens that the first head misses.

SpecInfer trains its second draft model on the samples that the first one gets wrong. Here every target token has a
weight: ``floor`` if the first head ranks it within its tree's width at that depth, else 1. Both heads then draft one
combined tree. Shapes: B rows, T tokens, K draft positions.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.simulation.ranks import WIDTH
from drafthead.models.token_tree import TokenTree
from drafthead.train.trainer.batches import Batch


def load_first(name: str, head: DraftHead) -> DraftHead:
    """Load the head from ``name``, a folder or Hub repository, onto the base of ``head``; return it in eval mode. Raise
    a ``UserError`` if the loaded head was trained with its base, or reads other layers of the base than ``head`` does.
    A head that reads only the final hidden state is always accepted."""
    first = load_head(name, head.base)
    if first.config.trains_base:
        raise UserError(f"boost.head={name} was trained together with its base; boost a head of the frozen base")
    if first.spec.layers not in ((), head.spec.layers):
        raise UserError(
            f"boost.head={name} reads the base's layers {first.spec.layers}, but the trained head reads "
            f"{head.spec.layers}; boost a head that reads the same layers, or only the final hidden state"
        )
    return first.eval()


def boosted(batches: Iterator[Batch], first: DraftHead, depth: int, floor: float) -> Iterator[Batch]:
    """Yield ``batches`` with loss weights for a second head of ``depth`` positions: ``floor`` for targets that the head
    ``first`` would draft, 1 for all others."""
    tree = first.tree or TokenTree.chain(first.depth)
    for batch, hidden in batches:
        ranks = first.candidate_ranks(batch, hidden, top=WIDTH)
        yield replace(batch, weights=target_weights(ranks, tree, depth, floor)), hidden


def target_weights(ranks: Tensor, tree: TokenTree, depth: int, floor: float) -> Tensor:
    """Return loss weights [B, T, depth] of every token as a target: ``floor`` if the first head drafts it, else 1. The
    first head drafts a token if the token's rank is at most the largest rank in ``tree`` at that depth. ``ranks``
    [B, T, K] of the true tokens among the first head's candidates count from 0; -1 means no target. Draft positions k
    count from 1: position k of anchor t predicts token t + 1 + k, so ``ranks[b, t, k - 1]`` determines
    ``weights[b, t + 1 + k, k - 1]``."""
    widths = [1 + max((path[-1] for path in tree.paths if len(path) == k), default=-1) for k in range(1, depth + 1)]
    weights = torch.ones(*ranks.shape[:2], depth, device=ranks.device)
    for k in range(1, min(depth, ranks.shape[2]) + 1):
        rank = ranks[:, : -(1 + k), k - 1]
        weights[:, 1 + k :, k - 1] = torch.where((rank >= 0) & (rank < widths[k - 1]), floor, 1.0)
    return weights
