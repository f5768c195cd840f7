"""The one speculative decoding loop. It knows ``Drafter`` and ``BaseModel``, and no head by name.

Every step drafts a token tree after the last committed token, reads it in one pass of the base, accepts a path by
a rule of ``eval/verify.py`` and commits it with the target's own next token. Plain decoding is the same loop with
a tree that is only its root. Rows of a batch have prompts, accepted lengths and ends of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.contract import DraftConfig, Drafter, DraftSampling, DynamicTree
from drafthead.models.decoding.random_source import VERIFY, PerRowRng
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import ROOT_ONLY, DecodeConfig, DecodeState, StepOutput
from drafthead.models.decoding.step_log import DecodeResult, StepRecord
from drafthead.models.token_tree import TokenTree

if TYPE_CHECKING:
    pass


def check_ids(ids: Sequence[int], *, vocab_size: int, max_context: int, max_new_tokens: int, where: str) -> None:
    """Refuse ids that the base cannot read and answer.

    Args:
        ids: the prompt.
        vocab_size: ids must be below.
        max_context: positions of the base.
        max_new_tokens: of the answer, which needs room in the context too.
        where: what the message calls the prompt.

    Raises:
        UserError: no ids, an id outside the vocabulary, or too many ids.
    """
    if not ids:
        raise UserError(f"{where} is empty; give it at least one token, or leave it out")
    outside = next(((place, token) for place, token in enumerate(ids) if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise UserError(
            f"{where} holds token id {outside[1]} at place {outside[0]}, but the base's ids go from 0 to "
            f"{vocab_size - 1}; tokenise it with the base's own tokenizer"
        )
    if len(ids) + max_new_tokens > max_context:
        raise UserError(
            f"{where} has {len(ids)} tokens, which with max_new_tokens={max_new_tokens} is more than the base's "
            f"context of {max_context}; shorten the prompt or lower max_new_tokens"
        )


OnTokens = Callable[[list[int]], None]
GREEDY = Sampler()
EXACT = AcceptanceRule()


def default_draft_config(drafter: Drafter | None) -> DraftConfig:
    """The drafter's calibrated tree, else a chain over all its positions; without a drafter only the root."""
    if drafter is None:
        return ROOT_ONLY
    return DraftConfig(
        tree=drafter.tree or TokenTree.chain(drafter.depth), confidence_threshold=drafter.confidence_threshold
    )


def decode(
    base: BaseModel,
    drafter: Drafter | None,
    input_ids: list[int],
    *,
    max_new_tokens: int,
    draft_config: DraftConfig | None = None,
    sampler: Sampler = GREEDY,
    rule: AcceptanceRule = EXACT,
    seed: int = 0,
    on_tokens: OnTokens | None = None,
    ignore_eos: bool = False,
) -> DecodeResult:
    """Decode one prompt; with a drafter several tokens a step, and by an exact rule with the same law as without.

    Args:
        base: the target.
        drafter: a draft head attached to ``base``, another drafter, or None for plain decoding.
        input_ids: the prompt's token ids.
        max_new_tokens: stop after so many; EOS stops earlier and is kept as the last token.
        plan: what to draft; by default the drafter's calibrated tree, or a chain over all its positions.
        sampler: the law of the output; by default greedy, where the tokens are those of plain decoding.
        rule: how drafts are accepted; by default exactly.
        seed: of the row's random numbers.
        on_tokens: called with the tokens of every commit, as soon as they are final.
        ignore_eos: go on after EOS (for timing at a fixed length).

    Raises:
        UserError: an empty prompt, one that does not leave room for ``max_new_tokens`` in the context, a drafter for
            another vocabulary, or a rule that would bias the output with this plan.
    """
    return decode_batch(
        base,
        drafter,
        [input_ids],
        max_new_tokens=max_new_tokens,
        draft_config=draft_config,
        sampler=sampler,
        rule=rule,
        seeds=[seed],
        on_tokens=on_tokens and [on_tokens],
        ignore_eos=ignore_eos,
    )[0]


