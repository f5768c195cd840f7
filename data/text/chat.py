"""Documents of token ids, and conversations rendered by the tokenizer's chat template."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json

Tokenizer: TypeAlias = Any
"""A tokenizer of transformers, a ``PreTrainedTokenizerBase``. Importing that class would take seconds."""
Message = dict[str, str]
"""``{"role": "system" | "user" | "assistant", "content": ...}``. The base fills in assistant messages whose content is
empty."""


@dataclass(frozen=True)
class Document:
    """Consecutive tokens of one text. Drafts never cross its ends."""

    input_ids: npt.NDArray[np.int32]
    """[n] token ids."""
    loss_mask: npt.NDArray[np.bool_]
    """A value per token: True if the token may be a target of a draft in training."""

    def __len__(self) -> int:
        return len(self.input_ids)


def user_turn(text: str) -> list[Message]:
    """Return a conversation that consists of one user message."""
    return [{"role": "user", "content": text}]


def conversation(turns: Sequence[str]) -> list[Message]:
    """Return the user's turns as messages, with an empty assistant message after each turn except the last."""
    return [message for turn in turns for message in (*user_turn(turn), {"role": "assistant", "content": ""})][:-1]


def turns_of(messages: Sequence[Message], answers: Sequence[str]) -> list[Message]:
    """Fill empty assistant messages with ``answers`` in order; return the messages before the first unfilled one."""
    filled: list[Message] = []
    remaining = iter(answers)
    for message in messages:
        if message["role"] == "assistant" and not message["content"]:
            answer = next(remaining, None)
            if answer is None:
                break
            message = {"role": "assistant", "content": answer}
        filled.append(message)
    return filled


def num_turns(messages: Sequence[Message]) -> int:
    """Return how many answers the base has to give: one per empty assistant message, and one at the end."""
    return 1 + sum(message["role"] == "assistant" and not message["content"] for message in messages)


def prompt_ids(
    tokenizer: Tokenizer, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the token ids that the base reads before it answers: ``messages`` and the start of the answer.

    ``template_kwargs`` are variables of the chat template, such as ``enable_thinking``.
    """
    return encode(tokenizer, render(tokenizer, messages, template_kwargs))


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
    generation_prompt: bool = True,
) -> str:
    """Return ``messages`` as text by the chat template; with ``generation_prompt`` it ends with the answer's start.

    ``template_kwargs`` are variables of the template, such as ``{"enable_thinking": False}``. A ``UserError``
    is raised if there is no template or if it refuses the messages.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path or 'the base'} has no chat template, so conversations cannot "
            "be rendered; use an instruction-tuned base or give the base a chat template"
        )
    conversation: Any = list(messages)
    try:
        return str(
            tokenizer.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **template_variables(template_kwargs),
            )
        )
    except TemplateError as error:
        roles = [m["role"] for m in messages]
        raise UserError(f"the chat template refuses messages with roles {roles}: {error}; change the data") from error


def template_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the chat template's ``variables`` ({} for None).

    If ``tools`` is the path of a JSON file, the list of tool definitions in the file replaces it.
    """
    given = dict(variables or {})
    if isinstance(given.get("tools"), str):
        given["tools"] = read_json(Path(given["tools"]))
    if not isinstance(tools := given.get("tools") or [], list):
        raise UserError(f"chat template variable tools must be a list of tool definitions, got {tools!r}"[:400])
    return given


def unread_variables(tokenizer: Tokenizer, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that are not variables of the chat template."""
    from jinja2 import Environment, TemplateError
    from jinja2.meta import find_undeclared_variables

    template = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", str(tokenizer.chat_template))  # transformers' own tag
    try:
        read_names = find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
    except TemplateError:
        read_names = {*re.findall(r"\w+", template)}
    return sorted({*names} - read_names)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text from ``render``; no special tokens are added, because the text has them."""
    # `verbose` would warn about long prompts.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
