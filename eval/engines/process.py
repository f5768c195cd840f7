"""An engine's process: start, wait until it is ready, and kill it with its children, even if our process is killed."""

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RUNNER = Path(__file__).with_name("runner.py")
NOISE = ("WARNING", "INFO", "DEBUG", "Traceback", "^")


class EngineError(Exception):
    """A failure of the engine itself: it is missing, too old, has ended or does not respond. It ends the evaluation."""


class EngineProcess:
    """``python runner.py ...`` in a new process group.

    Its standard input is a pipe from our process. When our process ends, by whatever signal, the pipe closes and the
    runner kills its process group.
    """

    version = ""
    """Version of the engine's package, once the runner has reported it."""

    def __init__(self, name: str, python: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        self._reports, theirs = os.pipe()
        self._buffer = b""
        try:
            # -P: with the runner's folder on the path, the engine would import our modules by its own names.
            self._process = subprocess.Popen(
                [python, "-P", str(RUNNER), *arguments],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, **environment, "REPORTS": str(theirs)},
                pass_fds=[theirs],
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"{name} cannot be started with {python} ({error.strerror})") from None
        finally:
            os.close(theirs)

    def report(self, key: str, deadline: float) -> Any:
        """Wait for the runner to report ``key``, and return the reported value.

        Raises:
            EngineError: the runner reports an error, ends, or misses the deadline.
        """
        while True:
            line, separator, rest = self._buffer.partition(b"\n")
            if separator:
                self._buffer = rest
                said = self._said(line)
                if key in said:
                    return said[key]
                continue
            self._check_start(deadline)
            if select.select([self._reports], [], [], 0.2)[0]:
                self._buffer += os.read(self._reports, 4096)

    def wait_until(self, ready: Callable[[], bool], deadline: float) -> None:
        """Wait until ``ready()`` is true.

        Raises:
            EngineError: the process ends or the deadline passes.
        """
        while not ready():
            self._check_start(deadline)
            time.sleep(0.3)

    def _check_start(self, deadline: float) -> None:
        self.check()
        if time.monotonic() > deadline:
            raise EngineError(f"{self.name} did not start in time{self._tail()}")

    def check(self) -> None:
        """Raise an :class:`EngineError` if the process has ended."""
        code = self._process.poll()
        if code is None:
            return
        # What it reported last may still lie in the pipe.
        while select.select([self._reports], [], [], 0)[0] and (more := os.read(self._reports, 4096)):
            self._buffer += more
        for line in self._buffer.splitlines():
            self._said(line)
        how = f"signal {-code}, {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise EngineError(f"{self.name} died ({how}){self._tail()}")

    def _said(self, line: bytes) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise EngineError(f"{self.name} is {said['error']}")
        return said

    def _tail(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        telling = [line for line in lines if any(word in line for word in ("Error", "error", "ASSERT", "assert"))]
        candidates = [line for line in telling or lines if not line.lstrip("( ").startswith(NOISE)]
        return f": {candidates[-1][-300:]}" if candidates else ""

    def close(self) -> None:
        """Kill the process and its children."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self._reports)
        self._log.close()
