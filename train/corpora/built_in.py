"""Answers by built-in decoding, prompts that the base writes itself, and its agreement with others' answers."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.answers.store import Answer, ProcessGroup, Prompt
from drafthead.data.batch import Ratio
from drafthead.errors import UserError
from drafthead.models.base.parts import BaseParts
from drafthead.models.decoding.corpus import check_context, generate_answers
from drafthead.system.display import Display
from drafthead.train.original_base import OriginalBase

BATCHES_PER_BLOCK = 2  # more keep the batch full for longer; fewer lose less work in an interruption
LOGIT_ROWS = 512  # number of positions whose logits are in memory at once


@dataclass(frozen=True)
class BuiltInBackend:
    """Generator of answers that decodes with the base on every process; ``ServerBackend`` has the same interface.
    Prompts are answered in blocks of ``BATCHES_PER_BLOCK`` batches. Each block starts with an empty batch and is saved
    as one shard. Rounding depends on the rows of a batch; with fixed blocks, hidden states are bit-equal for any number
    of processes and after any interruption."""

    base: OriginalBase
    sampler: SamplerConfig
    batch_size: int
    keep_hidden_states: bool
    max_prompt_tokens: int

    def identity(self, recorded: dict[str, Any]) -> dict[str, Any]:  # manifest entries that determine the answers
        return {"dtype": str(self.base.parts.dtype)}

    def at(self, temperature: float) -> "BuiltInBackend":
        return replace(self, sampler=replace(self.sampler, temperature=temperature))

    def check(self, prompts: Sequence[Prompt]) -> None:
        check_context(self.base.parts, self.max_prompt_tokens, self.sampler)

    def shards(
        self, prompts: Sequence[Prompt], done: Collection[int], group: ProcessGroup, on_done: Callable[[], None]
    ) -> Iterator[tuple[int, list[Answer]]]:
        """Yield (number among the unfinished blocks, answers) of this process's blocks, which are assigned in turn. A
        block has prompts of similar length, because the cost of a batch depends on its longest row. Blocks are
        shuffled, so that the remaining time can be estimated early and an unfinished corpus is representative. ``done``
        has the numbers of prompts that are answered already. ``on_done`` is called after every answer."""
        size = BATCHES_PER_BLOCK * self.batch_size
        prompts = sorted(prompts, key=lambda prompt: -len(prompt[1]))
        blocks = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        random.Random(self.sampler.seed).shuffle(blocks)
        missing = [[prompt for prompt in block if prompt[0] not in done] for block in blocks]
        unfinished = [block for block in missing if block]
        for number, block in list(enumerate(unfinished))[group.rank :: group.size]:
            answers, longest = [], min(self.max_prompt_tokens, max(len(ids) for _, ids in block))
            limits = {"batch_size": self.batch_size, "max_prompt_tokens": longest}
            states = self.keep_hidden_states
            for answer in generate_answers(self.base.whole(), block, self.sampler, **limits, keep_hidden_states=states):
                answers.append(answer)
                on_done()
            yield number, sorted(answers, key=lambda a: a.prompt_number)

    def answer(self, prompts: Sequence[Prompt], sampler: SamplerConfig) -> Iterator[Answer]:
        """Yield answers sampled by ``sampler``, without hidden states, in the order in which they finish."""
        longest = max((len(ids) for _, ids in prompts), default=1)
        return generate_answers(
            self.base.whole(), prompts, sampler, batch_size=self.batch_size, max_prompt_tokens=longest
        )


@dataclass(frozen=True)
class Agreement:
    """Agreement of the base with answers that another model or a person may have written."""

    answers: int
    tokens: int
    greedy: float  # share of the answers' tokens that are the base's likeliest next tokens; nan without tokens
    probability: float  # mean probability of the answers' tokens, at temperature 1; nan without tokens


def agreement(base: OriginalBase, answers: Iterable[Answer]) -> Agreement:
    """Measure how likely the tokens of ``answers`` are for the base, in one pass over each answer with its prompt. All
    tokens of greedy answers by the same weights agree, except for ties and rounding (bfloat16, a quantised server)."""
    return agreement_along(base.parts, base.read_answers(answers))


@torch.inference_mode()
def agreement_along(parts: BaseParts, read: Iterable[tuple[Answer, Tensor]]) -> Agreement:
    """Measure how likely the tokens of answers are for a base. With each answer of n tokens come its final states,
    [n - 1 or n, D]."""
    greedy, probability, tokens, count = 0, 0.0, 0, 0
    for answer, states in read:
        count += 1
        hidden = states[answer.boundary - 1 :].to(parts.device, parts.dtype)
        trained = torch.tensor(answer.ids[answer.boundary :], device=parts.device)
        for start in range(0, len(trained), LOGIT_ROWS):
            targets = trained[start : start + LOGIT_ROWS]
            logits = parts.lm_head.logits(hidden[start : start + len(targets)])
            greedy += int((logits.argmax(-1) == targets).sum())
            probability += float(logits.float().log_softmax(-1).gather(-1, targets[:, None]).exp().sum())
            tokens += len(targets)
    return Agreement(count, tokens, Ratio(greedy, tokens).value, Ratio(probability, tokens).value)


MARKER = "\u0001"
MIN_CHARS = 12  # of a prompt that the base writes; shorter ones, mostly greetings, are dropped
MAX_TURN_TOKENS = 60
EXPECTED_YIELD = 0.6  # expected share of the base's own prompts that end within the limit and are not duplicates


def self_prompted_prompts(
    base: BaseParts,
    answer: Callable[[Sequence[Prompt], SamplerConfig], Iterator[Answer]],
    wanted: int,
    seed: int,
    batch_size: int,
    display: Display,
    max_tokens: int,
) -> list[str]:
    """Return ``wanted`` different prompts that the base writes at temperature 1 and top-p 0.95. ``answer`` is the
    method of a backend that generates texts. Each call asks it for at least ``batch_size`` prompts, none longer than
    ``max_tokens`` or ``MAX_TURN_TOKENS`` tokens. Raise a ``UserError`` if too few prompts are usable."""
    opening = user_opening(base)
    turns: dict[str, None] = {}
    attempt = 0
    while len(turns) < wanted:
        if attempt > 20 * wanted + 200:
            raise UserError(
                f"only {len(turns)} of the {attempt} prompts that the base wrote are complete; name prompt sources"
            )
        batch = max(batch_size, int((wanted - len(turns)) / EXPECTED_YIELD))
        sampler = SamplerConfig(temperature=1.0, top_p=0.95, max_new_tokens=min(MAX_TURN_TOKENS, max_tokens), seed=seed)
        prompts = [(attempt + i, opening) for i in range(batch)]
        attempt += batch
        for row in answer(prompts, sampler):
            text = base.tokenizer.decode(row.input_ids[row.boundary :], skip_special_tokens=True).strip()
            if row.finished and len(text) >= MIN_CHARS:
                turns.setdefault(text)
            display.progress("writing prompts", min(len(turns), wanted), wanted)
            if len(turns) >= wanted:
                break
    return list(turns)[:wanted]


def user_opening(base: BaseParts) -> list[int]:
    """Return the token ids of the chat template that stand before the user's message."""
    if not base.tokenizer.chat_template:
        raise UserError(f"{base.name} has no chat template to write prompts with; set data.answers.self_prompted=0")
    text = base.tokenizer.apply_chat_template(
        [{"role": "user", "content": MARKER}], tokenize=False, **base.config.chat_template_kwargs
    )
    ids: list[int] = base.tokenizer(text.split(MARKER)[0], add_special_tokens=False).input_ids
    return ids
