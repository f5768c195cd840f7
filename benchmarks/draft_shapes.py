"""Train draft models of equal size and different shapes, and compare them: wider and shallower, or narrower and deeper.

    python benchmarks/draft_shapes.py --depths 1,2,4 phases.distill.steps=600
    python benchmarks/draft_shapes.py --depths 1,2 --widths 3072,1536

The recipe draft_lm_smollm2 trains each draft model in a run folder below --out, with the settings at the end of the
command. Interrupted runs resume. Acceptance is simulated on the base's answers to the suite, and latency is measured.
Both together predict the speed of each model's best chain, which is then measured by decoding. --plot draws the models
with lines of equal predicted speed.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from common import entry_point, numbers, parser, print_table, save_record

from drafthead.data.answers.store import Answer
from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.errors import UserError
from drafthead.eval.config import SuiteConfig
from drafthead.eval.metrics.speedup_breakdown import expected_tokens
from drafthead.eval.metrics.steps import decode_tokens_per_second, mean_accepted_length, step_table
from drafthead.eval.report.plots import GRID, INK, new_axes, save_png, styled
from drafthead.eval.timing.interleaved import Decoder, TimedResults, run_interleaved
from drafthead.eval.trees.cost_model import measure_costs
from drafthead.eval.trees.finished_answers import base_answers
from drafthead.eval.trees.simulate import text_ranks
from drafthead.models.base.base_model import BaseModel, meta_base
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode_batch
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base, load_head
from drafthead.models.simulation.acceptance import accept_probs_of_ranks, simulate_acceptance
from drafthead.models.token_tree import TokenTree
from drafthead.system.machine import other_processes_line

BASE = "embedded:smollm2"
RECIPE = "draft_lm_smollm2"


def main(given: Sequence[str] | None = None) -> None:
    """Train every shape, measure all in one interleaved run, and print the table."""
    options = parser(__doc__)
    add = options.add_argument
    add("--depths", default="1,2,4", help="numbers of decoder layers")
    add("--widths", default="", help="MLP channels of each draft model (default: equal numbers of parameters)")
    add("--reference", type=int, default=2, help="size of each draft model, in layers of the base")
    add("--suite", default="mt_bench")
    add("--limit", type=int, default=12)
    add("--max-new-tokens", type=int, default=96)
    add("--out", type=Path, default=Path("outputs/draft_shapes"), help="folder of the runs")
    add("--plot", type=Path, metavar="FILE.png")
    add("settings", nargs="*", metavar="key=value", help="more settings of the training runs")
    arguments = options.parse_args(given)
    depths = numbers("depths", arguments.depths)
    widths = numbers("widths", arguments.widths) if arguments.widths else []
    if widths and len(widths) != len(depths):
        raise UserError(f"--widths needs one width per depth, got {len(widths)} for {len(depths)} depths")
    base = load_base(BASE)
    widths = widths or [equal_width(base, arguments.reference, depth) for depth in depths]
    folders = [arguments.out / f"depth{depth}-width{width}" for depth, width in zip(depths, widths, strict=True)]
    for depth, width, folder in zip(depths, widths, folders, strict=True):
        train(arguments.settings, depth, width, folder)
    suite = {"suite": arguments.suite, "limit": arguments.limit, "max_new_tokens": arguments.max_new_tokens}
    texts = base_answers(base, SuiteConfig(**suite))
    heads = {folder.name: load_head(folder / "head", base) for folder in folders}
    rows = [{"name": name, **predicted(base, head, texts)} for name, head in heads.items()]
    timed = measure_speeds(base, heads, rows, texts, arguments.max_new_tokens)
    save_record(arguments, "draft_shapes", {"rows": rows, "other_processes_cores": timed.other_processes_cores})
    if arguments.plot:
        draw(rows, arguments.plot)
    table = [
        {"shape": row["name"], "parameters": f"{row['parameters'] / 1e6:.1f} M", "acceptance": row["acceptance"]}
        | {"draft ms": 1e3 * row["draft_s"], "chain": row["draft_tokens"], "tau": row["tokens"]}
        | {"predicted tok/s": row["predicted"], "measured": row["measured"]}
        for row in sorted(rows, key=lambda row: -row["measured"])
    ]
    print_table(f"Draft models of equal size; {other_processes_line(timed.other_processes_cores)}", table)


def equal_width(base: BaseModel, reference: int, depth: int) -> int:
    """Return the MLP channels, a multiple of 16, that give ``depth`` layers the size of ``reference`` base layers."""
    layer: Any = meta_base(base.model.config).model.model.layers[0]
    layer_parameters: int = sum(parameter.numel() for parameter in layer.parameters())
    per_channel: int = 3 * base.hidden_size  # a column of gate, up and down projection
    without_mlp: int = layer_parameters - per_channel * layer.mlp.gate_proj.out_features
    width = (reference * layer_parameters / depth - without_mlp) / per_channel
    if width < 16:
        raise UserError(
            f"{depth} layers without an MLP are already as large as {reference} layers of the base; raise reference, "
            "or lower depths"
        )
    return 16 * round(width / 16)


def train(more: Sequence[str], depth: int, width: int, folder: Path) -> None:
    """Train a draft model of ``depth`` layers and ``width`` MLP channels in a new process and the run ``folder``.

    A run that is finished already ends at once.
    """
    settings = [f"recipe={RECIPE}", f"head.num_layers={depth}", f"head.intermediate_size={width}"]
    settings += [f"out={folder}", f"name={folder.name}", "stages=[corpora,train]", *more]
    done = subprocess.run([sys.executable, "-m", "drafthead", "train", *settings], check=False)
    if done.returncode:
        raise UserError(f"training {folder.name} ended with code {done.returncode}; its output above has the reason")


def predicted(base: BaseModel, head: DraftHead, texts: Sequence[Answer]) -> dict[str, Any]:
    """Return simulated acceptance, measured latencies in seconds, and the best chain of a draft model.

    "acceptance" is that of the first draft. "draft_s" is the latency of a draft token, "verify_s" has those of a pass
    of the base over 1, 2, ... tokens, and "overhead_s" is the time of a step outside both models. "draft_tokens" is the
    length of the best chain, "tokens" its mean accepted length, and "predicted" its tokens per second.
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


