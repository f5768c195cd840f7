"""``drafthead certify``: does every acceptance rule keep the target's law? Enumerated exactly, not sampled.

Each row runs the decoder's own drafting and verification on a small random target and drafter, once for every way that
chance can fall (``eval/enumerate_laws.py``). What a step commits, completed by the target to one token more than the
tree is deep, must have the target's own law: the total variation between the two is rounding, below 1e-9. A lossy rule
says so, and by how much. What would be biased is refused.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import write_json
from drafthead.eval.lossless.cases import LOSSY, RAW, Case, Refusal, cases, refusals
from drafthead.eval.lossless.enumerate import committed, distance
from drafthead.eval.lossless.tabular_lm import TableDraft, TabularLM
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.contract import DraftConfig, DraftSampling
from drafthead.models.token_tree import TokenTree

EXACT_BELOW = 1e-9
"""Total variation that is rounding."""
PAIRS = 64
"""Random targets, each with a drafter near it, behind ``total_variation``."""
EPILOG = """\
A row is exact when the total variation is below 1e-9, lossy when its rule says that it is, refused when it cannot be
built because it would bias the output. Anything else FAILED, and the exit code is 1.

  drafthead certify                        one line per rule, siblings and shape: the worst of all samplers
  drafthead certify --each                 a line per sampler
  drafthead certify --only block --each    only rows with this word
  drafthead certify --json rows.json       every row, for machines
"""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What a line of the certificate is about."""

    rule: str
    draft_sampling: str
    sampler: str
    shape: str


@dataclass(frozen=True, kw_only=True)
class Row(Labels):
    """One line of the certificate."""

    verdict: str
    """``exact``, ``lossy``, ``refused`` or ``FAILED``."""
    vocabulary: int = 0
    """0 where nothing is enumerated."""
    outcomes: int = 0
    """Ways that chance can fall, the bonus apart."""
    total_variation: float | None = None
    """Between what is committed and the target's law, over depth + 1 tokens; None where nothing is enumerated."""
    reason: str = ""
    """Of a refusal."""


@lru_cache(maxsize=64)
def total_variation(rule: AcceptanceRule, draft_sampling: DraftSampling = DraftSampling.TOP_K) -> float:
    """How far ``rule`` moves the law of a token: the mean total variation over random targets with drafters near them.

    Exact for each of 64 fixed pairs over 8 tokens, with a chain of one draft; 0 for a lossless rule. A synthetic
    figure: it says how lossy a rule is beside others, not how far a certain model's texts are moved.
    """
    if rule.lossless:
        return 0.0
    total = 0.0
    for seed in range(PAIRS):
        target = TabularLM.random(8, 1, seed)
        draft_config = DraftConfig(tree=TokenTree.chain(1), draft_sampling=draft_sampling, sampler=RAW)
        draft = TableDraft(table=target.near(PAIRS + seed, 0.5), draft_config=draft_config)
        total += distance(committed(draft, target, RAW, rule, 1), target.probs(RAW), length=1)
    return total / PAIRS


def certified(case: Case, seed: int) -> Row:
    """Enumerate ``case`` on the random target and drafter of ``seed``."""
    target, draft = case.tables(seed)
    found = committed(draft, target, case.sampler, case.rule, case.shape.depth, greedy=case.greedy)
    apart = distance(found, target.probs(case.sampler))
    exact = "exact" if apart < EXACT_BELOW else "FAILED"
    return Row(
        **asdict(_labels(case)),
        vocabulary=case.shape.vocabulary,
        outcomes=found.outcomes,
        total_variation=apart,
        verdict=exact if case.rule.lossless else "lossy",
    )


def refused(refusal: Refusal) -> Row:
    """Try to build what must be refused."""
    reason = ""
    try:
        refusal.build()
    except (UserError, ValueError) as error:
        reason = str(error)
    return Row(**asdict(_labels(refusal)), verdict="refused" if reason else "FAILED", reason=reason)


def certificate(only: str = "", progress: Callable[[int, int], None] | None = None) -> list[Row]:
    """All rows, or those in whose rule, siblings, sampler or shape the words ``only`` occur.

    Args:
        only: as in a row, such as ``block`` or ``chain 2 + chain 2``.
        progress: called with the rows done and their number.

    Raises:
        UserError: no such row.
    """
    every: list[Case | Refusal] = [*cases(), *refusals()]
    wanted = [
        (number, case)
        for number, case in enumerate(every)
        if any(only in label for label in asdict(_labels(case)).values())
    ]
    if not wanted:
        raise UserError(f"no row of the certificate has {only!r}; run drafthead certify to see them all")
    rows = []
    for done, (number, case) in enumerate(wanted, start=1):
        rows.append(certified(case, seed=10 * number) if isinstance(case, Case) else refused(case))
        if progress:
            progress(done, len(wanted))
    return rows


