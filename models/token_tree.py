"""Shapes of token trees: ``TokenTree`` is one static tree, ``TreeShape`` has the trees of a batch as tensors.

A node is the root or a drafted token. A draft's rank is its number among the candidates after its parent, 0 for the
likeliest.

Shape legend: B rows (1 if all rows have the same tree), N nodes (root included), S children of a node.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Self

import torch
from torch import Tensor

NO_CHILD = 0  # in `TreeShape.children`: node 0 is the root, which is never a child


@dataclass(frozen=True, kw_only=True)
class TokenTree:
    """The shape of a token tree. Node 0 is the root: the last committed token, not yet read by the base. A chain of K
    drafts has the parents (-1, 0, 1, ..., K-1) and the ranks (0, 0, ..., 0)."""

    parents: tuple[int, ...]  # -1 for the root; a parent stands before its children
    ranks: tuple[int, ...]  # among the drafter's candidates after the parent, 0 for the likeliest; 0 for the root

    @staticmethod
    @lru_cache(maxsize=256)
    def chain(depth: int) -> "TokenTree":
        return TokenTree(parents=tuple(range(-1, depth)), ranks=(0,) * (depth + 1))

    @classmethod
    def from_paths(cls, paths: "list[tuple[int, ...]]") -> "TokenTree":
        """Return the tree whose nodes have these paths of ranks from the root (Medusa's ``choices``). Example: (0,) is
        the likeliest draft, (0, 1) the second likeliest after it. Nodes are numbered by depth, then by path; the root
        () may be left out. Any other missing parent raises a ValueError."""
        ordered = sorted(set(paths) - {()}, key=lambda p: (len(p), p))
        index: dict[tuple[int, ...], int] = {(): 0}
        for path in ordered:
            index[path] = len(index)
        missing = [p for p in ordered if p[:-1] not in index]
        if missing:
            raise ValueError(f"tree path {list(missing[0])} has no parent {list(missing[0][:-1])}; add it")
        if (smallest := min(map(min, ordered), default=0)) < 0:
            raise ValueError(f"ranks must be >= 0, got {smallest}")
        return cls(parents=(-1, *(index[p[:-1]] for p in ordered)), ranks=(0, *(p[-1] for p in ordered)))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The ranks on the path from the root to each node; () for the root."""
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            paths.append((*paths[parent], rank))
        return tuple(paths)

    @cached_property
    def depth(self) -> int:
        return max(len(p) for p in self.paths)

    @classmethod
    def expansion(cls, widths: "list[int]") -> "TokenTree":
        """Return SpecInfer's expansion <k_1, ..., k_m> (2305.09781): every node at depth i - 1 gets k_i children."""
        if not widths or min(widths) < 1:
            raise ValueError(f"an expansion needs widths of at least 1, got {widths}")
        paths: list[tuple[int, ...]] = [()]
        level: list[tuple[int, ...]] = [()]
        for width in widths:
            level = [(*path, rank) for path in level for rank in range(width)]
            paths += level
        return cls.from_paths(paths)

    # The caches of these methods may keep the few trees of a program alive.
    @lru_cache(maxsize=256)  # noqa: B019
    def truncate(self, depth: int) -> "TokenTree":
        if depth >= self.depth:
            return self
        return TokenTree.from_paths([path for path in self.paths if len(path) <= depth])

    @lru_cache(maxsize=256)  # noqa: B019
    def first(self, nodes: int) -> "TokenTree":
        """Return the tree of the ``nodes`` nodes, root included, with the smallest depth plus sum of ranks on the path:
        a guess at the likeliest nodes, for use without a drafter's probabilities."""
        if nodes >= len(self):
            return self
        # A child's sum exceeds its parent's, so the first nodes always form a tree.
        by_guess = sorted(self.paths, key=lambda path: (len(path) + sum(path), len(path), path))
        return TokenTree.from_paths(by_guess[: max(1, nodes)])

    @cached_property
    def shape(self) -> "TreeShape":
        return TreeShape.from_parents(torch.tensor([self.parents]), tree=self)

    @lru_cache(maxsize=256)  # noqa: B019
    def shape_on(self, device: torch.device) -> "TreeShape":
        return self.shape.to(device)


def causal_mask(count: int, device: torch.device) -> Tensor:
    """Return the mask [count, count] bool in which a position sees itself and earlier positions. (On a CPU, torch's
    ``tril`` starts all threads even for one value; a comparison does not.)"""
    positions = torch.arange(count, device=device)
    return positions[:, None] >= positions


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """The token trees of a batch; rows with fewer nodes are padded with nodes of parent -1."""

    parents: Tensor  # [B or 1, N] int64, -1 for the root and for padding; a parent stands before its children
    depths: Tensor  # [B or 1, N] int64, 0 for the root and for padding
    ancestors: Tensor  # [B or 1, N, N] bool: [i, j] is true if node j is node i or one of its ancestors
    children: Tensor
    """[B or 1, N, S] int64: children in the order in which verification tries them, then ``NO_CHILD``. In a tree
    combined from several drafters, a node may be listed several times."""
    depth: int  # an upper bound of the number of drafts on a path
    tree: TokenTree | None = None  # of all rows; None for trees that are chosen in each step

    @classmethod
    def from_parents(cls, parents: Tensor, tree: TokenTree | None = None, width: int | None = None) -> Self:
        """Return the shape of the trees with these ``parents`` [B or 1, N]; the root and padding have -1. Children are
        listed in the order of their nodes. ``width`` is an upper bound of the number of children of a node; with None,
        children are counted, which waits for the device."""
        rows, nodes = parents.shape
        known = (parents >= 0)[..., None]
        above = parents.clamp(min=0)
        reach = torch.zeros(rows, nodes, nodes, device=parents.device)
        reach.scatter_(2, above[..., None], known.float())
        reach = reach + torch.eye(nodes, device=parents.device)
        depth = tree.depth if tree is not None else nodes - 1
        for _ in range(max(1, depth).bit_length()):  # every round doubles how far up a node sees
            reach = (reach @ reach).clamp(max=1)
        ancestors = reach > 0
        depths = ancestors.sum(-1) - 1
        brothers = (parents[:, :, None] == parents[:, None, :]) & known
        # How many of a node's siblings stand before it:
        rank = (brothers & causal_mask(nodes, parents.device)).sum(-1) - known[..., 0].long()
        count = width if width is not None else int(rank.max()) + 1
        table = torch.zeros(rows, nodes, count + 1, dtype=torch.int64, device=parents.device)
        # The root and padding have no parent: they go to a column that is dropped.
        column = torch.where(parents >= 0, rank, count)
        index = torch.arange(nodes, device=parents.device).expand(rows, nodes)
        table.view(rows, -1).scatter_(1, above * (count + 1) + column, index)
        if tree is None and width is None:
            depth = int(depths.max())
        children = table[..., :count]
        return cls(parents=parents, depths=depths, ancestors=ancestors, children=children, depth=depth, tree=tree)

    def __len__(self) -> int:
        return self.parents.shape[1]

    @property
    def is_chain(self) -> bool:  # chains without `tree` do not count
        return self.tree is not None and self.depth == len(self) - 1

    def to(self, device: torch.device) -> "TreeShape":
        if self.parents.device == device:
            return self
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return TreeShape(**moved, depth=self.depth, tree=self.tree)
