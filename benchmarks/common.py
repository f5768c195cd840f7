"""Shared code of the benchmarks: options, records and tables."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from drafthead.errors import UserError
from drafthead.eval.report.tables import ResultTable
from drafthead.files.local import write_json
from drafthead.system.machine import hardware, versions


def parser(doc: str | None) -> ArgumentParser:
    """Return a parser that prints ``doc`` as its help and has the option --json."""
    options = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, metavar="FILE", help="write the record to this file")
    return options


def at_least(arguments: Namespace, least: int, *names: str) -> None:
    """Reject options with a value below ``least``."""
    for name in names:
        if getattr(arguments, name) < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(arguments, name)}")


def listed(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names in a comma-separated list, each once; reject names that are not in ``known``."""
    names = list(dict.fromkeys(name for name in text.split(",") if name))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UserError(f"--{option} accepts {', '.join(known)}, got {', '.join(unknown) or 'nothing'}")
    return names


def numbers(option: str, text: str, kind: Callable[[str], Any] = int, least: float = 1) -> list[Any]:
    """Return the numbers in a comma-separated list; reject those below ``least``."""
    try:
        values = [kind(value) for value in text.split(",")]
    except ValueError:
        raise UserError(f"--{option} needs numbers, separated by commas, got {text}") from None
    if min(values) < least:
        raise UserError(f"--{option} must be at least {least:g}, got {text}")
    return values


def filled(page: Path, marks: tuple[str, str], text: str) -> str:
    """Return the content of ``page`` with ``text`` between its two ``marks``."""
    before, _, rest = page.read_text().partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not end:
        raise UserError(f"{page} has no lines {marks[0].strip()} and {marks[1].strip()} to write between")
    return f"{before}{marks[0]}{text}{end}{after}"


def now() -> str:
    """Return the time in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def new_record(benchmark: str) -> dict[str, Any]:
    """Return a record without results: time, hardware and versions."""
    return {"benchmark": benchmark, "date": now(), "hardware": hardware(), "versions": versions()}


def save_record(arguments: Namespace, benchmark: str, results: dict[str, Any]) -> None:
    """Write the file of --json: time, hardware, versions, arguments and ``results``."""
    if arguments.json:
        given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
        write_json(arguments.json, new_record(benchmark) | {"arguments": given} | results)


def print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print a table with a line per row; the keys of the first row are the columns."""
    console = Console(highlight=False)
    console.width = max(console.width, 180)  # rich assumes 80 columns if the output is a pipe
    console.print(ResultTable.of(title, rows).console())


@torch.inference_mode()
def generated(model: Any, prompts: Sequence[list[int]], new: int) -> list[list[int]]:
    """Return ``new`` greedy tokens after each prompt by transformers' batched ``generate``, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    lengths = {"min_new_tokens": new, "max_new_tokens": new}
    out = model.generate(ids, attention_mask=mask, do_sample=False, eos_token_id=None, pad_token_id=0, **lengths)
    answers: list[list[int]] = out[:, width:].tolist()
    return answers


def entry_point(main: Callable[[], object]) -> None:
    """Run ``main``; report bad input in one line with exit status 2, an interruption with 130."""
    try:
        code = main()
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None  # the status of argparse
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(code)