@torch.inference_mode()
def decode_batch(
    base: BaseModel,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    draft_config: DraftConfig | None = None,
    sampler: Sampler = GREEDY,
    rule: AcceptanceRule = EXACT,
    seeds: Sequence[int] | None = None,
    on_tokens: Sequence[OnTokens] | None = None,
    ignore_eos: bool = False,
) -> list[DecodeResult]:
    """``decode`` of several prompts at once; every row ends at its own time, and its text is that of batch 1.

    The random numbers of a row depend on its seed (by default its number) and its length alone; so does a sampled text,
    but near the end of the base's or a draft model's context, where the longest row bounds all drafts. Times of a step
    and of the prefill are those of the whole batch; ``total_s`` ends when the row does.

    Raises:
        UserError: as ``decode``; names the prompt.
    """
    draft_config = draft_config or default_draft_config(drafter)
    if drafter is not None and isinstance(draft_config.tree, DynamicTree):
        draft_config = draft_config.at_most(drafter.depth)
    seeds = list(seeds) if seeds is not None else list(range(len(prompts)))
    listeners: Sequence[OnTokens | None] = on_tokens or [None] * len(prompts)
    _check_batch(base, prompts, max_new_tokens, draft_config, seeds, listeners)
    check_drafter(base, drafter, draft_config, rule)
    eos = frozenset() if ignore_eos else base.eos_ids
    started = perf_counter()  # allocating the cache is part of decoding, as it is in transformers' generate
    capacity = max(map(len, prompts)) + max_new_tokens + draft_config.nodes
    session = DecodeState(
        base, drafter, DecodeConfig(draft_config=draft_config, sampler=sampler, rule=rule), len(prompts), capacity
    )
    first = session.read_prompts(list(prompts), PerRowRng(seeds, [0] * len(prompts), VERIFY, base.device)).tolist()
    prefill_s = perf_counter() - started
    length = draft_config.adaptive.start if draft_config.adaptive else 0
    rows = [
        _Row(prompt_length=len(ids), seed=seed, on_tokens=listener, length=length)
        for ids, seed, listener in zip(prompts, seeds, listeners, strict=True)
    ]
    for row, token in zip(rows, first, strict=True):
        row.commit([token], max_new_tokens, eos, started)
    active = rows
    while True:
        running = [place for place, row in enumerate(active) if not row.ended]
        if not running:
            return [DecodeResult(tokens=r.answer, steps=r.steps, prefill_s=prefill_s, total_s=r.total_s) for r in rows]
        if len(running) < len(active):
            session.select(running)
            active = [active[place] for place in running]
        _step(session, active, max_new_tokens, eos, started)


def _check_batch(
    base: BaseModel,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    draft_config: DraftConfig,
    seeds: Sequence[int],
    listeners: Sequence[OnTokens | None],
) -> None:
    """Refuse, before anything is read, what cannot be decoded together."""
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not prompts or len(seeds) != len(prompts) or len(listeners) != len(prompts):
        raise UserError(
            f"a batch needs prompts, and a seed and a listener for each or none, got {len(prompts)} prompts, "
            f"{len(seeds)} seeds and {len(listeners)} listeners"
        )
    for number, ids in enumerate(prompts):
        check_ids(
            ids,
            vocab_size=base.vocab_size,
            max_context=base.max_context,
            max_new_tokens=max_new_tokens,
            where=f"prompt {number} of the batch" if len(prompts) > 1 else "the prompt",
        )
    if draft_config.adaptive is not None and len(prompts) > 1:
        # All rows share a draft length, so a row's random numbers would depend on its neighbours.
        raise UserError(f"an adaptive draft length needs one prompt at a time, got {len(prompts)}; decode one by one")


@dataclass
class _Row:
    """One answer in the making."""

    prompt_length: int
    seed: int
    on_tokens: OnTokens | None
    answer: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    ended: bool = False
    total_s: float = 0.0
    length: int = 0
    """Levels to draft next, where the plan is adaptive."""

    def commit(self, tokens: list[int], limit: int, eos: frozenset[int], started: float) -> int:
        """Add tokens, cut at the limit and behind EOS; returns how many were kept."""
        kept = truncate(tokens, limit - len(self.answer), eos)
        self.answer += kept
        self.ended = self.answer[-1] in eos or len(self.answer) >= limit
        self.total_s = perf_counter() - started
        if self.on_tokens:
            self.on_tokens(kept)
        return len(kept)


