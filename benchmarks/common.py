"""Shared code of the benchmarks: options, records and tables."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import write_json
from drafthead.data.utils.machine import hardware, versions
from drafthead.eval.report.tables import ResultTable


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


def numbers(option: str, text: str) -> list[int]:
    """Return the numbers in a comma-separated list; reject anything but whole numbers above 0."""
    values = text.split(",")
    if not all(value.isdigit() and int(value) for value in values):
        raise UserError(f"--{option} needs whole numbers of at least 1, separated by commas, got {text}")
    return [int(value) for value in values]


def save_record(arguments: Namespace, benchmark: str, results: dict[str, Any]) -> None:
    """Write the file of --json: arguments, time (UTC), hardware, versions and ``results``."""
    if arguments.json:
        given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
        date = datetime.now(UTC).isoformat(timespec="seconds")
        run = {"benchmark": benchmark, "date": date, "arguments": given, "hardware": hardware(), "versions": versions()}
        write_json(arguments.json, run | results)


def print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print a table with a line per row; the keys of the first row are the columns."""
    console = Console(highlight=False)
    console.width = max(console.width, 140)  # rich assumes 80 columns if the output is a pipe
    console.print(ResultTable.of(title, rows).console())


@torch.inference_mode()
def generated(
    model: Any, prompts: Sequence[list[int]], new: int, eos: int | None = None, **settings: Any
) -> list[list[int]]:
    """Return the answers of transformers' batched ``generate``, greedy by default, padded on the left.

    Without ``eos`` every answer has ``new`` tokens.
    """
    pad, width = eos or 0, max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    least = {"min_new_tokens": new} if eos is None else {}
    given = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": False, **least, **settings}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, **given)
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
