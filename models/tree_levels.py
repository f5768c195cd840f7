"""Static trees while they are drafted: their levels, and what is left of them where nodes are missing.

Shape legend: B rows, F frontier nodes, M nodes of a level, N nodes.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from drafthead.data.contracts import Proposal, Siblings
from drafthead.data.token_tree import TokenTree, TreeShape


@dataclass(frozen=True)
class Level:
    """One level of a static tree."""

    nodes: Tensor
    """[M] nodes on the level, in order."""
    parents: Tensor
    """[M] place of each one's parent in the frontier above."""
    ranks: Tensor
    """[M] which candidate (or sample) of its parent each one takes."""
    width: int
    """Candidates needed of a parent."""
    inner: Tensor
    """[F] those of ``nodes`` that have children, as places on this level: the next frontier."""
    above: Tensor
    """[F] their parents' places in the frontier above."""


@lru_cache(maxsize=512)
def levels_of(tree: TokenTree, device: torch.device, sampled: bool) -> tuple[Level, ...]:
    """The levels of ``tree``; for samples, ranks count siblings instead of naming candidates."""
    levels = []
    frontier = [0]
    for depth in range(1, tree.depth + 1):
        nodes = [n for n, path in enumerate(tree.paths) if len(path) == depth]
        parents = [frontier.index(tree.parents[n]) for n in nodes]
        if sampled:
            ranks = [parents[:place].count(parent) for place, parent in enumerate(parents)]
        else:
            ranks = [tree.ranks[n] for n in nodes]
        inner = [place for place, n in enumerate(nodes) if n in tree.parents]

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        levels.append(
            Level(
                nodes=tensor(nodes),
                parents=tensor(parents),
                ranks=tensor(ranks),
                width=max(ranks) + 1,
                inner=tensor(inner),
                above=tensor([parents[place] for place in inner]),
            )
        )
        frontier = [nodes[place] for place in inner]
    return tuple(levels)


def living(tree: TokenTree, tokens: Tensor, alive: Tensor, confidence: Tensor) -> Proposal:
    """The nodes of a static tree that are alive in some row; in other rows they are padding."""
    kept = alive.any(0).nonzero()[:, 0]
    if len(kept) == len(tree) and bool(alive[:, : len(tree)].all()):
        shape = tree.shape_on(tokens.device)
        kept = torch.arange(len(tree), device=tokens.device)
    else:
        place = torch.zeros(alive.shape[1], dtype=torch.int64, device=tokens.device)
        place[kept] = torch.arange(len(kept), device=tokens.device)
        above = torch.tensor((0, *tree.parents[1:]), device=tokens.device)
        parents = place[above[kept]].expand(tokens.shape[0], -1)
        parents = torch.where(alive[:, kept], parents, -1)
        parents[:, 0] = -1
        shape = TreeShape.from_parents(parents)
    return Proposal(
        tokens=tokens[:, kept], shape=shape, siblings=Siblings.DETERMINISTIC, confidence=confidence[:, kept]
    )


def without_missing(tree: TokenTree, tokens: Tensor) -> TreeShape:
    """The shape without samples that do not exist, and without what would follow them."""
    shape = tree.shape_on(tokens.device)
    missing = tokens < 0
    if not missing.any():
        return shape
    parents = torch.tensor([tree.parents], device=tokens.device)
    dead = (shape.ancestors & missing[:, None, :]).any(-1)
    return TreeShape.from_parents(torch.where(dead, -1, parents), width=shape.children.shape[2])
