"""Values of a column as texts and as prompts."""

from typing import Any

from drafthead.data.chat import Message
from drafthead.data.errors import UserError

_ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
}


def column_value(row: dict[str, Any], column: str, where: str) -> Any:
    """The row's value in a column; None where it has none.

    Raises:
        UserError: there is no such column; the message lists those present, ``where`` says which row it is.
    """
    if column not in row:
        present = ", ".join(map(str, row)) or "none"
        raise UserError(f"{where} has no column {column!r}; present: {present}; set source.column")
    return row[column]


def as_text(value: Any, column: str, where: str) -> str:
    """A text.

    Raises:
        UserError: it is none; ``where`` says which row has it.
    """
    if not isinstance(value, str):
        raise UserError(f"{where}: column {column!r} holds a {type(value).__name__}, expected text; set source.column")
    return value


def as_prompt(value: Any, column: str, where: str) -> list[Message]:
    """The messages before the first answer, of a text or a conversation; empty where the assistant begins.

    Raises:
        UserError: it is neither; ``where`` says which row has it.
    """
    if isinstance(value, str):
        return user_turn(value)
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise UserError(
            f"{where}: column {column!r} holds a {type(value).__name__}, expected text or a list of "
            "{role, content} or {from, value}; set source.column"
        )
    messages: list[Message] = []
    for turn in value:
        role, content = (turn.get(a, turn.get(b)) for a, b in (("role", "from"), ("content", "value")))
        if role not in _ROLES or not isinstance(content, str):
            raise UserError(
                f"{where}: a turn has role {role!r} and a {type(content).__name__} as content, expected text and a "
                f"role among {', '.join(_ROLES)}; repair the row"
            )
        if _ROLES[role] == "assistant":
            break
        messages.append({"role": _ROLES[role], "content": content})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    return messages


def user_turn(text: str) -> list[Message]:
    """A prompt of one turn."""
    return [{"role": "user", "content": text}]
