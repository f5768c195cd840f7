"""Prompt lookup (Saxena, 2023; transformers' ``prompt_lookup_num_tokens``): drafts copied from the text itself.

Where the last tokens have occurred before, what followed them then is drafted again. It needs no model and no training,
and pays where answers repeat their prompt: summaries, edits, retrieval. With ``matches`` above 1 the continuations of
several occurrences become one tree.

Shape legend: B rows, T tokens, M matches, K draft positions, N nodes.
"""

from functools import lru_cache

import torch
from torch import Tensor

from drafthead.data.batch import HiddenStates
from drafthead.data.utils.errors import UserError
from drafthead.models.decoding.contract import DraftConfig, Drafter, DraftSampling, Proposal
from drafthead.models.decoding.draft_cache import TokenBuffer
from drafthead.models.decoding.growth import root_only
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.token_tree import TokenTree, TreeShape


class PromptLookup(Drafter[TokenBuffer]):
    """The longest n-grams that end a row, looked up in its own prompt and answer.

    Its drafts are a function of the prefix, so they are verified as top-k candidates whatever ``draft_sampling`` says.
    ``confidence_threshold`` has no effect, and of the tree only depth and number of nodes count.
    """

    def __init__(self, num_tokens: int = 10, max_ngram: int = 3, matches: int = 1, newest: bool = True) -> None:
        """Say what to look for.

        Args:
            num_tokens: most drafts of a continuation.
            max_ngram: longest suffix to look for; shorter ones follow, down to one token (transformers: 2).
            matches: continuations to draft, the longest matches first.
            newest: among matches of one length prefer the last to the first. transformers takes the first.
        """
        for name, value in (("num_tokens", num_tokens), ("max_ngram", max_ngram), ("matches", matches)):
            if value < 1:
                raise UserError(f"prompt lookup needs {name} of at least 1, got {value}")
        self.max_ngram, self.matches, self.newest = max_ngram, matches, newest
        self._depth = num_tokens
        self.tree = TokenTree.from_paths(
            [(rank, *(0,) * below) for rank in range(matches) for below in range(num_tokens)]
        )

    @property
    def depth(self) -> int:
        return self._depth

    def init_state(self, batch: int) -> TokenBuffer:
        return TokenBuffer.none(batch)

    def update(
        self, state: TokenBuffer, tokens: Tensor, base_hidden: HiddenStates | None, counts: Tensor | None = None
    ) -> TokenBuffer:
        return state.append(tokens, counts)

    @torch.inference_mode()
    def draft(
        self, state: TokenBuffer, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None
    ) -> Proposal:
        depth = min(draft_config.depth, self.depth)
        if depth == 0 or draft_config.nodes == 1:
            return root_only(last_token)
        text = state.append(last_token[:, None])
        start, length = self._find(text)
        offsets = torch.arange(depth, device=last_token.device)
        places = start[..., None] + offsets
        valid = (length > 0)[..., None] & (places < text.lengths[:, None, None])  # [B, M, K]
        if not valid.any():
            return root_only(last_token)
        found = text.tokens.gather(1, places.clamp(max=text.longest - 1).flatten(1)).view(places.shape)
        if valid.shape[:2] == (1, 1):
            count = min(int(valid.sum()), draft_config.nodes - 1)
            return Proposal(
                tokens=torch.cat([last_token[:, None], found[:, 0, :count]], 1),
                shape=_chain(count).shape_on(last_token.device),
                draft_sampling=DraftSampling.TOP_K,
            )
        return _tree(last_token, found, valid, draft_config.nodes)

    def _find(self, text: TokenBuffer) -> tuple[Tensor, Tensor]:
        """The best matches of every row: where their continuations start, and how many tokens match (0: none). [B, M]

        One pass of a few tensor operations over the text for each length of n-gram.
        """
        rows, width = text.tokens.shape
        device = text.tokens.device
        length = torch.zeros(rows, width, dtype=torch.int64, device=device)  # [:, e]: matching tokens that end at e - 1
        running = torch.ones(rows, width, dtype=torch.bool, device=device)
        for back in range(1, min(self.max_ngram, width - 1) + 1):
            wanted = text.tokens.gather(1, (text.lengths[:, None] - back).clamp(min=0))
            running = running & torch.nn.functional.pad(text.tokens[:, : width - back] == wanted, (back, 0))
            length += running
        place = torch.arange(width, device=device)
        length.masked_fill_(place >= text.lengths[:, None], 0)  # a continuation has one token at least
        score = length * width + (place if self.newest else width - 1 - place)
        best = score.topk(min(self.matches, width), 1).indices
        return best, length.gather(1, best)


@lru_cache(maxsize=64)
def _chain(depth: int) -> TokenTree:
    return TokenTree.chain(depth)


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
