"""Documents of token ids, and conversations rendered by the tokenizer's chat template."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from drafthead.errors import UserError, one_line
from drafthead.files.local import read_json

Tokenizer: TypeAlias = Any  # ``PreTrainedTokenizerBase`` of transformers, whose import would take seconds
Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}; the base answers content ""
Variables: TypeAlias = Mapping[str, Any] | None  # of the chat template, such as {"enable_thinking": False}
MARK = "1602176634"  # no chat template contains or changes it, so it shows if a template writes a message


def user_turn(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def conversation(turns: Sequence[str]) -> list[Message]:
    """Interleave the user's turns with empty assistant messages."""
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
    """Count the answers that the base has to give: one per empty assistant message, and one at the end."""
    return 1 + sum(message["role"] == "assistant" and not message["content"] for message in messages)


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Message], template_kwargs: Variables = None) -> list[int]:
    """Return the ids that the base reads before it answers: ``messages`` and the start of the answer."""
    return encode(tokenizer, render(tokenizer, messages, template_kwargs))


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Variables = None,
    generation_prompt: bool = True,
) -> str:
    """Return ``messages`` as text by the chat template; with ``generation_prompt`` it ends with the answer's start."""
    if not tokenizer.chat_template:
        name = tokenizer.name_or_path or "the base"
        raise UserError(f"the tokenizer of {name} has no chat template; use an instruction-tuned base")
    if _reads_parts(tokenizer, str(tokenizer.chat_template)):
        messages = [{**m, "content": _parts(m["content"])} if m["content"] else m for m in messages]
    return _apply(tokenizer, messages, template_variables(template_kwargs), generation_prompt)


def _apply(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any], generation_prompt: bool
) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    given: dict[str, Any] = {"add_generation_prompt": generation_prompt, **variables}
    try:
        if all(message["content"] is not None for message in messages):
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **given))
        # apply_chat_template leaves out null content, by which templates of DeepSeek tell a tool call from an answer.
        given = {**tokenizer.special_tokens_map, **given}
        template = tokenizer.get_chat_template(tools=variables.get("tools"))
        return str(render_jinja_template([list(messages)], chat_template=template, **given)[0][0])
    except Exception as error:  # a template is a program, which may raise anything
        reason = f"the chat template refuses messages with roles {[m['role'] for m in messages]}: {one_line(error)}"
        raise UserError(f"{reason}; change the data") from error


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@lru_cache(maxsize=8)
def _reads_parts(tokenizer: Tokenizer, template: str) -> bool:
    """Return True if ``template`` writes a user's text only as a list of parts; reject one that never writes it."""

    def writes(content: Any) -> bool | None:
        """Return True if the template writes ``content``, and None if it refuses a conversation of one message."""
        try:
            return MARK in _apply(tokenizer, [{"role": "user", "content": content}], {}, True)
        except UserError:
            return None

    as_text = writes(MARK)
    if as_text is False and not writes(_parts(MARK)):
        raise UserError("the chat template leaves out the text of the user's messages; give the base another template")
    return not as_text and bool(writes(_parts(MARK)))


def template_variables(variables: Variables) -> dict[str, Any]:
    """Return a copy of ``variables``, with the path of a JSON file in ``tools`` replaced by the file's list."""
    given = dict(variables or {})
    if isinstance(given.get("tools"), str):
        given["tools"] = read_json(Path(given["tools"]))
    if not isinstance(tools := given.get("tools") or [], list):
        raise UserError(f"chat template variable tools must be a list of tool definitions, got {tools!r}"[:400])
    return given


def unread_variables(tokenizer: Tokenizer, names: Iterable[str]) -> list[str]:  # not used by the chat template
    from jinja2 import Environment, TemplateError
    from jinja2.meta import find_undeclared_variables

    template = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", str(tokenizer.chat_template))  # transformers' own tag
    try:
        read_names = find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
    except TemplateError:
        read_names = {*re.findall(r"\w+", template)}
    return sorted({*names} - read_names)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text from ``render``, which holds its special tokens already."""
    require_whole_characters(text, "the text ")
    # `verbose` would warn about long prompts.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def encode_after(tokenizer: Tokenizer, prompt: str, prompt_ids: list[int], text: str) -> list[int]:
    """Return the ids of ``text`` after ``prompt``; no token crosses the boundary, as when the base writes ``text``."""
    ids = encode(tokenizer, prompt + text)
    if ids[: len(prompt_ids)] != prompt_ids:
        # A control token takes the prompt's place: SentencePiece puts a word mark before a text that stands alone.
        prompt_ids = encode(tokenizer, tokenizer.eos_token or "")
        ids = encode(tokenizer, (tokenizer.eos_token or "") + text)
    return ids[len(prompt_ids) :]


def require_whole_characters(text: str, name: str = "") -> None:
    """Raise a ``UserError`` about ``name`` if ``text`` holds half a character, such as ``"\\ud83d"`` in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise UserError(f"{name}holds half a character ({half}), which no tokenizer reads; remove it") from None
