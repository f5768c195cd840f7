"""Serve a recipe's base in vLLM, which answers and computes hidden states for `drafthead train`.

usage: drafthead serve recipe=NAME [key=value ...]

drafthead serve recipe=eagle3_smollm2_vllm
drafthead train recipe=eagle3_smollm2_vllm data.states.url=http://127.0.0.1:8000

The settings are those of `drafthead train`. The server writes the layers that the recipe's head reads. It is started
from the environment of `drafthead engines install=vllm`, at the port of data.states.url or at 8000, and is stopped with
this command. Its command line is printed, for a machine of your own. That machine needs the same data.folder. To start
and stop the server with the training, give the training data.states.serve=true instead.
"""

import time

from omegaconf import DictConfig

from drafthead.models.base.parts import BaseParts
from drafthead.settings.compose import run_recipe
from drafthead.system.display import Display
from drafthead.train.config import RunConfig, parse_run
from drafthead.train.corpora.served_base import served_layers
from drafthead.train.corpora.states_server import StatesServer


def _main(cfg: DictConfig) -> None:
    run, display = parse_run(cfg), Display()
    parts = BaseParts.of_checkpoint(run.base, progress=display.line)
    layers = served_layers(run.head_config().read_layers(parts.num_layers), parts.num_layers)
    server = StatesServer(parts, run.data.states, layers, run.data.served_folder, display.line)
    server.start()
    try:
        display.line(f"ready: give the training data.states.url={server.url}")
        display.line("   Ctrl-C stops it")
        while True:
            server.check()
            time.sleep(1)
    finally:
        server.close()


def main() -> None:
    run_recipe(_main, RunConfig, __doc__)


if __name__ == "__main__":
    main()
