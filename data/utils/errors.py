"""The one error that bad input raises, and limits of settings. Entry points print its message as one line, without a
traceback.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

MAX_START, MAX_END = 1600, 600
"""Characters of an overlong message that are kept: it starts with what was found and ends with what to do."""


class UserError(ValueError):
    """Bad input. The message says what was found, what was expected and what to do next."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= MAX_START + MAX_END else f"{text[:MAX_START]} ... {text[-MAX_END:]}"


def check_limits(settings: Any, prefix: str = "", **limits: str | tuple[str, ...]) -> None:
    """Refuse settings outside of an interval, such as ``"[0, 1)"`` or ``"[1, inf)"``, or that are none of some words.

    Of a list every item counts, and there must be one. What may be None is not checked then. ``prefix`` stands before a
    setting's name in messages.
    """
    for key, wanted in limits.items():
        value, optional = getattr(settings, key), "None" in str(settings.__dataclass_fields__[key].type)
        items = value if isinstance(value, list) else [value]
        if (value is None and optional) or (items and all(_within(item, wanted) for item in items)):
            continue
        if isinstance(wanted, tuple):
            *first, last = (*wanted, "null") if optional else wanted
            asked = f"{', '.join(first)} or {last}"
        else:
            asked, (low, high, _) = f"in {wanted}", _interval(wanted)
            if high == float("inf"):
                asked = f"{'at least' if wanted[0] == '[' else 'above'} {low:g}"
                asked += " and finite" if isinstance(value, float) else ""
            asked += " or null" if optional else ""
        raise ValueError(f"{prefix}{key} must be {asked}, got {value!r}")


def _within(value: Any, wanted: str | tuple[str, ...]) -> bool:
    if isinstance(wanted, tuple):
        return value in wanted
    low, high, (low_open, high_open) = _interval(wanted)
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


def require(config: Any, group: str, **limits: tuple[bool, str]) -> None:
    """Check ``field=(whether its limit holds, the limit in words)``; ``group`` is the key of ``config`` in a recipe."""
    for key, (holds, limit) in limits.items():
        if not holds:
            raise UserError(f"{group}{key} must be {limit}, got {getattr(config, key)!r}")


def at_least(value: float, least: float) -> tuple[bool, str]:
    """A limit of ``require``."""
    return value >= least, f"at least {least}"


def one_of(value: str, allowed: Iterable[str]) -> tuple[bool, str]:
    """A limit of ``require``."""
    return value in allowed, f"one of {', '.join(allowed)}"
