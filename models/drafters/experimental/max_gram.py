"""Max-Gram of Cascade Speculative Drafting (2312.11462): prompt lookup with a match of any length and a bigram table.

If nothing matches, each draft is the most frequent successor of the token before, counted on the base's own answers.

Shape legend: V vocabulary.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from drafthead.models.drafters.prompt_lookup import PromptLookup, TokenBuffer


class MaxGram(PromptLookup):
    """Prompt lookup with matches of any length. Rows without a match are continued from ``bigrams``."""

    def __init__(self, num_tokens: int = 10, bigrams: Tensor | None = None) -> None:
        """``bigrams`` [V] int64 is from ``bigram_table``; without it, rows without a match get no drafts."""
        super().__init__(num_tokens, max_ngram=None)
        self.bigrams = bigrams

    def identity(self) -> tuple[object, ...]:
        bigrams = None if self.bigrams is None else hashlib.sha256(self.bigrams.cpu().numpy().tobytes()).hexdigest()
        return (*super().identity(), bigrams)

    def continuations(self, text: TokenBuffer, last_token: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        tokens, valid, length = super().continuations(text, last_token, depth)
        if self.bigrams is None:
            return tokens, valid, length
        self.bigrams = self.bigrams.to(last_token.device)
        unmatched, token = ~valid[:, 0, 0], last_token
        known = unmatched
        for k in range(depth):
            token = self.bigrams[token.clamp(min=0)]
            known = known & (token >= 0)
            tokens[:, 0, k] = torch.where(unmatched, token.clamp(min=0), tokens[:, 0, k])
            valid[:, 0, k] |= known
        return tokens, valid, length


def bigram_table(answers: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """Return for every token id the (lowest) id that follows it most often in ``answers``, or -1, [V] int64."""
    counts = Counter(pair for ids in answers for pair in pairwise(ids))
    table = torch.full((vocab_size,), -1, dtype=torch.int64)
    for (token, following), _ in sorted(counts.items(), key=lambda item: (item[1], -item[0][1])):
        table[token] = following  # the most frequent one comes last
    return table
