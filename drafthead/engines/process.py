"""An engine's process: start, wait until it is ready, and kill it with its children, even if our process is killed."""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

RUNNER = Path(__file__).with_name("runner.py")
ELSEWHERE = "See root cause above"  # of vLLM, after the lines that say it
NOISE = ("WARNING", "INFO", "DEBUG", "Traceback", "^")


class EngineError(Exception):
    """A failure of a serving engine: it is missing, too old, has ended or does not respond. It ends the evaluation."""


class EngineProcess:
    """The process ``python runner.py ARGUMENTS`` in its own process group, started by the constructor. Its standard
    input is a pipe from our process. When our process ends, by whatever signal, the pipe closes and the runner kills
    its process group."""

    def __init__(self, name: str, python: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        try:
            # -P: with the runner's folder on the path, the engine would import our modules by its own names.
            command, log = [python, "-P", str(RUNNER), *arguments], self._log
            variables = {**os.environ, **environment}
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=variables, start_new_session=True
            )
        except OSError as error:
            raise EngineError(f"{name} cannot be started with {python} ({error.strerror})") from None

    def wait_until(self, ready: Callable[[], bool], timeout_s: float, setting: str = "") -> None:
        """Wait until ``ready()`` is true; raise an ``EngineError`` if the process ends or the time is over. ``setting``
        is the name of the setting that raises this limit."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                limit = f"{timeout_s:g} s" + (f" ({setting})" if setting else "")
                raise EngineError(f"{self.name} did not start within {limit}{self._tail()}")
            time.sleep(0.3)

    def check(self) -> None:
        """Raise an :class:`EngineError` if the process has ended."""
        code = self._process.poll()
        if code is not None:
            how = f"signal {-code}, {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise EngineError(f"{self.name} ended ({how}){self._tail()}")

    def _tail(self) -> str:
        """Return ": " and the last line of the output that looks like an error, else its last line; "" if none."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        telling = [line for line in lines if any(word in line for word in ("Error", "error", "ASSERT", "assert"))]
        causes = [line for line in telling if re.search(r"\b\w*(Error|Exception): ", line) and ELSEWHERE not in line]
        telling = causes or telling
        candidates = [line for line in telling or lines if not line.lstrip("( ").startswith(NOISE)]
        return f": {candidates[-1][-300:]}" if candidates else ""

    def close(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()