def _labels(case: Case | Refusal) -> Labels:
    if isinstance(case, Refusal):
        return Labels(rule=case.rule, draft_sampling=case.draft_sampling, sampler="any", shape=case.shape)
    sampler = _named(case.sampler, "temperature")
    if case.draft_sampler is not None and case.draft_sampler != case.sampler:
        sampler += f"; drafts {_named(case.draft_sampler, 'temperature')}"
    return Labels(
        rule="greedy" if case.greedy else _named(case.rule, "name"),
        draft_sampling=case.draft_sampling.value.replace("_", " "),
        sampler=sampler,
        shape=case.shape.name,
    )


def _named(settings: Any, always: str) -> str:
    """Settings that differ from their defaults, the one called ``always`` in any case: ``temperature 0, top_k 3``."""
    first = getattr(settings, always)
    shown = [first if isinstance(first, str) else f"{always} {first:g}"]
    for item in fields(settings):
        value = getattr(settings, item.name)
        if item.name != always and value != item.default:
            shown.append(f"{item.name} {value:g}")
    return ", ".join(shown)


def worst_samplers(rows: Sequence[Row]) -> list[Row]:
    """The worst row of each rule, siblings and shape, with all of their outcomes."""
    found = []
    for _, group in groupby(rows, lambda row: (row.rule, row.draft_sampling, row.shape, row.vocabulary)):
        alike = list(group)
        worst = max(alike, key=lambda row: (row.verdict == "FAILED", row.total_variation or 0.0))
        several = worst.sampler if len(alike) == 1 or worst.verdict == "FAILED" else f"{len(alike)} samplers"
        found.append(replace(worst, sampler=several, outcomes=sum(row.outcomes for row in alike)))
    return found


def table(rows: Sequence[Row]) -> Table:
    """The rows as printed."""
    shown = Table(title="the law of what is committed, against the target's own")
    for heading in ("rule", "draft_sampling", "sampler", "shape"):
        shown.add_column(heading, overflow="fold")
    for heading in ("vocabulary", "outcomes", "total variation"):
        shown.add_column(heading, justify="right")
    shown.add_column("verdict", no_wrap=True)
    for row in rows:
        style = {"FAILED": "[bold red]", "lossy": "[yellow]"}.get(row.verdict, "[default]")
        enumerated = row.total_variation is not None
        shown.add_row(
            *(row.rule, row.draft_sampling, row.sampler, row.shape),
            str(row.vocabulary) if enumerated else "",
            f"{row.outcomes:,}" if enumerated else "",
            f"{row.total_variation:.1e}" if row.verdict == "exact" else _plain(row.total_variation),
            f"{style}{row.verdict}[/]",
        )
    return shown


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def summary(rows: Sequence[Row]) -> str:
    """One line: how many rows have which verdict."""
    counts = Counter(row.verdict for row in rows)
    outcomes = sum(row.outcomes for row in rows)
    verdicts = ", ".join(f"{counts[v]} {v}" for v in ("exact", "lossy", "refused", "FAILED") if counts[v])
    return f"{len(rows)} rows, {outcomes:,} outcomes: {verdicts}"


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    found = argparse.ArgumentParser(
        prog="drafthead certify",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--each", action="store_true", help="a line for every sampler, not only the worst")
    found.add_argument("--only", default="", metavar="WORDS", help="only rows with these words, as the table has them")
    found.add_argument("--json", type=Path, metavar="FILE", help="write every row there")
    return found


def main() -> None:
    """Entry point.

    Raises:
        SystemExit: 1 when a row failed.
    """
    arguments = parser().parse_args()
    torch.set_num_threads(1)  # the tensors are small
    display = Display()
    try:
        with display.stage("enumerating"):
            rows = certificate(arguments.only, lambda done, total: display.progress("rows", done, total))
        if arguments.json:
            write_json(arguments.json, [asdict(row) for row in rows])
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    if not display.console.is_terminal:  # a pipe says that it has 80 columns, which would fold every cell
        display.console.width = max(display.console.width, 160)
    display.console.print(table(rows if arguments.each else worst_samplers(rows)))
    for row in rows:
        if row.reason:
            display.line(f"refused, {row.rule}, {row.draft_sampling}, {row.shape}: {row.reason}")
    display.line(summary(rows))
    for rule in LOSSY:
        mean = total_variation(rule)
        display.line(
            f"{_named(rule, 'name')}: lossy, total variation {mean:.3f} of a token's law, mean of {PAIRS} targets"
        )
    if any(row.verdict == "FAILED" for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
