"""Several drafters at once: the union of their trees (SpecInfer, 2305.09781).

Nodes with the same tokens from the root on become one node, which the target processes once. Their candidates stay
separate: a token that two drafters sampled is a candidate twice, each time with the distribution it was drawn from.
Dropping one, or using one distribution for both, would make the output inexact. Candidates are tried in the order of
the drafters, whatever was sampled. All rows are combined at once, by tensor operations in a loop over depths.

For example, after the root "a", drafter 1 drafts "b c" and drafter 2 drafts "b d"::

    all drafters' nodes   a  b  c  b  d     union: a - b -+- c
    index of first equal  0  1  2  1  4                   +- d
    number in the union   0  1  2  1  3

Shape legend: B rows, N nodes (root included), S candidates at a node, M nodes of all drafters before combining.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from drafthead.data.batch import BaseHidden, HiddenStates, HiddenStatesSpec
from drafthead.errors import UserError
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.cost_growth import other_drafts, price_drafts
from drafthead.models.decoding.cost_tree import AcceptanceModel, CostTree
from drafthead.models.decoding.coupling import Coupling
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, DynamicTree, Proposal, Session
from drafthead.models.decoding.growth import StepwiseDrafter, StepwiseSession
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.token_tree import NO_CHILD, TokenTree, TreeShape
from drafthead.system.devices import is_host, on_device


class CompositeDrafter(Drafter):
    """Base class of combinations of drafters; a subclass sets ``depth`` and ``tree`` and defines ``open``."""

    def __init__(self, drafters: Sequence[Drafter], kind: str) -> None:
        """``kind`` names the combination in error messages, such as "a relay"."""
        bases = {d.base_fingerprint for d in drafters if d.base_fingerprint is not None}
        if len(bases) > 1:
            raise UserError(f"the drafters of {kind} were loaded for different bases; load them all on one base")
        self.base_fingerprint = next(iter(bases), None)
        self.vocab_size = max((d.vocab_size for d in drafters if d.vocab_size is not None), default=None)
        self.drafters = tuple(drafters)
        self.spec = HiddenStatesSpec(layers=tuple(dict.fromkeys(n for d in drafters for n in d.spec.layers)))
        self.reads_base = any(drafter.reads_base for drafter in drafters)

    def identity(self) -> tuple[object, ...]:
        return (type(self).__name__, *(drafter.identity() for drafter in self.drafters))

    def remember(self, tokens: list[int]) -> None:
        for drafter in self.drafters:
            drafter.remember(tokens)


class CompositeSession(Session):
    """Base class of sessions with one session per drafter; a subclass defines ``draft``. The drafters' sessions all get
    the same committed tokens, and none uses the target's cache."""

    def __init__(self, drafter: CompositeDrafter, rows: int) -> None:
        self.drafter = drafter
        self.sessions = [part.open(rows) for part in drafter.drafters]

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self.sessions[0].lengths

    def commit(self, tokens: Tensor, counts: list[int], base_hidden: BaseHidden, nodes: Tensor | None = None) -> None:
        spec = self.drafter.spec
        for part, session in zip(self.drafter.drafters, self.sessions, strict=True):
            hidden = base_hidden
            if base_hidden is not None and part.spec != spec:
                # The layers that this drafter reads, out of those that any drafter reads.
                read = [base_hidden.layer(spec.layers.index(number)) for number in part.spec.layers]
                hidden = HiddenStates(final=base_hidden.final, layers=torch.cat(read, -1) if read else None)
            session.commit(tokens, counts, hidden, self.nodes_of(session, nodes))

    def nodes_of(self, session: Session, nodes: Tensor | None) -> Tensor | None:
        """Return the numbers of ``nodes`` of the combined tree in the tree of ``session``, for its ``commit``. This
        base class returns None: ``session`` keeps none of its nodes."""
        return None

    def select(self, rows: list[int]) -> None:
        for session in self.sessions:
            session.select(rows)

    def rollback(self, lengths: list[int]) -> None:
        for session in self.sessions:
            session.rollback(lengths)


