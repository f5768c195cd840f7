"""The only decoding loop: it decodes single prompts, batches and the answers of a corpus.

Every step drafts a token tree after the last committed token of each row, and reads the tree in one pass of the base. A
rule of ``acceptance.py`` accepts a path, which is committed together with the target's next token. Decoding without
drafts is the same loop with a tree that is only its root. The rows of a batch may have different prompts, accept
different numbers of drafts and end at different steps.

Shape legend: B rows, T tokens, D width, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from drafthead.errors import UserError
from drafthead.files.local import same_base
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.parts import BaseParts
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.cost_tree import CostTree
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, DynamicTree
from drafthead.models.decoding.random_source import VERIFY, PerRowRng
from drafthead.models.decoding.sampling import Sampler, TargetSampler
from drafthead.models.decoding.step import ROOT_ONLY, DecodeConfig, DecodeResult, DecodeState, StepRecord
from drafthead.models.token_tree import TokenTree

OnTokens = Callable[[list[int]], None]
GREEDY = Sampler()
EXACT = AcceptanceRule()


def default_draft_config(drafter: Drafter | None, rows: int = 1) -> DraftConfig:
    """Return a config with a tree by cost if that is the drafter's default, else its static tree."""
    if drafter is not None and drafter.by_cost:
        assert drafter.tree_costs is not None
        return DraftConfig(tree=CostTree(costs=drafter.tree_costs, depth=drafter.depth))
    return static_draft_config(drafter, rows)


def static_draft_config(drafter: Drafter | None, rows: int = 1) -> DraftConfig:
    """Return a config with the drafter's tree for a batch of ``rows``; without a tree, a chain over its positions."""
    if drafter is None:
        return ROOT_ONLY
    sizes = [n for n in drafter.batch_trees if n <= rows]
    tree = (drafter.batch_trees[max(sizes)] if sizes else drafter.tree) or TokenTree.chain(drafter.depth)
    return DraftConfig(tree=tree, confidence_threshold=drafter.confidence_threshold)


@dataclass(kw_only=True)
class DecodingSequence:
    """One sequence being decoded: a prompt and its answer so far. Times in seconds."""

    number: int
    prompt: list[int]
    seed: int
    on_tokens: OnTokens | None = None
    answer: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # with ``keep_logits``, the base's [V] for every token
    hidden: list[Tensor] = field(default_factory=list)
    """With ``keep_hidden_states``, the base's final ones, float16: [T, D] of the prompt, then of each step. The
    answer's last token has none, because the base does not read it."""
    ended: bool = False
    started: float = 0.0
    prefill_s: float = 0.0
    prefill_rows: int = 1
    total_s: float = 0.0
    draft_length: int = 0  # tree levels to draft in the next step, if ``DraftConfig.adaptive`` is set


