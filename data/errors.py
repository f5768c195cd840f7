"""The one error that bad input raises. Entry points print its message as one line, without a traceback."""


class UserError(ValueError):
    """Bad input. The message says what was found, what was expected and what to do next."""


def one_line(error: BaseException) -> str:
    """What another library said, as part of a message of ours: in one line, and not without end."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= 400 else f"{said[:400]}..."
