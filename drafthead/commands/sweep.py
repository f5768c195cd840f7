"""``drafthead sweep``: which head, draft length and confidence threshold is fastest here, by decoding with all of them.

Made for Kangaroo, whose exit layer and threshold trade acceptance against the cost of drafting; works for any heads of
one base. All combinations, and what every head does by default, answer the same prompts in one interleaved run. The
fastest becomes the winner's default if its interval lies above what that head did before; its folder keeps the table
and the default before (sweep.json, sweep.png).
"""

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import MISSING
from rich.box import SIMPLE
from rich.table import Table

from drafthead.commands.command import command
from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError, check_limits
from drafthead.data.utils.files import write_json
from drafthead.data.utils.machine import hardware, versions
from drafthead.eval.metrics.acceptance import mean_accepted_length, mean_of, steps_of
from drafthead.eval.metrics.speed import speedup_interval, tokens_per_second
from drafthead.eval.metrics.summary import AUTOREGRESSIVE
from drafthead.eval.prompts.prompt import conversation_ids
from drafthead.eval.prompts.suites import load_suite
from drafthead.eval.report.plots import MUTED, new_axes, save_png, styled
from drafthead.eval.timing.interleaved import Decoder, run_interleaved
from drafthead.eval.timing.result_log import FailedDecode
from drafthead.eval.timing.transformers_generate import transformers_generate
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.step_log import DecodeResult
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.head_folder import read_head_config
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree

STOCK, TRANSFORMERS, OURS = AUTOREGRESSIVE
USAGE = """\
usage: drafthead sweep heads=[DIR,...] [key=value ...]

  heads=[DIR,...]                   head folders of one base, e.g. of several exit layers
  thresholds=[0,0.2,0.4,0.6,0.8]    confidence thresholds: nothing is drafted after a draft with less confidence
  drafts=[0,4]                      lengths of chains; 0 is the tree that the head drafts by default
  suite=smoke                       prompts to decode; limit=N takes fewer, max_new_tokens=96 is an answer's length
  seed=0                            of the order of prompts
  dry=true                          measure, but leave the heads as they are
"""


@dataclass(kw_only=True)
class SweepConfig:
    """Settings of the command."""

    heads: list[str] = MISSING
    thresholds: list[float] = field(default_factory=lambda: [0.0, 0.2, 0.4, 0.6, 0.8])
    drafts: list[int] = field(default_factory=lambda: [0, 4])
    suite: str = "smoke"
    limit: int | None = None
    max_new_tokens: int = 96
    seed: int = 0
    dry: bool = False

    def __post_init__(self) -> None:
        if not self.heads:
            raise ValueError("heads is empty; give head folders, heads=[outputs/NAME/head]")
        if bad := [t for t in self.thresholds if not 0 <= t < 1]:
            raise ValueError(f"thresholds must be in [0, 1), got {bad}")
        check_limits(self, drafts="[0, inf)", max_new_tokens="[2, inf)")


@dataclass(frozen=True)
class Candidate:
    """One way to draft."""

    folder: str
    head: DraftHead
    drafts: int
    """Length of the chain; 0: the head's calibrated tree."""
    threshold: float
    default: bool = False
    """Whether this is what the head does when nothing is said."""

    @property
    def name(self) -> str:
        """For tables; unique within a sweep."""
        shape = f"chain:{self.drafts}" if self.drafts else "tree"
        return f"{self.folder} {shape} {self.threshold:g}"

    def draft_config(self) -> DraftConfig:
        """What it drafts."""
        tree = TokenTree.chain(self.drafts) if self.drafts else self.head.tree
        assert tree is not None
        return DraftConfig(tree=tree, confidence_threshold=self.threshold)


