"""Train a draft head: ``accelerate launch train/run.py recipe=medusa_llama3``, or ``drafthead train recipe=...``."""

import sys
from pathlib import Path

if not __package__:  # run as a file: look in the checkout, not in train/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import hydra
from omegaconf import DictConfig, OmegaConf

from drafthead.data.utils.settings import one_line_errors, run_main, say
from drafthead.train.config import RunConfig, parse_run
from drafthead.train.distributed import signals
from drafthead.train.estimate.memory import print_estimate
from drafthead.train.pipeline import run_pipeline


@hydra.main(version_base="1.3", config_path="pkg://drafthead.recipes", config_name="train")
@one_line_errors
def _main(cfg: DictConfig) -> None:
    run = parse_run(cfg)
    if run.mode == "estimate":
        print_estimate(run)
        return
    with signals.install_handlers(say):
        run_pipeline(run, OmegaConf.to_yaml(cfg, resolve=True))


def main() -> None:
    """Entry point."""
    run_main(_main, RunConfig)


if __name__ == "__main__":
    main()
