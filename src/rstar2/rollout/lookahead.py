"""Collecting ahead of the learner: while step n is learnt, steps up to n + k are collected.

    collect(n):  starts n ... n + k, waits for n      then the caller learns n and publishes v + 1
                     └── n + 1 ... n + k continue under v, then under v + 1 (updated in flight)

With staleness k = 0, step n alone is collected and nothing continues. Without overlap, steps n ...
n + k are collected one after the other before step n is returned: every group of step n is then
exactly k updates old (fewer at the start), and the numbers do not depend on timing.

Invariants
- A group is stamped with the weights that serve when it is dispatched. Step n + k starts only
  when the learner asks for step n, so no group is more than k updates older than the weights that
  learn from it. A group whose stamp is older all the same is dropped and counted.
- At most as many groups are in flight as one step has, those of earlier steps first: collecting
  ahead fills the engines while a step waits for its last groups, and does not delay these.
- What a step draws is a function of the recipe's seed and the step (`Collector`), so a run that
  was killed draws its unfinished steps again: none is lost and none is learnt from twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from heapq import heappop, heappush
from typing import Protocol

from rstar2.rollout.collector import CollectedStep
from rstar2.tasks import cancel_all
from rstar2.types import WeightVersion


class StepCollector(Protocol):
    """The one method of Collector that looking ahead needs."""

    async def collect(self, step: int, position: int) -> CollectedStep: ...


class LookaheadCollector:
    """Returns the steps of one stage in order and collects up to `staleness` steps beyond each."""

    def __init__(
        self, collector: StepCollector, *, staleness: int, last: int, overlap: bool = True
    ) -> None:
        self.collector, self.staleness, self.last = collector, staleness, last
        self.overlap = overlap
        """Whether later steps are collected while the learner works."""
        self.step = 0
        """The step that the learner waits for, or learns."""
        self._tasks: dict[int, asyncio.Task[CollectedStep]] = {}

    async def collect(self, step: int, position: int, version: WeightVersion) -> CollectedStep:
        """Return the groups of a step, for weights `version` to learn from; start later steps."""
        self.step = step
        for later in range(step, max(step, min(step + self.staleness, self.last)) + 1):
            if later not in self._tasks:
                self._tasks[later] = asyncio.ensure_future(self.collector.collect(later, position))
            if not self.overlap:
                await asyncio.wait((self._tasks[later],))
        try:
            collected = await self._tasks[step]
        finally:
            self._tasks.pop(step).cancel()
        return drop_stale(collected, version - self.staleness)

    async def close(self) -> None:
        """Cancel the steps in flight; nothing was learnt from them, so they are drawn again."""
        tasks = list(self._tasks.values())
        await cancel_all(tasks)
        self._tasks.clear()


def drop_stale(collected: CollectedStep, oldest: WeightVersion) -> CollectedStep:
    """Mark groups that were dispatched under weights older than `oldest` as not used."""
    stale = sum(d.used and d.version < oldest for d in collected.drawn)
    if not stale:
        return collected
    drawn = tuple(replace(d, used=d.used and d.version >= oldest) for d in collected.drawn)
    return replace(collected, drawn=drawn, stale=stale)


class GroupSlots:
    """At most `count` groups in flight; the next free slot goes to the earliest waiting step."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._order = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def acquire(self, step: int) -> AsyncIterator[None]:
        """Hold a slot for a group of this step."""
        if self._free > 0:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._order += 1
            heappush(self._waiting, (step, self._order, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # granted, but its task was cancelled
                    self._release()
                raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        while self._waiting:
            turn = heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
