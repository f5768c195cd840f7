"""``drafthead.generate``: one call from a prompt to a text."""

from dataclasses import dataclass

from torch import Tensor

from drafthead.data.text.chat import user_turn
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.decoding.loop import EXACT, GREEDY, OnTokens, decode
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step_log import DecodeResult


@dataclass(frozen=True)
class Answer:
    """A generated answer."""

    text: str
    tokens: list[int]
    mean_accepted_length: float
    """Tokens committed a step, bonus included; 1 for plain decoding."""
    tokens_per_second: float
    log: DecodeResult
    """Every step."""


def generate(
    base: BaseModel,
    drafter: Drafter | None,
    prompt: str | list[int] | Tensor,
    *,
    max_new_tokens: int = 256,
    draft_config: DraftConfig | None = None,
    sampler: Sampler = GREEDY,
    rule: AcceptanceRule = EXACT,
    seed: int = 0,
    on_tokens: OnTokens | None = None,
) -> Answer:
    """Answer a prompt, by default greedily. A drafter changes the speed, but not the distribution of the answer.

    Args:
        base: the target (``drafthead.load_base``, or ``BaseModel.wrap`` around a loaded model).
        drafter: a head attached to it, another drafter, or None for plain decoding.
        prompt: a user's message (put into the chat template), or token ids ([T] or [1, T]) taken as they are.
        max_new_tokens: stop after so many, if EOS has not before.
        draft_config: what to draft; by default the drafter's calibrated tree, or a chain over all its positions.
        sampler: temperature, top-p and so on; by default greedy.
        rule: how drafts are accepted; by default exactly.
        seed: of a sampled answer.
        on_tokens: called with tokens as soon as they are final.
    """
    if isinstance(prompt, str):
        ids = base.prompt_ids(user_turn(prompt))
    else:
        ids = prompt.flatten().tolist() if isinstance(prompt, Tensor) else list(prompt)
    log = decode(
        base,
        drafter,
        ids,
        max_new_tokens=max_new_tokens,
        draft_config=draft_config,
        sampler=sampler,
        rule=rule,
        seed=seed,
        on_tokens=on_tokens,
    )
    steps = len(log.steps)
    return Answer(
        text=base.tokenizer.decode(log.tokens, skip_special_tokens=True),
        tokens=log.tokens,
        mean_accepted_length=sum(s.committed for s in log.steps) / steps if steps else 1.0,
        tokens_per_second=len(log.tokens) / log.total_s,
        log=log,
    )
