"""Batched plain generation that keeps the batch full: a finished row's slot is taken over by the next prompt.

It makes the phase-2 corpus, so it also hands over what it computes anyway: the base's ``h`` of every token it read.

Shape legend: B slots, D base width.
"""
# Whether answers came from the base: how many of their tokens it would choose itself.
# Prompts that the base writes itself: it continues its chat template up to the user's turn (as in Magpie, 2406.08464).

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafthead.data.answers.backend import Backend, Prompt, RankGroup
from drafthead.data.answers.config import SamplerConfig
from drafthead.data.answers.store import Generation
from drafthead.data.batch import Ratio
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.kv_cache import RaggedCache


@torch.inference_mode()
def greedy_match_rate(base: BaseModel, answers: Iterable[Generation]) -> float:
    """Share of the answers' tokens, in [0, 1], that are the base's likeliest after the tokens before them.

    Of greedy answers by the same weights all are, but for ties and rounding (bfloat16, a quantised server).
    """
    agreed = tokens = 0
    for answer in answers:
        ids = torch.from_numpy(answer.input_ids).long().to(base.device)
        hidden = base.forward(ids[None, :-1], base.new_cache(len(ids) - 1)).final[0, answer.boundary - 1 :]
        agreed += int((base.logits(hidden).argmax(-1) == ids[answer.boundary :]).sum())
        tokens += len(ids) - answer.boundary
    return Ratio(agreed, tokens).value


BLOCK = 2
"""Prompts a block, in slots: more waste less at a block's end, where slots run empty, and lose more when killed."""


@dataclass
class _Row:
    """One answer in the making."""

    number: int
    prompt: list[int]
    hidden: list[Tensor]
    """[T, D] pieces in order: prompt, then one vector per read answer token."""
    generator: torch.Generator | None
    answer: list[int] = field(default_factory=list)


@torch.inference_mode()
def generate(
    base: BaseModel,
    prompts: Iterable[tuple[int, list[int]]],
    sampler: SamplerConfig,
    *,
    slots: int,
    keep_hidden_states: bool = False,
    max_prompt_tokens: int = 512,
) -> Iterator[Generation]:
    """Answers in the order in which they finish.

    Args:
        base: the model that answers.
        prompts: (number, token ids); a prompt longer than ``max_prompt_tokens`` is skipped. The number seeds its row.
        sampler: temperature 0 is greedy.
        slots: rows decoded at a time.
        keep_hidden_states: hand over ``h`` as float16, [len(input_ids) - 1, D]: the last token is never read.
        max_prompt_tokens: with ``sampler.max_new_tokens`` the capacity of a row.

    Raises:
        UserError: the capacity exceeds the base's context.
    """
    capacity = check_context(base, max_prompt_tokens, sampler)
    waiting = deque((n, ids) for n, ids in prompts if 0 < len(ids) <= max_prompt_tokens)
    shared = _SharedPrefix(base, [ids for _, ids in waiting])
    cache = base.new_slots(min(slots, max(1, len(waiting))), capacity)
    rows: list[_Row | None] = [None] * cache.keys.shape[1]
    eos = frozenset() if sampler.ignore_eos else base.eos_ids
    last = torch.zeros(len(rows), dtype=torch.int64, device=base.device)
    while waiting or any(rows):
        for slot in range(len(rows)):
            while rows[slot] is None and waiting:
                number, ids = waiting.popleft()
                row = _Row(number, ids, [], _generator(sampler, number))
                logits = shared.read_prompt(row, cache, slot)
                last[slot] = _choose(logits[None], [row], sampler)[0]
                rows[slot] = row
                yield from _collect(row, int(last[slot]), rows, slot, sampler, eos, keep_hidden_states)
        if len(rows) > 1 and not waiting:
            rows, last, cache = _shrink(rows, last, cache)
        if any(rows):
            hidden = base.forward(last[:, None], cache).final[:, 0]
            last = _choose(base.logits(hidden), rows, sampler)
            kept = hidden.half() if keep_hidden_states else None
            for slot, token in enumerate(last.tolist()):
                current = rows[slot]
                if current is None:
                    cache.lengths[slot] = 0
                    continue
                if kept is not None:
                    current.hidden.append(kept[slot : slot + 1])
                yield from _collect(current, token, rows, slot, sampler, eos, keep_hidden_states)


