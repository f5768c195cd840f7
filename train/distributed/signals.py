"""Graceful shutdown: after SIGTERM or SIGINT, finish the step, save a checkpoint and exit with 128 + signal number.
Outside ``defer_signals`` blocks everything is on disk already, so the program ends at once. Inside a block it ends
when it checks ``stop_signal``, or at the end of the block. A second Ctrl-C ends it at once."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_S = 1.0  # repeats within this time are one signal: terminals, launchers and schedulers each send one


class Stopped(SystemExit):
    """Exit of the program after a signal, once its work is saved. The exit code is 128 plus the signal's number."""

    def __init__(self, signum: int, done: str = "") -> None:
        """Make the line "stopped by SIGNAL DONE; ..." for the user. ``done``: progress, such as ``after step 7``."""
        super().__init__(128 + signum)
        self.line = (
            f"stopped by {signal.Signals(signum).name}{f' {done}' if done else ''}; finished work is kept, and the "
            "same command resumes from there"
        )


class _State:
    """Signals of this program. The class is used without instances."""

    received = 0  # number of the first signal that has not ended the program yet; 0: none
    since = 0.0  # ``time.monotonic()`` of the latest signal that was not ignored as a repeat
    deferring = 0  # number of nested ``defer_signals`` blocks that are open


def stop_signal() -> int:
    """Return the number of the signal (SIGTERM or SIGINT) for which the program is to stop; 0 for none."""
    return _State.received


@contextmanager
def install_handlers(log: Callable[[str], None]) -> Iterator[None]:
    """Make SIGTERM and SIGINT end the block, which is the whole program, with ``Stopped``; ``log`` then gets one line
    for the user. Call it on the main thread."""
    previous = {signum: signal.signal(signum, _receive) for signum in SIGNALS}
    _State.received, _State.deferring = 0, 0
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
    """Let the block finish if a signal arrives in it; the end of the outermost such block then raises ``Stopped``."""
    _State.deferring += 1
    try:
        yield
    finally:
        _State.deferring -= 1
    if _State.received and not _State.deferring:
        raise Stopped(_State.received)


def _receive(signum: int, frame: FrameType | None) -> None:
    """Handle a signal: stop now, or record the signal inside ``defer_signals``; a second Ctrl-C ends the program."""
    now, is_first = time.monotonic(), not _State.received
    if not is_first and now - _State.since <= REPEAT_S:
        return
    _State.received, _State.since = _State.received or signum, now
    if not _State.deferring:
        raise Stopped(signum)
    if is_first:
        line = f"{signal.Signals(signum).name}: saving and exiting after this step; press Ctrl-C again to exit now\n"
        os.write(2, line.encode())  # not through a Python buffer: the signal may have interrupted a write
    elif signum == signal.SIGINT:
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)
