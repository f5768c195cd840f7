"""Prompt lookup (Saxena, 2023; transformers' ``prompt_lookup_num_tokens``): drafts copied from the context.

If the last tokens occurred before, the tokens that followed them then are drafted. Prompt lookup needs neither a model
nor training. It pays if answers repeat their prompt: summaries, edits, retrieval. With ``matches`` above 1, the
continuations of several occurrences become one tree.

Two extensions come from suffix decoding (SuffixDecoding, 2411.04975). ``per_match`` limits the drafts by the length of
the match, because what followed a single token is seldom right again. In a tree shared with a head, more nodes are then
left for the head's drafts. ``memory`` also searches the latest finished answers. SuffixDecoding searches them with a
suffix tree, this module by one pass over their tokens.

Shape legend: B rows, T tokens, M matches, K draft positions.
"""

from collections import deque

import torch
from torch import Tensor

from drafthead.data.batch import BaseHidden
from drafthead.errors import UserError
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.candidates import root_only
from drafthead.models.decoding.cost_growth import other_drafts, price_drafts
from drafthead.models.decoding.cost_tree import CostTree
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, Proposal, Session, take_rows
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.token_tree import TokenTree, TreeShape
from drafthead.system.devices import is_host, on_device

SEPARATOR = -1  # between remembered answers
NO_TOKEN = -2  # stands for a separator in the n-gram to look up, so that separators do not match each other


class TokenBuffer:
    """The tokens of every row of a batch; rows can have different lengths."""

    def __init__(self, tokens: Tensor, lengths: list[int]) -> None:
        """Store the first ``lengths[b]`` of ``tokens`` [B, T] int64 in each row b. T is the largest length."""
        self.tokens, self.lengths = tokens, lengths

    def append(self, tokens: Tensor, counts: list[int]) -> "TokenBuffer":
        lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        known = self.tokens.to(tokens.device)
        if len(counts) == 1:
            return TokenBuffer(torch.cat([known, tokens[:, : counts[0]]], 1), lengths)
        wider = torch.cat([known, torch.zeros_like(tokens)], 1)
        # Tokens after ``counts[b]`` are written past the row's new length, and the next tokens overwrite them.
        start = on_device(self.lengths, tokens.device)[:, None]
        wider.scatter_(1, start + torch.arange(tokens.shape[1], device=tokens.device), tokens)
        return TokenBuffer(wider[:, : max(lengths)], lengths)

    @property
    def ends(self) -> Tensor:  # [B] int64
        return on_device(self.lengths, self.tokens.device)