@command("sweep", SweepConfig, USAGE)
def main(config: SweepConfig) -> None:
    """Decode with every combination, and keep the fastest."""
    suite = load_suite(config.suite, config.limit, config.seed)
    display = Display()
    with display.stage(f"{len(config.heads)} heads"):
        base, heads = _load(config.heads)
    candidates = candidates_of(heads, config.drafts, config.thresholds)
    new = config.max_new_tokens
    decoders: dict[str, Decoder] = {
        OURS: partial(decode, base, None, max_new_tokens=new),
        TRANSFORMERS: lambda ids: transformers_generate(base, ids, new),
        STOCK: partial(transformers_generate, base, max_new_tokens=new, model=base.stock()),
    }
    for c in candidates:
        decoders[c.name] = partial(decode, base, c.head, max_new_tokens=new, draft_config=c.draft_config())
    with display.stage(f"decoding {len(suite)} prompts in {len(decoders)} ways"):
        timing = run_interleaved(
            suite,
            lambda prompt, answers: conversation_ids(base.tokenizer, prompt, answers, base.config.chat_template_kwargs),
            decoders,
            None,
            config.seed,
            partial(display.progress, "decoding"),
        )
    rows = rows_of(candidates, timing.results)
    best = max(rows, key=lambda row: row["speedup"])
    display.console.print(table_of(rows))
    winner = next(c for c in candidates if c.name == best["name"])
    record: dict[str, Any] = {"suite": config.suite, "limit": config.limit, "max_new_tokens": new, "rows": rows}
    record |= {"best": best["name"], "hardware": hardware(), "versions": versions()}
    record["default_before"] = {
        "choices": None if winner.head.tree is None else [list(path) for path in winner.head.tree.paths[1:]],
        "confidence_threshold": winner.head.confidence_threshold,
    }
    if config.dry:
        display.line(f"fastest: {best['name']}, {best['speedup']:.2f}x; nothing was changed (dry=true)")
        return
    changed = is_faster(best, next(row for row in rows if row["head"] == best["head"] and row["default"]))
    if changed:
        if winner.drafts:
            winner.head.tree = TokenTree.chain(winner.drafts)
        winner.head.confidence_threshold = winner.threshold
        winner.head.save_pretrained(winner.folder)
    write_json(Path(winner.folder) / "sweep.json", record | {"changed": changed})
    draw(rows, Path(winner.folder) / "sweep.png")
    now = "now the default" if changed else "the default stays, within the noise of it,"
    now = "the default already" if best["default"] else now
    display.line(f"fastest: {best['name']}, {best['speedup']:.2f}x; {now} of {winner.folder} (sweep.json, sweep.png)")
    display.line(f"   best of {len(rows)} on the prompts that chose it: `drafthead eval` on others says what it buys")


def _load(folders: list[str]) -> tuple[BaseModel, dict[str, DraftHead]]:
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"no head folder at {folder}: the fastest head's defaults are written there; give folders")
    bases = {folder: read_head_config(Path(folder))["base"].get("fingerprint") for folder in folders}
    if other := [folder for folder in folders if bases[folder] != bases[folders[0]]]:
        raise UserError(
            f"{other[0]} was trained for another base than {folders[0]} (other weights, or an adapter); sweep heads of "
            "one base at a time"
        )
    base, first = load_base_and_head(folders[0], BaseConfig())
    return base, {folders[0]: first} | {f: DraftHead.from_pretrained(f, base) for f in folders[1:]}


def candidates_of(heads: dict[str, DraftHead], drafts: list[int], thresholds: list[float]) -> list[Candidate]:
    """What every head does by default, and every combination that it can draft."""
    deepest = max(head.depth for head in heads.values())
    if max(drafts) > deepest:
        raise UserError(
            f"drafts={max(drafts)} is more than the {deepest} positions that the heads draft; give at most {deepest} "
            "(0 is a head's own tree)"
        )
    found = []
    for folder, head in heads.items():
        own = (0 if head.tree is not None else head.depth, head.confidence_threshold)
        found.append(Candidate(folder, head, *own, default=True))
        for length, threshold in product(drafts, thresholds):
            possible = head.tree is not None if length == 0 else length <= head.depth
            if possible and (length, threshold) != own:
                found.append(Candidate(folder, head, length, threshold))
    return found


