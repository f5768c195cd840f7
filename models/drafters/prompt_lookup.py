"""Prompt lookup (Saxena, 2023; transformers' ``prompt_lookup_num_tokens``): drafts copied from the text itself.

Where the last tokens have occurred before, what followed them then is drafted again. It needs no model and no training,
and pays where answers repeat their prompt: summaries, edits, retrieval. With ``matches`` above 1 the continuations of
several occurrences become one tree.

Extensions. ``per_match`` bounds the drafts by how many tokens match, as suffix decoding does (SuffixDecoding,
2411.04975): what followed one token is seldom right again, and in a tree shared with a head its nodes are worth more to
the head. With ``memory`` it also searches the latest finished answers of a conversation or a stream, as suffix decoding
does too (there a suffix tree, here one pass over at most so many tokens). With no ``max_ngram`` and a ``bigrams`` table
it is Max-Gram of Cascade Speculative Drafting (2312.11462): the longest match of any length, and the likeliest next
tokens of a table where nothing matches.

Shape legend: B rows, T tokens, M matches, K draft positions, N nodes, V vocabulary.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from drafthead.data.batch import HiddenStates
from drafthead.data.utils.errors import UserError
from drafthead.models.decoding.draft_cache import TokenBuffer
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, Proposal
from drafthead.models.decoding.growth import root_only
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.token_tree import TokenTree, TreeShape

SEPARATOR = -1
"""Between remembered answers; nothing matches it."""
NO_TOKEN = -2


class PromptLookup(Drafter[TokenBuffer]):
    """The longest n-grams that end a row, looked up in its own prompt and answer.

    Its drafts are a function of the prefix, so they are verified as top-k candidates whatever ``draft_sampling`` says.
    ``confidence_threshold`` has no effect, and of the tree only depth and number of nodes count.
    """

    def __init__(
        self,
        num_tokens: int = 10,
        max_ngram: int | None = 3,
        matches: int = 1,
        memory: int = 0,
        bigrams: Tensor | None = None,
        per_match: int | None = None,
    ) -> None:
        """Say what to look for.

        Args:
            num_tokens: most drafts of a continuation.
            max_ngram: longest suffix to look for; shorter ones follow, down to one token (transformers: 2). None: any.
            matches: continuations to draft, the longest matches first, then the last (transformers: the first).
            memory: tokens of finished answers (with their prompts) to search too, the oldest dropped first.
            bigrams: [V] int64, the likeliest token after each, -1 where none is known (``bigram_table``).
            per_match: most drafts for every token that matches; None: ``num_tokens`` after any match.
        """
        counts = {"num_tokens": num_tokens, "max_ngram": max_ngram, "matches": matches, "per_match": per_match}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise UserError(f"prompt lookup needs {name} of at least 1, got {value}")
        if memory < 0:
            raise UserError(f"prompt lookup needs a memory of at least 0 tokens, got {memory}")
        self.memory, self.bigrams = memory, bigrams
        self._answers: deque[list[int]] = deque()
        self._remembered = torch.zeros(1, 0, dtype=torch.int64)
        self.max_ngram, self.matches, self.per_match = max_ngram, matches, per_match
        self._depth = num_tokens
        self.tree = TokenTree.from_paths(
            [(rank, *(0,) * below) for rank in range(matches) for below in range(num_tokens)]
        )

    @property
    def depth(self) -> int:
        return self._depth

    def identity(self) -> tuple[object, ...]:
        bigrams = None if self.bigrams is None else hashlib.sha256(self.bigrams.cpu().numpy().tobytes()).hexdigest()
        settings = (self.depth, self.max_ngram, self.matches, self.memory, self.per_match)
        return (type(self).__name__, *settings, bigrams)

    def init_state(self, batch: int) -> TokenBuffer:
        return TokenBuffer.none(batch)

    def update(
        self, state: TokenBuffer, tokens: Tensor, base_hidden: HiddenStates | None, counts: Tensor | None = None
    ) -> TokenBuffer:
        return state.append(tokens, counts)

    def remember(self, tokens: list[int]) -> None:
        if self.memory == 0:
            return
        self._answers.append([*tokens[-self.memory + 1 :], SEPARATOR] if self.memory > 1 else [])
        while sum(map(len, self._answers)) > self.memory:
            self._answers.popleft()
        kept = [token for answer in self._answers for token in answer]
        self._remembered = torch.tensor([kept], dtype=torch.int64)

    @torch.inference_mode()
    def draft(
        self, state: TokenBuffer, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None
    ) -> Proposal:
        depth = min(draft_config.depth, self.depth)
        if depth == 0 or draft_config.nodes == 1:
            return root_only(last_token)
        text = self._searched(state.append(last_token[:, None]))
        start, length = self._find(text)
        offsets = torch.arange(depth, device=last_token.device)
        places = start[..., None] + offsets
        valid = (length > 0)[..., None] & (places < text.lengths[:, None, None])  # [B, M, K]
        if self.per_match is not None:
            valid &= offsets < self.per_match * length[..., None]
        found = text.tokens.gather(1, places.clamp(max=text.longest - 1).flatten(1)).view(places.shape)
        valid &= (found != SEPARATOR).cumprod(-1, dtype=torch.int32).bool()
        found = found.clamp(min=0)  # padding is read too, and must be a token
        if self.bigrams is not None:
            self._fill(last_token, found, valid)
        if not valid.any():
            return root_only(last_token)
        if valid.shape[:2] == (1, 1):
            count = min(int(valid.sum()), draft_config.nodes - 1)
            return Proposal(
                tokens=torch.cat([last_token[:, None], found[:, 0, :count]], 1),
                shape=TokenTree.chain(count).shape_on(last_token.device),
                draft_sampling=DraftSampling.TOP_K,
            )
        return _tree(last_token, found, valid, draft_config.nodes)

    def _searched(self, text: TokenBuffer) -> TokenBuffer:
        """Every row after the remembered answers, whose matches count as older than its own."""
        earlier = self._remembered.shape[1]
        if earlier == 0:
            return text
        self._remembered = self._remembered.to(text.tokens.device)
        tokens = torch.cat([self._remembered.expand(len(text.lengths), -1), text.tokens], 1)
        return TokenBuffer(tokens=tokens, lengths=text.lengths + earlier)

    def _fill(self, last_token: Tensor, found: Tensor, valid: Tensor) -> None:
        """Rows where nothing matches draft the likeliest next token of every token, as far as the table goes."""
        assert self.bigrams is not None
        self.bigrams = self.bigrams.to(last_token.device)
        nothing, token = ~valid[:, 0, 0], last_token
        known = nothing
        for k in range(found.shape[-1]):
            token = self.bigrams[token.clamp(min=0)]
            known = known & (token >= 0)
            found[:, 0, k] = torch.where(nothing, token.clamp(min=0), found[:, 0, k])
            valid[:, 0, k] |= known

    def _find(self, text: TokenBuffer) -> tuple[Tensor, Tensor]:
        """The best matches of every row: where their continuations start, and how many tokens match (0: none). [B, M]

        One pass of a few tensor operations over the text for each length of n-gram.
        """
        rows, width = text.tokens.shape
        device = text.tokens.device
        length = torch.zeros(rows, width, dtype=torch.int64, device=device)  # [:, e]: matching tokens that end at e - 1
        running = torch.ones(rows, width, dtype=torch.bool, device=device)
        place = torch.arange(width, device=device)
        earlier = place < text.lengths[:, None]  # a continuation has one token at least
        for back in range(1, min(self.max_ngram or width, width - 1) + 1):
            wanted = text.tokens.gather(1, (text.lengths[:, None] - back).clamp(min=0))
            wanted.masked_fill_(wanted == SEPARATOR, NO_TOKEN)
            running = running & torch.nn.functional.pad(text.tokens[:, : width - back] == wanted, (back, 0))
            length += running
            if self.max_ngram is None and not (running & earlier).any():
                break
        length.masked_fill_(~earlier, 0)
        best = (length * width + place).topk(min(self.matches, width), 1).indices
        return best, length.gather(1, best)


def bigram_table(answers: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """[V] int64: the most frequent next token of every token in ``answers``, the lower id of equal ones; -1: none."""
    counts = Counter(pair for ids in answers for pair in pairwise(ids))
    table = torch.full((vocab_size,), -1, dtype=torch.int64)
    for (token, following), _ in sorted(counts.items(), key=lambda item: (item[1], -item[0][1])):
        table[token] = following  # the most frequent one comes last
    return table


def _tree(last_token: Tensor, found: Tensor, valid: Tensor, nodes: int) -> Proposal:
    """The continuations ``found`` ([B, M, K]) as one tree, at most ``nodes`` with the root; the first ones win."""
    rows, matches, depth = found.shape
    device = found.device
    equal = (found[:, :, None] == found[:, None]) & valid[:, :, None] & valid[:, None]
    equal = equal.cumprod(-1, dtype=torch.int32).bool()  # [B, M, M, K]: alike up to this depth
    owner = equal.int().argmax(2)  # [B, M, K]: the first continuation with this path
    numbers = torch.arange(matches, device=device)[:, None]
    active = (valid & (owner == numbers)).flatten(1)
    active &= active.cumsum(1) < nodes
    step = torch.arange(1, depth, device=device)
    parents = torch.zeros(rows, matches, depth, dtype=torch.int64, device=device)
    parents[..., 1:] = owner[..., :-1] * depth + step  # of node (m, k) in a table that starts with the root
    order = (~active).sort(dim=1, stable=True).indices[:, : int(active.sum(1).max())]
    place = torch.zeros(rows, matches * depth + 1, dtype=torch.int64, device=device)
    place.scatter_(1, order + 1, torch.arange(1, order.shape[1] + 1, device=device).expand(rows, -1))
    above = place.gather(1, parents.flatten(1).gather(1, order))
    above = torch.where(active.gather(1, order), above, -1)
    root = last_token.new_full((rows, 1), -1)
    return Proposal(
        tokens=torch.cat([last_token[:, None], found.flatten(1).gather(1, order)], 1),
        shape=TreeShape.from_parents(torch.cat([root, above], 1)),
        draft_sampling=DraftSampling.TOP_K,
    )
