"""Finds engines that hang: an engine can pass its health check and still not generate.

An engine with running turns is asked to score a short text, which runs its model. If it fails to
do so within the deadline twice in a row, it hangs and is ended, so that every request that waits
for it fails at once. The fleet then runs those turns on other engines and restarts it; it gets no
turns until its weights are verified. One failure is not enough: a paused machine looks the same.
Nor does a failure count if this process was late itself: then the answer may be waiting here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from rstar2.engine.base import Engine
from rstar2.errors import DeadlineError, EngineError, InfrastructureError
from rstar2.http_client import LocalResourceError
from rstar2.rollout.fleet import Fleet

log = logging.getLogger(__name__)

STRIKES = 2
TICKS = 40
"""Measurements of this process's own lateness in `hang_s`."""
LATE, LEAST_LATE_S = 0.25, 1.0
"""A probe does not count if this process was late for more than this share of its time, and for
more than a moment."""


class Watchdog:
    """Probes the engines of a fleet until cancelled; run it as a task."""

    def __init__(
        self,
        fleet: Fleet,
        probe_ids: Sequence[int],
        *,
        hang_s: float,
        on_hang: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.fleet, self.probe_ids = fleet, tuple(probe_ids)
        self.hang_s, self.on_hang = hang_s, on_hang
        self.late_s = 0.0
        """By how much this process's event loop was late, summed up since the start."""

    async def run(self) -> None:
        """Probe all engines concurrently; returns only by cancellation."""
        probes = (self._probe(engine) for engine in self.fleet.engines.values())
        await asyncio.gather(self._measure_lateness(), *probes)

    async def _measure_lateness(self) -> None:
        loop, tick_s = asyncio.get_running_loop(), self.hang_s / TICKS
        while True:
            due = loop.time() + tick_s
            await asyncio.sleep(tick_s)
            self.late_s += loop.time() - due

    async def _probe(self, engine: Engine) -> None:
        strikes = 0
        while True:
            await asyncio.sleep(self.hang_s / 4)
            if not self._busy(engine.name):
                strikes = 0
                continue
            strikes = 0 if await self._works(engine) else strikes + 1
            if strikes == STRIKES:
                strikes = 0
                log.warning("engine %s hangs: no score within %g s", engine.name, self.hang_s)
                self.on_hang(engine.name)
                await end_engine(engine)

    def _busy(self, name: str) -> bool:
        scheduler = self.fleet.scheduler
        return name in scheduler.engines and scheduler.running(name) > 0

    async def _works(self, engine: Engine) -> bool:
        """Whether the engine can score; a dead engine counts as working (the fleet detects it).

        So does one that this machine cannot ask.
        """
        probe_s, late_s = self.hang_s / STRIKES, self.late_s
        try:
            async with asyncio.timeout(probe_s):
                await engine.score(self.probe_ids)
        except (TimeoutError, DeadlineError):
            await asyncio.sleep(self.hang_s / TICKS)  # the lateness of the last tick is measured
            if self.late_s - late_s <= max(LATE * probe_s, LEAST_LATE_S):
                return False
            log.info("engine %s: probe not counted, this process is too busy", engine.name)
        except (EngineError, LocalResourceError) as error:
            log.info("engine %s did not score: %s", engine.name, error)
        return True


async def end_engine(engine: Engine) -> None:
    """End an engine that hangs or failed; all requests that wait for it fail with EngineError."""
    try:
        await engine.abort()
    except (InfrastructureError, OSError) as error:
        log.warning("engine %s did not end cleanly: %s", engine.name, error)
