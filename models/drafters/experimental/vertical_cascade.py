"""Speculative decoding as a drafter: a model drafts for the target, and an inner drafter speeds up that model.

Every draft is a committed token of the inner decoding. Its distribution is therefore exactly that of the model, which
is all that verification by the target needs. The inner drafter may be such a cascade too.

Shape legend: B rows, K drafts, V vocabulary.
"""

import torch
from torch import Tensor

from drafthead.data.batch import BaseHidden
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.candidates import root_only
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, Proposal, Session
from drafthead.models.decoding.loop import EXACT, check_drafter, static_draft_config
from drafthead.models.decoding.node_cache import ModelCache
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import DecodeConfig, DecodeState
from drafthead.models.drafters.draft_model import LMDrafter
from drafthead.models.token_tree import TokenTree

SEED_BYTES = 8


class VerticalCascade(LMDrafter):
    """A drafter of chains: a draft model whose tokens are themselves decoded speculatively, with an inner drafter. With
    top-k candidates, the model decodes greedily. Otherwise it samples with the outer ``DraftConfig``'s sampler, and its
    distributions are part of the proposal. A confidence threshold has no effect."""

    def __init__(
        self,
        model: BaseModel,
        drafter: Drafter | None,
        *,
        num_tokens: int = 8,
        draft_config: DraftConfig | None = None,
        target: BaseModel | None = None,
    ) -> None:
        """``drafter`` drafts for ``model`` (as ``LMDrafter`` has it), from tokens alone; None: token by token."""
        super().__init__(model, target, num_tokens)
        self.drafter = drafter
        self.draft_config = draft_config or static_draft_config(drafter)
        # The fastest row commits up to a whole inner path per step, the slowest one token; all rows take equal steps.
        self.room = num_tokens * (self.draft_config.depth + 1) + self.draft_config.nodes
        if drafter is not None and drafter.reads_base:
            what = f"{type(drafter).__name__} reads the base's hidden states"
            raise UserError(f"{what}, so it cannot draft for another model, as B in nested:A+B")
        check_drafter(model, drafter, self.draft_config, EXACT)

    def identity(self) -> tuple[object, ...]:
        inner = None if self.drafter is None else self.drafter.identity()
        return (*super().identity(), inner, self.draft_config)

    def remember(self, tokens: list[int]) -> None:
        if self.drafter is not None:
            self.drafter.remember(tokens)

    def open(self, rows: int, cache: TreeCache | None = None) -> "NestedSession":
        return NestedSession(self, rows)


