"""``drafthead study``: which shape a draft model should have (Decoding Speculative Decoding, 2402.01528)."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from drafthead.commands.command import command
from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError, check_limits
from drafthead.data.utils.files import make_folder, write_json
from drafthead.data.utils.machine import hardware, versions
from drafthead.eval.report.plots import GRID, INK, new_axes, save_png, styled
from drafthead.eval.trees.answers import FinishedAnswer, base_answers, text_ranks
from drafthead.eval.trees.cost_model import measure_costs
from drafthead.eval.trees.simulate import accept_probs_of_ranks, simulate_acceptance
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.shape import ModelShape
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.step_log import StepRecord
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import default_device
from drafthead.models.token_tree import TokenTree

USAGE = """\
Train draft models of equal size and different shapes, and compare them: wider and shallower, or narrower and deeper.

usage: drafthead study [depths=[1,2,4]] [key=value ...]

drafthead study depths=[1,2,4]                                      on SmolLM2, as large as two of its layers
drafthead study depths=[1,2,4,8] train=[phases.distill.steps=600]
drafthead study depths=[1,2] widths=[3072,1536] recipe=draft_lm_smollm2

A draft model of d layers gets MLPs as wide as makes its layers as large as reference=2 whole layers of the base, unless
widths=[...] says so itself. Each is trained by the recipe, in a run folder of its own under out that resumes where it
stopped. Its acceptance is simulated on the base's answers to the suite, its latency measured, and the throughput of its
best chain predicted from the two, and then measured by decoding: out/study.json and out/study.png, with lines of equal
predicted speed.
"""


@dataclass(kw_only=True)
class StudyConfig:
    """Settings of the command."""

    base: BaseConfig = field(default_factory=lambda: BaseConfig(name="embedded:smollm2"))
    """The base of the recipe."""
    recipe: str = "draft_lm_smollm2"
    depths: list[int] = field(default_factory=lambda: [1, 2, 4])
    """Decoder layers of each draft model."""
    widths: list[int] = field(default_factory=list)
    """MLP channels of each; by default such that all have equal parameters."""
    reference: int = 2
    """Whole layers of the base that all draft models are as large as."""
    train: list[str] = field(default_factory=list)
    """More settings of every training run."""
    suite: str = "mt_bench"
    limit: int = 12
    max_new_tokens: int = 96
    seed: int = 0
    out: str = "outputs/study"

    def __post_init__(self) -> None:
        check_limits(self, depths="[1, inf)", reference="[1, inf)", limit="[1, inf)", max_new_tokens="[2, inf)")
        if self.widths and len(self.widths) != len(self.depths):
            raise ValueError(f"widths needs one width per depth, got {len(self.widths)} for {len(self.depths)} depths")


@command("study", StudyConfig, USAGE)
def main(config: StudyConfig) -> None:
    """Train every shape, then measure all in one interleaved run."""
    out = Path(config.out)
    make_folder(out, "out=...")
    display = Display()
    with display.stage(f"base {config.base.name}"):
        base = BaseModel.load(config.base, default_device())
    shape = ModelShape.from_config(base.model.config)
    widths = config.widths or [equal_width(shape, config.reference, depth) for depth in config.depths]
    folders = [out / f"depth{depth}-width{width}" for depth, width in zip(config.depths, widths, strict=True)]
    for depth, width, folder in zip(config.depths, widths, folders, strict=True):
        with display.stage(f"training {depth} layers of {width} channels"):
            train(config, depth, width, folder)
    with display.stage(f"the base's answers: {config.suite}"):
        texts = base_answers(
            base, suite=config.suite, limit=config.limit, max_new_tokens=config.max_new_tokens, seed=config.seed
        )
    heads = {folder.name: DraftHead.from_pretrained(folder / "head", base) for folder in folders}
    rows = []
    for name, head in heads.items():
        with display.stage(f"acceptance and latency: {name}"):
            rows.append({"name": name, **predicted(base, head, texts)})
    with display.stage("decoding, all shapes side by side"):
        decode_interleaved(base, list(heads.values()), rows, texts)
    record = {"recipe": config.recipe, "suite": config.suite, "limit": config.limit, "rows": rows}
    write_json(out / "study.json", record | {"hardware": hardware(), "versions": versions()})
    draw(rows, out / "study.png")
    display.console.print(table(rows))
    best, expected = (max(rows, key=lambda row: row[key])["name"] for key in ("measured", "predicted"))
    display.line(f"fastest: {best}; predicted: {expected}   {out / 'study.json'}, {out / 'study.png'}")


def equal_width(shape: ModelShape, reference: int, depth: int) -> int:
    """Return the MLP channels, a multiple of 16, with which ``depth`` layers are as large as ``reference`` whole
    layers.
    """
    a_channel = 3 * shape.hidden_size
    inner = next(outputs for name, _, outputs in shape.linears if name == "gate_proj")
    beside = shape.layer_parameters - a_channel * inner
    width = (reference * shape.layer_parameters / depth - beside) / a_channel
    if width < 16:
        raise UserError(
            f"{depth} layers without an MLP are as large as {reference} of the base already; raise reference, or lower "
            "depths"
        )
    return 16 * round(width / 16)


def train(config: StudyConfig, depth: int, width: int, folder: Path) -> None:
    """Run one training in a new process; a finished one ends at once."""
    settings = [f"recipe={config.recipe}", f"head.num_layers={depth}", f"head.intermediate_size={width}"]
    settings += [f"out={folder}", f"name={folder.name}", "stages=[corpora,train]", *config.train]
    done = subprocess.run([sys.executable, "-m", "drafthead.cli", "train", *settings], check=False)
    if done.returncode:
        raise UserError(f"training {folder.name} ended with code {done.returncode}; its lines above say why")


def predicted(base: BaseModel, head: DraftHead, texts: Sequence[FinishedAnswer]) -> dict[str, Any]:
    """Return acceptance by replay, latencies, and the throughput that both predict of the best chain. Tokens and
    seconds.
    """
    ranks = [accept_probs_of_ranks(answer, 1) for answer in text_ranks(head, texts)]
    costs = measure_costs(base, head)
    lengths = range(1, head.depth + 1)
    tokens = {d: simulate_acceptance(ranks, TokenTree.chain(d)).mean_accepted_length for d in lengths}
    speed = {d: tokens[d] / costs.step(d + 1, d) for d in lengths}
    best = max(speed, key=lambda d: speed[d])
    return {
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "acceptance": tokens[1] - 1,
        "draft_s": costs.draft_at(1),
        "draft_tokens": best,
        "tokens": tokens[best],
        "predicted": speed[best],
        "verify_s": [costs.verify_at(n) for n in range(1, head.depth + 2)],
        "overhead_s": costs.overhead,
    }


def decode_interleaved(
    base: BaseModel, heads: Sequence[DraftHead], rows: Sequence[dict[str, Any]], texts: Sequence[FinishedAnswer]
) -> None:
    """Add to every row the measured speed of its best chain and of plain decoding.

    Answers are decoded in turns, so that a slow minute affects all.
    """
    steps: list[list[StepRecord]] = [[] for _ in (None, *heads)]
    for text in texts:
        for head_steps, head, row in zip(steps, (None, *heads), (None, *rows), strict=True):
            chain = DraftConfig(tree=TokenTree.chain(row["draft_tokens"] if row else 0))
            new = len(text.ids) - text.boundary
            head_steps += decode(base, head, text.ids[: text.boundary], max_new_tokens=new, draft_config=chain).steps
    speeds = [
        sum(step.committed for step in head_steps) / sum(step.total_s for step in head_steps) for head_steps in steps
    ]
    for row, speed, head_steps in zip(rows, speeds[1:], steps[1:], strict=True):
        committed = sum(step.committed for step in head_steps)
        row |= {"measured": speed, "tokens_decoded": committed / len(head_steps), "autoregressive": speeds[0]}


def chain_speed(row: dict[str, Any], acceptance: float, draft_s: float) -> float:
    """Return tokens per second of the best chain of a drafter with equal acceptance at all positions (2211.17192)."""
    fastest = 0.0
    for length in range(1, len(row["verify_s"])):
        tokens = sum(acceptance**k for k in range(length + 1))
        fastest = max(fastest, tokens / (length * draft_s + row["verify_s"][length] + row["overhead_s"]))
    return fastest


@styled
def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw acceptance over the latency of a draft token, with lines of equal predicted speedup."""
    figure, axes = new_axes(height=3.6)
    slowest = 1.6 * max(row["draft_s"] for row in rows)
    low, high = min(row["acceptance"] for row in rows), max(row["acceptance"] for row in rows)
    delays = np.linspace(slowest / 40, slowest, 40)
    chances = np.linspace(max(0.0, low - 0.1), min(0.99, high + 0.1), 40)
    plain = 1 / (rows[0]["verify_s"][0] + rows[0]["overhead_s"])  # of the minute that its latencies are of
    speeds = [[chain_speed(rows[0], a, d) / plain for d in delays] for a in chances]
    lines = axes.contour(1e3 * delays, chances, speeds, levels=10, colors=GRID, linewidths=1.2)
    axes.clabel(lines, fmt="%.2fx", fontsize=7, colors=INK)
    for row, marker in zip(rows, cycle("os^Dv<>P"), strict=False):
        label = f"{row['name']}: {row['measured'] / row['autoregressive']:.2f}x measured"
        axes.plot(1e3 * row["draft_s"], row["acceptance"], marker=marker, linestyle="", label=label)
    axes.legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    axes.set_xlabel("ms a draft token (lines: predicted speedup)")
    axes.set_ylabel("acceptance of the first draft")
    save_png(figure, path)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table for the console, the fastest shape first."""
    shown = Table("shape", "parameters", "acceptance", "draft ms", "chain", "tau", "tokens/s predicted", "measured")
    for row in sorted(rows, key=lambda row: -row["measured"]):
        shown.add_row(
            row["name"],
            f"{row['parameters'] / 1e6:.1f} M",
            f"{row['acceptance']:.3f}",
            f"{1e3 * row['draft_s']:.1f}",
            str(row["draft_tokens"]),
            f"{row['tokens']:.2f}",
            f"{row['predicted']:.1f}",
            f"{row['measured']:.1f}",
        )
    return shown
