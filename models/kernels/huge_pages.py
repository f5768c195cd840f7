"""Weights in huge pages: with small pages, address translation makes a forward pass a twentieth slower.

Gathering small pages into huge ones takes up to four seconds for SmolLM2, so a thread does it while loading continues.
"""

import ctypes
import mmap
import os
import sys
from functools import cache
from queue import Queue
from threading import Thread

HUGE_PAGE = 2**21  # bytes
MADV_COLLAPSE = 25  # gather pages into huge ones at once, since Linux 6.1; not in the ``mmap`` module


def use_huge_pages(address: int, size: int, owner: object) -> None:
    """Ask Linux to back ``size`` bytes from ``address`` by huge pages, in the background; no-op on other systems. Linux
    may decline. Neighbouring data on the same huge pages is included. ``owner`` is kept alive until the region is
    processed, so that its memory is not freed before."""
    if sys.platform == "linux":
        _regions().put((address, size, owner))


def wait_for_huge_pages() -> None:
    """Wait until all regions are processed, so that this work does not disturb a measurement."""
    if sys.platform == "linux":
        _regions().join()


@cache
def _regions() -> "Queue[tuple[int, int, object]]":
    """Return the queue of regions; the first call starts the thread that processes them."""
    regions: Queue[tuple[int, int, object]] = Queue()
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def process() -> None:
        while True:
            address, size, owner = regions.get()
            start = address // HUGE_PAGE * HUGE_PAGE
            length = -(-(address + size - start) // HUGE_PAGE) * HUGE_PAGE
            for advice in (mmap.MADV_HUGEPAGE, MADV_COLLAPSE):
                advise(start, length, advice)
            del owner
            regions.task_done()

    Thread(target=process, name="huge pages", daemon=True).start()
    return regions


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_regions.cache_clear)  # a forked process has no thread to empty the queue
