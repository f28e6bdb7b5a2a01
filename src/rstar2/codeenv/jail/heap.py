"""Huge pages for the warm heap. The cost of a fork grows with the number of pages.

Before the imports, Python's arenas and malloc are directed into one contiguous heap. After the
warm-up the kernel is asked to collapse that heap into huge pages (MADV_COLLAPSE). All of this is
optional: where libc or the kernel lacks a part, calls are slower and nothing else changes.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from pathlib import Path

_HUGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8

_libc = ctypes.PyDLL(None, use_errno=True)


class _ArenaAllocator(ctypes.Structure):
    """PyObjectArenaAllocator of CPython's C API."""

    _fields_ = (
        ("ctx", ctypes.c_void_p),
        ("alloc", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
    )


class WarmHeap:
    """Directs allocations between construction and `settle` into one heap."""

    def __init__(self, reserve_mb: int = 64) -> None:
        self._original: _ArenaAllocator | None = None
        self._fillers: list[list[object]] = []
        if not hasattr(_libc, "mallopt"):
            return
        _libc.mallopt(_M_ARENA_MAX, 1)
        _libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        _libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        _libc.mallopt(_M_TOP_PAD, reserve_mb << 20)
        self._redirect_arenas()

    def _redirect_arenas(self) -> None:
        """Take arenas from aligned_alloc instead of mmap; they are still freed by unmapping."""
        api = ctypes.pythonapi
        aligned = ctypes.cast(_libc.aligned_alloc, ctypes.c_void_p).value
        if aligned is None:
            return
        original = _ArenaAllocator()
        api.PyObject_GetArenaAllocator(ctypes.byref(original))
        # aligned_alloc(alignment, size) fits alloc(ctx, size): ctx is the alignment
        redirected = _ArenaAllocator(4096, aligned, original.free)
        api.PyObject_SetArenaAllocator(ctypes.byref(redirected))
        self._original = original

    def fill_holes(self) -> None:
        """Fill the free blocks that the warm-up left in Python's pools.

        Later allocations of the worker and its calls then use new memory. A write into a free block
        would split a huge page.
        """
        for size, holes in _holes().items():
            if size >= 48:
                self._fillers.append([bytes(size - 33) for _ in range(holes)])
            elif size == 32:
                self._fillers.append([float("0.5") for _ in range(holes)])
            else:
                self._fillers.append([object() for _ in range(holes)])

    def settle(self) -> None:
        """Restore the usual allocators for later calls and collapse the heap."""
        self.fill_holes()
        self.stop_redirecting()
        collapse()

    def stop_redirecting(self) -> None:
        """Restore the usual allocators.

        No deep recursion may happen before this: Python also takes its frame stack from the arena
        allocator, and each part that it unmaps leaves a hole in the heap.
        """
        if self._original is None:
            return
        ctypes.pythonapi.PyObject_SetArenaAllocator(ctypes.byref(self._original))
        _libc.mallopt(_M_TOP_PAD, 128 << 10)
        _libc.mallopt(_M_MMAP_THRESHOLD, 128 << 10)
        self._original = None


_HOLES = re.compile(r"^\s*\d+\s+(\d+)\s+\d+\s+\d+\s+(\d+)\s*$", re.MULTILINE)


def _holes() -> dict[int, int]:
    """Free blocks in Python's pools by size, from the report that CPython writes to stderr."""
    if not hasattr(sys, "_debugmallocstats"):
        return {}
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            sys._debugmallocstats()
            _libc.fflush(None)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        text = file.read().decode()
    return {int(size): int(free) for size, free in _HOLES.findall(text)}


_pages: list[int] = []
"""Addresses of the huge pages of the warm heap."""


def collapse() -> None:
    """Turn the large anonymous mappings into huge pages, where the kernel supports it.

    Each page is requested separately: a single call would stop at the first hole. Calls after the
    first only restore pages that writes have split.
    """
    candidates = _pages or _candidates()
    done = [page for page in candidates if _advise(page, _MADV_COLLAPSE)]
    if not _pages:
        _pages.extend(done)
        for page in set(candidates) - set(done):
            _advise(page, _MADV_HUGEPAGE)


def _advise(page: int, advice: int) -> bool:
    outcome: int = _libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE), advice)
    return outcome == 0


def _candidates() -> list[int]:
    """Addresses of huge pages that lie entirely in a writable private anonymous mapping."""
    pages: list[int] = []
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return pages
    for line in lines:
        fields = line.split(maxsplit=5)
        name = fields[5] if len(fields) > 5 else ""
        if fields[1] != "rw-p" or (name and name != "[heap]"):
            continue
        start, end = (int(part, 16) for part in fields[0].split("-"))
        pages.extend(range(-(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE, _HUGE))
    return pages
