"""Draft, verify, accept: the state of some rows between speculative steps, and one such step.

``eval/decode.py`` runs a session to the end of its answers; ``eval/nested.py`` runs one to draft for another.

Shape legend: B rows, T tokens, N tree nodes, V vocabulary.
"""

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from drafthead.data.batch import Features, FeatureSpec, pad_rows
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.kv_cache import KVCache, RaggedCache
from drafthead.models.decoding.acceptance import AcceptanceRule, greedy
from drafthead.models.decoding.contract import Acceptance, DraftConfig, Drafter, DraftSampling, DraftState, Proposal
from drafthead.models.decoding.draft_cache import rewind
from drafthead.models.decoding.growth import root_only
from drafthead.models.decoding.random_source import DRAFT, VERIFY, PerRowRng, RandomSource
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.token_tree import TokenTree

ROOT_ONLY = DraftConfig(tree=TokenTree.chain(0))


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How a session drafts, draws and accepts; the same for all of its rows."""

    draft_config: DraftConfig
    sampler: Sampler
    """The law of the output. Temperature 0 is greedy decoding."""
    rule: AcceptanceRule
    return_probs: bool = False
    """Hand over the target's laws of the committed tokens, for a session that drafts for another."""

    @property
    def greedy(self) -> bool:
        """The target's own choices decide, without any law."""
        return self.sampler.plain_greedy and self.rule.name == "exact" and not self.return_probs


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """One step of every row."""

    tokens: Tensor
    """[B, 1 + depth] int64: accepted drafts and the bonus, then padding."""
    counts: Tensor
    """[B] int64: how many of them count, at least 1."""
    proposal: Proposal
    acceptance: Acceptance
    entropy: Tensor
    """[B] nats of the target's unwarped law of the first token."""
    draft_s: float
    verify_s: float


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Where a session stood. What its caches hold up to there stays as it is."""

    lengths: Tensor
    """[B] int64 positions in the base's cache."""
    state: DraftState | None
    last_token: Tensor
    context: Tensor | None
    context_lengths: Tensor