def _step(session: DecodeState, rows: list[_Row], limit: int, eos: frozenset[int], started: float) -> None:
    began = perf_counter()
    positions = [len(row.answer) for row in rows]
    output = session.step([row.seed for row in rows], positions, _depth_limit(session, rows, limit))
    tokens, counts, entropy = output.tokens.tolist(), output.counts.tolist(), output.entropy.tolist()
    kept = [
        row.commit(committed[:count], limit, eos, started)
        for row, committed, count in zip(rows, tokens, counts, strict=True)
    ]
    proposed, depths = _offered(output, len(rows))
    total_s = perf_counter() - began
    for n, row in enumerate(rows):
        record = StepRecord(
            position=positions[n],
            proposed=proposed[n],
            depth=depths[n],
            accepted=counts[n] - 1,
            committed=kept[n],
            entropy=entropy[n],
            draft_s=output.draft_s,
            verify_s=output.verify_s,
            total_s=total_s,
        )
        row.steps.append(record)
        adaptive = session.policy.draft_config.adaptive
        if adaptive is not None:
            row.length = min(session.policy.draft_config.depth, adaptive.next(row.length, depths[n], counts[n] - 1))


def _depth_limit(session: DecodeState, rows: list[_Row], limit: int) -> int:
    """Levels that positions allow: no draft stands behind the base's context, and at greedy decoding, where it cannot
    change a token, none behind the end of every answer."""
    longest = max(row.prompt_length + len(row.answer) for row in rows)
    depth = session.base.max_context - longest
    if session.policy.greedy:
        depth = min(depth, max(limit - len(row.answer) for row in rows) - 1)
    if session.policy.draft_config.adaptive is not None:
        depth = min(depth, rows[0].length)
    return max(0, depth)


def _offered(output: StepOutput, rows: int) -> tuple[list[int], list[int]]:
    """Nodes drafted and longest path, per row."""
    shape = output.proposal.shape
    if shape.tree is not None:
        return [len(shape) - 1] * rows, [shape.tree.depth] * rows
    drafted = (shape.parents >= 0).sum(1).expand(rows)
    return drafted.tolist(), shape.depths.max(1).values.expand(rows).tolist()


def truncate(tokens: list[int], room: int, eos: frozenset[int]) -> list[int]:
    """The tokens that count: at most ``room``, and none behind the first EOS."""
    kept = tokens[:room]
    for place, token in enumerate(kept):
        if token in eos:
            return kept[: place + 1]
    return kept


def check_drafter(base: BaseModel, drafter: Drafter | None, draft_config: DraftConfig, rule: AcceptanceRule) -> None:
    """Refuse a drafter, a plan and a rule that do not go together.

    Raises:
        UserError: another vocabulary, a plan deeper than the drafter, or a rule that would bias the output.
    """
    if drafter is None:
        return
    if drafter.vocab_size is not None and drafter.vocab_size > base.vocab_size:
        raise UserError(
            f"the drafter's vocabulary has {drafter.vocab_size} ids but {base.name} has {base.vocab_size}; use a "
            "drafter with the base's tokenizer"
        )
    if draft_config.draft_sampling is not DraftSampling.TOP_K and drafter.vocab_size not in (None, base.vocab_size):
        raise UserError(
            f"the drafter's laws are over {drafter.vocab_size} ids but {base.name} has {base.vocab_size}; tell the "
            "drafter its target"
        )
    if drafter.base_fingerprint is not None and drafter.base_fingerprint != base.fingerprint:
        raise UserError(f"the draft head was loaded for another base than {base.name}; attach it to this one")
    if isinstance(draft_config.tree, TokenTree) and draft_config.depth > drafter.depth:
        raise UserError(
            f"the tree is {draft_config.depth} deep, but the drafter drafts {drafter.depth} positions; choose a "
            "shallower one"
        )
    rule.check(draft_config.draft_sampling, draft_config.tree)
