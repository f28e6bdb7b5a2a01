"""Keep freed memory in the process, so that the next tensor of that size costs no page faults.

glibc gives large blocks back to the kernel as soon as they are freed. A training or decoding step
allocates the same few sizes over and over, and the kernel clears the same pages again for each.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Serve all sizes from malloc's heap and never trim it; False where libc has no such knob."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    trimmed = libc.mallopt(_M_TRIM_THRESHOLD, _LARGEST)
    return bool(trimmed and libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30))
