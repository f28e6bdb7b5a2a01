"""The deadlines of a fleet's turns: time on an engine counts against a turn, waiting for one does
not.

    submit ──> waits for a placement ──> sent to an engine ──> the engine has started on it
               └──────── bounded by progress of the fleet ────┘└── bounded by `deadline_s` ──┘

An engine may queue what it was sent. It reports how many requests wait, those that wait for a
connection to it included. Requests start in the order of arrival, so all but the last `waiting`
turns that were sent have started. A report counts only for turns that were sent before the report
before it was asked for: requests may overtake each other on their way. The turns of an engine that
does not report count as started.

Before its start, a turn is given up (StallError) once the fleet made no progress for `stall_s`: no
turn ended, no token was sampled, no engine joined.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from types import TracebackType

from rstar2.errors import DeadlineError, InfrastructureError
from rstar2.types import EngineLoad


class StallError(InfrastructureError):
    """A turn waited for an engine while no engine made progress."""


@dataclass(slots=True, eq=False)
class TurnClock:
    """The deadline of one turn. Entered, it bounds the time of everything inside: that raises
    StallError or DeadlineError."""

    session: str
    deadline_s: float
    clocks: TurnClocks
    timeout: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    requested: float = field(default_factory=monotonic)
    engine: str | None = None
    sent: float = 0.0
    started: bool = False
    error: InfrastructureError | None = None

    async def __aenter__(self) -> TurnClock:
        await self.timeout.__aenter__()
        self.clocks.entered(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clocks.left(self)
        try:
            await self.timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise self.why() from None

    def start(self) -> None:
        """An engine has started on the turn: its deadline runs from now on."""
        self.started = True
        if not self.timeout.expired():
            self.timeout.reschedule(asyncio.get_running_loop().time() + self.deadline_s)

    def give_up(self, error: InfrastructureError) -> None:
        """End the turn with this error."""
        if not self.timeout.expired():
            self.error = error
            self.timeout.reschedule(asyncio.get_running_loop().time())

    def why(self) -> InfrastructureError:
        """The error of a turn whose time is up."""
        return self.error or DeadlineError(
            f"{self.engine} did not finish a turn of {self.session} within {self.deadline_s:g} s "
            "of starting on it (agent.generate_deadline_s)"
        )


class TurnClocks:
    """The clocks of all turns that a fleet runs; used on its event loop only."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._clocks: dict[str, TurnClock] = {}
        self._unstarted: dict[str, dict[str, TurnClock]] = {}
        """Turns that were sent to each engine and may still wait there, in the order of sending."""
        self._asked: dict[str, float] = {}
        """When the last load report of each engine was asked for."""
        self._counters: dict[str, tuple[int, int, int]] = {}
        self.progress = 0.0
        """When the fleet last made progress."""

    def bound(self, session: str, deadline_s: float) -> TurnClock:
        """The clock of a turn, to be entered."""
        return TurnClock(session, deadline_s, self)

    def entered(self, clock: TurnClock) -> None:
        """The turn was submitted."""
        self._clocks[clock.session] = clock

    def left(self, clock: TurnClock) -> None:
        """The turn has ended, well or not."""
        del self._clocks[clock.session]
        self._forget(clock)

    def sent(self, clock: TurnClock, engine: str) -> None:
        """The turn was sent to an engine."""
        clock.engine, clock.sent = engine, monotonic()
        self._unstarted.setdefault(engine, {})[clock.session] = clock

    def lost(self, clock: TurnClock) -> None:
        """The engine of the turn was lost: the turn waits for another one."""
        self._forget(clock)
        clock.engine, clock.started = None, False
        if not clock.timeout.expired():
            clock.timeout.reschedule(None)

    def _forget(self, clock: TurnClock) -> None:
        if clock.engine is not None and not clock.started:
            self._unstarted.get(clock.engine, {}).pop(clock.session, None)

    def progressed(self) -> None:
        """A turn ended, an engine joined, or new weights are on their way."""
        self.progress = monotonic()

    def reported(self, engine: str, load: EngineLoad, asked: float) -> None:
        """An engine reported its load, for which it was asked at `asked`."""
        counters = (load.steps, load.decoded, load.prefilled)
        if self._counters.get(engine) != counters:
            self._counters[engine] = counters
            self.progressed()
        before, self._asked[engine] = self._asked.get(engine, 0.0), asked
        unstarted = self._unstarted.get(engine, {})
        for clock in list(islice(unstarted.values(), max(0, len(unstarted) - load.waiting))):
            if clock.sent >= before:
                break
            del unstarted[clock.session]
            clock.start()

    def silent(self, engine: str) -> None:
        """The engine did not report its load: take its turns as started, so that they end."""
        for clock in self._unstarted.pop(engine, {}).values():
            clock.start()

    def give_up_stalled(self) -> None:
        """Give up the turns that have not started, if the fleet makes no progress."""
        now = monotonic()
        if now - self.progress <= self.stall_s:
            return
        waiting = [clock for clock in self._clocks.values() if not clock.started]
        for clock in waiting:
            if now - max(self.progress, clock.requested) > self.stall_s:
                clock.give_up(
                    StallError(
                        f"{clock.session} waited for an engine, and no engine made progress for "
                        f"{self.stall_s:g} s (scheduler.stall_s); {len(waiting)} turns wait"
                    )
                )
