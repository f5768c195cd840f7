"""The one error that bad input raises. Entry points print its message as one line, without a traceback."""

BEGINNING, END = 1600, 600
"""Characters of an overlong message that are kept: what was found stands at the beginning, the remedy at the end."""


class UserError(ValueError):
    """Bad input. The message says what was found, what was expected and what to do next."""

    def __str__(self) -> str:
        said = super().__str__()
        return said if len(said) <= BEGINNING + END else f"{said[:BEGINNING]} ... {said[-END:]}"


def one_line(error: BaseException) -> str:
    """What another library said, as part of a message of ours: in one line, and not without end."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= 400 else f"{said[:400]}..."