class CombinedDrafter(CompositeDrafter):
    """A drafter whose tree is the union of several drafters' trees.

    Draft sampling, sampler, confidence threshold and depth of a ``DraftConfig`` apply to all drafters. The nodes of a
    dynamic tree are divided equally. No drafter uses the target's cache: the target reads the whole union, while an
    early exit would have read only the nodes that it drafted itself.

    Up to some number of nodes, verification takes as long as for one token; every further node costs time. ``nodes`` is
    the size up to which the first drafter fills the union. The other drafters draft first and are never cut, so the
    union can be larger. The first drafter's tree is then cut to the nodes that still fit, perhaps to the root alone:
    those with the lowest depth plus ranks, which are probably its likeliest ones. How many nodes the others drafted
    depends on the context alone, so the output stays exact. All rows of a batch get as many nodes of the first drafter
    as the row with the most other nodes allows. On a GPU, whose tensors the host cannot read freely, every drafter
    drafts its whole tree.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        trees: Sequence[TokenTree] | None = None,
        nodes: int | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Combine ``drafters``, whose candidates are tried in this order. By default each drafts its own tree, or a
        chain over all its positions. ``names`` are for reports."""
        super().__init__(drafters, "a combined drafter")
        self.trees = tuple(trees) if trees else tuple(d.tree or TokenTree.chain(d.depth) for d in drafters)
        if nodes is not None and nodes < 2:
            raise UserError(f"a combined tree needs at least 2 nodes (the root and one draft), got {nodes}")
        self.nodes, self.depth = nodes, max(drafter.depth for drafter in drafters)
        self.names = tuple(names or (type(drafter).__name__ for drafter in drafters))
        self.tree = union(self.trees)
        self.tree_costs, self.drafts_by_cost = drafters[0].tree_costs, drafters[0].drafts_by_cost
        self.prefers_cost = trees is None and nodes is None and drafters[0].by_cost

    def identity(self) -> tuple[object, ...]:
        return (*super().identity(), self.trees, self.nodes)

    def open(self, rows: int, cache: TreeCache | None = None) -> "CombinedSession":
        return CombinedSession(self, rows)

    def draft_configs(self, draft_config: DraftConfig) -> list[DraftConfig]:
        """Return ``draft_config`` with each drafter's own tree, or an equal share of the nodes of a dynamic tree."""
        if isinstance(draft_config.tree, DynamicTree):
            share = 1 + (draft_config.nodes - 1) // len(self.drafters)
            if share < 2:
                what = f"{len(self.drafters)} combined drafters cannot share a tree of {draft_config.nodes} nodes"
                raise UserError(f"{what}; give at least {len(self.drafters) + 1}")
            return [replace(draft_config, tree=replace(draft_config.tree, nodes=share)) for _ in self.drafters]
        trees = [tree.truncate(draft_config.depth) for tree in self.trees]
        needed = 1 + sum(len(tree) - 1 for tree in trees)
        if draft_config.nodes < needed:
            what = f"the tree has room for {draft_config.nodes} nodes, but the combined drafters' trees have {needed}"
            raise UserError(f"{what}; leave out the tree to draft all of them")
        return [replace(draft_config, tree=tree) for tree in trees]