def measure_speeds(
    base: BaseModel, heads: dict[str, DraftHead], rows: list[dict[str, Any]], texts: Sequence[Answer], new: int
) -> TimedResults:
    """Answer the prompts of ``texts`` autoregressively and with every head's best chain, in one interleaved run.

    Add measured speeds ("measured", and the baseline's "autoregressive", in tokens per second) and the mean accepted
    length ("tokens_decoded") to each head's row in ``rows``. A row's "name" is the head's key in ``heads``. Answers
    have up to ``new`` tokens.
    """
    prompts = [
        EvalPrompt("draft shapes", n, [], input_ids=tuple(text.ids[: text.boundary])) for n, text in enumerate(texts)
    ]
    decoders: dict[str, Decoder] = {
        "autoregressive": partial(decode_batch, base, None, max_new_tokens=new, batch_size=1)
    }
    for row in rows:
        chain = DraftConfig(tree=TokenTree.chain(row["draft_tokens"]))
        options: dict[str, Any] = {"max_new_tokens": new, "draft_config": chain, "batch_size": 1}
        decoders[row["name"]] = partial(decode_batch, base, heads[row["name"]], **options)
    timed = run_interleaved(
        prompts, lambda prompt, _: list(prompt.input_ids or ()), decoders, None, 0, lambda done, total: None
    )
    runs = step_table(timed.results).groupby("method")
    speeds, lengths = (
        {name: metric(run) for name, run in runs} for metric in (decode_tokens_per_second, mean_accepted_length)
    )
    for row in rows:
        row |= {"measured": speeds[row["name"]], "autoregressive": speeds["autoregressive"]}
        row["tokens_decoded"] = lengths[row["name"]]
    return timed


def chain_speed(row: dict[str, Any], acceptance: float, draft_s: float) -> float:
    """Return tokens per second of the best chain if every position has the same ``acceptance`` (2211.17192).

    ``draft_s`` is the latency of a draft token; the other latencies are those of ``row``, as from ``predicted``.
    """
    lengths = range(1, len(row["verify_s"]))
    step_s = {length: length * draft_s + row["verify_s"][length] + row["overhead_s"] for length in lengths}
    return max(float(expected_tokens(acceptance, length) / step_s[length]) for length in lengths)


@styled
def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw each model's acceptance over its latency per draft token, with lines of equal predicted speedup.

    ``rows`` are those of ``predicted`` and ``measure_speeds``, one per model.
    """
    figure, axes = new_axes(height=3.6)
    slowest = 1.6 * max(row["draft_s"] for row in rows)
    low, high = min(row["acceptance"] for row in rows), max(row["acceptance"] for row in rows)
    delays = np.linspace(slowest / 40, slowest, 40)
    chances = np.linspace(max(0.0, low - 0.1), min(0.99, high + 0.1), 40)
    plain = 1 / (rows[0]["verify_s"][0] + rows[0]["overhead_s"])  # measured together with its latencies
    speeds = [[chain_speed(rows[0], a, d) / plain for d in delays] for a in chances]
    lines = axes.contour(1e3 * delays, chances, speeds, levels=10, colors=GRID, linewidths=1.2)
    axes.clabel(lines, fmt="%.2fx", fontsize=7, colors=INK)
    for row, marker in zip(rows, cycle("os^Dv<>P"), strict=False):
        label = f"{row['name']}: {row['measured'] / row['autoregressive']:.2f}x measured"
        axes.plot(1e3 * row["draft_s"], row["acceptance"], marker=marker, linestyle="", label=label)
    axes.legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    axes.set_xlabel("ms per draft token (lines: predicted speedup)")
    axes.set_ylabel("acceptance of the first draft")
    save_png(figure, path)


if __name__ == "__main__":
    entry_point(main)
