"""Told to stop: SIGTERM and SIGINT let a run save what it has and leave.

The first signal ends the program at once where all that is done is on disk already, and at the end of the piece of
work in hand where it is not (``held``): an optimiser step, an answer on its way into a shard. The exit code is 128 plus
the signal's number, as shells and schedulers count: 143 after SIGTERM, 130 after SIGINT. A second Ctrl-C leaves without
waiting.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
IMPATIENT_S = 1.0
"""Repeats within this time are one signal: terminals, launchers and schedulers each send their own."""


class Stopped(SystemExit):
    """The program was told to stop and has kept what it did."""

    def __init__(self, signum: int, done: str = "") -> None:
        """``done`` says what was reached, a clause."""
        super().__init__(128 + signum)
        self.line = (
            f"stopped by {signal.Signals(signum).name}{f' {done}' if done else ''}; what is done is kept, the same "
            "command goes on from there"
        )


class _State:
    pending = 0
    """The signal that was received and not obeyed yet, 0 for none."""
    since = 0.0
    held = 0


_state = _State()


def pending() -> int:
    """Number of the signal that this process has received inside ``held``; 0 for none."""
    return _state.pending


@contextmanager
def handled(say: Callable[[str], None]) -> Iterator[None]:
    """Obey signals inside; on the main thread only, around a whole program.

    Args:
        say: receives the line for the user when the program was stopped.
    """
    previous = {signum: signal.signal(signum, _receive) for signum in SIGNALS}
    _state.pending, _state.held = 0, 0
    try:
        yield
    except Stopped as stopped:
        say(stopped.line)
        raise
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def held() -> Iterator[None]:
    """A signal that comes inside is obeyed at the end, or before by who asks ``pending``."""
    _state.held += 1
    try:
        yield
    finally:
        _state.held -= 1
    if _state.pending and not _state.held:
        raise Stopped(_state.pending)


def _receive(signum: int, frame: FrameType | None) -> None:
    now, first = time.monotonic(), not _state.pending
    if not first and now - _state.since <= IMPATIENT_S:
        return
    _state.pending, _state.since = _state.pending or signum, now
    if not _state.held:
        raise Stopped(signum)
    if first:
        line = f"{signal.Signals(signum).name}: saving and leaving after this step; Ctrl-C again leaves at once\n"
        os.write(2, line.encode())  # not through a buffer, which may be half written where the signal came
    elif signum == signal.SIGINT:
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)
