"""Build the corpora of a recipe and nothing else: ``drafthead data recipe=medusa_smollm2``."""

import sys
from pathlib import Path

if not __package__:  # run as a file: look in the checkout, not in data/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import hydra
import torch
from accelerate import Accelerator
from omegaconf import DictConfig

from drafthead.data.config import one_line_errors, run_main, say
from drafthead.data.display import Display
from drafthead.models.base import BaseModel
from drafthead.train import signals
from drafthead.train.config import RunConfig, parse_run, preflight
from drafthead.train.corpora import Corpora
from drafthead.train.pipeline import WAITING, group_of
from drafthead.train.processes import Processes


@hydra.main(version_base="1.3", config_path="pkg://drafthead.recipes", config_name="train")
@one_line_errors
def _main(cfg: DictConfig) -> None:
    run = parse_run(cfg)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[WAITING])
    with signals.handled(say), Processes(run.dead_after_s).watched():
        _build(run, accelerator)


def _build(run: RunConfig, accelerator: Accelerator) -> None:
    display = Display(accelerator.is_main_process)
    if accelerator.is_main_process:
        preflight(run)
    accelerator.wait_for_everyone()
    with display.stage(f"base model {run.base.name or 'random'}"):
        base = BaseModel.load(run.base, accelerator.device, display.line)
    corpora = Corpora(base, run.data, run.seed, display.progress, group_of(accelerator), display.line)
    with display.stage("corpus: the base's own answers"):
        stats = corpora.generations().stats
    display.line(f"   {stats.rows} answers, {stats.tokens:,} tokens, {stats.finished} ended by the base itself")
    for name, phase in run.phases.items():
        if phase.corpus == "text" and not run.data.text.stream:
            with display.stage(f"corpus: text of phase {name}"):
                with accelerator.main_process_first():
                    rows = corpora.text_rows(phase.row_length)
            display.line(f"   {len(rows)} rows of {phase.row_length} tokens")
    display.line(f"corpora: {run.data.folder}")


def main() -> None:
    """Entry point."""
    run_main(_main)


if __name__ == "__main__":
    main()
