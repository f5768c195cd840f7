"""A vLLM server that we start: in the foreground, watched until it is interrupted, or during other work."""

import re
import shlex
import signal
import socket
import time
from collections.abc import Mapping, Sequence

import httpx2
import torch

from drafthead.engines.environment import engine_python
from drafthead.engines.process import EngineError, EngineProcess
from drafthead.engines.vllm import vllm_python, vllm_variables
from drafthead.errors import UserError
from drafthead.system.display import Display

START_S = 1800.0
WATCH_S = 10.0  # seconds between two lines about acceptance
MODULE = "vllm.entrypoints.openai.api_server"


class LocalVllm:
    """A vLLM server on this machine. It ends with our process, by whatever signal."""

    def __init__(
        self, model: str, arguments: Sequence[str], variables: Mapping[str, str], port: int, python: str = ""
    ) -> None:
        """``python`` is the interpreter of vLLM's environment; empty: that of ``drafthead engines install=vllm``."""
        self._arguments, self._port, self._python = ["--model", model, "--seed", "0", *arguments], port, python
        self._own_variables = dict(variables)
        self._variables = {**variables, **vllm_variables(model, torch.get_num_threads())}
        self._process: EngineProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def command(self) -> str:
        """Return the shell command of this server."""
        python = self._python or engine_python()
        words = [*(f"{key}={value}" for key, value in self._own_variables.items()), python, "-m", MODULE]
        return shlex.join([*words, "--port", str(self._port), *self._arguments])

    def start(self) -> None:
        """Start vLLM and wait until it answers; raise a ``UserError`` if its port is taken or if it ends."""
        python = vllm_python(self._python or None)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                raise UserError(f"port {self._port} is in use; stop the server there, or choose another port")
        self._process = EngineProcess("vLLM", python, ["vllm", str(self._port), *self._arguments], self._variables)
        try:
            self._process.wait_until(lambda: read(f"{self.url}/health") is not None, START_S)
        except EngineError as error:
            self.close()
            raise UserError(str(error)) from None
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise a ``UserError`` if the server has ended."""
        try:
            if self._process is not None:
                self._process.check()
        except EngineError as error:
            raise UserError(str(error)) from None

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def serve_vllm(server: LocalVllm, display: Display, ready: str) -> None:
    """Start ``server`` and show the acceptance of its drafts, until Ctrl-C or SIGTERM. The line ``ready`` is printed
    when it answers."""
    display.line(f"the command: {server.command}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server.start()
        display.line(ready)
        display.line("   Ctrl-C stops it")
        counted, since = counters(read(f"{server.url}/metrics") or ""), time.monotonic()
        while True:
            server.check()
            time.sleep(1)
            if time.monotonic() - since >= WATCH_S:
                latest = counters(read(f"{server.url}/metrics") or "")
                seconds, since = time.monotonic() - since, time.monotonic()
                if text := acceptance_line(counted, latest, seconds):
                    display.line(f"   {text}")
                counted = latest or counted
    except KeyboardInterrupt:
        display.line("stopped")
    finally:
        server.close()


def read(url: str) -> str | None:
    """Return the text at ``url``; None if the server does not answer."""
    try:
        answer = httpx2.get(url, timeout=2)
    except httpx2.HTTPError:
        return None
    return answer.text if answer.is_success else None


def counters(text: str) -> dict[str, float]:
    """Return Prometheus counters, summed over labels; ``name[0]`` is ``name`` at draft position 0."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := re.match(r"([\w:]+)(\{.*\})? ([\d.eE+-]+)$", line):
            name, labels, value = match.groups()
            position = re.search(r'position="(\d+)"', labels or "")
            name = name.removesuffix("_total") + (f"[{position[1]}]" if position else "")
            found[name] = found.get(name, 0.0) + float(value)
    return found


def acceptance_line(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> str:
    """Return tokens per second and acceptance between two readings of vLLM's counters; "" if nothing was drafted."""

    def counted(name: str) -> float:
        return after.get(f"vllm:{name}", 0.0) - before.get(f"vllm:{name}", 0.0)

    steps, shares = counted("spec_decode_num_drafts"), list[str]()
    if steps <= 0:
        return ""
    while f"vllm:spec_decode_num_accepted_tokens_per_pos[{len(shares)}]" in after:
        shares.append(f"{100 * counted(f'spec_decode_num_accepted_tokens_per_pos[{len(shares)}]') / steps:.0f}")
    tau = 1 + counted("spec_decode_num_accepted_tokens") / steps
    speed = counted("generation_tokens") / seconds
    return f"{speed:.1f} tokens/s, {tau:.2f} tokens per step that drafted, accepted by position {' / '.join(shares)} %"
