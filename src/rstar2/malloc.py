"""Keep freed memory in the process, so that the next tensor of that size causes no page faults.

glibc returns large blocks to the kernel as soon as they are freed. Training and decoding steps
allocate the same few sizes repeatedly, and the kernel would zero the pages again each time.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Serve all sizes from malloc's heap and never trim it; False if libc has no mallopt."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    trimmed = libc.mallopt(_M_TRIM_THRESHOLD, _LARGEST)
    return bool(trimmed and libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30))