@dataclass(kw_only=True)
class DecodeLoop:
    """The loop that decodes prompts, up to ``batch_size`` at once; the next one takes the row of a sequence that
    ended."""

    base: BaseModel
    drafter: Drafter | None
    config: DecodeConfig
    max_new_tokens: int
    batch_size: int
    capacity: int  # largest number of tokens of a prompt with its answer
    record_steps: bool = True
    keep_hidden_states: bool = False
    keep_logits: bool = False

    @torch.inference_mode()
    def run(self, prompts: Iterable[DecodingSequence], every_step: bool = False) -> Iterator[DecodingSequence]:
        """Yield sequences as they end; with ``every_step`` also unfinished ones, after prefill and each step."""
        # Each iteration yields the rows that ended and replaces them by waiting prompts, drops or clears those that
        # were not replaced, and decodes one step of the others.
        waiting = deque(prompts)
        started = perf_counter()  # allocating the cache is part of decoding, as it is in transformers' generate
        rows = [waiting.popleft() for _ in range(min(self.batch_size, len(waiting)))]
        if not rows:
            return
        capacity = self.capacity + self.config.draft_config.nodes
        with self.base.lock:
            state = DecodeState.empty(self.base, self.drafter, self.config, len(rows), capacity)
        if self.drafter is None:
            state.share_prefix([row.prompt for row in (*rows, *waiting)])
        self._prefill(state, rows, list(range(len(rows))), started)
        reported: set[int] = set()
        while True:
            for slot in range(len(rows)):
                # A loop, because a new row can end with its first token.
                while rows[slot].ended and rows[slot].number not in reported:
                    reported.add(rows[slot].number)
                    if self.drafter is not None:
                        self.drafter.remember(rows[slot].prompt + rows[slot].answer)
                    yield rows[slot]
                    if waiting:
                        rows[slot] = waiting.popleft()
                        self._prefill(state, [rows[slot]], [slot], perf_counter())
            active = [slot for slot, row in enumerate(rows) if not row.ended]
            if not active:
                break
            if every_step:
                yield from [rows[slot] for slot in active]
            # Dropping rows copies the caches, which costs more than keeping a few empty rows. With a drafter, rows
            # are always dropped, because it must not draft for empty rows.
            if len(active) < len(rows) and (self.drafter is not None or len(active) <= 0.75 * len(rows)):
                state.select(active)
                rows = [rows[slot] for slot in active]
            state.clear([slot for slot, row in enumerate(rows) if row.ended])
            self._step(state, rows)

    def _prefill(self, state: DecodeState, rows: list[DecodingSequence], slots: list[int], started: float) -> None:
        rng = PerRowRng([row.seed for row in rows], [0] * len(rows), VERIFY, self.base.device, state.races)
        with self.base.lock:
            hidden = state.read_prompts([row.prompt for row in rows], rng, rows=slots)
        first = state.last_token[slots].tolist()
        prefill_s = perf_counter() - started
        adaptive = self.config.draft_config.adaptive
        for row, states, token in zip(rows, hidden, first, strict=True):
            row.started, row.prefill_s, row.prefill_rows = started, prefill_s, len(rows)
            row.draft_length = adaptive.start if adaptive else 0
            if self.keep_hidden_states:
                row.hidden.append(states.half())
            if self.keep_logits:
                row.logits += self.base.logits(states[-1:])
            self._commit(row, [token])

    def _commit(self, row: DecodingSequence, tokens: list[int]) -> None:
        row.answer += tokens
        row.ended = tokens[-1] in self.config.eos_ids or len(row.answer) >= self.max_new_tokens
        row.total_s = perf_counter() - row.started
        if row.on_tokens:
            row.on_tokens(tokens)

    def _step(self, state: DecodeState, rows: list[DecodingSequence]) -> None:
        started = perf_counter()
        config, positions = self.config.draft_config, [len(row.answer) for row in rows]
        active = [row for row in rows if not row.ended]
        depth = self._depth(active)
        most_tokens = [max(1, self.max_new_tokens - position) for position in positions]
        # A step commits up to depth + 1 tokens: the accepted drafts and the target's next token. Only if that can be
        # more than a row may still have, the step truncates.
        short = min(most_tokens) < min(depth, config.depth) + 1
        with self.base.lock:
            step = state.step([row.seed for row in rows], positions, depth, most_tokens if short else None)
        hidden = step.hidden.final.half() if self.keep_hidden_states else None
        for n, row in enumerate(rows):
            if row.ended:
                continue
            if self.keep_logits:  # before the commit, whose listener may read them
                row.logits += step.logits[n, step.acceptance.nodes[n, : len(step.tokens[n])]]
            self._commit(row, step.tokens[n])
            if hidden is not None:
                row.hidden.append(hidden[n, : len(step.tokens[n])])
        total_s = perf_counter() - started
        for row, record in zip(rows, step.records, strict=True):
            if len(row.answer) == record.position:
                continue  # the row had ended before this step
            if self.record_steps:
                row.steps.append(replace(record, rows=len(active), total_s=total_s))
            if config.adaptive is not None:
                length = config.adaptive.next(row.draft_length, record.depth, record.accepted)
                row.draft_length = min(config.depth, length)

    def _depth(self, active: list[DecodingSequence]) -> int:
        """Return the largest depth of the next trees; the row with the least room limits all rows."""
        depth = self.base.max_context - max(len(row.prompt) + len(row.answer) for row in active)
        if self.config.same_text:  # drafting less at the end of an answer cannot change it
            depth = min(depth, self.max_new_tokens - min(len(row.answer) for row in active) - 1)
        if self.config.draft_config.adaptive is not None:
            depth = min(depth, active[0].draft_length)
        return max(0, depth)


