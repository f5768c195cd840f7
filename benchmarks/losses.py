"""The losses of `models/heads/common/losses.py` against each other: one head, one corpus, one budget.

    python benchmarks/losses.py                                       Medusa on the embedded model, the demo's settings
    python benchmarks/losses.py --recipe eagle3_smollm2 phases.distill.steps=500
    python benchmarks/losses.py --losses ce,lk --seeds 3 --json losses.json
    python benchmarks/losses.py debug=tiny                            on a random tiny base: does it run?

The head of a recipe is trained once per loss and seed, through the recipe's phases, each of them with that loss; all
read the same corpus and the same cached features, in the same order for the same seed, from the same initial weights.
After the last step the held-out answers give, by draft position:

  top-1     share of the targets that the head's likeliest token hits: what greedy decoding accepts.
  overlap   sum of min(p, q), what speculative sampling accepts. p is renormalised on the draft vocabulary.

and the mean accepted length of greedy decoding with a chain over all positions, by replay. Seconds are
those of the training steps alone. With several seeds everything is a mean, and the lowest and highest length
stand beside theirs.
"""

from collections.abc import Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from accelerate.utils import set_seed
from common import at_least, composed, entry_point, listed, parser, save_record, trained_steps
from rich.table import Table

from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json_lines
from drafthead.models.heads.common.losses import TERMS
from drafthead.train.config import RunConfig, preflight
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.distributed.launcher import Launch, launched
from drafthead.train.pipeline import Workspace
from drafthead.train.trainer.trainer import Trainer

LOSSES: dict[str, dict[str, float]] = {
    "ce": {"ce": 1.0},
    "kl": {"kl": 1.0},
    "ce+kl": {"ce": 0.5, "kl": 0.5},
    "tv": {"tv": 1.0},
    "lk": {"lk": 1.0},
    "adaptive": {"lk_adaptive": 1.0},
}
"""Names of the table, and the weights they stand for in a recipe."""
NEVER = 10**9
"""Steps: nothing is measured or saved before the end of a phase."""

Result = dict[str, Any]


def load_recipe(name: str, overrides: Sequence[str]) -> RunConfig:
    """The checked recipe, with cached features in every phase and nothing measured or saved in between."""
    run = composed([f"recipe={name}", *overrides])
    if run.trains_base:
        raise UserError(
            f"recipe {name} trains its base along, so the losses would not start from the same one; compare them with "
            "a recipe that does not"
        )
    phases = {key: replace(phase, hidden_states="cached") for key, phase in run.phases.items()}
    checkpoint = replace(run.checkpoint, every_steps=NEVER)
    return replace(run, phases=phases, checkpoint=checkpoint, validate_every=NEVER)


def with_loss(run: RunConfig, loss: str, seed: int) -> RunConfig:
    """The run with one of ``LOSSES`` in every phase; decay and depth weights stay the recipe's."""
    weights: dict[str, Any] = {**dict.fromkeys(TERMS, 0.0), **LOSSES[loss]}
    phases = {key: replace(phase, loss=replace(phase.loss, **weights)) for key, phase in run.phases.items()}
    return replace(run, phases=phases, seed=seed)


def train(run: RunConfig, corpora: Corpora, launch: Launch) -> Result:
    """Train one head; what the held-out answers say of it, and the seconds of its training steps."""
    set_seed(run.seed)
    with TemporaryDirectory(prefix="drafthead-losses-") as folder:
        work = Workspace(replace(run, out=folder), replace(launch, display=Display(enabled=False)))
        work.corpora = corpora
        head = work.new_head()
        Trainer(work.run, head, corpora, work.folder, work.launch, tracker=None).train()
        rows = read_json_lines(work.folder / "metrics.jsonl")
    positions = range(1, head.depth + 1)
    return {
        "seconds": sum(row["step_ms"] * steps for row, steps in trained_steps(rows)) / 1e3,
        "mean_accepted_length": rows[-1]["held_out_mean_accepted_length"],
        "accept": [rows[-1][f"held_out_accept_{k}"] for k in positions],
        "overlap": [rows[-1][f"held_out_overlap_{k}"] for k in positions],
    }


def mean_result(results: Sequence[Result]) -> Result:
    """Means over the seeds, and every seed's mean accepted length."""
    means: Result = {key: np.mean([result[key] for result in results], 0).tolist() for key in results[0]}
    return means | {"by_seed": [result["mean_accepted_length"] for result in results]}


def main(given: list[str] | None = None) -> None:
    """Entry point."""
    options = parser(__doc__)
    add = options.add_argument
    add("--recipe", default="medusa_smollm2", metavar="NAME", help="whose head, corpus and phases are used")
    add("--losses", default=",".join(LOSSES), metavar="LIST", help=f"comma list of {', '.join(LOSSES)}")
    add("--seeds", type=int, default=1, metavar="N", help="of the head's initial weights and the order of the rows")
    add("overrides", nargs="*", metavar="key=value", help="settings of the recipe, as for `drafthead train`")
    arguments = options.parse_args(given)
    arguments.losses = listed("losses", arguments.losses, list(LOSSES))
    at_least(arguments, 1, "seeds")
    run = load_recipe(arguments.recipe, arguments.overrides)
    preflight(run)
    found: dict[str, list[Result]] = {name: [] for name in arguments.losses}
    with launched(run) as launch:
        display, corpora = launch.display, Workspace(run, launch).corpora
        with display.stage("corpus"):
            corpora.generations()
        for seed in range(run.seed, run.seed + arguments.seeds):
            for name, entries in found.items():
                with display.stage(f"{name}, seed {seed}"):
                    entries.append(train(with_loss(run, name, seed), corpora, launch))
                tokens, seconds = entries[-1]["mean_accepted_length"], entries[-1]["seconds"]
                display.line(f"   {tokens:.3f} mean accepted length, {seconds:.0f} s of training")
    results = {name: mean_result(entries) for name, entries in found.items()}
    display.console.print(results_table(results, title=f"{arguments.recipe}, {budget(run)}"))
    save_record(arguments, "losses", {"budget": budget(run), "results": results})


def budget(run: RunConfig) -> str:
    """What every loss has: the phases' steps and positions a step."""
    steps = (f"{n} {p.steps} x {p.grad_accum_steps * p.micro_batch_size * p.seq_len}" for n, p in run.phases.items())
    return f"steps x positions: {', '.join(steps)}"


def results_table(results: dict[str, Result], title: str) -> Table:
    """One row a loss."""
    table = Table("loss", "top-1 by position", "overlap by position", "mean accepted length", "seconds", title=title)
    for name, result in results.items():
        tokens = f"{result['mean_accepted_length']:.3f}"
        if len(result["by_seed"]) > 1:
            tokens += f" ({min(result['by_seed']):.3f} to {max(result['by_seed']):.3f})"
        shares = (" ".join(f"{value:.3f}" for value in result[key]) for key in ("accept", "overlap"))
        table.add_row(name, *shares, tokens, f"{result['seconds']:.0f}")
    return table


if __name__ == "__main__":
    entry_point(main)
