"""SymPy's caches without an order of use: a hit writes to no page that calls share.

SymPy keeps the results of each cached function in a bounded `lru_cache`. Every hit there moves its
entry to the end of a linked list: it writes to three entries, which the warm-up has scattered over
the heap, and each write costs a call a page fault. Unbounded, the same cache is a plain dictionary.
A program that computes for long would fill it without end, so all entries are dropped when there
are many new ones. SymPy computes a dropped result anew; no result changes.
"""

from __future__ import annotations

import gc
import importlib
import os
from typing import Any

_SIZE = "SYMPY_CACHE_SIZE"
MOST_NEW = 30_000
"""New entries of all caches, 20 to 60 MB, after which they are dropped."""


def import_sympy() -> None:
    """Import SymPy with unbounded caches, unless the environment chooses their size."""
    if _SIZE in os.environ:
        importlib.import_module("sympy")
        return
    os.environ[_SIZE] = "None"
    try:
        importlib.import_module("sympy")
    finally:
        del os.environ[_SIZE]  # not for the processes that a program starts


class CacheLimit:
    """Drops the entries of SymPy's caches when there are many new ones.

    Python calls it before and after each garbage collection. Full collections become rarer as
    there are more objects, so the check costs little.
    """

    def __init__(self, cache: Any) -> None:
        self._functions = [function for function in cache.CACHE if hasattr(function, "cache_info")]
        self._clear = cache.clear_cache
        self._most = self._entries() + MOST_NEW

    def _entries(self) -> int:
        return sum(function.cache_info().currsize for function in self._functions)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2 and self._entries() > self._most:
            self._clear()


def limit() -> None:
    """After the warm-up of an interpreter with SymPy: bound what calls add to its caches."""
    cache = importlib.import_module("sympy.core.cache")
    if cache.SYMPY_CACHE_SIZE is None:
        gc.callbacks.append(CacheLimit(cache))
