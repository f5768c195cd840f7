"""Decoding as a drafter: a model in between drafts for the target, itself sped up by a drafter of its own.

Every draft is a committed token of the inner decoding, so its distribution is exactly the inner model's, whatever the
inner drafter does: the outer verification needs nothing else. The inner drafter may be nested again.

Shape legend: B rows, T tokens, K drafts, V vocabulary.
"""

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.data.batch import HiddenStates
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.kv_cache import KVCache
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.contract import DraftConfig, Drafter, DraftSampling, DraftState, Proposal
from drafthead.models.decoding.draft_cache import TokenBuffer, common_prefix
from drafthead.models.decoding.growth import root_only
from drafthead.models.decoding.loop import check_drafter, default_draft_config
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import DecodeConfig, DecodeState, Snapshot
from drafthead.models.token_tree import TokenTree

INITIAL_CAPACITY = 256
"""Positions to begin with, after a prompt; doubled when they run out."""
MAX_SNAPSHOTS = 8
"""Latest steps to keep: decoding nested twice returns several at a time."""
SEED_BYTES = 8


class Nested(Drafter["NestedState"]):
    """Chains drafted by speculative decoding of ``model``.

    With top-k candidates the inner model decodes greedily; otherwise it samples from ``draft_config.sampler``'s
    distributions, which go with the proposal. ``draft_config.confidence_threshold`` has no effect here.
    """

    def __init__(
        self,
        model: BaseModel,
        drafter: Drafter | None,
        *,
        num_tokens: int = 8,
        draft_config: DraftConfig | None = None,
        rule: AcceptanceRule | None = None,
        target: BaseModel | None = None,
    ) -> None:
        """Nest the decoding of ``model``.

        Args:
            model: in between; on the target's device and with its tokenizer.
            drafter: drafts for ``model``; None: ``model`` decodes plainly.
            num_tokens: most drafts for the target, and the length of the default chain.
            draft_config: the inner decoding's; by default the inner drafter's own tree, or a chain over its positions.
            rule: the inner decoding's; by default exact.
            target: the model to draft for. Needed only where its vocabulary is padded to more ids than ``model`` has.
        """
        if num_tokens < 1:
            raise UserError(f"nested drafting needs num_tokens of at least 1, got {num_tokens}")
        self.model, self.drafter = model, drafter
        self.draft_config = draft_config or default_draft_config(drafter)
        self.rule = rule or AcceptanceRule()
        self._depth = num_tokens
        self._vocabulary = target.vocab_size if target is not None else model.vocab_size
        if not self.rule.lossless:
            raise UserError(
                f"the inner rule {self.rule.name} is lossy: its tokens do not have the probs that they would be "
                "verified with; use rule.name=exact inside"
            )
        if model.vocab_size > self._vocabulary:
            raise UserError(
                f"{model.name} has {model.vocab_size} ids but the target has {self._vocabulary}; use a model with the "
                "target's tokenizer"
            )
        check_drafter(model, drafter, self.draft_config, self.rule)

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def vocab_size(self) -> int:
        return self._vocabulary

    def remember(self, tokens: list[int]) -> None:
        if self.drafter is not None:
            self.drafter.remember(tokens)

    def init_state(self, batch: int) -> "NestedState":
        return NestedState(
            text=TokenBuffer.none(batch), inner=_Inner(self.model, self.drafter, self.draft_config, self.rule)
        )

    def update(
        self, state: "NestedState", tokens: Tensor, base_hidden: HiddenStates | None, counts: Tensor | None = None
    ) -> "NestedState":
        known = tokens.clamp(max=self.model.vocab_size - 1)  # padding ids of the target: it must read something
        text = state.text.append(known, counts)
        if state.text.longest == 0 and int(text.lengths.min()) > 1:
            state.inner.begin(text)  # the prompt belongs to the prefill, and not to the first step
        return NestedState(text=text, inner=state.inner)

    @torch.inference_mode()
    def draft(
        self, state: "NestedState", last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None
    ) -> Proposal:
        if not draft_config.is_chain:
            raise UserError("nested drafting drafts chains; use tree=chain, or combine it with a drafter of trees")
        text = state.text.append(last_token.clamp(max=self.model.vocab_size - 1)[:, None])
        depth = min(draft_config.depth, self.depth, self.model.max_context - text.longest)
        if depth < 1:
            return root_only(last_token)
        config = inner_config(self.draft_config, self.rule, draft_config, rng)
        state.inner.bring_to(text, config)
        tokens, probs = state.inner.decode(depth, inner_seeds(last_token, rng))
        return decoded_chain(last_token, tokens, probs, draft_config.draft_sampling, self._vocabulary)


