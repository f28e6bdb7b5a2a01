"""Memory settings of a process."""

from __future__ import annotations

import gc

from rstar2.malloc import COLLECT_AFTER, rare_collections


def test_collections_are_rare_inside_and_as_before_outside() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold() == (COLLECT_AFTER, *before[1:])
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
