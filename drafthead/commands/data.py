"""Build the corpora of a recipe and nothing else: ``drafthead data recipe=medusa_smollm2``."""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from drafthead.data.utils.config import one_line_errors, run_main, say
from drafthead.train.config import RunConfig, parse_run, preflight
from drafthead.train.distributed import signals
from drafthead.train.distributed.launcher import main_process_first
from drafthead.train.start import Launch, launched, open_corpora

if not __package__:  # run as a file: look in the checkout, not in data/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)


@hydra.main(version_base="1.3", config_path="pkg://drafthead.recipes", config_name="train")
@one_line_errors
def _main(cfg: DictConfig) -> None:
    run = parse_run(cfg)
    with signals.handled(say), launched(run) as launch:
        build(run, launch)


def build(run: RunConfig, launch: Launch) -> None:
    """Make the corpora of ``run`` that are not on disk yet; all processes must call it."""
    display = launch.display
    if launch.is_main:
        preflight(run)
    launch.accelerator.wait_for_everyone()
    corpora = open_corpora(run, launch)
    for name, phase in run.phases.items():
        if phase.corpus == "text" and not run.data.text.stream:
            with display.stage(f"corpus: text of phase {name}"):
                with main_process_first(launch.accelerator, run.per_node_data):
                    rows = corpora.text_rows(phase.seq_len)
            display.line(f"   {len(rows)} rows of {phase.seq_len} tokens")
    display.line(f"corpora: {run.data.folder}")


def main() -> None:
    """Entry point."""
    run_main(_main, RunConfig)


if __name__ == "__main__":
    main()
