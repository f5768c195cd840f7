"""What the benchmarks share: how a record describes itself, and how bad input ends a script."""

import math
from argparse import Namespace
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.machine import hardware, versions

BAD_INPUT = 2
"""Exit code after bad input, as argparse's own; ``compare.py`` keeps 1 for numbers that got worse."""


def described(benchmark: str, arguments: Namespace) -> dict[str, Any]:
    """How every record begins: benchmark, date (UTC), arguments, hardware, versions."""
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": {name: _plain(value) for name, value in vars(arguments).items()},
        "hardware": hardware(),
        "versions": versions(),
    }


def finite(value: float) -> float | None:
    """The value, or None for what JSON cannot hold."""
    return value if math.isfinite(value) else None


def entry_point(main: Callable[[], object]) -> None:
    """Run ``main``; bad input becomes one line on stderr.

    Raises:
        SystemExit: 2 after bad input, 130 after an interruption, else what ``main`` returned (None is 0).
    """
    try:
        code = main()
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(BAD_INPUT) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(code)


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
