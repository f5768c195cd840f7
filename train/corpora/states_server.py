"""A vLLM server that runs a base for a training. It answers, and writes the hidden states that the head reads."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import torch

from drafthead.engines.server import LocalVllm
from drafthead.engines.vllm import states_arguments
from drafthead.models.base.parts import BaseParts
from drafthead.models.formats.format import vllm_options
from drafthead.train.corpora.corpus_config import PORT, StatesConfig


def states_server(parts: BaseParts, config: StatesConfig, layers: Sequence[int], folder: Path) -> LocalVllm:
    """Return a server, not yet started, that writes the states of ``layers`` into ``folder``. Files there are removed:
    they are of requests that nobody waits for any more."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    of_states, variables = states_arguments(layers, folder.resolve(), not torch.accelerator.is_available())
    arguments = [*vllm_options(parts), *of_states, *config.arguments]
    port = urlsplit(config.url or "").port or PORT
    return LocalVllm(str(parts.config.folder()), arguments, variables, port)
