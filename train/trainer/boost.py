"""Boosting of drafters (SpecInfer, 2305.09781): a second head learns what the first one misses.

SpecInfer trains its second draft model on the samples that the first gets wrong. Here every prediction has a weight of
its own: 1 where the first head's tree would not hold the right token, ``floor`` where it does. Both heads are then
combined in one tree, whose node at a depth is right if either is.

Shape legend: B rows, T tokens, K draft positions.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.eval.trees.calibrate import WIDTH
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.token_tree import TokenTree
from drafthead.train.trainer.batches import Batch


def load_first(name: str, head: DraftHead) -> DraftHead:
    """The first head, attached to the base of ``head``; it must read what the corpora of ``head`` hold."""
    first = DraftHead.from_pretrained(name, head.base)
    if first.config.lora() is not None:
        raise UserError(f"boost.head={name} trained its base along; boost a head of the frozen base")
    if first.spec.layers not in ((), head.spec.layers):
        raise UserError(
            f"boost.head={name} reads the base's layers {first.spec.layers}, but the head that is trained reads "
            f"{head.spec.layers}; boost a head that reads the same"
        )
    return first.eval()


def boosted(batches: Iterator[Batch], first: DraftHead, depth: int, floor: float) -> Iterator[Batch]:
    """``batches`` with the weights that ``first`` leaves to a head of ``depth`` positions."""
    tree = first.tree or TokenTree.chain(first.depth)
    for batch, hidden in batches:
        ranks = first.candidate_ranks(batch, hidden, top=WIDTH)
        yield replace(batch, weights=missed(ranks, tree, depth, floor)), hidden


def missed(ranks: Tensor, tree: TokenTree, depth: int, floor: float) -> Tensor:
    """[B, T, depth] weight of every token as a target: ``floor`` where ``tree`` has a candidate of its rank.

    ``ranks`` [B, T, K] are those of ``candidate_ranks``, at the place that is drafted from: -1 where there is none.
    """
    widths = [1 + max((path[-1] for path in tree.paths if len(path) == k), default=-1) for k in range(1, depth + 1)]
    weights = torch.ones(*ranks.shape[:2], depth, device=ranks.device)
    for k in range(1, min(depth, ranks.shape[2]) + 1):
        rank = ranks[:, : -(1 + k), k - 1]
        weights[:, 1 + k :, k - 1] = torch.where((rank >= 0) & (rank < widths[k - 1]), floor, 1.0)
    return weights