def inner_config(
    inner: DraftConfig, rule: AcceptanceRule, outer: DraftConfig, rng: RandomSource | None
) -> DecodeConfig:
    """How the model in between decodes: greedily for top-k candidates, else with the sampler that ``outer`` names."""
    sampled = outer.draft_sampling is not DraftSampling.TOP_K
    if sampled and rng is None:
        raise ValueError("sampled candidates need a random source")
    sampler = outer.sampler if sampled else Sampler()
    return DecodeConfig(draft_config=inner, sampler=sampler, rule=rule, return_probs=sampled)


def decoded_chain(
    last_token: Tensor, tokens: Tensor, probs: Tensor | None, draft_sampling: DraftSampling, vocabulary: int
) -> Proposal:
    """Tokens [B, K] that an inner decoding committed, and the probs [B, K, <= V] that they were drawn from, if any."""
    depth, prob_index = tokens.shape[1], None
    if probs is not None:
        probs = torch.nn.functional.pad(probs, (0, vocabulary - probs.shape[-1]))
        prob_index = torch.arange(depth + 1, device=last_token.device).clamp(max=depth - 1)[None, :, None]
    return Proposal(
        tokens=torch.cat([last_token[:, None], tokens], 1),
        shape=TokenTree.chain(depth).shape_on(last_token.device),
        draft_sampling=draft_sampling,
        probs=probs,
        prob_index=prob_index,
    )


def inner_seeds(last_token: Tensor, rng: RandomSource | None) -> list[int]:
    """Seeds of the inner decoding's numbers, drawn from the outer drafting's own: a row's depend on nothing else.

    An inner decoding nested once more draws its seeds from these, so no two streams share numbers.
    """
    if rng is None:
        return [0] * len(last_token)
    drawn = rng.categorical(torch.ones(len(last_token), SEED_BYTES, 256, device=last_token.device))
    return [int.from_bytes(bytes(row), "little") for row in drawn.tolist()]


@dataclass
class NestedState(DraftState):
    """Committed tokens, and the decode_state shared by successive states."""

    text: TokenBuffer
    inner: "_Inner"


def _leads_to(known: TokenBuffer, text: TokenBuffer) -> bool:
    """Whether every row of ``text`` continues ``known`` by at least one token, or none does."""
    new = text.lengths - known.lengths
    continues = bool((new > 0).all()) or not bool(new.any())
    return continues and bool((common_prefix(known, text) == known.lengths).all())