class DecodeState:
    """Rows in the making: the base's cache, the drafter's state, and each row's last token, not yet read."""

    def __init__(
        self, base: BaseModel, drafter: Drafter | None, policy: DecodeConfig, rows: int, capacity: int
    ) -> None:
        self.base, self.drafter, self.policy = base, drafter, policy
        capacity += drafter.extra_cache_slots(policy.draft_config) if drafter else 0
        self.cache: KVCache | RaggedCache = base.new_cache(capacity) if rows == 1 else base.new_slots(rows, capacity)
        self.spec = drafter.spec if drafter else FeatureSpec()
        self.state: DraftState | None = drafter.attach(drafter.init_state(rows), self.cache) if drafter else None
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=base.device)
        self._context: Tensor | None = None
        self._context_lengths = torch.zeros(rows, dtype=torch.int64, device=base.device)
        if policy.sampler.repetition_penalty != 1:
            self._context = torch.zeros(rows, capacity, dtype=torch.int64, device=base.device)

    def read_prompts(
        self, prompts: list[list[int]], rng: RandomSource | None = None, first: Tensor | None = None
    ) -> Tensor:
        """Prefill every row by itself; returns the first answer token of each ([B]).

        Args:
            prompts: token ids.
            coins: chance for the first tokens.
            first: [B] int64 the first tokens, where they are known already.
        """
        counts = torch.tensor([len(ids) for ids in prompts], device=self.base.device)
        tokens = torch.zeros(len(prompts), int(counts.max()), dtype=torch.int64, device=self.base.device)
        hidden = []
        for row, ids in enumerate(prompts):
            tokens[row, : len(ids)] = torch.tensor(ids, device=self.base.device)
            lent = self.cache if isinstance(self.cache, KVCache) else self.cache.slot(row)
            hidden.append(self.base.forward(tokens[row : row + 1, : len(ids)], lent, spec=self.spec))
        if isinstance(self.cache, RaggedCache):
            self.cache.lengths = counts
        if self._context is not None:
            # Padding repeats a token of the row: what counts for a penalty is the set.
            self._context[:] = tokens[:, :1]
            self._remember(tokens, counts)
        self._observe(tokens, pad_rows(hidden), counts)
        self.last_token = (
            self._first_token(torch.cat([h.final[:, -1] for h in hidden]), rng) if first is None else first
        )
        self._remember(self.last_token[:, None], torch.ones_like(counts))
        return self.last_token

    def _first_token(self, hidden: Tensor, rng: RandomSource | None) -> Tensor:
        logits, sampler = self.base.logits(hidden), self.policy.sampler
        if sampler.plain_greedy:
            return logits.argmax(-1)
        assert rng is not None
        return rng.categorical(sampler.probs(logits, self._context)[:, None])[:, 0]

    def step(self, seeds: list[int], positions: list[int], depth: int | None = None) -> StepOutput:
        """Draft, verify and commit in the caches. The caller sets ``last`` (see :meth:`follow`).

        Args:
            seeds: of the rows.
            positions: tokens before the step, in every row: with the seed they decide the random numbers.
            depth: draft at most so many levels.
        """
        started = perf_counter()
        draft_config = self.policy.draft_config if depth is None else self.policy.draft_config.at_most(depth)
        if self.drafter is None or self.state is None or draft_config.depth == 0:
            proposal = root_only(self.last_token)
        else:
            sampled = draft_config.draft_sampling is not DraftSampling.TOP_K
            rng = PerRowRng(seeds, positions, DRAFT, self.base.device) if sampled else None
            proposal = self.drafter.draft(self.state, self.last_token, draft_config, rng)
        self.base.synchronise()
        drafted = perf_counter()
        hidden, logits = self.base.verify_logits(
            proposal.tokens, proposal.shape, self.cache, self.spec, proposal.partial_forward
        )
        choices = logits.argmax(-1) if self.policy.greedy else None
        self.base.synchronise()
        verified = perf_counter()
        if choices is not None:
            acceptance = greedy(proposal, choices)
        else:
            target = TargetProbs(logits, self.policy.sampler, self._context, proposal)
            rng = PerRowRng(seeds, positions, VERIFY, self.base.device)
            acceptance = self.policy.rule.verify(proposal, target, rng, return_probs=self.policy.return_probs)
        tokens, counts = self._commit(proposal, acceptance, hidden)
        return StepOutput(
            tokens=tokens,
            counts=counts,
            proposal=proposal,
            acceptance=acceptance,
            entropy=_entropy(logits[:, 0]),
            draft_s=drafted - started,
            verify_s=verified - drafted,
        )

    def _commit(self, proposal: Proposal, acceptance: Acceptance, hidden: Features) -> tuple[Tensor, Tensor]:
        """Keep the accepted path in the caches; returns the committed tokens and their counts."""
        nodes, counts = acceptance.nodes, acceptance.accepted + 1
        path = proposal.tokens.gather(1, nodes)
        self.cache.commit_path(nodes, counts)
        self._observe(path, hidden.map(lambda h: h.gather(1, nodes[..., None].expand(-1, -1, h.shape[-1]))), counts)
        tokens = torch.cat([path[:, 1:], path[:, :1]], 1)
        tokens.scatter_(1, acceptance.accepted[:, None], acceptance.bonus[:, None])
        self._remember(tokens, counts)
        self.last_token = acceptance.bonus
        return tokens, counts

    def advance(self, tokens: Tensor, counts: Tensor) -> None:
        """Read tokens ([B, T]) that were committed elsewhere: ``last`` and all but the last one of each row.

        Args:
            tokens: [B, T] int64 continuing the row behind ``last``.
            counts: [B] int64, how many of them count, at least 1.
        """
        path = torch.cat([self.last_token[:, None], tokens[:, :-1]], 1)
        hidden = self.base.forward(path, self.cache, counts, self.spec)
        self._observe(path, hidden, counts)
        self._remember(tokens, counts)
        self.last_token = tokens.gather(1, counts[:, None] - 1)[:, 0]

    def snapshot(self) -> "Snapshot":
        """Where the session stands, to come back to."""
        return Snapshot(
            lengths=self.cache.positions(torch.zeros(1, 1, dtype=torch.int64, device=self.base.device))[:, 0],
            state=self.state,
            last_token=self.last_token,
            context=None if self._context is None else self._context.clone(),
            context_lengths=self._context_lengths,
        )

    def restore(self, mark: "Snapshot") -> None:
        """Go back to a mark of this session; marks made since are void."""
        rewind(self.cache, mark.lengths)
        self.state, self.last_token = mark.state, mark.last_token
        self._context = None if mark.context is None else mark.context.clone()
        self._context_lengths = mark.context_lengths

    def _observe(self, tokens: Tensor, hidden: Features, counts: Tensor) -> None:
        if self.drafter is not None and self.state is not None:
            self.state = self.drafter.update(self.state, tokens, hidden, counts)

    def _remember(self, tokens: Tensor, counts: Tensor) -> None:
        """Write committed tokens into the context that a repetition penalty reads."""
        if self._context is None:
            return
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        places = self._context_lengths[:, None] + offsets
        # Behind a row's count its own last token is repeated, which changes nothing.
        kept = tokens.gather(1, torch.minimum(offsets.expand_as(tokens), counts[:, None] - 1))
        self._context.scatter_(1, places, kept)
        self._context_lengths = self._context_lengths + counts

    def select(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        self.cache = self.cache.select(rows)
        if self.drafter is not None and self.state is not None:
            self.state = self.drafter.attach(self.state.select(rows), self.cache)
        self.last_token = self.last_token[rows]
        self._context = None if self._context is None else self._context[rows]
        self._context_lengths = self._context_lengths[rows]


class TargetProbs:
    """The target's warped law after any node of the step's trees."""

    def __init__(self, logits: Tensor, sampler: Sampler, context: Tensor | None, proposal: Proposal) -> None:
        self._logits, self._sampler, self._context, self._proposal = logits, sampler, context, proposal
        self._rows = torch.arange(logits.shape[0], device=logits.device)

    def __call__(self, nodes: Tensor) -> Tensor:
        """[B, M] nodes -> [B, M, V] laws."""
        rows = self._rows[:, None]
        logits, context = self._logits[rows, nodes], self._context
        if context is not None:
            tokens, ancestors = self._proposal.tokens[:, None], self._proposal.shape.ancestors
            seen = ancestors.expand(len(rows), -1, -1)[rows, nodes]
            path = torch.where(seen, tokens, tokens[..., :1])
            context = torch.cat([context[:, None].expand(-1, nodes.shape[1], -1), path], 2).flatten(0, 1)
        return self._sampler.probs(logits.flatten(0, 1), context).view(logits.shape)


def _entropy(logits: Tensor) -> Tensor:
    """[B, V] finite logits -> [B] nats, in one softmax: every step of plain decoding pays for it too."""
    scores = logits.float()
    probabilities = scores.softmax(-1)
    log_sum = scores.max(-1).values - probabilities.max(-1).values.log()
    entropy: Tensor = log_sum - torch.linalg.vecdot(probabilities, scores)
    return entropy
