"""Collecting ahead of the learner: while step n is learnt, steps up to n + k are drawn.

    take(n):   collect n ... n + k  ──wait──> n      then the caller learns n and publishes v + 1
                       ^    └── go on meanwhile, under v, then under v + 1 (updated in flight)
                       └── staleness 0: n alone, nothing goes on

Invariants
- A group is stamped with the weights that serve when it is dispatched. Step n + k is begun only
  when step n is taken, so no group is more than k updates older than the weights that learn from
  it; one that is all the same (a stamp says so) is dropped and counted, never learnt from.
- At most as many groups are in flight as one step has, those of earlier steps first: running ahead
  fills the engines while the last groups of a step are awaited, and does not crowd these out.
- What a step draws is a function of the recipe's seed and the step (`Collector`), so a run that was
  killed draws the steps that were under way again: none is lost and none is learnt from twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from heapq import heappop, heappush
from typing import Protocol

from rstar2.rollout.collector import Collected
from rstar2.types import WeightVersion


class Collects(Protocol):
    """What running ahead needs of a Collector."""

    shown: int

    async def collect(self, step: int, position: int) -> Collected: ...


class Ahead:
    """Hands out the steps of one stage in order, collecting up to `staleness` beyond each."""

    def __init__(self, collector: Collects, *, staleness: int, last: int) -> None:
        self.collector, self.staleness, self.last = collector, staleness, last
        self._tasks: dict[int, asyncio.Task[Collected]] = {}

    async def take(self, step: int, position: int, version: WeightVersion) -> Collected:
        """The groups of a step, to be learnt from by weights `version`; later ones are begun."""
        self.collector.shown = step
        for ahead in range(step, max(step, min(step + self.staleness, self.last)) + 1):
            if ahead not in self._tasks:
                self._tasks[ahead] = asyncio.ensure_future(self.collector.collect(ahead, position))
        try:
            collected = await self._tasks[step]
        finally:
            task = self._tasks.pop(step)
            task.cancel()
        return drop_stale(collected, version - self.staleness)

    async def close(self) -> None:
        """End what is still being collected; it was not learnt from and will be drawn again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()


def drop_stale(collected: Collected, oldest: WeightVersion) -> Collected:
    """The same groups, with those dispatched under weights older than `oldest` out of use."""
    stale = sum(d.used and d.version < oldest for d in collected.drawn)
    if not stale:
        return collected
    drawn = tuple(replace(d, used=d.used and d.version >= oldest) for d in collected.drawn)
    return replace(collected, drawn=drawn, stale=stale)


class Places:
    """At most `count` groups in flight; of those that wait, the earliest step's goes first."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._order = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def one(self, step: int) -> AsyncIterator[None]:
        """Hold a place for a group of this step."""
        if self._free > 0:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._order += 1
            heappush(self._waiting, (step, self._order, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # given and not wanted any more
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            turn = heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
