"""Serve a head in vLLM; or serve a recipe's base in vLLM, which answers and computes states for `drafthead train`.

usage: drafthead serve head=FOLDER [key=value ...], or drafthead serve recipe=NAME [key=value ...]

drafthead serve head=outputs/medusa_smollm2/head
drafthead serve head=outputs/medusa_smollm2/head drafter=head+prompt_lookup:8:2
drafthead serve recipe=eagle3_smollm2_vllm
drafthead train recipe=eagle3_smollm2_vllm data.states.url=http://127.0.0.1:8000

vLLM runs from the environment of `drafthead engines install=vllm`, and is stopped with this command. Its command line
is printed.

With head=, drafthead's own code drafts inside vLLM, so that no export is needed. Acceptance is shown while it serves.

With recipe=, the settings are those of `drafthead train`. The server writes the layers that the recipe's head reads, at
the port of data.states.url or at 8000. A machine of your own needs the same data.folder. To start and stop the server
with the training, give the training data.states.serve=true instead.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from omegaconf import DictConfig
from pydantic import Field

from drafthead.commands.command import command
from drafthead.engines.server import LocalVllm, serve_vllm
from drafthead.engines.vllm import proposer_arguments
from drafthead.errors import UserError
from drafthead.models.base.base_config import BaseConfig, save_merged
from drafthead.models.base.parts import BaseParts
from drafthead.models.drafters.expression import parse_drafter
from drafthead.models.formats.format import vllm_options
from drafthead.models.heads.parts.head_folder import read_head_config, resolve_folder
from drafthead.models.heads.parts.loading import config_class, load_parts_and_head
from drafthead.settings.compose import run_recipe
from drafthead.settings.schema import Positive, settings
from drafthead.system.display import Display
from drafthead.train.config import RunConfig, parse_run
from drafthead.train.corpora.corpus_config import PORT
from drafthead.train.corpora.served_base import served_layers
from drafthead.train.corpora.states_server import states_server


@settings(kw_only=True)
class ServeConfig:
    """Settings of ``drafthead serve head=FOLDER``."""

    head: str
    """Head to serve: a folder (``outputs/NAME/head``) or a Hub repository (``user/name``)."""
    base: BaseConfig = field(default_factory=BaseConfig)
    """Base model. By default the base that the head was trained for."""
    drafter: str = "head"
    """Drafters, joined by ``+``: ``head``, ``prompt_lookup[:TOKENS[:PER_MATCH]]``, ``suffix_memory[:TOKENS[:MEMORY]]``,
    ``max_gram``. Each request drafts the chain of the largest expected accepted length."""
    drafts: Positive | None = None
    """Largest number of tokens that a request drafts in a step. With null, the head's trained positions, or the TOKENS
    of another drafter if they are more."""
    fit_length: bool = True
    """Draft only as far as the expected gain exceeds the cost. Both are learnt while serving: shares of acceptance, and
    times of vLLM's steps. With false, every step drafts as far as it can."""
    requests: Positive = 4
    """Largest number of requests that vLLM answers at once (``--max-num-seqs``)."""
    port: Annotated[int, Field(ge=1, le=65535)] = PORT
    """Port of the server on this machine."""
    arguments: list[str] = field(default_factory=list)
    """More arguments for vLLM. For example ``[--gpu-memory-utilization, "0.8"]``."""
    python: str = ""
    """Python interpreter of vLLM's environment. Empty: the environment of ``drafthead engines install=vllm``."""


@command("serve", ServeConfig, __doc__)
def serve_head(config: ServeConfig) -> None:
    display = Display()
    folder = resolve_folder(config.head)
    head_type = str(read_head_config(folder)["head_type"])
    if config_class(head_type).needs_layers:
        what = (
            f"a head of the type {head_type} runs layers of the base, which drafthead's code inside vLLM does not have"
        )
        raise UserError(f"{what}; `drafthead generate` decodes with it")
    with display.stage(f"head {config.head}"):
        parts, head = load_parts_and_head(folder, config.base)
    if not replace(parts.config, adapter=None).has_whole_tensors:
        what = f"vLLM cannot serve {parts.name} as drafthead loads it (random weights, or GGUF)"
        raise UserError(f"{what}; give the base's folder of safetensors, base=FOLDER")
    expression = parse_drafter(config.drafter)
    trained = min(head.depth, head.config.trained_positions)
    drafts = config.drafts or max([trained, *(part.tokens for part in expression.walk())])
    more: dict[str, object] = {"drafter": config.drafter} if config.drafter != "head" else {}
    more |= {"fit_length": True} if config.fit_length else {}
    arguments, variables = proposer_arguments(str(folder.resolve()), drafts, **more)
    arguments += ["--max-num-seqs", str(config.requests)]
    if head.open(1).reads_all_states:
        arguments += ["--no-enable-prefix-caching"]  # the head would not see the cached part of a prompt
    options = [*vllm_options(parts), *arguments, *config.arguments]
    with _merged(parts.config, display) as base:
        server = LocalVllm(str(base), options, variables, config.port, config.python)
        serve_vllm(server, display, f"{parts.name} with {config.drafter}, up to {drafts} drafts: {server.url}/v1")


@contextmanager
def _merged(config: BaseConfig, display: Display) -> Iterator[Path]:
    """Yield the folder of a base: its own or, because drafthead's code in vLLM needs whole weights, a temporary copy
    with the adapter merged."""
    if not config.adapter:
        yield Path(config.folder())
        return
    with TemporaryDirectory(prefix="drafthead-base-") as folder:
        with display.stage(f"a temporary copy of the base with {config.adapter} merged, in {folder}"):
            save_merged(config, Path(folder))
        yield Path(folder)


def _serve_states(cfg: DictConfig) -> None:
    run, display = parse_run(cfg), Display()
    parts = BaseParts.of_checkpoint(run.base, progress=display.line)
    layers = served_layers(run.head_config().read_layers(parts.num_layers), parts.num_layers)
    folder = run.data.served_folder
    display.line(f"hidden states of the layers {', '.join(map(str, layers))}, written to {folder}")
    server = states_server(parts, run.data.states, layers, folder)
    serve_vllm(server, display, f"ready: give the training data.states.url={server.url}")


def main() -> None:
    """Serve a head; with a recipe, hidden states."""
    if any(argument.startswith("recipe=") for argument in sys.argv[1:]):
        run_recipe(_serve_states, RunConfig, __doc__)
    else:
        serve_head()


if __name__ == "__main__":
    main()
