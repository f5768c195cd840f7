"""Build the corpora of a recipe and nothing else: ``drafthead data recipe=medusa_smollm2``."""

import sys
from pathlib import Path

if not __package__:  # run as a file: look in the checkout, not in data/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import hydra
from omegaconf import DictConfig

from drafthead.data.config import one_line_errors, run_main, say
from drafthead.data.display import Display
from drafthead.models.base import BaseModel
from drafthead.train import signals
from drafthead.train.config import RunConfig, parse_run, preflight
from drafthead.train.corpora import Corpora


@hydra.main(version_base="1.3", config_path="pkg://drafthead.recipes", config_name="train")
@one_line_errors
def _main(cfg: DictConfig) -> None:
    run = parse_run(cfg)
    preflight(run)
    with signals.handled(say):
        _build(run)


def _build(run: RunConfig) -> None:
    display = Display()
    with display.stage(f"base model {run.base.name or 'random'}"):
        base = BaseModel.load(run.base, progress=display.line)
    corpora = Corpora(base, run.data, run.seed, display.progress)
    with display.stage("corpus: the base's own answers"):
        stats = corpora.generations().stats
    display.line(f"   {stats.rows} answers, {stats.tokens:,} tokens, {stats.finished} ended by the base itself")
    for name, phase in run.phases.items():
        if phase.corpus == "text":
            with display.stage(f"corpus: text of phase {name}"):
                rows = corpora.text_rows(phase.row_length)
            display.line(f"   {len(rows)} rows of {phase.row_length} tokens")
    display.line(f"corpora: {run.data.folder}")


def main() -> None:
    """Entry point."""
    run_main(_main)


if __name__ == "__main__":
    main()