class CombinedSession(CompositeSession):
    """Merges the trees of its drafters' sessions."""

    drafter: CombinedDrafter

    def __init__(self, drafter: CombinedDrafter, rows: int) -> None:
        super().__init__(drafter, rows)
        self._own_numbers: list[Tensor] = []
        """The second result of ``combine`` for the latest draft; of a tree by cost, only that of the first drafter."""

    @torch.inference_mode()
    def draft(self, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None) -> Proposal:
        drafter = self.drafter
        if isinstance(draft_config.tree, CostTree):
            return self._draft_by_cost(last_token, draft_config, rng)
        parts = zip(drafter.drafters, drafter.draft_configs(draft_config), self.sessions, strict=True)
        (head, head_config, session), *others = parts
        proposals = [other.draft(last_token, config.truncate(part.depth), rng) for part, config, other in others]
        # A device's trees have their full size, padding included, which would leave the head no room.
        limited = is_host(last_token.device)
        if limited and drafter.nodes is not None and isinstance(head_config.tree, TokenTree):
            room = drafter.nodes - sum(len(p.shape) - 1 for p in proposals)
            head_config = replace(head_config, tree=head_config.tree.first(room))
        first = session.draft(last_token, head_config.truncate(head.depth), rng)
        proposal, self._own_numbers = combine([first, *proposals])
        return proposal

    def _draft_by_cost(self, last_token: Tensor, config: DraftConfig, rng: RandomSource | None) -> Proposal:
        """Draft the tree that pays. The likeliest drafts of all drafters compete in one order. If the first drafter
        draws its drafts, those of the others are chosen before."""
        assert isinstance(config.tree, CostTree)
        drafter, session = self.drafter, self.sessions[0]
        grows = isinstance(session, StepwiseSession)
        scored = list[tuple[Proposal, AcceptanceModel, Coupling | None]]()
        for part, tree, other in list(zip(drafter.drafters, drafter.trees, self.sessions, strict=True))[grows:]:
            likeliest = DraftConfig(tree=tree.truncate(min(config.depth, part.depth)), likelihoods=True)
            if isinstance(part, StepwiseDrafter):
                likeliest = replace(likeliest, coupling=config.coupling)
            if part.is_certain or isinstance(part, StepwiseDrafter):  # which knows the random numbers
                scored.append((other.draft(last_token, likeliest), AcceptanceModel(), None))
            else:
                scored.append((other.draft(last_token, likeliest), config.tree.costs.lookup, config.coupling))
        others, self._own_numbers = other_drafts(last_token, scored), []
        if not isinstance(session, StepwiseSession):
            return price_drafts(last_token, config, others)
        config_of_head = config.truncate(drafter.drafters[0].depth)
        if config.draft_sampling is DraftSampling.TOP_K:
            proposal = session.draft_by_cost(last_token, config_of_head, others=others)
            own = torch.arange(len(proposal.shape), device=last_token.device)
            self._own_numbers = [own.expand_as(proposal.tokens)]
            return proposal
        priced = price_drafts(last_token, config, others)
        drawn = session.draft_by_cost(last_token, config_of_head, rng, verified=len(priced.shape) - 1)
        combined, numbers = combine([drawn, priced])
        self._own_numbers = numbers[:1]
        return replace(combined, forecast=drawn.forecast)

    def nodes_of(self, session: Session, nodes: Tensor | None) -> Tensor | None:
        number = self.sessions.index(session)
        if nodes is None or number >= len(self._own_numbers):
            return None
        return self._own_numbers[number].gather(1, nodes)


def union(trees: Sequence[TokenTree]) -> TokenTree:
    """Join ``trees`` at one root without merging nodes, which is the largest possible union. The ranks of the root's
    children continue from tree to tree, so that children of different trees stay separate."""
    paths: list[tuple[int, ...]] = []
    offset = 0
    for tree in trees:
        paths += [(path[0] + offset, *path[1:]) for path in tree.paths[1:]]
        offset = 1 + max((path[0] for path in paths), default=-1)
    return TokenTree.from_paths(paths)


