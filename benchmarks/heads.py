"""Every draft head on SmolLM2: the same answers to train on, the same training time, one table.

    python benchmarks/heads.py --minutes 20 --json heads.json --markdown heads.md
    python benchmarks/heads.py --heads medusa,kangaroo --minutes 5 --out outputs/heads_short
    python benchmarks/heads.py --only table
    python benchmarks/heads.py --minutes 0.05 --suite builtin --out outputs/tiny_heads debug=tiny     does it run?
    python benchmarks/compare.py before.json heads.json

Three parts, all of them unless --only names some:

  train  the recipe `<head>_smollm2` of every head on one corpus (--data), each by `drafthead train` in a process of its
         own. A probe of a few steps measures what a step of each phase takes; the steps are set so that all phases
         together take --minutes, divided by --shares. Features are cached. Corpora, caches, measuring on held-out
         answers, checkpoints and the choice of the tree are no part of the budget.
  eval   the suite, answered by all heads, prompt lookup and both plain decodings in one interleaved run. A head whose
         base was tuned along has a run of its own, against plain decoding of that base.
  table  from what both left in --out.

Killed at any point, the same command goes on: the chosen steps are kept in each head's folder, and a finished head is
not trained again. Nothing else should run meanwhile; the probes decide how many steps a head gets.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import described, entry_point
from composed import composed
from heads_table import console_tables, find_results, markdown, measure_heads, tuned_lines
from heads_training import KINDS, NEVER, Entry, train_all

from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import write_atomic, write_json
from drafthead.eval.config import EvalConfig
from drafthead.eval.prompts.suites import load_suite

HEADS = ("medusa", "hydra", "hydra_pp", "mlp_speculator", "kangaroo", "eagle3", "draft_lm", "medusa2")
PARTS = ("train", "eval", "table")
OURS = ("recipe", "out", "name", "mode", "resume")
"""Settings that this benchmark sets, beside the steps."""


def parse_arguments(given: list[str] | None) -> argparse.Namespace:
    """The command line; lists are split.

    Raises:
        UserError: an unknown part, nothing to do, or a number that cannot be meant.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=20.0, metavar="N", help="training time of a head (default 20)")
    add("--heads", default=",".join(HEADS), metavar="LIST", help=f"comma list; default {','.join(HEADS)}")
    add("--only", default=",".join(PARTS), metavar="PARTS", help=f"comma list of {', '.join(PARTS)}")
    add("--out", type=Path, default=Path("outputs/heads"), metavar="DIR", help="default outputs/heads")
    add(
        "--data",
        default="smollm2_large",
        metavar="NAME",
        help="recipes/data/NAME.yaml for all; not used with debug=...",
    )
    shares = "of the time, for phases on text, on answers, and with the base (where it is tuned); default 1:6:3"
    add("--shares", default="1:6:3", metavar="T:A:B", help=shares)
    add("--suite", default="spec_bench_like", metavar="NAME", help="prompts, as in `drafthead eval`")
    add("--limit", type=int, default=36, metavar="N", help="of them so many, over all tasks")
    add("--max-new-tokens", type=int, default=96, metavar="N", help="of an answer")
    add("--json", type=Path, metavar="FILE", help="write the record here, for compare.py")
    add("--markdown", type=Path, metavar="FILE", help="write the table here")
    add("overrides", nargs="*", metavar="key=value", help="settings of all recipes, as for `drafthead train`")
    arguments = parser.parse_intermixed_args(given)
    for name in ("heads", "only"):
        setattr(arguments, name, list(dict.fromkeys(part for part in getattr(arguments, name).split(",") if part)))
    unknown = [part for part in arguments.only if part not in PARTS]
    if unknown or not arguments.only:
        raise UserError(f"--only knows {', '.join(PARTS)}, got {', '.join(unknown) or 'nothing'}")
    if not arguments.heads:
        raise UserError(f"--heads names none; there are {', '.join(HEADS)}")
    if not 0 < arguments.minutes < NEVER:
        raise UserError(f"--minutes must be more than 0, got {arguments.minutes:g}")
    weights = arguments.shares.split(":")
    if len(weights) != len(KINDS) or not all(weight.isdigit() and int(weight) for weight in weights):
        raise UserError(f"--shares takes three whole numbers above 0 such as 1:6:3, got {arguments.shares}")
    arguments.shares = [int(weight) for weight in weights]
    _check_overrides(arguments.overrides)
    return arguments


def _check_overrides(overrides: Sequence[str]) -> None:
    for override in overrides:
        key, given, _ = override.partition("=")
        if not given:
            raise UserError(f"{override!r} is no setting; give key=value, as for `drafthead train`")
        if key.lstrip("+~") in OURS or key.endswith(".steps"):
            raise UserError(f"{override}: {key} is set here; see --heads, --out, --minutes and --shares")


def open_entry(name: str, arguments: argparse.Namespace) -> Entry:
    """A head's recipe with the shared data, cached features, a short evaluation of its own, and the overrides.

    Raises:
        UserError: no such recipe or setting.
    """
    folder = arguments.out / name
    given = [f"recipe={name}_smollm2", f"out={folder}", "eval.limit=2", "eval.max_new_tokens=24"]
    if any(override.startswith("debug=") for override in arguments.overrides):
        given.append(f"data.folder={arguments.out / 'corpora'}")
    else:
        given.append(f"data={arguments.data}")
    given += arguments.overrides
    run = composed(given)
    phases = {key: replace(phase, features="cached") for key, phase in run.phases.items()}
    cached = [f"phases.{key}.features=cached" for key in phases]
    return Entry(name, folder, replace(run, phases=phases), [*given, *cached])


def main(given: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 1 when a head could not be trained."""
    arguments = parse_arguments(given)
    config = _eval_config(arguments)
    load_suite(config.suite, config.limit, config.seed)  # a wrong name fails before anything is trained
    entries = [open_entry(name, arguments) for name in arguments.heads]
    display = Display()
    failed = train_all(entries, arguments, display) if "train" in arguments.only else {}
    done = [entry for entry in entries if entry.finished]
    if not done:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise UserError(f"{arguments.out} has no trained head: {reasons or 'run the part train first'}")
    if "eval" in arguments.only:
        measure_heads(done, config, arguments.out, display)
    if "table" in arguments.only:
        _show(find_results(done, arguments.out), arguments, display)
    for entry in entries:
        if not entry.finished:
            reason = failed.get(entry.name, "it is not trained; run the part train first")
            display.line(f"left out: {entry.name}: {reason}")
    return 1 if failed else 0


def _show(results: dict[str, Any], arguments: argparse.Namespace, display: Display) -> None:
    for table in console_tables(results):
        display.console.print(table)
    for line in tuned_lines(results):
        display.line(line)
    if arguments.markdown:
        write_atomic(arguments.markdown, markdown(results))
        display.line(f"table: {arguments.markdown}")
    if arguments.json:
        write_json(arguments.json, described("heads", arguments) | results)
        display.line(f"record: {arguments.json}")


def _eval_config(arguments: argparse.Namespace) -> EvalConfig:
    try:
        return EvalConfig(suite=arguments.suite, limit=arguments.limit, max_new_tokens=arguments.max_new_tokens)
    except ValueError as error:
        raise UserError(str(error)) from None


if __name__ == "__main__":
    entry_point(main)
