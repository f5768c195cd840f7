"""Compare two records of one benchmark: every number, its change, and whether that is worse.

    python benchmarks/compare.py OLD.json NEW.json [--limit 5] [--only 'costs.verify.*']

Reads what the benchmarks write with --json, and of the eval.json of `drafthead eval` the overall numbers.
Which direction is better follows from the names on the way to a number, the innermost first (numbers as names are
passed over), by how they end:

  lower is better    _s, _ms, seconds, bytes, verify, verify_ratio, draft, draft_by_depth, overhead, data_wait
  higher is better   tokens_per_second, speedup, ratio_to_floor, mfu, mean_accepted_length, times_less

Other numbers (sizes, counts, intervals) are shown, but never called worse. A number that only one file has is listed.

Exit code: 0; 1 when a number got worse by more than the limit; 2 when the files cannot be compared.
"""

import math
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from common import entry_point
from rich.console import Console
from rich.table import Table

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json

LOWER = (
    *("_s", "_ms", "seconds", "bytes"),
    *("verify", "verify_ratio", "draft", "draft_by_depth", "overhead", "data_wait"),
)
HIGHER = ("tokens_per_second", "speedup", "ratio_to_floor", "mfu", "mean_accepted_length", "times_less")
DESCRIPTION = ("benchmark", "date", "arguments", "hardware", "versions")
"""Entries of a record that say what was measured, and are no measurements."""
DECISIVE = ("cpu", "cores", "torch_threads", "gpu")
"""Of the hardware, what must be equal; the kernel keeps a varying part of the memory for itself."""

Names = tuple[str, ...]


def direction(path: Names) -> int:
    """1 where higher is better, -1 where lower is, 0 where neither is known."""
    for name in reversed(path):
        if name.isdigit():
            continue
        if name.endswith(HIGHER):
            return 1
        if name.endswith(LOWER):
            return -1
    return 0


def numbers(value: Any, path: Names = ()) -> Iterator[tuple[Names, float]]:
    """Every number in a record with the names that lead to it; truth values and descriptions are none."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if path or name not in DESCRIPTION:
                yield from numbers(inner, (*path, str(name)))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for place, inner in enumerate(value):
            yield from numbers(inner, (*path, str(place)))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def percent(old: float, new: float) -> float:
    """Change relative to the old value."""
    if old == new:
        return 0.0
    return 100 * (new - old) / abs(old) if old else math.copysign(math.inf, new)


def check_comparable(old: Mapping[str, Any], new: Mapping[str, Any], force: bool) -> None:
    """Refuse records of different benchmarks, and of different hardware unless ``force``."""
    if old.get("benchmark") != new.get("benchmark"):
        raise UserError(f"these are different benchmarks: {old.get('benchmark')} and {new.get('benchmark')}")
    first, second = (record.get("hardware") or {} for record in (old, new))
    changed = [key for key in DECISIVE if first.get(key) != second.get(key)]
    differing = "; ".join(f"{key} {first.get(key)} and {second.get(key)}" for key in changed)
    if differing and not force:
        raise UserError(f"measured on different hardware ({differing}); pass --force to compare all the same")


def notes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What else differs between the two runs: arguments, versions, and numbers that only one has."""
    found = []
    for part in ("arguments", "versions"):
        before, after = dict(old.get(part) or {}), dict(new.get(part) or {})
        for key in sorted((before.keys() | after.keys()) - {"json"}):
            if before.get(key) != after.get(key):
                found.append(f"{part}: {key} was {before.get(key)}, is {after.get(key)}")
    found += [f"only in the first file: {name}" for name in _missing(old, new)]
    found += [f"only in the second file: {name}" for name in _missing(new, old)]
    return found


def _missing(of: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Numbers that ``other`` does not have; a whole part that it lacks is one entry."""
    there = {path for path, _ in numbers(other)}
    lost = [path for path, _ in numbers(of) if path not in there]
    parts = [path[0] for path in lost if path[0] not in other]
    single = [".".join(path) for path in lost if path[0] in other]
    return [f"{part} ({parts.count(part)} numbers)" for part in dict.fromkeys(parts)] + single


def main(given: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    options.add_argument("old", type=Path, help="record to compare with")
    options.add_argument("new", type=Path, help="record to judge")
    options.add_argument("--limit", type=float, default=5.0, metavar="PERCENT", help="tolerated change (default 5)")
    options.add_argument("--only", default="*", metavar="GLOB", help="dotted names to compare, as 'costs.*'")
    options.add_argument("--force", action="store_true", help="compare although the hardware differs")
    arguments = options.parse_args(given)
    if not arguments.limit >= 0:
        raise UserError(f"--limit must be 0 or more percent, got {arguments.limit:g}")
    old, new = read_record(arguments.old), read_record(arguments.new)
    check_comparable(old, new, arguments.force)
    before = dict(numbers(old))
    found = {path: n for path, n in numbers(new) if path in before and fnmatchcase(".".join(path), arguments.only)}
    if not found:
        raise UserError(
            f"the files have no number in common that {arguments.only!r} names; is each a benchmark's --json?"
        )
    table = Table(title=f"{arguments.old} against {arguments.new}")
    table.add_column("number", overflow="fold")
    for name in ("old", "new", "change", ""):
        table.add_column(name, justify="right", no_wrap=True)
    judgements = []
    for path, value in found.items():
        change = percent(before[path], value)
        gain = direction(path) * change
        judgement = "worse" if gain < -arguments.limit else "better" if gain > arguments.limit else ""
        judgements.append(judgement)
        style = {"worse": "bold red", "better": "green"}.get(judgement)
        row = (".".join(path), f"{before[path]:.4g}", f"{value:.4g}", f"{change:+.1f} %", judgement)
        table.add_row(*row, style=style)
    console = Console(highlight=False)
    console.print(table)
    for line in notes(old, new):
        console.print(line, markup=False, soft_wrap=True)
    worse, better = judgements.count("worse"), judgements.count("better")
    console.print(f"{len(found)} numbers: {worse} worse and {better} better by more than {arguments.limit:g} %")
    return 1 if worse else 0


def read_record(path: Path) -> dict[str, Any]:
    """A benchmark's JSON file, or what an evaluation says over all prompts."""
    record = read_json(path)
    if not isinstance(record, dict):
        raise UserError(f"{path} holds {type(record).__name__}, not a record; give a file that a benchmark wrote")
    return {"benchmark": "eval", **record["overall"]} if "overall" in record else record


if __name__ == "__main__":
    entry_point(main)
