"""Acceptance rules: pure functions from a proposal and the target's view of it to a verdict.

Shape legend: B batch, N tree nodes (root included).
"""

import torch
from torch import Tensor

from drafthead.data.contracts import Proposal, Verdict


def greedy(proposal: Proposal, target_BN: Tensor) -> Verdict:
    """Accept the longest path on which every draft is the target's own greedy choice. Lossless.

    Exact for siblings of every kind, since the committed tokens are the target's whatever was drafted: a node is
    accepted iff all nodes from the root to it equal the target's argmax at their parents; distinct siblings make
    that path unique, and among equal ones the first is taken.

    Args:
        proposal: the drafted tree.
        target_BN: [B, N] int64, the target's argmax after every node.
    """
    tree = proposal.tree
    device = target_BN.device
    parents = torch.tensor((0, *tree.parents[1:]), device=device)
    matches = proposal.tokens == target_BN[:, parents]
    matches[:, 0] = True
    ancestors, depths = tree.ancestors.to(device), tree.depths.to(device)
    # A node survives when none of its ancestors (itself included) fails: no Python loop over nodes or depths.
    failures = (~matches).float() @ ancestors.t().float()
    reached = torch.where(failures == 0, depths, -1)
    accepted, node = reached.max(1)
    on_path = ancestors[node]  # [B, N]; nodes are ordered by depth along a path
    order = torch.where(on_path, torch.arange(len(tree), device=device), len(tree)).sort(1).values[:, : tree.depth + 1]
    return Verdict(
        nodes=order.masked_fill(order == len(tree), 0),
        accepted=accepted,
        bonus=target_BN.gather(1, node[:, None])[:, 0],
    )
