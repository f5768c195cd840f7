"""The vLLM server that runs a base for a training: it answers, and writes the hidden states that the head reads."""

import shlex
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import torch

from drafthead.data.answers.http_client import quiet_clients
from drafthead.engines.process import EngineError, EngineProcess
from drafthead.engines.vllm import states_arguments, vllm_python, vllm_variables
from drafthead.errors import UserError
from drafthead.models.base.parts import BaseParts
from drafthead.models.formats.format import cpu_memory, dtype_name
from drafthead.train.corpora.corpus_config import PORT, StatesConfig

START_S = 1800.0  # longest time to load a base


class StatesServer:
    """A server of the base of ``parts`` at this machine. Its process ends with ours, by whatever signal."""

    def __init__(
        self, parts: BaseParts, config: StatesConfig, layers: Sequence[int], folder: Path, log: Callable[[str], None]
    ) -> None:
        """Log the command line that writes the states of ``layers`` into ``folder``."""
        self._folder, self._log = folder.resolve(), log
        self._port = urlsplit(config.url or "").port or PORT
        self._process: EngineProcess | None = None
        on_cpu, model = not torch.accelerator.is_available(), parts.config.folder()
        self._arguments = ["--model", str(model), "--dtype", dtype_name(parts), "--seed", "0"]
        self._arguments += ["--served-model-name", parts.name]
        self._arguments += ["--enforce-eager", *cpu_memory(parts)] if on_cpu else []
        of_states, variables = states_arguments(layers, self._folder, on_cpu)
        self._arguments += [*of_states, *config.arguments]
        words = [f"{key}={value}" for key, value in variables.items()]
        words += ["python", "-m", "vllm.entrypoints.openai.api_server", "--port", str(self._port), *self._arguments]
        log(f"hidden states of the layers {', '.join(map(str, layers))}, written to {self._folder}. The command:")
        log(f"   {shlex.join(words)}")
        self._variables = variables | vllm_variables(str(model), torch.get_num_threads())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the server and wait until it answers; raise a ``UserError`` if its port is taken or if it ends."""
        quiet_clients()
        python = vllm_python(None)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                raise UserError(
                    f"port {self._port} is in use; stop that server, or set data.states.url=http://127.0.0.1:PORT"
                )
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.glob("*.safetensors*"):
            file.unlink()  # of requests that nobody waits for any more
        self._process = EngineProcess("vLLM", python, ["vllm", str(self._port), *self._arguments], self._variables)
        try:
            self._process.wait_until(self._is_ready, START_S)
        except EngineError as error:
            self.close()
            raise UserError(str(error)) from None
        except BaseException:
            self.close()
            raise
        self._log(f"   vLLM runs the base at {self.url}")

    def _is_ready(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/health", timeout=2).is_success
        except httpx2.HTTPError:
            return False

    def check(self) -> None:
        """Raise a ``UserError`` if the server was started and has ended."""
        if self._process is not None:
            try:
                self._process.check()
            except EngineError as error:
                raise UserError(str(error)) from None

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
