"""Check exhaustively, on small random distributions, that the acceptance rules keep the target's distribution.

usage: drafthead certify [key=value ...]

drafthead certify
drafthead certify each=true only=block
drafthead certify json=rows.json
drafthead certify callable=my_rules:leviathan length=3

Each row of the table runs the decoder's own drafting and verification on a small random target and drafter, once for
every outcome of every random draw. Results of a row:
  exact    the committed tokens have the target's distribution: the total variation is below 1e-9
  lossy    the rule is documented as lossy
  refused  the combination would bias the output, and cannot be built
  biased   a published way of drafting that is known to bias the output, and is found to do so
  local    under a grammar's masks, as plain masked decoding; the total variation is from the law of texts that obey it
  FAILED   anything else; the exit code is then 1

callable=module:function enumerates your own sampler instead, on random targets, each with a draft model near it. The
function is called with (target, draft, choose, length) and returns the tokens of one step. target(prefix) and
draft(prefix) return probabilities, and choose(probs) draws an index. torch.multinomial and torch.rand are enumerated
too. The exit code is 1 if the sampler is biased.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, field, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from rich.table import Table
from rich.text import Text

from drafthead.commands.command import command
from drafthead.eval.lossless.callables import ROUNDING, load_sampler
from drafthead.eval.lossless.callables import distances as sampler_distances
from drafthead.eval.lossless.cases import LOSSY
from drafthead.eval.lossless.certify import PAIRS, Row, certify, rule_total_variation, settings_label
from drafthead.files.local import write_json
from drafthead.settings.schema import Positive, PositiveFloat, require, settings
from drafthead.system.display import Display


@settings(kw_only=True)
class CertifyConfig:
    """Settings of ``drafthead certify``."""

    each: bool = False
    """Print a row per sampler of the target (temperature, top-p, ...). With false, a row has the largest total
    variation of all samplers."""
    only: str = ""
    """Run only the rows whose rule, draft_sampling, sampler or shape, as printed, contains this text. Empty: all."""
    json: str | None = None
    """JSON file to write all rows to."""
    callable: str = ""
    """Speculative sampler to enumerate instead of ours: ``module:function``."""
    length: Positive = 2
    """Largest number of tokens that ``callable`` may draft per step. It gets this number as ``length``."""
    vocabulary: Annotated[int, Field(ge=2, le=127)] = 3
    """Number of tokens in the vocabulary of the random targets for ``callable``."""
    target: list[PositiveFloat] = field(default_factory=list)
    """Next-token probabilities of a target for ``callable``, the same after every prefix. Empty: random targets."""
    draft: list[PositiveFloat] = field(default_factory=list)
    """Next-token probabilities of the draft model, the same after every prefix. Required with ``target``."""

    def __post_init__(self) -> None:
        same = len(self.target) == len(self.draft)
        require(same and len(self.target) != 1, "draft", "as many probabilities as target, at least 2", self.draft)
        for key in ("target", "draft"):
            total = sum(getattr(self, key))
            require(not self.target or abs(total - 1) < 1e-6, key, "probabilities that add up to 1", getattr(self, key))


@command("certify", CertifyConfig, __doc__)
def main(config: CertifyConfig) -> None:
    torch.set_num_threads(1)  # the tensors are small
    display = Display()
    if config.callable:
        check_callable(config, display)
        return
    with display.stage("enumerating all outcomes"):
        rows = certify(config.only, lambda done, total: display.progress("rows", done, total))
    if config.json:
        write_json(Path(config.json), [asdict(row) for row in rows])
    if not display.console.is_terminal:  # a pipe says that it has 80 columns, which would fold every cell
        display.console.width = max(display.console.width, 160)
    shown = rows
    if not config.each:
        # The worst row of each rule, draft sampling and shape, with the outcomes of its whole group.
        shown = []
        for _, group in groupby(rows, lambda row: (row.rule, row.draft_sampling, row.shape, row.vocabulary)):
            alike = list(group)
            worst = max(alike, key=lambda row: (row.result == "FAILED", row.total_variation or 0.0))
            several = worst.sampler if len(alike) == 1 or worst.result == "FAILED" else f"{len(alike)} samplers"
            shown.append(replace(worst, sampler=several, outcomes=sum(row.outcomes for row in alike)))
    display.console.print(table(shown))
    for row in rows:
        if row.reason:
            display.line(f"refused, {row.rule}, {row.draft_sampling}, {row.shape}: {row.reason}")
    counts = Counter(row.result for row in rows)
    results = ", ".join(
        f"{counts[v]} {v}" for v in ("exact", "lossy", "biased", "local", "refused", "FAILED") if counts[v]
    )
    display.line(f"{len(rows)} rows, {sum(row.outcomes for row in rows):,} outcomes: {results}")
    for rule in LOSSY:
        mean = rule_total_variation(rule)
        display.line(
            f"{settings_label(rule, 'name')}: lossy, total variation {mean:.3f} of a token's distribution, "
            f"mean of {PAIRS} targets"
        )
    if any(row.result == "FAILED" for row in rows):
        raise SystemExit(1)


def check_callable(config: CertifyConfig, display: Display) -> None:
    sampler = load_sampler(config.callable)
    probs = (config.target, config.draft) if config.target else None
    with display.stage("enumerating all outcomes"):
        distances, outcomes = sampler_distances(sampler, config.length, config.vocabulary, probs)
    worst, mean = max(distances), sum(distances) / len(distances)
    result = "exact" if worst < ROUNDING else "biased"
    targets = "the given target" if probs else f"{len(distances)} random targets of {config.vocabulary} tokens"
    display.line(
        f"{config.callable}: {result}. Total variation of {config.length + 1} tokens from the target's own: mean "
        f"{mean:.4f}, largest {worst:.4f}, on {targets}, {outcomes:,} outcomes"
    )
    if config.json:
        row = {"rule": config.callable, "result": result, "outcomes": outcomes, "total_variation": distances}
        write_json(Path(config.json), [row])
    if result == "biased":
        raise SystemExit(1)


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="distribution of the committed tokens, against the target's own")
    for heading in ("rule", "draft_sampling", "sampler", "shape"):
        shown.add_column(heading, overflow="fold")
    for heading in ("vocabulary", "outcomes", "total variation"):
        shown.add_column(heading, justify="right")
    shown.add_column("result", no_wrap=True)
    styles = {"FAILED": "bold red", "lossy": "yellow", "biased": "yellow"}
    for row in rows:
        numbers = ("", "", "")
        if row.total_variation is not None:
            variation = f"{row.total_variation:{'.1e' if row.result == 'exact' else '.4f'}}"
            numbers = (str(row.vocabulary), f"{row.outcomes:,}", variation)
        result = Text(row.result, styles.get(row.result, ""))
        shown.add_row(row.rule, row.draft_sampling, row.sampler, row.shape, *numbers, result)
    return shown
