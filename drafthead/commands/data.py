"""Build the corpora of a recipe and nothing else: ``drafthead data recipe=medusa_smollm2``."""

import hydra
from omegaconf import DictConfig

from drafthead.data.utils.settings import one_line_errors, run_main, say
from drafthead.train.config import RunConfig, parse_run
from drafthead.train.distributed import signals
from drafthead.train.distributed.launcher import launched
from drafthead.train.pipeline import RunContext, corpora
from drafthead.train.preflight import preflight


@hydra.main(version_base="1.3", config_path="pkg://drafthead.recipes", config_name="train")
@one_line_errors
def _main(cfg: DictConfig) -> None:
    run = parse_run(cfg)
    with signals.install_handlers(say), launched(run) as launch:
        if launch.is_main:
            preflight(run)
        launch.accelerator.wait_for_everyone()
        corpora(RunContext(run, launch))


def main() -> None:
    """Entry point."""
    run_main(_main, RunConfig)


if __name__ == "__main__":
    main()
