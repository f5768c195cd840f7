"""Train a draft head on a frozen base: corpora, phases, tree, evaluation, head on disk.

usage: drafthead train recipe=NAME [key=value ...]

drafthead train recipe=medusa_smollm2                # the embedded real model, on 2 CPU cores
drafthead train recipe=medusa_llama3 mode=estimate   # print memory, tokens, disk and time of the run
drafthead train recipe=medusa_llama3 debug=tiny      # the whole run on a random tiny base, offline
drafthead train recipe=medusa_llama3 --cfg job       # print the composed settings
drafthead train recipe=medusa_smollm2 'stages=[tree,evaluate]'   # only these stages, on the head in the run folder
drafthead train recipe=medusa_smollm2 phases.distill.optim.lr=1e-3,2e-3 'name=lr_${phases.distill.optim.lr}' -m

The same command resumes an interrupted run.
Exit codes: 0 done; 1 an error, in one line; 143 or 130 stopped (SIGTERM, Ctrl-C) and saved. A second Ctrl-C exits at
once.
"""

import sys
import textwrap
from importlib import resources
from pathlib import Path

if not __package__:  # run as a file: look in the checkout, not in train/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from drafthead.errors import print_any_text
from drafthead.settings.compose import run_recipe, say
from drafthead.train.config import RunConfig, parse_run
from drafthead.train.distributed import signals
from drafthead.train.estimate.hours import print_estimate
from drafthead.train.pipeline import run_pipeline


def _main(cfg: DictConfig) -> None:
    run = parse_run(cfg, HydraConfig.get().overrides.task)
    if run.mode == "estimate":
        print_estimate(run)
        return
    with signals.install_handlers(say):
        run_pipeline(run, OmegaConf.to_yaml(cfg, resolve=True))


def main() -> None:
    run_recipe(_main, RunConfig, __doc__ + recipe_groups())


def recipe_groups() -> str:
    """Return the lines of ``--help`` that list the recipe files of each group: ``head=eagle3 | hydra | ...``."""
    folder = resources.files("drafthead.recipes")
    groups = ("recipe", "base", "head", "data", "phases", "shard", "tracker", "machine", "budget", "debug")
    wrapper = textwrap.TextWrapper(118, initial_indent="  ", subsequent_indent="      ", break_long_words=False)
    lines = []
    for group in groups:
        names = sorted(f.name.removesuffix(".yaml") for f in (folder / group).iterdir() if f.is_file())
        lines.append(wrapper.fill(f"{group}={' | '.join(names)}"))
    return "\ngroups (files in recipes/):\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print_any_text()
    main()
