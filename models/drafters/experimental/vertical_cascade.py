"""Speculative decoding as a drafter: a model drafts for the target, and an inner drafter speeds up that model.

Every draft is a committed token of the inner decoding. Its distribution is therefore exactly the inner model's, which
is all that the outer verification needs. The inner drafter may be nested again.

Shape legend: B rows, T tokens, K drafts, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafthead.data.batch import HiddenStates
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.draft_cache import DraftCache, PendingTokens, TokenBuffer
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, Proposal
from drafthead.models.decoding.growth import root_only
from drafthead.models.decoding.loop import EXACT, check_drafter, default_draft_config
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import DecodeConfig, DecodeState
from drafthead.models.drafters.draft_model import LMDrafter
from drafthead.models.token_tree import TokenTree

SEED_BYTES = 8


@dataclass
class CascadeState(PendingTokens):
    """Committed tokens, the model's cache of them, and the inner drafter's state."""

    inner: Any


class VerticalCascade(LMDrafter[CascadeState]):
    """Chains drafted by speculative decoding of ``model``.

    With top-k candidates the inner model decodes greedily. Otherwise it samples from the distributions of
    ``draft_config.sampler``, which the proposal contains. ``draft_config.confidence_threshold`` has no effect.
    """

    def __init__(
        self,
        model: BaseModel,
        drafter: Drafter | None,
        *,
        num_tokens: int = 8,
        draft_config: DraftConfig | None = None,
        target: BaseModel | None = None,
    ) -> None:
        """Draft with the decoding of ``model``; ``num_tokens`` and ``target`` are those of ``LMDrafter``.

        ``drafter`` drafts for ``model`` from tokens alone; None: ``model`` decodes plainly. ``draft_config`` belongs to
        the inner decoding, by default with the inner drafter's tree, or a chain over its positions.
        """
        super().__init__(model, target, num_tokens)
        self.drafter = drafter
        self.draft_config = draft_config or default_draft_config(drafter)
        # The fastest row commits up to a whole inner path per step, the slowest one token; all rows take equal steps.
        self.room = num_tokens * (self.draft_config.depth + 1) + self.draft_config.nodes
        if drafter is not None and drafter.reads_base:
            raise UserError(
                f"{type(drafter).__name__} reads the base's hidden states, so it cannot draft for a model in between; "
                "let prompt lookup, a model or an early exit do it"
            )
        check_drafter(model, drafter, self.draft_config, EXACT)

    def identity(self) -> tuple[object, ...]:
        inner = None if self.drafter is None else self.drafter.identity()
        return (*super().identity(), inner, self.draft_config)

    def remember(self, tokens: list[int]) -> None:
        if self.drafter is not None:
            self.drafter.remember(tokens)

    def init_state(self, batch: int) -> CascadeState:
        inner = None if self.drafter is None else self.drafter.init_state(batch)
        return CascadeState(text=TokenBuffer.none(batch), cache=DraftCache(self.model), inner=inner)

    def update(
        self,
        state: CascadeState,
        tokens: Tensor,
        base_hidden: HiddenStates | None,
        counts: Tensor | None = None,
    ) -> CascadeState:
        known = self.known(tokens)
        inner = None if self.drafter is None else self.drafter.update(state.inner, known, None, counts)
        return replace(state.append(known, counts), inner=inner)

    @torch.inference_mode()
    def draft(
        self,
        state: CascadeState,
        last_token: Tensor,
        draft_config: DraftConfig,
        rng: RandomSource | None = None,
    ) -> Proposal:
        if not draft_config.is_chain:
            raise UserError("nested drafting drafts chains; use tree=chain, or combine it with a drafter of trees")
        depth = min(draft_config.depth, self.depth, self.model.max_context - state.text.longest - 1)
        if depth < 1:
            return root_only(last_token)
        sampled = draft_config.draft_sampling is not DraftSampling.TOP_K
        if sampled and rng is None:
            raise ValueError("sampled candidates need a random source")
        config = DecodeConfig(
            draft_config=self.draft_config,
            sampler=draft_config.sampler if sampled else Sampler(),
            rule=EXACT,
            return_probs=sampled,
        )
        root = self.known(last_token)
        cache = self.read(state, root)
        decoding = DecodeState(self.model, self.drafter, config, cache, state.inner, root)
        tokens, probs = _decoded(decoding, state.text.lengths, depth, inner_seeds(root, rng))
        prob_index = None
        if probs is not None:
            probs = torch.nn.functional.pad(probs, (0, self.vocab_size - probs.shape[-1]))
            prob_index = torch.arange(depth + 1, device=root.device).clamp(max=depth - 1)[None, :, None]
        return Proposal(
            tokens=torch.cat([last_token[:, None], tokens], 1),
            shape=TokenTree.chain(depth).shape_on(root.device),
            draft_sampling=draft_config.draft_sampling,
            probs=probs,
            prob_index=prob_index,
        )

    def read(self, state: CascadeState, root: Tensor) -> TreeCache:
        """Return the cache of the committed tokens, which end before the ``root`` ([B]), with ``room`` after them."""
        state.cache.prefill(state.text, self.room)
        return state.cache.cache


def inner_seeds(last_token: Tensor, rng: RandomSource | None) -> list[int]:
    """Return seeds of the inner decoding, drawn from each row's random numbers of the outer drafting alone.

    A decoding nested once more draws its seeds from these, so no two streams share numbers.
    """
    if rng is None:
        return [0] * len(last_token)
    drawn = rng.categorical(torch.ones(len(last_token), SEED_BYTES, 256, device=last_token.device))
    return [int.from_bytes(bytes(row), "little") for row in drawn.tolist()]


def _decoded(decoding: DecodeState, read: Tensor, count: int, seeds: list[int]) -> tuple[Tensor, Tensor | None]:
    """Return the next ``count`` tokens of every row, [B, K] int64, and their probs [B, K, V] or None.

    The rows have ``read`` ([B]) tokens before. Decoding continues until the slowest row has enough; the others drop the
    excess.
    """
    rows, device = len(seeds), decoding.last_token.device
    filled = torch.zeros(rows, dtype=torch.int64, device=device)
    # An extra column takes the excess, which is dropped.
    tokens = torch.zeros(rows, count + 1, dtype=torch.int64, device=device)
    probs: Tensor | None = None
    while int(filled.min()) < count:
        positions = (read + filled).tolist()
        # The depth ignores what is still missing: if it depended on other rows, this row's random numbers would, too.
        room = decoding.base.max_context - 1 - max(positions)
        output = decoding.step(seeds, positions, max(0, min(count - 1, room)))
        width = output.tokens.shape[1]
        offsets = torch.arange(width, device=device)
        counted = offsets < output.counts[:, None]
        columns = torch.where(counted, filled[:, None] + offsets, count).clamp(max=count)
        tokens.scatter_(1, columns, output.tokens)
        if (step_probs := output.acceptance.probs) is not None:
            if probs is None:
                probs = step_probs.new_zeros(rows, count + 1, step_probs.shape[-1])
            probs.scatter_(1, columns[..., None].expand(-1, -1, step_probs.shape[-1]), step_probs[:, :width])
        filled = filled + output.counts
    return tokens[:, :count], None if probs is None else probs[:, :count]
