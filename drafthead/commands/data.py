"""Make the corpora of a recipe, without training.

usage: drafthead data recipe=NAME [key=value ...]

drafthead data recipe=medusa_smollm2
drafthead data recipe=eagle3_llama3 data.answers.server.url=http://node7:8000

The settings are those of `drafthead train`.
"""

from contextlib import ExitStack

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from drafthead.settings.compose import run_recipe, say
from drafthead.train.config import RunConfig, parse_run
from drafthead.train.distributed import signals
from drafthead.train.distributed.launcher import launched
from drafthead.train.pipeline import RunContext, corpora
from drafthead.train.preflight import preflight


def _main(cfg: DictConfig) -> None:
    run = parse_run(cfg, HydraConfig.get().overrides.task)
    with signals.install_handlers(say), ExitStack() as at_end, launched(run) as launch:
        if launch.is_main:
            preflight(run)
        launch.accelerator.wait_for_everyone()
        context = RunContext(run, launch)
        at_end.push(context.close)
        corpora(context)


def main() -> None:
    run_recipe(_main, RunConfig, __doc__)


if __name__ == "__main__":
    main()
