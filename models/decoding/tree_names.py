"""Names of draft trees, as in ``tree=dynamic:16``."""

import re

from drafthead.errors import UserError
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import LARGEST, CostTree, TreeCosts
from drafthead.models.decoding.drafter import Drafter, DynamicTree
from drafthead.models.token_tree import TokenTree

TREES = "head, static, cost[:NODES], chain[:K], expansion:1-1-3, dynamic:NODES[:WIDTH], or a tree.json"
UNMEASURED = TreeCosts(
    costs={1: CostModel(verify={1: 1.0}, draft=0.0, overhead=0.0, context=1)}
)  # to check a name only


def parse_tree(spec: str, depth: int, costs: TreeCosts | None) -> TokenTree | DynamicTree | CostTree | None:
    """Parse ``chain``, ``chain:K``, ``expansion:1-1-3``, ``dynamic:NODES[:WIDTH]`` or ``cost[:NODES]``; return None for
    other kinds. ``depth`` is the length of ``chain`` and the depth of trees that are chosen in each step. A malformed
    value raises a ``UserError``, and so does a tree by cost without ``costs``."""
    kind, _, detail = spec.partition(":")
    try:
        if kind == "chain":
            length = int(detail) if detail else depth
            if length < 1:
                raise ValueError("a chain needs at least one draft")
            return TokenTree.chain(length)
        if kind == "expansion":
            return TokenTree.expansion([int(width) for width in re.split("[-,]", detail)])
        if kind == "dynamic":
            nodes, _, width = detail.partition(":")
            return DynamicTree(nodes=int(nodes), width=int(width or 8), depth=depth)
        if kind == "cost":
            tree = CostTree(costs=costs or UNMEASURED, nodes=int(detail or LARGEST), depth=depth)
    except ValueError as error:
        raise UserError(f"tree {spec!r} cannot be read ({error}); give one of {TREES}") from None
    if kind != "cost":
        return None
    if costs is None:
        what = f"tree={spec} needs the costs of a step on this machine, which the drafter does not have"
        raise UserError(f"{what}; run stages=[tree] of its run, or set drafter.tree_costs")
    return tree


def named_tree(spec: str, drafter: Drafter) -> TokenTree | DynamicTree | CostTree:
    """Return the tree that ``spec`` names for ``drafter``; a name of no tree raises a ``UserError``."""
    if spec == "static":
        return drafter.tree or TokenTree.chain(drafter.depth)
    tree = parse_tree(spec, drafter.depth, drafter.tree_costs)
    if tree is None:
        known = TREES.removeprefix("head, ").removesuffix(", or a tree.json")
        raise UserError(f"{spec!r} names no tree; give one of {known}")
    return tree
