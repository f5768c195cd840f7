"""The one error that bad input raises, and limits of settings. Entry points print its message as one line, without a
traceback.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

MAX_START, MAX_END = 1600, 600
"""Characters of an overlong message that are kept: it starts with what was found and ends with what to do."""


class UserError(ValueError):
    """Bad input. The message says what was found, what was expected and what to do next."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= MAX_START + MAX_END else f"{text[:MAX_START]} ... {text[-MAX_END:]}"


def check_limits(settings: Any, prefix: str = "", **limits: str | Sequence[str] | tuple[bool, str]) -> None:
    """Refuse settings outside of their limits.

    A limit is an interval, such as ``"[0, 1)"`` or ``"[1, inf)"``; some words; or whether it holds, and its wording. Of
    a list every item must be within an interval or be one of the words, and there must be one. What may be None is not
    checked then. ``prefix`` stands before a setting's name in messages.
    """
    for key, limit in limits.items():
        value, optional = getattr(settings, key), "None" in str(settings.__dataclass_fields__[key].type)
        if value is None and optional:
            continue
        items = value if isinstance(value, list) else [value]
        if isinstance(limit, str):
            holds, asked = bool(items) and all(_within(item, limit) for item in items), f"in {limit}"
            low, high, _ = _interval(limit)
            if high == float("inf"):
                asked = f"{'at least' if limit[0] == '[' else 'above'} {low:g}"
                asked += " and finite" if isinstance(value, float) else ""
        elif isinstance(limit[0], bool):
            holds, asked = limit[0], str(limit[1])
        else:
            holds, asked = bool(items) and all(item in limit for item in items), f"one of {', '.join(map(str, limit))}"
        if not holds:
            raise UserError(f"{prefix}{key} must be {asked}{' or null' if optional else ''}, got {value!r}")


def _within(value: Any, interval: str) -> bool:
    low, high, (low_open, high_open) = _interval(interval)
    return (low < value or (low == value and not low_open)) and (value < high or (value == high and not high_open))


@lru_cache
def _interval(text: str) -> tuple[float, float, tuple[bool, bool]]:
    """Its ends, and whether each is left out."""
    low, high = text[1:-1].split(",")
    return float(low), float(high), (text[0] == "(", text[-1] == ")")


def one_line(error: BaseException) -> str:
    """The text of another library's error, as part of a message of ours: in one line of at most 400 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]}..."