def combine(proposals: Sequence[Proposal]) -> tuple[Proposal, list[Tensor]]:
    """Return the union of the drafted trees, and per drafter a tensor [B, N] of each node's number in its own tree.

    The number is -1 for nodes that the drafter did not draft. Nodes of two drafters with the same tokens from the root
    become one node. Equal samples of one drafter stay separate nodes: both may have the same children, which one merged
    node would have twice.
    """
    drafting = [n for n, proposal in enumerate(proposals) if len(proposal.shape) > 1] or [0]
    device = proposals[0].tokens.device
    if len(drafting) == 1:
        combined = replace(proposals[drafting[0]], slots=None)
        own = [torch.arange(len(combined.shape), device=device).expand_as(combined.tokens)]
    else:
        drafted = [proposals[n] for n in drafting]
        kinds = {p.draft_sampling for p in drafted if p.probs is not None}
        if len(kinds) > 1:
            what = "combined drafters must all sample with replacement, or all without"
            raise UserError(f"{what}; give all the same draft_sampling")
        table = _Table(drafted)
        parents, tokens, new_number = _compact(table, _same_node(table))
        count = parents.shape[1]
        numbers = [_list_nodes(table, n, len(p.shape), new_number, count) for n, p in enumerate(drafted)]
        own = [_at_nodes(at, torch.arange(at.shape[1], device=device).expand_as(at), count, -1) for at in numbers]
        children, prob_index = _candidates(drafted, numbers, count)
        shape = TreeShape.from_parents(parents, width=None if is_host(device) else children.shape[2])
        probs = [p.probs for p in drafted if p.probs is not None]
        combined = Proposal(
            tokens=tokens,
            shape=replace(shape, children=children),
            draft_sampling=kinds.pop() if kinds else DraftSampling.TOP_K,
            probs=torch.cat(probs, 1) if probs else None,
            prob_index=prob_index if probs else None,
        )
    only_root = torch.full_like(combined.tokens, -1)
    only_root[:, :1] = 0  # a slice is filled; writing one element would wait for the device
    return combined, [own[drafting.index(n)] if n in drafting else only_root for n in range(len(proposals))]


class _Table:
    """The M nodes of all proposals in one list: the shared root, then the other nodes of each drafter in turn."""

    def __init__(self, proposals: Sequence[Proposal]) -> None:
        rows, device = proposals[0].tokens.shape[0], proposals[0].tokens.device
        shapes = [proposal.shape for proposal in proposals]
        sizes = [len(shape) - 1 for shape in shapes]
        self.offsets = [0, *accumulate(sizes)]  # a drafter's node n > 0 is node offset + n of the list

        def joined(values: Iterable[Tensor]) -> Tensor:  # [B or 1, N] each -> [B, M], with the root only once
            return torch.cat([value[:, min(n, 1) :].expand(rows, -1) for n, value in enumerate(values)], 1)

        self.tokens, self.depths = joined(p.tokens for p in proposals), joined(shape.depths for shape in shapes)
        above = (shape.parents for shape in shapes)
        self.parents = joined(torch.where(p > 0, p + offset, p) for p, offset in zip(above, self.offsets, strict=False))
        self.owner = on_device([0, *(n for n, size in enumerate(sizes) for _ in range(size))], device)
        free = is_host(device)
        levels = sorted((int(p.shape.depths.max()) if free else p.shape.depth for p in proposals), reverse=True)
        self.shared_depth = levels[1]  # deeper nodes of two drafters cannot coincide


def _same_node(table: _Table) -> Tensor:
    """Return, for each node of ``table``, the index of the node that represents it in the union, [B, M] int64: itself,
    or an earlier drafter's node with the same tokens from the root."""
    rows, count = table.tokens.shape
    device = table.tokens.device
    index = torch.arange(count, device=device)
    same = index.expand(rows, -1).contiguous()
    earlier = index[:, None] > index
    same_drafter = table.owner[:, None] == table.owner
    alike = (table.tokens[:, :, None] == table.tokens[:, None]) & earlier
    for depth in range(1, table.shared_depth + 1):
        above = torch.where(table.parents >= 0, same.gather(1, table.parents.clamp(min=0)), -1)
        on_level = (table.depths == depth) & (above >= 0)
        twins = alike & (above[:, :, None] == above[:, None]) & on_level[:, :, None] & on_level[:, None]
        repeated = (twins & same_drafter).any(-1)
        # Match only first samples: if a drafter drew "b" twice, the second "b" keeps its own node and children.
        meets = twins & ~same_drafter & ~repeated[:, None] & ~repeated[..., None]
        first = torch.where(meets.any(-1), meets.int().argmax(-1), index)
        same = torch.where(on_level, first, same)
    return same


