"""Documents of token ids, and conversations rendered by the tokenizer's chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from drafthead.data.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
"""``{"role": "system" | "user" | "assistant", "content": ...}``. An assistant without content: for the base to fill."""


@dataclass(frozen=True)
class Document:
    """Tokens that belong together; drafts never look across its ends."""

    input_ids: npt.NDArray[np.int32]
    """[n]."""
    loss_mask: npt.NDArray[np.bool_]
    """[n]: this token is trained (may be a target)."""

    def __len__(self) -> int:
        return len(self.input_ids)


def user_turn(text: str) -> list[Message]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def conversation(turns: Sequence[str]) -> list[Message]:
    """The user's turns, with an answer of the base to be filled in after each but the last."""
    return [message for turn in turns for message in (*user_turn(turn), {"role": "assistant", "content": ""})][:-1]


def turns_of(messages: Sequence[Message], answers: Sequence[str]) -> list[Message]:
    """``messages`` up to the user's turn after ``answers``, which take the empty places of the assistant."""
    found: list[Message] = []
    filled = iter(answers)
    for message in messages:
        if message["role"] == "assistant" and not message["content"]:
            answer = next(filled, None)
            if answer is None:
                break
            message = {"role": "assistant", "content": answer}
        found.append(message)
    return found


def num_turns(messages: Sequence[Message]) -> int:
    """Answers that the base gives in a conversation: to every empty place of the assistant, and at the end."""
    return 1 + sum(message["role"] == "assistant" and not message["content"] for message in messages)


def prompt_ids(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Ids of ``messages`` and of the start of the assistant's turn: what the base reads before it answers.

    ``template_kwargs`` are variables of the chat template, such as ``enable_thinking``.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path or 'the base'} has no chat template, so conversations cannot "
            "be rendered; use an instruction-tuned base or give the base a chat template"
        )
    try:
        text = str(
            tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **(template_kwargs or {})
            )
        )
    except TemplateError as error:
        roles = [m["role"] for m in messages]
        raise UserError(f"the chat template refuses messages with roles {roles}: {error}; change the data") from error
    # The template has written every special token already; `verbose` would warn about long prompts.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
