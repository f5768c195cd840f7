"""The one error that bad input raises. Entry points print its message as one line, without a traceback."""

MAX_START, MAX_END = 1600, 600
"""Leading and trailing characters of an overlong message to show: what was found, and what to do."""


class UserError(ValueError):
    """Bad input. The message says what was found, what was expected and what to do next."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= MAX_START + MAX_END else f"{text[:MAX_START]} ... {text[-MAX_END:]}"


def one_line(error: BaseException) -> str:
    """Return the text of another library's error in one line of at most 400 characters, for use in a message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]}..."