def _compact(table: _Table, same: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number the union's nodes, from ``same`` [B, M] of ``_same_node``. Return their parents [B, N] and tokens [B, N],
    and the number in the union of each node of ``table``, [B, M]."""
    rows, count = same.shape
    index = torch.arange(count, device=same.device)
    active = (same == index) & (table.parents >= 0)
    active[:, 0] = True
    width = int(active.sum(1).max()) if is_host(same.device) else count
    # A stable sort moves nodes to the front in their order: parents stay before their children, padding comes last.
    order = (~active).sort(dim=1, stable=True).indices[:, :width]
    new_number = torch.zeros_like(same).scatter_(1, order, torch.arange(width, device=same.device).expand(rows, -1))
    new_number = new_number.gather(1, same)
    above = table.parents.gather(1, order)
    parents = torch.where((above >= 0) & active.gather(1, order), new_number.gather(1, above.clamp(min=0)), -1)
    return parents, table.tokens.gather(1, order), new_number


def _list_nodes(table: _Table, drafter: int, count: int, new_number: Tensor, dropped: int) -> Tensor:
    """Return the numbers in the union of a drafter's ``count`` nodes, [B, count]; padding gets the number ``dropped``.
    ``new_number`` [B, M] is the union's number of each node of ``table``. It maps padding to the root."""
    nodes = torch.arange(count, device=new_number.device) + table.offsets[drafter]
    nodes[:1] = 0  # a slice is filled; writing one element would wait for the device
    padding = table.parents[:, nodes] < 0
    padding[:, 0] = False
    return torch.where(padding, dropped, new_number[:, nodes])


def _at_nodes(numbers: Tensor, values: Tensor, count: int, fill: int) -> Tensor:
    """Return [B, ``count``, ...] with ``values`` [B, n, ...] at the nodes ``numbers`` [B, n], and ``fill`` elsewhere.
    Values with the number ``count`` are dropped."""
    at = numbers.view(*numbers.shape, *(1,) * (values.ndim - 2)).expand_as(values)
    return values.new_full((len(values), count + 1, *values.shape[2:]), fill).scatter_(1, at, values)[:, :count]


def _candidates(proposals: Sequence[Proposal], numbers: list[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Return ``Proposal.shape.children`` and ``Proposal.prob_index`` [B, N, S] of the union of ``count`` = N nodes.

    ``numbers`` are the results of ``_list_nodes``. Each drafter's candidates first get columns of their own, because a
    node of the union stands for at most one node per drafter. Then each node's candidates move to the first columns; on
    a CPU, columns that no node uses are removed.
    """
    by_drafter, probs = [], 0
    for proposal, at in zip(proposals, numbers, strict=True):
        known = proposal.shape.children.expand(len(at), -1, -1)
        to = at.gather(1, known.flatten(1)).view(known.shape).masked_fill(known == NO_CHILD, NO_CHILD)
        dist = torch.full_like(known, -1)
        if proposal.prob_index is not None and proposal.probs is not None:
            dist = torch.where(proposal.prob_index >= 0, proposal.prob_index + probs, -1).expand(known.shape)
            probs += proposal.probs.shape[1]
        by_drafter.append((_at_nodes(at, to, count, NO_CHILD), _at_nodes(at, dist, count, NO_CHILD)))
    children, prob_index = (torch.cat(columns, 2) for columns in zip(*by_drafter, strict=True))
    gaps = children == NO_CHILD
    order = gaps.sort(dim=2, stable=True).indices
    if is_host(children.device):
        order = order[..., : max(1, int((~gaps).sum(2).max()))]
    return children.gather(2, order), prob_index.gather(2, order)
