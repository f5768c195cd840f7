"""Several drafters along one path (the horizontal cascade of Cascade Speculative Drafting, 2312.11462).

The first drafter drafts the tokens right after the context, and each further one continues from the last draft. Early
positions, which matter most, come from the best drafter, later ones from cheaper ones. A lookup that continues a head's
drafts finds matches that the committed tokens do not contain yet. Every candidate keeps the distribution it was drawn
from, so the output is exact under sampling. See also ``vertical_cascade.py`` and ``combined.py`` (union of trees).

Shape legend: B rows.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.candidates import root_only
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, Proposal
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.drafters.combined import CompositeDrafter, CompositeSession
from drafthead.models.token_tree import TokenTree, TreeShape


class HorizontalCascade(CompositeDrafter):
    """A drafter of chains (``relay:A+B``) whose drafts come from several drafters in turn. If a drafter stops early in
    a row, or drafts nothing, the next one continues from the last draft. Draft sampling, sampler and confidence
    threshold of a ``DraftConfig`` apply to all drafters."""

    def __init__(self, drafters: Sequence[Drafter], lengths: Sequence[int]) -> None:
        """All but the first drafter must draft from tokens alone, because drafts have no hidden states of the base."""
        super().__init__(drafters, "a relay")
        for index, (drafter, length) in enumerate(zip(drafters, lengths, strict=True)):
            name = type(drafter).__name__
            if not 1 <= length <= drafter.depth:
                what = f"the relay lets {name} draft {length} tokens, but it can draft 1 to {drafter.depth}"
                raise UserError(f"{what}; change the number after @")
            if index and drafter.reads_base:
                what = f"{name} reads the base's hidden states"
                raise UserError(f"{what}, which drafts do not have, so in a relay it can only be the first")
        self.lengths, self.depth = tuple(lengths), sum(lengths)
        self.tree = TokenTree.chain(self.depth)
        self.confidence_threshold = drafters[0].confidence_threshold

    def identity(self) -> tuple[object, ...]:
        return (*super().identity(), self.lengths)

    def open(self, rows: int, cache: TreeCache | None = None) -> "CascadeSession":
        return CascadeSession(self, rows)


class CascadeSession(CompositeSession):
    """A session in which each drafter first commits the earlier drafters' drafts, then drafts, then rolls back."""

    drafter: HorizontalCascade

    @torch.inference_mode()
    def draft(self, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None) -> Proposal:
        if not draft_config.is_chain:
            what = "a relay drafts chains, not trees"
            raise UserError(f"{what}; use tree=head or tree=chain:K, or combine it: (relay:A+B)+C")
        proposal, left, committed = root_only(last_token), draft_config.depth, self.lengths
        for length, session in zip(self.drafter.lengths, self.sessions, strict=True):
            length = min(length, left)
            left -= length
            if length == 0:
                break
            drafted = drafted_tokens(proposal)
            counts = drafted.tolist()
            if max(counts) > 0:
                session.commit(proposal.tokens[:, :-1], counts, None)
            leaf = proposal.tokens.gather(1, drafted[:, None])[:, 0]
            # Later drafters do not know the output's random numbers: rows may have different numbers of drafts by then.
            coupling = draft_config.coupling if proposal.tokens.shape[1] == 1 else None
            chain_config = replace(draft_config, tree=TokenTree.chain(length), coupling=coupling)
            proposal = concatenate(proposal, session.draft(leaf, chain_config, rng))
            if max(counts) > 0:
                session.rollback(committed)
        return replace(proposal, slots=None)


def drafted_tokens(proposal: Proposal) -> Tensor:
    """Return the number of drafts in each row of a chain, [B] int64."""
    return (proposal.shape.parents >= 0).sum(1).expand(proposal.tokens.shape[0])


def concatenate(first: Proposal, second: Proposal) -> Proposal:
    """Join two chains of every row to one; the root of ``second`` is the last draft of ``first``.

    Rows of ``first`` may have different lengths. Padding (``-``) moves to the end::

        first   root a b    second  b c     joined  root a b c
                root x -            x y             root x y -
    """
    if len(second.shape) == 1:
        return first
    if len(first.shape) == 1:
        return second
    if max(first.shape.children.shape[2], second.shape.children.shape[2]) > 1:
        raise ValueError("concatenate needs two chains, but a node of the proposals has several children")
    kinds = {p.draft_sampling for p in (first, second) if p.probs is not None}
    if len(kinds) > 1:
        what = "the drafters of a relay must all sample with replacement, or all without"
        raise UserError(f"{what}; give all the same draft_sampling")
    rows, device = first.tokens.shape[0], first.tokens.device
    head, tail = drafted_tokens(first), drafted_tokens(second)
    count = 1 + int((head + tail).max())
    parts = ((first, torch.zeros_like(head), head), (second, head, tail))
    # An extra column takes padding and is dropped.
    tokens = torch.zeros(rows, count + 1, dtype=torch.int64, device=device)
    prob_index = torch.full((rows, count + 1), -1, dtype=torch.int64, device=device)
    probs: list[Tensor] = []
    for proposal, offset, length in parts:
        node = torch.arange(len(proposal.shape), device=device)
        new_node = offset[:, None] + node
        tokens.scatter_(1, torch.where(node <= length[:, None], new_node, count), proposal.tokens)
        if proposal.probs is None or proposal.prob_index is None:
            continue
        index = proposal.prob_index[..., 0].expand(rows, -1)
        index = torch.where(index >= 0, index + sum(p.shape[1] for p in probs), -1)
        prob_index.scatter_(1, torch.where(node < length[:, None], new_node, count), index)
        probs.append(proposal.probs)
    number = torch.arange(count, device=device)
    parents = torch.where(number <= (head + tail)[:, None], number - 1, -1)
    same = bool((head + tail == count - 1).all())
    return Proposal(
        tokens=tokens[:, :count],
        shape=TokenTree.chain(count - 1).shape_on(device) if same else TreeShape.from_parents(parents, width=1),
        draft_sampling=kinds.pop() if kinds else DraftSampling.TOP_K,
        probs=torch.cat(probs, 1) if probs else None,
        prob_index=prob_index[:, :count, None] if probs else None,
    )
