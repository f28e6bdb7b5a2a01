"""Memory settings of a process."""

from __future__ import annotations

import gc
import subprocess
import sys

from rstar2.malloc import COLLECT_AFTER, rare_collections

FRAGMENTED = """
from rstar2.malloc import freed_memory, keep_freed_memory, limit_freed_memory

assert keep_freed_memory()
before = freed_memory()
blocks = [bytearray(2**20) for _ in range(300)]
held = freed_memory() - before
kept = blocks[::10]  # used blocks between the free ones
del blocks
limit_freed_memory(most=2**30)
freed = freed_memory() - before
limit_freed_memory(most=2**27)
left = freed_memory() - before
assert all(len(block) == 2**20 for block in kept)
print(held // 2**20, freed // 2**20, left // 2**20)
"""


def test_freed_memory_is_kept_up_to_a_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRAGMENTED], capture_output=True, text=True, timeout=60, check=True
    )
    held, freed, left = map(int, done.stdout.split())
    assert abs(held) < 20, "used blocks are not free"
    assert freed > 250, "270 of 300 blocks are free, and below the limit they are kept"
    assert left < 20


def test_collections_are_rare_inside_and_as_before_outside() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold() == (COLLECT_AFTER, *before[1:])
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