class NestedSession(Session):
    """A session with the draft model's cache of the committed tokens and the inner drafter's session."""

    def __init__(self, drafter: VerticalCascade, rows: int) -> None:
        self.drafter = drafter
        self._context = ModelCache(drafter.model, rows)
        self._inner = None if drafter.drafter is None else drafter.drafter.open(rows)
        self._drafted = 0

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self._context.lengths

    def commit(self, tokens: Tensor, counts: list[int], base_hidden: BaseHidden, nodes: Tensor | None = None) -> None:
        before, drafted, self._drafted = self.lengths, self._drafted, 0
        tokens = self._known(tokens)
        # The draft model has read all drafts but the last, so their accepted ones are not read again.
        slots = None if nodes is None or not drafted else torch.where(nodes < drafted, nodes, -1)
        kept = self._context.append(tokens, counts, slots)
        if self._inner is not None:
            unread = self._context.unread
            if unread is None or not any(kept):  # prompts are read at once; ``unread`` may hold earlier tokens, too
                kept, unread = [0] * len(counts), (tokens, counts)
            self._inner.rollback([length + keep for length, keep in zip(before, kept, strict=True)])
            if max(unread[1]) > 0:
                self._inner.commit(*unread, None)

    def _known(self, tokens: Tensor) -> Tensor:
        return tokens.clamp(max=self.drafter.model.vocab_size - 1)

    def select(self, rows: list[int]) -> None:
        self._context.select(rows)
        if self._inner is not None:
            self._inner.select(rows)

    def rollback(self, lengths: list[int]) -> None:
        self._drafted = 0
        self._context.rollback(lengths)
        if self._inner is not None:
            self._inner.rollback(lengths)

    @torch.inference_mode()
    def draft(self, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None) -> Proposal:
        drafter, model = self.drafter, self.drafter.model
        if not draft_config.is_chain:
            raise UserError("nested drafting drafts chains, not trees; use tree=chain, or combine it: (nested:A+B)+C")
        committed = self.lengths
        if self._inner is not None:
            self._inner.rollback(committed)  # an earlier draft after the same tokens
        depth = min(draft_config.depth, drafter.depth, model.max_context - max(committed) - 1)
        if depth < 1:
            return root_only(last_token)
        sampled = draft_config.draft_sampling is not DraftSampling.TOP_K
        if sampled and rng is None:
            raise ValueError("sampled candidates need random numbers; give rng to draft")
        config = DecodeConfig(
            draft_config=drafter.draft_config,
            sampler=draft_config.sampler if sampled else Sampler(),
            rule=EXACT,
            return_probs=sampled,
        )
        root = self._known(last_token)
        decoding = DecodeState(model, drafter.drafter, config, self.read(root, depth), self._inner, root)
        tokens, probs = _decoded(decoding, committed, depth, inner_seeds(root, rng))
        self._drafted = depth
        prob_index = None
        if probs is not None:
            probs = torch.nn.functional.pad(probs, (0, drafter.vocab_size - probs.shape[-1]))
            prob_index = torch.arange(depth + 1, device=root.device).clamp(max=depth - 1)[None, :, None]
        return Proposal(
            tokens=torch.cat([last_token[:, None], tokens], 1),
            shape=TokenTree.chain(depth).shape_on(root.device),
            draft_sampling=draft_config.draft_sampling,
            probs=probs,
            prob_index=prob_index,
        )

    def read(self, root: Tensor, depth: int) -> TreeCache:
        """Return the draft model's cache of the committed tokens before ``root`` [B], with room for ``depth`` drafts
        and the inner drafter's trees."""
        return self._context.shared_cache(self.drafter.room, depth)


def inner_seeds(last_token: Tensor, rng: RandomSource | None) -> list[int]:
    """Draw a seed for each row's inner decoding from the row's random numbers ``rng``; None gives seeds of 0. A
    decoding inside the inner one draws its seeds from the inner random numbers, so no two decodings share numbers."""
    if rng is None:
        return [0] * len(last_token)
    drawn = rng.categorical(torch.ones(len(last_token), SEED_BYTES, 256, device=last_token.device))
    return [int.from_bytes(bytes(row), "little") for row in drawn.tolist()]


def _decoded(decoding: DecodeState, committed: list[int], count: int, seeds: list[int]) -> tuple[Tensor, Tensor | None]:
    """Decode ``count`` = K tokens in every row; row b continues after ``committed[b]`` tokens. Decoding continues until
    the slowest row has K tokens; further tokens of faster rows are dropped. Return the tokens [B, K] int64 and the
    distributions they were sampled from, [B, K, V]; None if decoding is greedy."""
    tokens: list[list[int]] = [[] for _ in seeds]
    probs: list[list[Tensor]] = [[] for _ in seeds]
    while min(map(len, tokens)) < count:
        positions = [before + len(row) for before, row in zip(committed, tokens, strict=True)]
        # The depth ignores what is still missing: if it depended on other rows, this row's random numbers would, too.
        room = decoding.base.max_context - 1 - max(positions)
        step = decoding.step(seeds, positions, max(0, min(count - 1, room)))
        for n, new in enumerate(step.tokens):
            tokens[n] += new
            if step.acceptance.probs is not None:
                probs[n].append(step.acceptance.probs[n, : len(new)])
    drafts = torch.tensor([row[:count] for row in tokens], device=decoding.last_token.device)
    return drafts, torch.stack([torch.cat(row)[:count] for row in probs]) if probs[0] else None