class BuiltInBackend:
    """A :class:`~drafthead.data.answers.backend.Backend` that decodes with the base, on every process of the group.

    Prompts are answered in blocks of ``BLOCK`` x ``slots``, each from an empty batch: rounding depends on what is
    computed side by side, so this makes hidden states too the same to the bit whatever was killed and however many
    processes share the work. A block is a shard; a kill loses the blocks under way.
    """

    def __init__(
        self, base: BaseModel, sampler: SamplerConfig, *, slots: int, keep_hidden_states: bool, max_prompt_tokens: int
    ) -> None:
        self.base, self.sampler, self.slots = base, sampler, slots
        self.keep_hidden_states, self.max_prompt_tokens = keep_hidden_states, max_prompt_tokens

    def identity(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """The dtype of the base."""
        return {"dtype": str(self.base.dtype)}

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Nothing can go wrong here but a context too short."""
        check_context(self.base, self.max_prompt_tokens, self.sampler)

    def shards(
        self, prompts: Sequence[Prompt], done: Collection[int], group: RankGroup, on_done: Callable[[], None]
    ) -> Iterator[tuple[int, list[Generation]]]:
        """This process's blocks, dealt in turn."""
        size = BLOCK * self.slots
        blocks = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        missing = [[prompt for prompt in block if prompt[0] not in done] for block in blocks]
        for place, block in group.share(list(enumerate(block for block in missing if block))):
            answers = []
            for answer in generate(
                self.base,
                block,
                self.sampler,
                slots=self.slots,
                keep_hidden_states=self.keep_hidden_states,
                max_prompt_tokens=self.max_prompt_tokens,
            ):
                answers.append(answer)
                on_done()
            yield place, sorted(answers, key=lambda a: a.prompt_number)

    def answer(self, prompts: Sequence[Prompt], sampler: SamplerConfig) -> Iterator[Generation]:
        """Answers in the order in which they finish."""
        longest = max((len(ids) for _, ids in prompts), default=1)
        return generate(self.base, prompts, sampler, slots=self.slots, max_prompt_tokens=longest)


def check_context(base: BaseModel, max_prompt_tokens: int, sampler: SamplerConfig) -> int:
    """Positions that a prompt and its answer need.

    Raises:
        UserError: they exceed the base's context.
    """
    needed = max_prompt_tokens + sampler.max_new_tokens
    if needed > base.max_context:
        raise UserError(
            f"prompts of {max_prompt_tokens} and answers of {sampler.max_new_tokens} tokens exceed {base.name}'s "
            f"context of {base.max_context}; lower one of them"
        )
    return needed


def _collect(
    row: _Row,
    token: int,
    rows: list[_Row | None],
    slot: int,
    sampler: SamplerConfig,
    eos: frozenset[int],
    keep_hidden_states: bool,
) -> Iterator[Generation]:
    """Add the row's next token; when that ends the answer, free the slot and hand the answer over."""
    row.answer.append(token)
    finished = token in eos
    if finished or len(row.answer) >= sampler.max_new_tokens:
        rows[slot] = None
        yield Generation(
            prompt_number=row.number,
            input_ids=torch.tensor(row.prompt + row.answer, dtype=torch.int32).numpy(),
            boundary=len(row.prompt),
            finished=finished,
            features=torch.cat(row.hidden).cpu().numpy() if keep_hidden_states else None,
        )


def _shrink(
    rows: list[_Row | None], last_token: Tensor, cache: RaggedCache
) -> tuple[list[_Row | None], Tensor, RaggedCache]:
    """Drop empty slots once nothing is left to fill them, when at least a quarter are empty."""
    alive = [i for i, row in enumerate(rows) if row is not None]
    if not alive or len(alive) > 0.75 * len(rows):
        return rows, last_token, cache
    return [rows[i] for i in alive], last_token[alive], cache.select(alive)


class _SharedPrefix:
    """The tokens that all prompts begin with (a system prompt), read once and copied into every slot."""

    def __init__(self, base: BaseModel, prompts: list[list[int]]) -> None:
        self.base = base
        self.length = _common_prefix(prompts)
        if self.length:
            self.cache = base.new_cache(self.length)
            tokens = torch.tensor([prompts[0][: self.length]], device=base.device)
            self.hidden = base.forward(tokens, self.cache).final[0]

    def read_prompt(self, row: _Row, cache: RaggedCache, slot: int) -> Tensor:
        """Fill ``slot`` with the row's prompt; returns the logits after it ([V])."""
        lent = cache.slot(slot)
        if self.length:
            lent.keys[:, :, :, : self.length] = self.cache.keys
            lent.values[:, :, :, : self.length] = self.cache.values
            lent.length = self.length
            row.hidden.append(self.hidden.half())
        rest = torch.tensor([row.prompt[self.length :]], device=self.base.device)
        hidden = self.base.forward(rest, lent).final[0]
        row.hidden.append(hidden.half())
        cache.lengths[slot] = lent.length
        return self.base.logits(hidden[-1:])[0]


def _common_prefix(prompts: list[list[int]]) -> int:
    """Length of the common beginning; at least one token of every prompt stays outside it."""
    if len(prompts) < 2:
        return 0
    low, high = min(prompts), max(prompts)
    limit = min(len(p) for p in prompts) - 1
    length = 0
    while length < limit and low[length] == high[length]:
        length += 1
    return length


def _generator(sampler: SamplerConfig, number: int) -> torch.Generator | None:
    if sampler.temperature == 0:
        return None
    # A generator per row: the text depends on the prompt and the seed, not on the batch it ran in.
    return torch.Generator().manual_seed(sampler.seed * 1_000_003 + number)


def _choose(logits: Tensor, rows: list["_Row | None"], sampler: SamplerConfig) -> Tensor:
    """The next token of every row ([B] int64): argmax at temperature 0, else a sample after top-k and top-p."""
    if sampler.temperature == 0:
        return logits.argmax(-1)
    probs = (logits.float() / sampler.temperature).softmax(-1)
    ids = None
    if sampler.top_k:  # before the copy to the host: k of V values
        probs, ids = probs.topk(min(sampler.top_k, probs.shape[-1]))
        ids = ids.cpu()
    probs = probs.cpu()
    # One float64 cumulative sum for the batch: inverting it per row is far cheaper than torch.multinomial per row.
    cumulative = probs.double().cumsum(-1)
    chosen = [
        _sample(p, c, row.generator, sampler.top_p) if row else 0
        for p, c, row in zip(probs, cumulative, rows, strict=True)
    ]
    target_idx = torch.tensor(chosen)
    return (target_idx if ids is None else ids.gather(1, target_idx[:, None])[:, 0]).to(logits.device)


def _sample(probs: Tensor, cumulative: Tensor, generator: torch.Generator | None, top_p: float) -> int:
    """A sample of the nucleus: the likeliest tokens until ``top_p`` of the mass is reached.

    By rejection, which is exact and spares sorting the vocabulary: a sample lies in the nucleus iff the tokens
    likelier than it have less than ``top_p`` together, and most do.
    """
    total = float(cumulative[-1])
    while True:
        point = torch.rand(1, generator=generator, dtype=torch.float64) * total
        token = min(int(torch.searchsorted(cumulative, point, right=True)), len(probs) - 1)
        if top_p >= 1 or float(probs[probs > probs[token]].sum()) < top_p * total:
            return token


MARK = "\u0001"
SHORTEST = 12
"""Characters; shorter turns are mostly greetings."""
LONGEST_TOKENS = 60
YIELD = 0.6
"""Share of attempts expected to end within the limit and be new."""


def self_prompted_prompts(
    base: BaseModel,
    backend: Backend,
    wanted: int,
    seed: int,
    slots: int,
    progress: Callable[[str, int, int], None],
    max_tokens: int,
) -> list[str]:
    """``wanted`` distinct user turns sampled from the base by ``backend``, at temperature 1, top-p 0.95.

    Raises:
        UserError: the chat template has no user turn to continue, or the base hardly ever ends one.
    """
    opening = _user_opening(base)
    found: dict[str, None] = {}
    attempt = 0
    while len(found) < wanted:
        batch = max(slots, int((wanted - len(found)) / YIELD))
        sampler = SamplerConfig(temperature=1.0, top_p=0.95, max_new_tokens=min(LONGEST_TOKENS, max_tokens), seed=seed)
        prompts = [(attempt + i, opening) for i in range(batch)]
        attempt += batch
        for row in backend.answer(prompts, sampler):
            text = base.tokenizer.decode(row.input_ids[row.boundary :], skip_special_tokens=True).strip()
            if row.finished and len(text) >= SHORTEST:
                found.setdefault(text)
            progress("writing prompts", min(len(found), wanted), wanted)
            if len(found) >= wanted:
                break
        if attempt > 20 * wanted + 200:
            raise UserError(
                f"the base ended only {len(found)} of {attempt} prompts it began; set data.generations.self_prompted=0 "
                "and name prompt sources"
            )
    return list(found)[:wanted]


def _user_opening(base: BaseModel) -> list[int]:
    """Token ids of the chat template up to where the user's words begin."""
    if not base.tokenizer.chat_template:
        raise UserError(f"{base.name} has no chat template, so it cannot write prompts; name prompt sources instead")
    text = base.tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    ids: list[int] = base.tokenizer(text.split(MARK)[0], add_special_tokens=False).input_ids
    return ids
