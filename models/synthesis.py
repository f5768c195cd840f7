"""Prompts that the base writes itself: it continues its chat template up to the user's turn (as in Magpie, 2406.08464).

They need no data set and come from the distribution that the base was tuned on.
"""

from collections.abc import Callable

from drafthead.data.backends import Backend
from drafthead.data.errors import UserError
from drafthead.data.generations import SamplerConfig
from drafthead.models.base import BaseModel

MARK = "\u0001"
SHORTEST = 12
"""Characters; shorter turns are mostly greetings."""
LONGEST_TOKENS = 60
YIELD = 0.6
"""Share of attempts expected to end within the limit and be new."""


def synthesise_prompts(
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
                f"the base ended only {len(found)} of {attempt} prompts it began; set data.generations.synthesised=0 "
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