def rows_of(candidates: list[Candidate], results: dict[str, list[DecodeResult]]) -> list[dict[str, Any]]:
    """JSON values of every candidate, the fastest first; speedups over the faster baseline."""
    kept = [n for n, r in enumerate(results[OURS]) if not isinstance(r, FailedDecode)]
    if not kept:
        raise UserError("no prompt could be answered; lower max_new_tokens or choose another suite")
    of = {name: [row[n] for n in kept] for name, row in results.items()}
    baseline = max((of[name] for name in AUTOREGRESSIVE), key=lambda answers: tokens_per_second(answers).value)
    rows = []
    for candidate in candidates:
        found = of[candidate.name]
        steps = steps_of(found)
        speedup, low, high = speedup_interval(baseline, found)
        rows.append(
            {
                "name": candidate.name,
                "head": candidate.folder,
                "exit_layer": getattr(candidate.head.config, "exit_layer", None),
                "drafts": candidate.drafts,
                "threshold": candidate.threshold,
                "default": candidate.default,
                "mean_accepted_length": mean_accepted_length(found).value,
                "drafted": mean_of(steps, lambda step: step.proposed).value,
                "draft_ms": 1e3 * mean_of(steps, lambda step: step.draft_s).value,
                "verify_ms": 1e3 * mean_of(steps, lambda step: step.verify_s).value,
                "speedup": speedup,
                "interval": [low, high] if math.isfinite(low) else None,  # one prompt has none
                "identical": sum(a.tokens == b.tokens for a, b in zip(of[OURS], found, strict=True)),
                "answers": len(found),
            }
        )
    return sorted(rows, key=lambda row: -row["speedup"])


def is_faster(best: dict[str, Any], default: dict[str, Any]) -> bool:
    """Whether the interval of ``best`` lies above what its head does by default: less than that is noise."""
    return best["interval"] is not None and best["interval"][0] > default["speedup"]


def table_of(rows: list[dict[str, Any]]) -> Table:
    """For the console."""
    shown = Table(title="by measured speed, the fastest first", caption="* what the head does by default", box=SIMPLE)
    shown.add_column("head", overflow="fold", min_width=14)
    for name in ("exit", "drafts", "below", "tokens", "draft ms", "speedup", "95 %", "same"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        interval = row["interval"] and "{:.2f}–{:.2f}".format(*row["interval"])
        shown.add_row(
            _short(row["head"]),
            str(row["exit_layer"] or "–"),
            (str(row["drafts"]) if row["drafts"] else "tree") + ("*" if row["default"] else ""),
            f"{row['threshold']:g}",
            f"{row['mean_accepted_length']:.2f}",
            f"{row['draft_ms']:.1f}",
            f"{row['speedup']:.2f}x",
            interval or "–",
            f"{row['identical']}/{row['answers']}",
        )
    return shown


def _short(folder: str) -> str:
    """A run's name, or that of a head folder that is in no run."""
    path = Path(folder)
    return path.parent.name if path.name == "head" and path.parent.name else path.name


@styled
def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Speedup over the threshold with its interval, a line for every head and shape, beside each other at a point."""
    figure, axes = new_axes(height=3.4)
    lines: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["head"], row["drafts"], row["threshold"])):
        lines.setdefault((row["head"], row["drafts"]), []).append(row)
    for place, ((head, drafts), own) in enumerate(lines.items()):
        apart = 0.008 * (place - (len(lines) - 1) / 2)
        ends = [row["interval"] or [row["speedup"]] * 2 for row in own]
        below = [max(0.0, row["speedup"] - low) for row, (low, _) in zip(own, ends, strict=True)]
        above = [max(0.0, high - row["speedup"]) for row, (_, high) in zip(own, ends, strict=True)]
        label = f"exit {own[0]['exit_layer']}" if own[0]["exit_layer"] else _short(head)
        axes.errorbar(
            [row["threshold"] + apart for row in own],
            [row["speedup"] for row in own],
            yerr=[below, above],
            marker="o",
            elinewidth=0.8,
            label=f"{label}, " + (f"chain of {drafts}" if drafts else "its tree"),
        )
    axes.axhline(1, linewidth=0.8, color=MUTED)
    axes.set_xlabel("confidence threshold")
    axes.set_ylabel("speedup over autoregressive decoding")
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    save_png(figure, path)
