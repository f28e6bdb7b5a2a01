"""Memory settings of a process.

`keep_freed_memory` keeps freed memory, so that the next tensor of that size causes no page faults.
glibc returns large blocks to the kernel as soon as they are freed. Training and decoding steps
allocate the same few sizes repeatedly, and the kernel would zero the pages again each time. Threads
that start later share one heap: glibc's heaps of single threads are at most 64 MB and are returned
whenever they are empty. Free blocks between used ones are lost to larger tensors, so this heap
grows with every training step; `limit_freed_memory` bounds what it holds.

`rare_collections` is for a driver with thousands of rollouts. They are hundreds of thousands of
live objects, which Python's collector of reference cycles would visit again and again, and hardly
any of them is ever part of a cycle.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rstar2.machine import total_memory

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST = (1 << 31) - 1

FREED_SHARE = 0.25
"""Share of the memory that a process may use and keeps although it is free."""

COLLECT_AFTER = 50_000
"""New objects between two collections; Python's own value is 700."""


def keep_freed_memory() -> bool:
    """Serve all sizes from malloc's heap and never trim it; False if libc has no mallopt."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    settings = ((_M_TRIM_THRESHOLD, _LARGEST), (_M_MMAP_THRESHOLD, 1 << 30), (_M_ARENA_MAX, 1))
    accepted = [libc.mallopt(*setting) for setting in settings]
    return all(accepted)


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def freed_memory() -> int:
    """Bytes that malloc holds in memory although they are free; 0 if libc does not say.

    Memory that does not come from malloc (code, mapped files) counts too.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return max(0, resident - int(info.uordblks) - int(info.hblkhd))


def limit_freed_memory(most: int | None = None) -> None:
    """Return all freed memory to the kernel if more than `most` bytes are held.

    The default is `FREED_SHARE` of the memory that this process may use. The next step then causes
    page faults again, which take a few percent of a step's time, so it is not done after each.
    """
    if freed_memory() > (FREED_SHARE * total_memory() if most is None else most):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect reference cycles rarely, and never look at what exists already."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
