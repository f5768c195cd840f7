"""Memory in huge pages: reading weights in 4 KiB pages costs a twentieth of a pass more."""

import ctypes
import mmap
import sys

HUGE_PAGE = 2**21
"""Bytes of a huge page."""
MADV_COLLAPSE = 25
"""Linux 6.1's advice to gather pages into huge ones now; the mmap module does not name it."""


def use_huge_pages(address: int, size: int) -> None:
    """Ask Linux to back this memory by huge pages.

    Best effort: where the kernel declines, nothing changes. Neighbours on the same huge pages are included.
    """
    if sys.platform != "linux":
        return
    start = address // HUGE_PAGE * HUGE_PAGE
    length = -(-(address + size - start) // HUGE_PAGE) * HUGE_PAGE
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for advice in (mmap.MADV_HUGEPAGE, MADV_COLLAPSE):
        advise(start, length, advice)
