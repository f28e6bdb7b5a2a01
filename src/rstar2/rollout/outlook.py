"""What `reserve.py` expects of one engine, of all engines together and of a usual rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from rstar2.rollout.forecast import KvDemand, KvForecast
from rstar2.rollout.speed import EngineSpeed
from rstar2.rollout.state import EngineState, SchedulerState, TurnRequest

TURN_SMOOTHING = 0.02
SLOW = 1.5
"""An engine is slow if its steps take this many times as long as those of the fastest."""
LATE = 0.1
"""A rollout counts as ended when it is expected to run with at most this probability."""


@dataclass(slots=True)
class EngineOutlook:
    """The forecast for one engine. It exists as long as the engine's state does."""

    name: str
    engine: EngineState
    speed: EngineSpeed
    forecast: KvForecast
    demands: dict[str, KvDemand] = field(default_factory=dict)
    queued: bool = False
    """The last report had turns in the engine's own queue."""
    excess: float = 0.0
    """Reported KV use above the forecast."""
    sharing: float = 0.0
    """The share of prompt tokens that rollouts of a group have in common, from reports."""
    refused: TurnRequest | None = None
    """The last request that was not admitted; it is tried again only after a change here."""
    stays: str = ""
    """The waiting turn that was last found not to move; looked at again after a report."""
    total: int = field(init=False)
    """Tokens that its cache can hold."""
    slots: int = field(init=False)
    """Sequences that it can run at once."""

    def __post_init__(self) -> None:
        self.total = self.engine.budget.total
        self.slots = self.engine.budget.capacity.max_sequences

    @property
    def room(self) -> float:
        return self.total - self.excess

    @property
    def step_s(self) -> float:
        """Seconds of a step with the rollouts that are here now."""
        alive, now = self.forecast.alive_now, self.forecast.now
        if now > self.total:
            share = self.total / now
            alive, now = share * alive, share * now
        return self.speed.seconds(alive, now)

    @property
    def drain_s(self) -> float:
        """Seconds until its rollouts are done, if they fill the cache to the end."""
        work = self.forecast.work
        return work / self.total * self.step_s if work else 0.0

    @property
    def pace(self) -> tuple[float, float]:
        """`step_s` and `drain_s`, computed together: they are compared for every engine."""
        step_s = self.step_s
        return step_s, self.forecast.work / self.total * step_s


@dataclass(frozen=True, slots=True)
class FleetOutlook:
    """The remaining work of all engines."""

    done_s: float
    """Seconds until everything could be done."""
    wait_s: float
    """Seconds until the first engine is expected to have room for another rollout."""
    steps: float
    """Steps that nine of ten new rollouts do not exceed."""


@dataclass(slots=True)
class UsualRollout:
    """The usual size and number of turns of a rollout, and what follows for engines."""

    size: float = 1.0
    """Tokens that the last new rollout was expected to hold in a step, on average."""
    turns: float = 1.0
    """Turns per rollout, a moving average."""
    _turns_of: dict[str, int] = field(default_factory=dict)

    def turn_ended(self, name: str) -> None:
        self._turns_of[name] = self._turns_of.get(name, 0) + 1

    def ended(self, name: str) -> None:
        """The rollout has ended: its turns are known."""
        self.turns += TURN_SMOOTHING * (self._turns_of.pop(name, 1) - self.turns)

    def tools_s(self, state: SchedulerState) -> float:
        """Seconds that its tools take."""
        return state.waits.mean * (self.turns - 1)

    def batch(self, state: SchedulerState, outlook: EngineOutlook) -> float:
        """Rollouts that the engine usually runs: those whose mean size fills its cache."""
        each = len(state.sessions) / len(state.engines)
        return max(1.0, min(each, outlook.slots, outlook.total / self.size))

    def step_s(self, state: SchedulerState, outlook: EngineOutlook) -> float:
        """Seconds of a step with as many rollouts as the engine usually runs."""
        batch = self.batch(state, outlook)
        return outlook.speed.seconds(batch, batch * self.size)

    def fleet(
        self, state: SchedulerState, outlooks: Sequence[EngineOutlook], demand: KvDemand
    ) -> FleetOutlook:
        """When all engines could be done with all rollouts, if these were divided evenly.

        New rollouts have this demand.
        """
        width = outlooks[0].forecast.width
        work = demand.mean_sum * width * max(1, state.new)
        rate, wait = 0.0, inf
        each, size = len(state.sessions) / len(state.engines), self.size
        for outlook in outlooks:  # as `step_s`, without what is the same for all engines
            total, here = outlook.total, outlook.forecast.work
            batch = max(1.0, min(each, outlook.slots, total / size))
            step_s = outlook.speed.seconds(batch, batch * size)
            work += here
            rate += total / step_s
            if wait:
                room_in = outlook.forecast.steps_until_room(demand, outlook.room)
                wait = min(wait, room_in * step_s)
        steps = width * float(np.count_nonzero(demand.alive > LATE))
        return FleetOutlook(work / rate, wait, steps)

    def _drain_s(self, state: SchedulerState, outlook: EngineOutlook) -> float:
        """Seconds until the engine is done with what it has, in such steps."""
        return outlook.forecast.work / outlook.total * self.step_s(state, outlook)

    def ends_last(
        self, state: SchedulerState, step_s: float, fleet: FleetOutlook, done_s: float
    ) -> bool:
        """Whether a new rollout that waits for room would end after the others are done."""
        return fleet.wait_s + fleet.steps * step_s + self.tools_s(state) > done_s

    def too_late(
        self,
        state: SchedulerState,
        outlook: EngineOutlook,
        outlooks: Sequence[EngineOutlook],
        fleet: FleetOutlook,
    ) -> bool:
        """Whether this engine would finish a new rollout after the others could be done."""
        if len(state.engines) < 2:
            return False
        drain_s, step_s = self._drain_s(state, outlook), self.step_s(state, outlook)
        if drain_s > fleet.done_s and any(self._drain_s(state, o) < drain_s for o in outlooks):
            return True
        if fleet.steps * step_s <= fleet.done_s:
            return False
        batch = self.batch(state, outlook)
        fastest = min(o.speed.seconds(batch, batch * self.size) for o in outlooks)
        return fleet.steps * step_s > SLOW * fleet.steps * fastest


def shared_prompts(state: SchedulerState, engine: EngineState, used: int) -> float:
    """The share of their prompts that the running rollouts have in common, from KV use."""
    running = [state.sessions[name] for name in engine.running]
    prompts = sum(s.first_prompt for s in running)
    separate = sum(
        engine.budget.rounded(s.first_prompt + state.estimated_completion(s)) for s in running
    )
    return min(1.0, max(0.0, (separate - used) / prompts))
