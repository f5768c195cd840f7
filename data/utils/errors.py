"""The error class for bad input. Entry points print its message in one line, without a traceback."""

MAX_START, MAX_END = 1600, 600
"""Numbers of characters at the start and the end of an overlong message that are printed; the middle is cut."""


class UserError(ValueError):
    """Bad input. The message says what was found, what was expected and what to do next."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= MAX_START + MAX_END else f"{text[:MAX_START]} ... {text[-MAX_END:]}"


def one_line(error: BaseException) -> str:
    """Return another library's error message in one line of at most 400 characters, to quote it in our messages."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]}..."
