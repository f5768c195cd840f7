"""Memory in huge pages: without them, address translation adds a twentieth to a pass that reads weights."""

import ctypes
import mmap
import sys

HUGE_PAGE = 2**21
"""Bytes of a huge page."""
MADV_COLLAPSE = 25
"""Advice of Linux 6.1 to gather pages into huge ones at once; the ``mmap`` module does not define it."""


def use_huge_pages(address: int, size: int) -> None:
    """Ask Linux to back ``size`` bytes from ``address`` by huge pages; does nothing elsewhere.

    The kernel may decline. Neighbouring data on the same huge pages is included.
    """
    if sys.platform != "linux":
        return
    start = address // HUGE_PAGE * HUGE_PAGE
    length = -(-(address + size - start) // HUGE_PAGE) * HUGE_PAGE
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for advice in (mmap.MADV_HUGEPAGE, MADV_COLLAPSE):
        advise(start, length, advice)