class PromptLookup(Drafter):
    """A drafter that searches a row's prompt and answer for earlier occurrences of its last tokens. Drafts are a
    function of the context, so they are top-k candidates for any ``draft_sampling``. Only depth and number of nodes of
    a ``DraftConfig`` are used."""

    drafts_by_cost = True

    def __init__(
        self,
        num_tokens: int = 10,
        max_ngram: int | None = 3,
        matches: int = 1,
        memory: int = 0,
        per_match: int | None = None,
    ) -> None:
        """Draft up to ``num_tokens`` tokens after each match.

        N-grams of up to ``max_ngram`` tokens (None: any) are searched, longer ones first. ``matches`` is the number of
        matches to draft from: the longest, and of equally long ones the latest (transformers: the first). ``memory``
        tokens of the latest answers and their prompts are searched too. ``per_match`` is the largest number of drafts
        per token of a match.
        """
        counts = {"num_tokens": num_tokens, "max_ngram": max_ngram, "matches": matches, "per_match": per_match}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise UserError(f"prompt lookup needs {name} of at least 1, got {value}")
        if memory < 0:
            raise UserError(f"prompt lookup needs a memory of at least 0 tokens, got {memory}")
        self.memory = memory
        self._answers: deque[list[int]] = deque()
        self._remembered = torch.zeros(1, 0, dtype=torch.int64)
        self.max_ngram, self.matches, self.per_match = max_ngram, matches, per_match
        self.depth = num_tokens
        paths = [(rank, *(0,) * below) for rank in range(matches) for below in range(num_tokens)]
        self.tree: TokenTree = TokenTree.from_paths(paths)

    def identity(self) -> tuple[object, ...]:
        return (type(self).__name__, self.depth, self.max_ngram, self.matches, self.memory, self.per_match)

    def open(self, rows: int, cache: TreeCache | None = None) -> "LookupSession":
        return LookupSession(self, rows)

    def remember(self, tokens: list[int]) -> None:
        if self.memory == 0:
            return
        self._answers.append([*tokens[-self.memory + 1 :], SEPARATOR] if self.memory > 1 else [])
        while sum(map(len, self._answers)) > self.memory:
            self._answers.popleft()
        tokens = [token for answer in self._answers for token in answer]
        self._remembered = torch.tensor([tokens], dtype=torch.int64).to(self._remembered.device)

    def to(self, device: torch.device) -> None:
        """Move the remembered answers, which drafting would wait for."""
        self._remembered = self._remembered.to(device)

    def continuations(self, text: TokenBuffer, last_token: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ``depth`` = K tokens after each of the best M matches, a mask of those to draft, [B, M, K] each,
        and the matches' lengths [B, M]. Each row of ``text`` ends with its ``last_token`` [B]. M is ``matches``, or
        fewer in a shorter text."""
        if earlier := self._remembered.shape[1]:
            # Remembered answers stand before every row, so that their matches count as older than its own.
            tokens = torch.cat([self._remembered.expand(len(text.lengths), -1), text.tokens], 1)
            text = TokenBuffer(tokens, [length + earlier for length in text.lengths])
        start, length = self._find(text)
        offsets = torch.arange(depth, device=last_token.device)
        positions = start[..., None] + offsets
        valid = (length > 0)[..., None] & (positions < text.ends[:, None, None])
        if self.per_match is not None:
            valid &= offsets < self.per_match * length[..., None]
        tokens = text.tokens.gather(1, positions.clamp(max=text.tokens.shape[1] - 1).flatten(1)).view(positions.shape)
        valid &= (tokens != SEPARATOR).cumprod(-1, dtype=torch.int32).bool()
        return tokens.clamp(min=0), valid, length  # padding is embedded too, and must be a token id

    def _find(self, text: TokenBuffer) -> tuple[Tensor, Tensor]:
        """Return the positions after the M best matches in ``text``, and the matches' lengths (0: none), [B, M] each.
        In "a b c a b", the n-gram "b" ends before the positions 2 and 5, and so does the longer "a b". The one that
        ends the text is not a match with earlier tokens, so the result is position 2, with length 2."""
        (rows, width), ends = text.tokens.shape, text.ends
        device = text.tokens.device
        length = torch.zeros(rows, width, dtype=torch.int64, device=device)  # [:, e]: matching tokens before position e
        running = torch.ones(rows, width, dtype=torch.bool, device=device)
        position = torch.arange(width, device=device)
        earlier = position < ends[:, None]  # a continuation has at least one token
        for back in range(1, min(self.max_ngram or width, width - 1) + 1):
            token = text.tokens.gather(1, (ends[:, None] - back).clamp(min=0))
            token.masked_fill_(token == SEPARATOR, NO_TOKEN)
            running = running & torch.nn.functional.pad(text.tokens[:, : width - back] == token, (back, 0))
            length += running
            if self.max_ngram is None and not (running & earlier).any():
                break
        length.masked_fill_(~earlier, 0)
        best = (length * width + position).topk(min(self.matches, width), 1).indices
        return best, length.gather(1, best)


class TextSession(Session):
    """Base class of sessions that keep the committed tokens of their rows, and nothing else."""

    def __init__(self, rows: int) -> None:
        self._text = TokenBuffer(torch.zeros(rows, 0, dtype=torch.int64), [0] * rows)

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self._text.lengths

    def commit(self, tokens: Tensor, counts: list[int], base_hidden: BaseHidden, nodes: Tensor | None = None) -> None:
        self._text = self._text.append(tokens, counts)

    def select(self, rows: list[int]) -> None:
        lengths = [self._text.lengths[row] for row in rows]
        self._text = TokenBuffer(take_rows(self._text.tokens, rows)[:, : max(lengths)], lengths)

    def rollback(self, lengths: list[int]) -> None:
        self._text = TokenBuffer(self._text.tokens[:, : max(lengths)], lengths)


class LookupSession(TextSession):
    """Searches the committed tokens of its rows at every step."""

    def __init__(self, drafter: PromptLookup, rows: int) -> None:
        super().__init__(rows)
        self._drafter = drafter

    def commit(self, tokens: Tensor, counts: list[int], base_hidden: BaseHidden, nodes: Tensor | None = None) -> None:
        super().commit(tokens, counts, base_hidden, nodes)
        self._drafter.to(tokens.device)

    @torch.inference_mode()
    def draft(self, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None) -> Proposal:
        if isinstance(draft_config.tree, CostTree):
            likeliest = DraftConfig(tree=self._drafter.tree.truncate(draft_config.depth), likelihoods=True)
            scored = self.draft(last_token, likeliest), draft_config.tree.costs.lookup, draft_config.coupling
            return price_drafts(last_token, draft_config, other_drafts(last_token, [scored]))
        depth = min(draft_config.depth, self._drafter.depth)
        if depth == 0 or draft_config.nodes == 1:
            return root_only(last_token)
        text = self._text.append(last_token[:, None], [1] * len(last_token))
        tokens, valid, length = self._drafter.continuations(text, last_token, depth)
        # What followed a longer match is likelier to follow again. A server learns the actual shares of acceptance.
        likelihoods = (1 - 0.5**length)[..., None].expand(valid.shape) if draft_config.likelihoods else None
        free = is_host(last_token.device)
        if free and not valid.any():
            return root_only(last_token)
        if free and valid.shape[:2] == (1, 1):
            count = min(int(valid.sum()), draft_config.nodes - 1)
            return Proposal(
                tokens=torch.cat([last_token[:, None], tokens[:, 0, :count]], 1),
                shape=TokenTree.chain(count).shape_on(last_token.device),
                draft_sampling=DraftSampling.TOP_K,
                likelihoods=None if likelihoods is None else _with_root(likelihoods[:, 0, :count]),
            )
        return tree_of(last_token, tokens, valid, draft_config.nodes, likelihoods)


def _with_root(likelihoods: Tensor) -> Tensor:
    """Return the likelihoods [B, 1 + N] of the root, which is certain, and of the N drafts [B, N]."""
    return torch.nn.functional.pad(likelihoods, (1, 0), value=1.0)


def tree_of(last_token: Tensor, tokens: Tensor, valid: Tensor, nodes: int, likelihoods: Tensor | None) -> Proposal:
    """Merge M continuations of ``last_token`` [B] into a tree per row, of up to ``nodes`` nodes with the root.
    ``tokens`` and ``valid`` [B, M, K] are the results of ``continuations``, and ``likelihoods`` [B, M, K] are those of
    ``tokens``. Earlier continuations get nodes first."""
    rows, matches, depth = tokens.shape
    device = tokens.device
    equal = (tokens[:, :, None] == tokens[:, None]) & valid[:, :, None] & valid[:, None]
    equal = equal.cumprod(-1, dtype=torch.int32).bool()  # [B, M, M, K]: equal paths up to this depth
    owner = equal.int().argmax(2)  # [B, M, K]: the first continuation with this path
    numbers = torch.arange(matches, device=device)[:, None]
    active = (valid & (owner == numbers)).flatten(1)
    active &= active.cumsum(1) < nodes
    step = torch.arange(1, depth, device=device)
    parents = torch.zeros(rows, matches, depth, dtype=torch.int64, device=device)
    parents[..., 1:] = owner[..., :-1] * depth + step  # of node (m, k) in a table that starts with the root
    # Counting the nodes would wait for the device: unused ones are padding.
    free = is_host(device)
    width = int(active.sum(1).max()) if free else min(nodes - 1, matches * depth)
    order = (~active).sort(dim=1, stable=True).indices[:, :width]
    index = torch.zeros(rows, matches * depth + 1, dtype=torch.int64, device=device)
    index.scatter_(1, order + 1, torch.arange(1, order.shape[1] + 1, device=device).expand(rows, -1))
    above = index.gather(1, parents.flatten(1).gather(1, order))
    above = torch.where(active.gather(1, order), above, -1)
    root = last_token.new_full((rows, 1), -1)
    return Proposal(
        tokens=torch.cat([last_token[:, None], tokens.flatten(1).gather(1, order)], 1),
        shape=TreeShape.from_parents(torch.cat([root, above], 1), width=None if free else matches),
        draft_sampling=DraftSampling.TOP_K,
        likelihoods=None if likelihoods is None else _with_root(likelihoods.flatten(1).gather(1, order)),
    )
