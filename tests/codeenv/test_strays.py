"""Numbers of processes that programs of a session left."""

from __future__ import annotations

from rstar2.codeenv.jail.strays import StrayProcesses


def test_long_session_is_searched_after_pids_started_again_from_the_lowest() -> None:
    """A session whose pids reached the highest of four million was lost."""
    strays = StrayProcesses()
    strays._most_pids, strays._swept = 1 << 22, (1 << 22) - 3
    found = strays._new_pids(304)
    assert found is not None
    assert set(found) == {*range((1 << 22) - 3, (1 << 22) + 1), *range(2, 304)}