def decode(
    base: BaseModel,
    drafter: Drafter | None,
    input_ids: list[int],
    *,
    seed: int = 0,
    on_tokens: OnTokens | None = None,
    **options: Any,
) -> DecodeResult:
    """Decode a prompt of token ids; ``options`` are those of ``decode_batch``."""
    return decode_batch(base, drafter, [input_ids], seeds=[seed], on_tokens=on_tokens and [on_tokens], **options)[0]


def decode_batch(
    base: BaseModel,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    *,
    seeds: Sequence[int] | None = None,
    on_tokens: Sequence[OnTokens] | None = None,
    ignore_eos: bool = False,
    **options: Any,
) -> list[DecodeResult]:
    """Decode ``prompts`` of token ids, up to ``batch_size`` (default: all) at once; results have their order.

    Most options are those of ``drafthead.generate``, but ``seeds`` (default: 0, 1, 2, ...) and ``on_tokens`` have an
    entry per prompt. ``ignore_eos``: continue to ``max_new_tokens``, to time a fixed length. ``timed``: wait for the
    device after drafting and after verification, so that ``draft_s`` and ``verify_s`` are exact.

    Random numbers depend only on a row's seed and length. Up to rounding, an answer therefore equals that of its prompt
    alone with the same seed. Sampled answers may differ near the end of the base's or a draft model's context, because
    the longest row limits the drafts of all rows. The times of a step are those of the whole batch (``StepRecord.rows``
    answers), and a prefill's time is that of all prompts read with it. A result's ``total_s`` runs from the start of
    its prefill until its own answer ended.
    """
    seeds = list(seeds) if seeds is not None else list(range(len(prompts)))
    listeners: Sequence[OnTokens | None] = on_tokens or [None] * len(prompts)
    if not prompts or len(seeds) != len(prompts) or len(listeners) != len(prompts):
        what = "decode_batch needs prompts, and as many seeds and on_tokens"
        raise UserError(f"{what}; got {len(prompts)} prompts, {len(seeds)} seeds and {len(listeners)} functions")
    eos_ids = frozenset[int]() if ignore_eos else base.eos_ids
    loop = prepare(base, drafter, prompts, eos_ids=eos_ids, with_entropy=True, **options)
    rows = [
        DecodingSequence(number=number, prompt=list(ids), seed=seed, on_tokens=listener)
        for number, (ids, seed, listener) in enumerate(zip(prompts, seeds, listeners, strict=True))
    ]
    return [
        DecodeResult(
            tokens=row.answer,
            steps=row.steps,
            prefill_s=row.prefill_s,
            prefill_rows=row.prefill_rows,
            total_s=row.total_s,
        )
        for row in sorted(loop.run(rows), key=lambda row: row.number)
    ]


def prepare(
    base: BaseModel,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    draft_config: DraftConfig | None = None,
    sampler: TargetSampler = GREEDY,
    rule: AcceptanceRule = EXACT,
    batch_size: int | None = None,
    name: str = "prompt {} of the batch",
    **settings: Any,
) -> DecodeLoop:
    """Return a loop that decodes ``prompts``, up to ``batch_size`` (None: all) at once. ``settings`` are the other
    fields of ``DecodeConfig``. ``name`` is the format of a prompt's name in messages."""
    rows = len(prompts) if batch_size is None else min(batch_size, len(prompts))
    for setting, value in (("max_new_tokens", max_new_tokens), ("batch_size", rows)):
        if value < 1:
            raise UserError(f"{setting} must be at least 1, got {value}")
    for number, ids in enumerate(prompts):
        check_ids(base, ids, max_new_tokens, name.format(number) if len(prompts) > 1 else "the prompt")
    if draft_config is None:  # block verification needs a chain
        default = static_draft_config if rule.name == "block" else default_draft_config
        draft_config = default(drafter, rows)
    if drafter is not None and isinstance(draft_config.tree, DynamicTree | CostTree):
        draft_config = draft_config.truncate(drafter.depth)
    if draft_config.adaptive is not None and rows > 1:
        # All rows share a draft length, so a row's random numbers would depend on its neighbours.
        what = f"an adaptive draft length needs one prompt at a time, got {rows}"
        raise UserError(f"{what}; set batch_size=1 or draft_config.adaptive=None")
    if isinstance(draft_config.tree, CostTree) and draft_config.draft_sampling is not DraftSampling.TOP_K and rows > 1:
        # The price of time is that of the whole batch, so a row's drafts would depend on its neighbours.
        what = f"a tree by cost with sampled drafts needs one prompt at a time, got {rows}"
        raise UserError(f"{what}; set batch_size=1 or draft_sampling=top_k")
    if sampler.coupled and not sampler.greedy:
        only = {"rule.name": (rule.name, "exact"), "draft_sampling": (draft_config.draft_sampling.value, "top_k")}
        if other := [f"{key}={given}" for key, (given, needed) in only.items() if given != needed]:
            what = "coupled sampling needs the exact rule and top_k drafts"
            raise UserError(f"{what}, got {' '.join(other)}; leave it out")
    check_drafter(base, drafter, draft_config, rule)
    if not drafts(draft_config, rows):
        drafter, draft_config = None, ROOT_ONLY
    return DecodeLoop(
        base=base,
        drafter=drafter,
        config=DecodeConfig(draft_config=draft_config, sampler=sampler, rule=rule, **settings),
        max_new_tokens=max_new_tokens,
        batch_size=rows,
        capacity=max(map(len, prompts)) + max_new_tokens,
    )


