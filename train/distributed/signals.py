"""Graceful shutdown: after SIGTERM or SIGINT, finish the step, save a checkpoint and exit with 128 + signal number.

Outside ``defer_signals`` blocks everything is on disk already, so the program ends at once. Inside a block it ends
where it checks ``stop_signal``, or at the end of the block. A second Ctrl-C ends it at once.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_S = 1.0
"""Repeats within this time count as one signal: terminals, launchers and schedulers each send their own."""


class Stopped(SystemExit):
    """Raised to end the program after a signal, once its work is saved."""

    def __init__(self, signum: int, done: str = "") -> None:
        """Create the exception; ``done`` describes the progress in its message, such as ``after step 7``."""
        super().__init__(128 + signum)
        self.line = (
            f"stopped by {signal.Signals(signum).name}{f' {done}' if done else ''}; finished work is kept, and the "
            "same command resumes from there"
        )


class _State:
    received = 0
    """Number of the first signal that was received and has not ended the program yet; 0 for none."""
    since = 0.0
    deferring = 0
    """Number of nested ``defer_signals`` blocks that are open."""


_state = _State()


def stop_signal() -> int:
    """Return the number of the signal that arrived inside ``defer_signals``; 0 for none."""
    return _state.received


@contextmanager
def install_handlers(log: Callable[[str], None]) -> Iterator[None]:
    """Handle SIGTERM and SIGINT inside the block, which spans the whole program. Call it on the main thread.

    ``log`` receives one line for the user.
    """
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
    """Delay a signal until the end of the outermost block, which then raises ``Stopped``."""
    _state.deferring += 1
    try:
        yield
    finally:
        _state.deferring -= 1
    if _state.received and not _state.deferring:
        raise Stopped(_state.received)


def _receive(signum: int, frame: FrameType | None) -> None:
    now, is_first = time.monotonic(), not _state.received
    if not is_first and now - _state.since <= REPEAT_S:
        return
    _state.received, _state.since = _state.received or signum, now
    if not _state.deferring:
        raise Stopped(signum)
    if is_first:
        line = f"{signal.Signals(signum).name}: saving and exiting after this step; press Ctrl-C again to exit now\n"
        os.write(2, line.encode())  # not through a Python buffer: the signal may have interrupted a write
    elif signum == signal.SIGINT:
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)
