"""One process at a time makes what is in a folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def exclusive(folder: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold ``folder``, made if need be; the system lets go of it when the process dies.

    Args:
        folder: only takers of this lock are kept out, readers are not.
        on_wait: called once if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
