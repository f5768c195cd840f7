"""What the benchmarks share: recipes, comma lists, how a record begins, and how bad input ends a script."""

import math
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from drafthead.data.utils.config import update_overrides
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.machine import hardware, versions
from drafthead.train.config import RunConfig, parse_run

BAD_INPUT = 2
"""Exit code after bad input, as argparse's own; ``compare.py`` keeps 1 for numbers that got worse."""


def composed(overrides: Sequence[str]) -> RunConfig:
    """The checked settings that `drafthead train` would run with."""
    try:
        with initialize_config_module("drafthead.recipes", version_base="1.3"):
            return parse_run(compose("train", overrides=update_overrides(list(overrides))))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{overrides[0]}: {str(error).splitlines()[0]}") from None


def parser(doc: str | None) -> ArgumentParser:
    """For a benchmark that writes a record."""
    found = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    found.add_argument("--json", type=Path, metavar="FILE", help="write the record here, for compare.py")
    return found


def at_least(arguments: Namespace, least: int, *names: str) -> None:
    """Refuse numbers below ``least``."""
    for name in names:
        if getattr(arguments, name) < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(arguments, name)}")


def listed(option: str, text: str, known: Sequence[str]) -> list[str]:
    """A comma list of known names, each once."""
    found = list(dict.fromkeys(part for part in text.split(",") if part))
    unknown = [part for part in found if part not in known]
    if unknown or not found:
        raise UserError(f"--{option} knows {', '.join(known)}, got {', '.join(unknown) or 'nothing'}")
    return found


def described(benchmark: str, arguments: Namespace) -> dict[str, Any]:
    """How every record begins: benchmark, date (UTC), arguments, hardware, versions."""
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()
        },
        "hardware": hardware(),
        "versions": versions(),
    }


def trained_steps(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
    """The rows of metrics.jsonl that are means over training steps, with the number of these steps."""
    done = 0
    for row in rows:
        if "step_ms" in row:
            yield row, row["total_step"] - done
            done = row["total_step"]


def finite(value: float) -> float | None:
    """The value, or None for what JSON cannot hold."""
    return value if math.isfinite(value) else None


def entry_point(main: Callable[[], object]) -> None:
    """Run ``main``; bad input becomes one line on stderr and exit code 2, an interruption 130."""
    try:
        code = main()
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(BAD_INPUT) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(code)
