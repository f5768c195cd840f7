"""The error class for bad input. Entry points print its message in one line, without a traceback."""

import io
import re
import sys
from collections.abc import Sequence

MAX_START, MAX_END = 1600, 600  # characters printed of the start and the end of an overlong message
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (with escapes of terminals), line separators, changes of direction, and halves of characters."""


def visible(text: str, keep: str = "") -> str:
    """Return ``text`` in one line, with control characters other than ``keep`` written as in Python: ``\\x1b``."""
    return _HIDDEN.sub(lambda match: match[0] if match[0] in keep else ascii(match[0])[1:-1], text)


def print_any_text() -> None:
    """Make this process print characters that the output's encoding lacks as escapes, such as ``\\u2013``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class UserError(ValueError):
    """Bad input. The message says what was found, what was expected and what to do next."""

    def __str__(self) -> str:
        text = visible(super().__str__())
        return text if len(text) <= MAX_START + MAX_END else f"{text[:MAX_START]} ... {text[-MAX_END:]}"


def listed(texts: Sequence[str], most: int = 5) -> str:
    return "; ".join([*texts[:most], *([f"and {len(texts) - most} more"] if len(texts) > most else [])])


def one_line(error: BaseException) -> str:
    """Return another library's error message in one line of at most 400 characters, to quote it in our messages."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]}..."
