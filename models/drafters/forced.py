"""A drafter of tokens that a schema or a grammar forces (ToolSpec, 2604.13519).

With transformers' ``prefix_allowed_tokens_fn``, or any logits processor that leaves a single token, the next token is
known before the base computes it: the names and the punctuation of a JSON schema, for example. Runs of such tokens are
drafted without a model, and all of them are accepted. The drafter asks the processors that verification uses.

Shape legend: B rows, K drafts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.candidates import root_only
from drafthead.models.decoding.drafter import DraftConfig, Drafter, Proposal
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.decoding.sampling import Contexts
from drafthead.models.drafters.combined import CompositeDrafter
from drafthead.models.drafters.prompt_lookup import TextSession, tree_of
from drafthead.models.token_tree import TokenTree


@dataclass(frozen=True)
class Constraint:
    """The tokens that an answer's grammar forces."""

    only_token: Callable[[Contexts], Tensor]  # the token [n] that must follow each context; -1 if several may
    eos_ids: frozenset[int]  # nothing is drafted after one of them


class ForcedTokens(Drafter):
    """Drafts the tokens that ``constraint`` forces, as a chain. Drafts are a function of the context, so they are top-k
    candidates for any ``draft_sampling``."""

    constraint: Constraint | None = None  # set by ``bind``
    is_certain = True

    def __init__(self, num_tokens: int) -> None:
        self.depth, self.tree = num_tokens, TokenTree.chain(num_tokens)

    def identity(self) -> tuple[object, ...]:
        return type(self).__name__, self.depth

    def open(self, rows: int, cache: TreeCache | None = None) -> "ForcedSession":
        if self.constraint is None:
            what = "forced drafts the tokens that prefix_allowed_tokens_fn or a logits processor of generate forces"
            raise UserError(f"{what}; use it in model.generate(custom_generate=drafthead.custom_generate(drafter=...))")
        return ForcedSession(self.constraint, rows)


def bind(drafter: Drafter, constraint: Constraint) -> None:
    """Set the constraint of every ``ForcedTokens`` in ``drafter``."""
    if isinstance(drafter, ForcedTokens):
        drafter.constraint = constraint
    for part in drafter.drafters if isinstance(drafter, CompositeDrafter) else ():
        bind(part, constraint)


class ForcedSession(TextSession):
    """Extends the committed tokens of its rows while they force the next one."""

    def __init__(self, constraint: Constraint, rows: int) -> None:
        super().__init__(rows)
        self._constraint, self._rows = constraint, list(range(rows))

    @torch.inference_mode()
    def draft(self, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None) -> Proposal:
        text, drafts = self._text.append(last_token[:, None], [1] * len(last_token)), list[Tensor]()
        running = torch.ones_like(last_token, dtype=torch.bool)
        for _ in range(min(draft_config.depth, draft_config.nodes - 1)):
            # Rows whose run has ended keep their context, because processors expect all rows of the batch.
            token = self._constraint.only_token(Contexts(text.tokens, text.ends, self._rows))
            token = torch.where(running, token, -1)
            running = token >= 0
            if not running.any():  # a wait for the device, as in the processors
                break
            drafts.append(token)
            text = text.append(token[:, None], running.long().tolist())
            for eos in self._constraint.eos_ids:
                running &= token != eos
        if not drafts:
            return root_only(last_token)
        tokens = torch.stack(drafts, -1)[:, None]  # [B, 1, K]
        likelihoods = torch.ones(tokens.shape, device=tokens.device) if draft_config.likelihoods else None
        return tree_of(last_token, tokens.clamp(min=0), tokens >= 0, draft_config.nodes, likelihoods)

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self._rows = [self._rows[row] for row in rows]