class _Inner:
    """A decode_state that is brought to any text: by going back to where it was on the way there, and reading on."""

    def __init__(
        self, model: BaseModel, drafter: Drafter | None, draft_config: DraftConfig, rule: AcceptanceRule
    ) -> None:
        self._model, self._drafter = model, drafter
        self._config = DecodeConfig(draft_config=draft_config, sampler=Sampler(), rule=rule)
        self._decode_state: DecodeState | None = None
        self._snapshots: list[tuple[TokenBuffer, Snapshot]] = []
        self._capacity = 0

    def select(self, rows: list[int]) -> "_Inner":
        """These rows only, in memory of their own."""
        if self._decode_state is not None and isinstance(self._decode_state.cache, KVCache):
            return self  # there is one row
        chosen = copy(self)
        chosen._snapshots = []
        if self._decode_state is not None:
            text, snapshot = self._snapshots[-1]
            self._decode_state.restore(snapshot)
            chosen._decode_state = copy(self._decode_state)
            chosen._decode_state.select(rows)
            chosen._remember(text.select(rows))
        return chosen

    @torch.inference_mode()
    def begin(self, text: TokenBuffer) -> None:
        """Read ``text`` afresh, all but the last token of every row."""
        rows = len(text.lengths)
        needed = text.longest + INITIAL_CAPACITY + 2 * self._config.draft_config.nodes
        self._capacity = max(needed, 2 * self._capacity)
        self._decode_state = DecodeState(self._model, self._drafter, self._config, rows, self._capacity)
        read = text.lengths - 1
        prompts = [row[:length] for row, length in zip(text.tokens.tolist(), read.tolist(), strict=True)]
        self._decode_state.read_prompts(prompts, first=text.tokens.gather(1, read[:, None])[:, 0])
        self._snapshots = []
        self._remember(text)

    def bring_to(self, text: TokenBuffer, config: DecodeConfig) -> None:
        """Stand where every row of ``text`` ends: its last token is the decode_state's ``last``."""
        penalised = config.sampler.repetition_penalty != 1
        fits = penalised == (self._config.sampler.repetition_penalty != 1)
        self._config = config
        room = text.longest + INITIAL_CAPACITY // 2 + config.draft_config.nodes
        if self._decode_state is None or not fits or room > self._capacity:
            return self.begin(text)
        self._decode_state.config = config
        while self._snapshots and not _leads_to(self._snapshots[-1][0], text):
            self._snapshots.pop()
        if not self._snapshots:
            return self.begin(text)
        known, snapshot = self._snapshots[-1]
        self._decode_state.restore(snapshot)
        new = text.lengths - known.lengths
        if int(new.max()) > 0:
            places = known.lengths[:, None] + torch.arange(int(new.max()), device=new.device)
            self._decode_state.advance(text.tokens.gather(1, places.clamp(max=text.longest - 1)), new)
            self._remember(text)
        return None

    def _remember(self, text: TokenBuffer) -> None:
        assert self._decode_state is not None
        self._snapshots.append((text, self._decode_state.snapshot()))
        del self._snapshots[1:-MAX_SNAPSHOTS]  # the prompt's is kept: whatever comes, it need not be read again

    def decode(self, count: int, seeds: list[int]) -> tuple[Tensor, Tensor | None]:
        """The next ``count`` tokens of every row, [B, K], and their probs [B, K, V] where the config returns them.

        Steps go on until the slowest row has enough; what others decode beyond is dropped.
        """
        decode_state = self._decode_state
        assert decode_state is not None
        rows = len(seeds)
        filled = torch.zeros(rows, dtype=torch.int64, device=decode_state.last_token.device)
        # One column more takes what is dropped.
        tokens = torch.zeros(rows, count + 1, dtype=torch.int64, device=filled.device)
        probs: Tensor | None = None
        while int(filled.min()) < count:
            positions = (self._snapshots[-1][0].lengths + filled).tolist()
            # Not what this row still needs: a draft length that depends on the others would change its numbers.
            room = self._model.max_context - max(positions)
            output = decode_state.step(seeds, positions, max(0, min(count - 1, room)))
            width = output.tokens.shape[1]
            offsets = torch.arange(width, device=filled.device)
            counted = offsets < output.counts[:, None]
            places = torch.where(counted, filled[:, None] + offsets, count).clamp(max=count)
            tokens.scatter_(1, places, output.tokens)
            if (found := output.acceptance.probs) is not None:
                if probs is None:
                    probs = found.new_zeros(rows, count + 1, found.shape[-1])
                probs.scatter_(1, places[..., None].expand(-1, -1, found.shape[-1]), found[:, :width])
            filled = filled + output.counts
        return tokens[:, :count], None if probs is None else probs[:, :count]
