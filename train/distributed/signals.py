"""Graceful shutdown: on SIGTERM or SIGINT finish the step, save a checkpoint, exit with 128 plus the signal's number.

Where everything is on disk already the program ends at once; inside ``defer_signals`` at the end of the block, or
before where ``stop_signal`` is read. A second Ctrl-C ends it without waiting.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_S = 1.0
"""Repeats within this time are one signal: terminals, launchers and schedulers each send their own."""


class Stopped(SystemExit):
    """The program received a signal and has saved what it did."""

    def __init__(self, signum: int, done: str = "") -> None:
        """``done`` says how far it came, a clause."""
        super().__init__(128 + signum)
        self.line = (
            f"stopped by {signal.Signals(signum).name}{f' {done}' if done else ''}; what is done is kept, the same "
            "command resumes from there"
        )


class _State:
    received = 0
    """The signal that was received and not obeyed yet; 0 for none."""
    since = 0.0
    deferring = 0


_state = _State()


def stop_signal() -> int:
    """Number of the signal that this process has received inside ``defer_signals``; 0 for none."""
    return _state.received


@contextmanager
def install_handlers(log: Callable[[str], None]) -> Iterator[None]:
    """Obey signals inside; on the main thread only, around a whole program. ``log`` receives the user's line."""
    previous = {signum: signal.signal(signum, _receive) for signum in SIGNALS}
    _state.received, _state.deferring = 0, 0
    try:
        yield
    except Stopped as stopped:
        log(stopped.line)
        raise
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def defer_signals() -> Iterator[None]:
    """A signal that comes inside is obeyed at the end of the block."""
    _state.deferring += 1
    try:
        yield
    finally:
        _state.deferring -= 1
    if _state.received and not _state.deferring:
        raise Stopped(_state.received)


def _receive(signum: int, frame: FrameType | None) -> None:
    now, first = time.monotonic(), not _state.received
    if not first and now - _state.since <= REPEAT_S:
        return
    _state.received, _state.since = _state.received or signum, now
    if not _state.deferring:
        raise Stopped(signum)
    if first:
        line = f"{signal.Signals(signum).name}: saving and leaving after this step; Ctrl-C again leaves at once\n"
        os.write(2, line.encode())  # not through a buffer, which may be half written where the signal came
    elif signum == signal.SIGINT:
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)
