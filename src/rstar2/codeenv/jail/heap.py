"""A warm heap that is cheap to fork: few pages, few mappings.

Before the imports, Python's arenas and malloc are directed into one contiguous heap. After the
warm-up the kernel is asked to collapse that heap into huge pages (MADV_COLLAPSE), and the parts of
each library are merged into two mappings. All of this is optional: where libc or the kernel lacks a
part, calls are slower and nothing else changes.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import sys
import sysconfig
from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

_HUGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8

_DOMAIN_RAW = 0
_READ_WRITE, _READ_EXECUTE = mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_EXEC
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MREMAP_TO = 1 | 2
"""MREMAP_MAYMOVE and MREMAP_FIXED."""
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = _libc.malloc.restype = ctypes.c_void_p


class _ArenaAllocator(ctypes.Structure):
    """PyObjectArenaAllocator of CPython's C API."""

    _fields_ = (
        ("ctx", ctypes.c_void_p),
        ("alloc", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
    )


class _RawAllocator(ctypes.Structure):
    """PyMemAllocatorEx of CPython's C API."""

    _fields_ = (
        ("ctx", ctypes.c_void_p),
        ("malloc", ctypes.c_void_p),
        ("calloc", ctypes.c_void_p),
        ("realloc", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
    )


class WarmHeap:
    """Directs allocations between construction and `settle` into one heap."""

    def __init__(self, reserve_mb: int = 64) -> None:
        self._original: _ArenaAllocator | None = None
        if not hasattr(_libc, "mallopt"):
            return
        _libc.mallopt(_M_ARENA_MAX, 1)
        _libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        _libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        _libc.mallopt(_M_TOP_PAD, reserve_mb << 20)
        self._redirect_arenas()

    def _redirect_arenas(self) -> None:
        """Take arenas from aligned_alloc instead of mmap, and give them back by free.

        Python also takes parts of its frame stack from the arena allocator. Unmapped, each of them
        would leave a hole in the heap whenever a deep recursion ends.
        """
        api = ctypes.pythonapi
        aligned = ctypes.cast(_libc.aligned_alloc, ctypes.c_void_p).value
        if aligned is None:
            return
        original = _ArenaAllocator()
        api.PyObject_GetArenaAllocator(ctypes.byref(original))
        raw = _RawAllocator()
        api.PyMem_GetAllocator(_DOMAIN_RAW, ctypes.byref(raw))
        # aligned_alloc(alignment, size) fits alloc(ctx, size): ctx is the alignment. The raw
        # domain's free(ctx, pointer) calls libc's free and ignores the size that follows.
        redirected = _ArenaAllocator(4096, aligned, raw.free)
        api.PyObject_SetArenaAllocator(ctypes.byref(redirected))
        self._original = original

    def settle(self) -> None:
        """Restore the usual allocators for later calls, collapse the heap, merge mappings."""
        fill_holes()
        self.stop_redirecting()
        collapse()
        merge_mappings()
        copy_interpreter()

    def stop_redirecting(self) -> None:
        """Restore the usual allocators. Arenas of the heap are unmapped if they become free."""
        if self._original is None:
            return
        ctypes.pythonapi.PyObject_SetArenaAllocator(ctypes.byref(self._original))
        _libc.mallopt(_M_TOP_PAD, 128 << 10)
        _libc.mallopt(_M_MMAP_THRESHOLD, 128 << 10)
        self._original = None


_fillers: list[list[object]] = []


def fill_holes() -> None:
    """Fill the free blocks in Python's pools and in malloc's heap.

    Later allocations then use new memory, one block after another: few pages, and no write into a
    free block of the warm heap, which would split a huge page.
    """
    _fill_malloc()
    for size, holes in _holes().items():
        if size >= 48:
            _fillers.append([bytes(size - 33) for _ in range(holes)])
        elif size == 32:
            _fillers.append([float("0.5") for _ in range(holes)])
        else:
            _fillers.append([object() for _ in range(holes)])


class _MallocInfo(ctypes.Structure):
    """mallinfo2 of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


_MALLOC_SIZES = (*(1 << bits for bits in range(16, 10, -1)), *range(1016, 0, -16))
"""Sizes of blocks, largest first: what is left of a large free block is filled by smaller ones."""


def _fill_malloc() -> None:
    """Allocate every free block below the unused end of malloc's heap; none is ever freed."""
    if not hasattr(_libc, "mallinfo2"):
        return
    _libc.sbrk.restype, _libc.mallinfo2.restype = ctypes.c_void_p, _MallocInfo
    info = _libc.mallinfo2()
    end = _libc.sbrk(0) - info.keepcost
    for size in _MALLOC_SIZES:
        block = 1
        while block and block < end:
            block = _libc.malloc(ctypes.c_size_t(size))
        _libc.free(ctypes.c_void_p(block))


_HOLES = re.compile(r"^\s*\d+\s+(\d+)\s+\d+\s+\d+\s+(\d+)\s*$", re.MULTILINE)


def _holes() -> dict[int, int]:
    """Free blocks in Python's pools by size, from the report that CPython writes to stderr."""
    if not hasattr(sys, "_debugmallocstats"):
        return {}
    reader, writer = os.pipe()  # holds ten times the report
    os.set_blocking(writer, False)
    kept = os.dup(2)
    os.dup2(writer, 2)
    os.close(writer)
    try:
        sys._debugmallocstats()
        _libc.fflush(None)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    with open(reader, "rb") as report:
        text = report.read().decode()
    return {int(size): int(free) for size, free in _HOLES.findall(text)}


_pages: list[int] = []
"""Addresses of the huge pages of the warm heap."""


def collapse() -> None:
    """Turn the large anonymous mappings into huge pages, where the kernel supports it.

    Each page is requested separately: a single call would stop at the first hole. Calls after the
    first only restore pages that writes have split.
    """
    if not _pages:
        for start, end in _anonymous():
            if -(-start // _HUGE) >= end // _HUGE:
                continue  # no room for a huge page
            # The whole mapping at once: a part with other flags would be a mapping of its own.
            _advise(start, end - start, _MADV_HUGEPAGE)
            first = -(-start // _HUGE) * _HUGE
            _pages.extend(range(first, end // _HUGE * _HUGE, _HUGE))
    for page in _pages:
        _advise(page, _HUGE, _MADV_COLLAPSE)


def _advise(start: int, size: int, advice: int) -> None:
    """Ask the kernel; a refusal only leaves small pages in place."""
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


_IMMORTAL = 0xFFFFFFFF
"""A reference count that Python 3.12 and later never change (its lower half is negative)."""


def immortalize() -> None:
    """From Python 3.12 on, make every object of the heap immortal.

    A child then no longer writes reference counts into shared pages: about half of its page
    faults. Objects that a call creates are counted as usual. A child tries it first: with some
    extension modules (SciPy's) the search for objects crashes, and then they stay as they are.
    """
    if sys.version_info < (3, 12) or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _immortalize()
            status = 0
        finally:
            os._exit(status)  # also if it raised: there is one zygote
    if os.waitpid(pid, 0)[1] == 0:
        _immortalize()


def _immortalize() -> None:
    alive = gc.get_objects()  # holds what is visited: no address may be free when it is written
    seen = {id(item) for item in alive}
    position = 0
    while position < len(alive):
        chunk = alive[position : position + 4096]
        position += len(chunk)
        for item in gc.get_referents(*chunk):
            if id(item) not in seen:
                seen.add(id(item))
                alive.append(item)
    ranges = sorted(_anonymous())
    starts = [start for start, _ in ranges]
    for address in seen - {id(alive), id(chunk)}:
        index = bisect_right(starts, address) - 1
        if index >= 0 and address < ranges[index][1]:  # libraries may have constant objects
            ctypes.c_uint32.from_address(address).value = _IMMORTAL


def merge_mappings() -> None:
    """Give the parts of each loaded library the same protection, so that the kernel merges them.

    A library is mapped in five parts: headers, code and constants, which become one readable and
    executable mapping, and two that it writes to, which become one. A fork copies every mapping.
    """
    for parts in _libraries():
        writable = parts[-1:] if parts[-1].protection == "rw-p" else []
        constant = parts[: len(parts) - len(writable)]
        if writable and [part.protection for part in constant[-2:]] == ["r--p", "r--p"]:
            writable.insert(0, constant.pop())  # relocated by the loader, then write-protected
        if any(part.protection == "r-xp" for part in constant):
            _protect(constant, _READ_EXECUTE)
        _protect(writable, _READ_WRITE)


def copy_interpreter() -> None:
    """Replace the mapped code of the interpreter by a copy in huge pages.

    A child shares huge pages from its start. Mapped from the file, the code would cost every child
    about 50 page faults.
    """
    for part in (part for parts in _libraries() for part in parts):
        name, size = os.path.basename(part.file), part.end - part.start
        if not name.startswith(("libpython", "python")) or size < 2 * _HUGE:
            continue
        if part.protection != "r-xp":
            continue
        copy = _libc.mmap(None, ctypes.c_size_t(size), _READ_WRITE, _ANONYMOUS, -1, 0)
        if copy in (None, _FAILED):
            continue
        ctypes.memmove(copy, part.start, size)
        _libc.mprotect(ctypes.c_void_p(copy), ctypes.c_size_t(size), _READ_EXECUTE)
        _advise(copy, size, _MADV_HUGEPAGE)
        # One step for the kernel: the code that makes this call is among the code that moves.
        _libc.mremap(
            ctypes.c_void_p(copy), ctypes.c_size_t(size), ctypes.c_size_t(size),
            _MREMAP_TO, ctypes.c_void_p(part.start),
        )  # fmt: skip
        first = -(-part.start // _HUGE) * _HUGE
        for page in range(first, part.end // _HUGE * _HUGE, _HUGE):
            _advise(page, _HUGE, _MADV_COLLAPSE)


class _Part(NamedTuple):
    """One mapping of a file."""

    start: int
    end: int
    protection: str
    file: str


def _libraries() -> list[list[_Part]]:
    """The private mappings of files, in groups that lie next to each other."""
    groups: list[list[_Part]] = []
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return groups
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith("/") or not fields[1].endswith("p"):
            continue
        start, end = (int(part, 16) for part in fields[0].split("-"))
        part = _Part(start, end, fields[1], fields[5])
        if groups and groups[-1][-1].file == part.file and groups[-1][-1].end == start:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _protect(parts: list[_Part], protection: int) -> None:
    """Change the protection; a refusal leaves the parts as they are."""
    if len(parts) > 1:
        start, size = parts[0].start, parts[-1].end - parts[0].start
        _libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(size), protection)


def _anonymous() -> list[tuple[int, int]]:
    """Writable private anonymous mappings: their start and end."""
    mappings: list[tuple[int, int]] = []
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return mappings
    for line in lines:
        fields = line.split(maxsplit=5)
        name = fields[5] if len(fields) > 5 else ""
        if fields[1] != "rw-p" or (name and name != "[heap]"):
            continue
        start, end = (int(part, 16) for part in fields[0].split("-"))
        mappings.append((start, end))
    return mappings