def drafts(draft_config: DraftConfig, rows: int) -> bool:
    """Return False if batches of ``rows`` never get drafts, so that the drafter need not read them."""
    if isinstance(draft_config.tree, CostTree):
        return rows == 1 or draft_config.tree.costs.pays(rows)
    return draft_config.nodes > 1


def check_ids(base: BaseParts, ids: Sequence[int], max_new_tokens: int, where: str) -> None:
    """Reject a prompt that is empty, has ids that ``base`` lacks, or leaves no room for ``max_new_tokens``."""
    if not ids:
        raise UserError(f"{where} is empty; give at least one token")
    outside = next(((position, token) for position, token in enumerate(ids) if not 0 <= token < base.vocab_size), None)
    if outside is not None:
        what = f"{where} has the token id {outside[1]} at position {outside[0]}"
        raise UserError(f"{what}, but the base's ids go from 0 to {base.vocab_size - 1}; use the base's own tokenizer")
    if len(ids) + max_new_tokens > base.max_context:
        more, remedy = f" with max_new_tokens={max_new_tokens}", " or lower max_new_tokens"
        if max_new_tokens == 0:  # the ids include the answer
            more = remedy = ""
        context = f"the base's context of {base.max_context}"
        raise UserError(f"{where} has {len(ids)} tokens, which{more} exceed {context}; shorten it{remedy}")


def check_drafter(base: BaseModel, drafter: Drafter | None, draft_config: DraftConfig, rule: AcceptanceRule) -> None:
    """Reject combinations that do not fit together or that would bias the output."""
    if drafter is None:
        return
    if drafter.vocab_size is not None and drafter.vocab_size > base.vocab_size:
        what = f"the drafter's vocabulary has {drafter.vocab_size} ids but {base.name} has {base.vocab_size}"
        raise UserError(f"{what}; use a drafter with the base's tokenizer")
    if draft_config.draft_sampling is not DraftSampling.TOP_K and drafter.vocab_size not in (None, base.vocab_size):
        what = f"the drafter's distributions have {drafter.vocab_size} ids but {base.name} has {base.vocab_size}"
        raise UserError(f"{what}; create the drafter with target=base")
    if drafter.base_fingerprint is not None and not same_base(drafter.base_fingerprint, base.fingerprint):
        raise UserError(f"the draft head was loaded for another base than {base.name}; use load_head(name, base)")
    if draft_config.prefix_threshold > 0 and not drafter.has_confidence:
        what = f"prefix_threshold={draft_config.prefix_threshold:g} needs a head trained with head.confidence=true"
        raise UserError(f"{what}; use one, or leave out prefix_threshold")
    if isinstance(draft_config.tree, TokenTree) and draft_config.depth > drafter.depth:
        what = f"the tree is {draft_config.depth} drafts deep, but the drafter drafts at most {drafter.depth}"
        raise UserError(f"{what}; choose a shallower tree")
    if isinstance(draft_config.tree, CostTree) and not drafter.drafts_by_cost:
        what = f"{type(drafter).__name__} does not score its drafts, which a tree by cost needs"
        raise UserError(f"{what}; draft with a head, a draft model, prompt lookup or A+B, or choose another tree")
    rule.check(draft_config)
