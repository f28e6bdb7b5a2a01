"""Memory settings of a process.

`keep_freed_memory` keeps freed memory, so that the next tensor of that size causes no page faults.
glibc returns large blocks to the kernel as soon as they are freed. Training and decoding steps
allocate the same few sizes repeatedly, and the kernel would zero the pages again each time. Threads
that start later share one heap: glibc's heaps of single threads are at most 64 MB and are returned
whenever they are empty.

`rare_collections` is for a driver with thousands of rollouts. They are hundreds of thousands of
live objects, which Python's collector of reference cycles would visit again and again, and hardly
any of them is ever part of a cycle.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST = (1 << 31) - 1

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
