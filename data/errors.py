"""The one error that bad input raises. Entry points print its message as one line, without a traceback."""


class UserError(ValueError):
    """Bad input. The message says what was found, what was expected and what to do next."""
