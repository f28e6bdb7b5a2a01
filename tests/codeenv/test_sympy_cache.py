"""SymPy's caches in warm interpreters: unbounded, but they do not grow without end."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

from rstar2.codeenv.jail.sympy_cache import MOST_NEW, CacheLimit


class Cached:
    """A cached function with this many entries."""

    def __init__(self, entries: int) -> None:
        self.entries = entries

    def cache_info(self) -> SimpleNamespace:
        return SimpleNamespace(currsize=self.entries)


def test_caches_are_cleared_in_a_full_collection_after_many_new_entries() -> None:
    first, second = Cached(5), Cached(10)
    cleared: list[int] = []
    cache = SimpleNamespace(
        CACHE=[first, second, print], clear_cache=lambda: cleared.append(first.entries)
    )
    limit = CacheLimit(cache)
    first.entries += MOST_NEW
    limit("start", {"generation": 2})
    assert not cleared, "the entries of the warm-up do not count"
    first.entries += 1
    limit("start", {"generation": 1})
    limit("stop", {"generation": 2})
    assert not cleared
    limit("start", {"generation": 2})
    assert cleared == [first.entries]


def test_sympy_is_imported_with_unbounded_caches_and_an_unchanged_environment() -> None:
    program = (
        "import gc, os\nfrom rstar2.codeenv.jail import sympy_cache\n"
        "sympy_cache.import_sympy()\nfrom sympy.core import cache\n"
        "print(cache.SYMPY_CACHE_SIZE, 'SYMPY_CACHE_SIZE' in os.environ)\n"
        "sympy_cache.limit()\nprint(len(gc.callbacks))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert run.stdout == "None False\n1\n"
