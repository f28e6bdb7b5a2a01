"""Our policy: admission by reserved KV. Pure; `state.py` draws the life of a session.

Rules, in the order in which they are applied:

1. A rollout is admitted to an engine if the KV cache is expected to hold it, together with the
   rollouts already there, until they end: the peak of the forecast (`forecast.py`, from lengths
   learnt in this run; the limit where nothing is known) plus a margin must fit, which it then does
   with probability `quantile`. The rollout reserves its part of that peak; reservations never
   exceed the cache. The variant `worst_case` instead reserves every rollout's limit from its first
   turn to its end (the paper's rule): no prefix is ever evicted, which deterministic runs need.
2. Turns of begun rollouts come before new rollouts, older rollouts before younger ones. They may
   use the margin. While one of them waits for KV, no new rollout is admitted anywhere: nothing
   overtakes a begun rollout.
3. New rollouts are admitted in the order of their groups, so that groups finish together. Each
   goes to the engine with the least remaining work among those that have room.
4. A turn runs where its prefix is, and waits there for a sequence slot: a slot becomes free sooner
   than a prefix is recomputed. If its engine is expected to overflow, the turn moves to one with
   room; without such an engine it waits. Once no new rollout is left to balance the load, a turn
   also moves from an engine with much remaining work to one with little, if that pays for
   recomputing its prefix.
5. While its tools run a rollout keeps its reservation, so that the next turn reuses its prefix. As
   soon as another rollout lacks the room, tool waits longer than `hold_s` lose their reservation,
   the longest wait first.
6. If idle reservations would leave an engine without any running turn, those of younger rollouts
   are evicted.
7. Forecasts and reservations are recomputed when the length table changes and as the engine
   advances. If the new forecast exceeds the cache, all reservations on that engine are reduced in
   proportion, and no new rollout is admitted there until it fits again.
8. KV use that an engine reports above its forecast is subtracted from its capacity. KV use below
   the sum of its running rollouts shows how much of their prompts they share; that part is not
   reserved twice. An engine that reports preemptions gets no new rollout until it reports none.

No starvation: by rules 2 and 6 the oldest rollout is never overtaken and can evict every idle
reservation of an engine without running turns. Ages are fixed at the first submit, so every
rollout becomes the oldest after finitely many others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import NormalDist

import numpy as np

from rstar2.config import SchedulerConfig
from rstar2.rollout.forecast import (
    POINTS,
    KvDemand,
    KvForecast,
    LengthModel,
    RolloutProgress,
    kv_demands,
)
from rstar2.rollout.state import (
    EngineState,
    Phase,
    Placement,
    SchedulerState,
    SessionState,
    TurnRequest,
)
from rstar2.types import EngineLoad

SHARING_MIN_RUNNING = 8
"""Running rollouts that a report needs before it says how much of their prompts they share."""
SHARING_SMOOTHING = 0.2
"""Weight of one report in the estimate of shared prompt tokens."""
SHARING_TRUST = 0.5
"""The part of the estimated sharing that is not reserved twice."""
UNEVEN = 1.15
"""An engine with this many times the remaining work of another is overloaded."""
RECOMPUTE = 1000
"""Recomputing a token costs about as much as decoding with this many tokens of context (a 14B model
on an MI300X: 1,100). Only moves that merely balance the load are weighed against this cost."""


@dataclass(slots=True)
class EngineOutlook:
    """The forecast for one engine. It exists as long as the engine's state does."""

    engine: EngineState
    forecast: KvForecast
    demands: dict[str, KvDemand] = field(default_factory=dict)
    preempting: bool = False
    """The last report had new preemptions."""
    excess: float = 0.0
    """Reported KV use above the forecast."""
    sharing: float = 0.0
    """The share of prompt tokens that rollouts of a group have in common, from reports."""
    refused: TurnRequest | None = None
    """The last request that did not fit; it is tried again only after a change here."""

    @property
    def room(self) -> float:
        return self.engine.budget.total - self.excess


class ReservePolicy:
    """Reserves the KV that rollouts are expected to need; with `worst_case`, their limits."""

    def __init__(
        self, config: SchedulerConfig, lengths: LengthModel, *, worst_case: bool = False
    ) -> None:
        self.lengths = lengths
        self.hold_s = inf if worst_case else config.hold_s
        self.worst_case = worst_case
        self._z = 0.0 if worst_case else max(0.0, NormalDist().inv_cdf(config.quantile))
        self._width = 1
        self._outlooks: dict[str, EngineOutlook] = {}
        self._idle: deque[tuple[float, str]] = deque()
        """Sessions in the order in which their tools started, outdated entries included."""

    # ------------------------------------------------------------------ events

    def turn_ended(self, state: SchedulerState, name: str) -> None:
        """The session's tools run."""
        self._idle.append((state.sessions[name].holding_since, name))

    def session_left(self, state: SchedulerState, name: str, engine: str) -> None:
        """The session is no longer on the engine."""
        outlook = self._outlooks.get(engine)
        if outlook is not None and (demand := outlook.demands.pop(name, None)) is not None:
            outlook.forecast.remove(demand)
            outlook.refused = None

    def load_reported(self, state: SchedulerState, name: str, load: EngineLoad) -> None:
        """An engine reported its load."""
        outlook = self._outlook(state, name)
        engine = outlook.engine
        engine.budget.used = load.kv_used
        # an idle engine may repeat its last figure: without running turns there is no excess
        excess = load.kv_used - float(outlook.forecast.mean[0]) if load.running else 0.0
        outlook.excess = max(0.0, excess)
        if not load.waiting and len(engine.running) >= SHARING_MIN_RUNNING and not self.worst_case:
            sharing = self._sharing(state, engine, load.kv_used)
            outlook.sharing += SHARING_SMOOTHING * (sharing - outlook.sharing)
        outlook.refused = None
        outlook.preempting = load.preemptions > engine.preemptions
        engine.preemptions = load.preemptions

    def _sharing(self, state: SchedulerState, engine: EngineState, used: int) -> float:
        """The share of their prompts that the running rollouts have in common, from KV use."""
        running = [state.sessions[name] for name in engine.running]
        prompts = sum(s.first_prompt for s in running)
        separate = sum(
            engine.budget.rounded(s.first_prompt + state.estimated_completion(s)) for s in running
        )
        return min(1.0, max(0.0, (separate - used) / prompts))

    # ------------------------------------------------------------------ decisions

    def decide(self, state: SchedulerState, now: float) -> list[Placement]:
        """Start all turns that may start now."""
        if not self.worst_case and self.lengths.outdated:
            self.lengths.refresh(
                state.estimated_completion(s) for s in state.sessions.values() if s.begun
            )
        placements: list[Placement] = []
        blocked = self._start_begun(state, placements)
        if blocked and self._evict_expired(state, now):
            blocked = self._start_begun(state, placements)
        while not blocked and (name := state.next_new()) is not None:
            placement = self._admit(state, name)
            if placement is None and self._evict_expired(state, now):
                placement = self._admit(state, name)
            if placement is None:
                break
            placements.append(placement)
        return placements

    def _start_begun(self, state: SchedulerState, placements: list[Placement]) -> bool:
        """Start turns of begun rollouts; True if one of them has to wait for KV."""
        blocked = False
        for name in state.pop_begun():
            session = state.sessions[name]
            home = session.engine
            placement = None
            if home is not None and state.serves(home) and not self._overfull(state, home):
                placement = self._rebalance(state, name, home)
                if placement is None and state.engines[home].has_slot:
                    placement = state.start(name, home, None)
            elif not blocked:  # a rollout that lacks KV is not overtaken by another that does
                placement = self._admit(state, name) or self._evict_younger(state, name, session)
                blocked = placement is None
            if placement is None:
                state.enqueue(name)
            else:
                placements.append(placement)
        return blocked

    def _admit(self, state: SchedulerState, name: str) -> Placement | None:
        """Start a rollout on an engine other than its own, if one has room for it to the end."""
        session = state.sessions[name]
        self._extend_to(session.request.limit)
        demand: KvDemand | None = None
        candidates = [
            outlook
            for engine in state.serving
            if engine != session.engine and state.engines[engine].has_slot
            if not (outlook := self._outlook(state, engine)).preempting or not outlook.demands
            if outlook.refused != session.request
        ]
        last = state.engines.get(session.last_engine or "")
        for outlook in sorted(candidates, key=lambda a: (a.engine is not last, _preference(a))):
            if demand is None:
                demand = self._demand(session, outlook)
            if self._fits(outlook, demand):
                return self._start(state, name, outlook, demand)
            outlook.refused = session.request
        return None

    def _rebalance(self, state: SchedulerState, name: str, home: str) -> Placement | None:
        """Move a turn to an engine with much less remaining work, if that saves time overall."""
        if self.worst_case or len(state.engines) < 2 or state.next_new() is not None:
            return None
        session, here = state.sessions[name], self._outlook(state, home)
        others = [
            self._outlook(state, e)
            for e in state.serving
            if e != home and state.engines[e].has_slot
        ]
        target = min(others, key=_preference, default=None)
        if target is None or here.forecast.work < UNEVEN * target.forecast.work:
            return None
        demand = self._demand(session, target)
        work = float(demand.mean.sum()) * self._width
        again = RECOMPUTE * session.tokens
        if work < again or target.forecast.work + work + again >= here.forecast.work:
            return None
        return self._start(state, name, target, demand) if self._fits(target, demand) else None

    def _fits(self, outlook: EngineOutlook, demand: KvDemand) -> bool:
        """Whether the rollout fits including the margin; an empty engine takes any."""
        if not outlook.demands:
            return True
        forecast = outlook.forecast
        part = max(1, ceil(demand.mean[forecast.fullest]))
        if forecast.peak_mean + part > outlook.room or not outlook.engine.budget.fits("", part):
            return False
        return forecast.peak_with(demand) <= outlook.room

    def _start(
        self, state: SchedulerState, name: str, outlook: EngineOutlook, demand: KvDemand
    ) -> Placement:
        """Reserve the rollout's part of the peak and start its turn."""
        engine_name = next(n for n, e in state.engines.items() if e is outlook.engine)
        home = state.sessions[name].engine
        if home is not None:
            self.session_left(state, name, home)
        outlook.forecast.add(demand)
        outlook.refused = None
        part = max(1, ceil(demand.mean[outlook.forecast.fullest]))
        placement = state.start(name, engine_name, min(part, outlook.engine.budget.free))
        outlook.demands[name] = demand
        return placement

    # ------------------------------------------------------------------ forecasts

    def _extend_to(self, limit: int) -> None:
        """Extend forecasts to the longest limit seen."""
        if limit > self._width * POINTS:
            self._width = -(-limit // POINTS)

    def _demand(self, session: SessionState, outlook: EngineOutlook) -> KvDemand:
        return self._demands([_progress(session, session.completion, outlook)], outlook).row(0)

    def _demands(self, rollouts: list[RolloutProgress], outlook: EngineOutlook) -> KvDemand:
        budget = outlook.engine.budget
        if self.worst_case:
            zeros = np.zeros((len(rollouts), POINTS))
            limits = np.array([[float(budget.rounded(r.limit))] for r in rollouts])
            return KvDemand(zeros + limits, zeros, zeros)
        block = budget.capacity.block_tokens
        return kv_demands(self.lengths, rollouts, width=self._width, block=block)

    def _outlook(self, state: SchedulerState, name: str) -> EngineOutlook:
        """The engine's forecast, recomputed if engine, length table or steps have changed."""
        engine = state.engines[name]
        outlook = self._outlooks.get(name)
        if outlook is None or outlook.engine is not engine:
            outlook = self._outlooks[name] = EngineOutlook(
                engine, KvForecast(self._width, 0, 0, z=self._z)
            )
        forecast = outlook.forecast
        outdated = (
            engine.steps - forecast.made_at >= forecast.width
            or self.lengths.tables != forecast.table
        )
        if self._width != forecast.width or (outdated and not self.worst_case):
            self._recompute(state, outlook)
        return outlook

    def _recompute(self, state: SchedulerState, outlook: EngineOutlook) -> None:
        """Recompute the forecast from the current lengths and redistribute the reservations."""
        engine, old = outlook.engine, outlook.forecast
        forecast = KvForecast(self._width, engine.steps, self.lengths.tables, z=self._z)
        names = list(outlook.demands)
        sessions = [state.sessions[name] for name in names]
        progress = [_progress(s, state.estimated_completion(s), outlook) for s in sessions]
        if names:
            demand = self._demands(progress, outlook)
            outlook.demands = {name: demand.row(index) for index, name in enumerate(names)}
            forecast.add(demand.total)
            budget = engine.budget
            available = budget.total - len(names)  # every session keeps at least one token
            factor = min(1.0, available / max(1.0, forecast.peak_mean))
            parts = np.maximum(1, (factor * demand.mean[:, forecast.fullest]).astype(int)).tolist()
            budget.revise(dict(zip(names, parts, strict=True)))
        outlook.forecast, outlook.refused = forecast, None
        outlook.excess = max(0.0, outlook.excess - max(0.0, float(forecast.mean[0] - old.mean[0])))

    def _overfull(self, state: SchedulerState, name: str) -> bool:
        """Whether the engine's expected peak exceeds its room."""
        outlook = self._outlooks[name]
        if outlook.forecast.peak_mean <= outlook.room:
            return False
        outlook = self._outlook(state, name)
        return outlook.forecast.peak_mean > outlook.room and len(outlook.demands) > 1

    # ------------------------------------------------------------------ making room

    def _evict_expired(self, state: SchedulerState, now: float) -> bool:
        """Evict sessions whose tools run for longer than `hold_s`; True if there were any."""
        evicted = False
        while self._idle and self._idle[0][0] + self.hold_s <= now:
            since, name = self._idle.popleft()
            session = state.sessions.get(name)
            if (
                session is None
                or session.phase is not Phase.HOLDING
                or session.holding_since != since
            ):
                continue
            if session.engine is not None:
                self._evict(state, name)
                evicted = True
        return evicted

    def _evict_younger(
        self, state: SchedulerState, name: str, session: SessionState
    ) -> Placement | None:
        """Evict idle reservations of younger rollouts from an engine without running turns."""
        home = session.engine
        for engine_name in sorted(state.serving, key=lambda e: e != home):
            outlook = self._outlook(state, engine_name)
            if outlook.engine.running:
                continue
            outlook.excess = 0.0  # nothing runs, so nothing is used beyond the reservations
            outlook.refused = None
            younger = sorted(
                ((state.sessions[n].rank, n) for n in outlook.demands if n != name), reverse=True
            )
            for rank, other in younger:
                if engine_name == home and outlook.forecast.peak_mean <= outlook.room:
                    break
                if engine_name != home and self._fits(outlook, self._demand(session, outlook)):
                    break
                if rank < session.rank:
                    break
                self._evict(state, other)
            if engine_name == home:
                if outlook.forecast.peak_mean <= outlook.room or len(outlook.demands) == 1:
                    return state.start(name, home, None)
            elif self._fits(outlook, demand := self._demand(session, outlook)):
                return self._start(state, name, outlook, demand)
        return None

    def _evict(self, state: SchedulerState, name: str) -> None:
        engine = state.sessions[name].engine
        assert engine is not None
        state.evict(name)
        self.session_left(state, name, engine)


def _progress(session: SessionState, completion: int, outlook: EngineOutlook) -> RolloutProgress:
    shared = int(SHARING_TRUST * outlook.sharing * session.first_prompt)
    return RolloutProgress(session.first_prompt, completion, session.request.limit, shared)


def _preference(outlook: EngineOutlook) -> tuple[float, int]:
    """Least remaining work first, then fewest running turns, then first to join."""
    return outlook.forecast.work / outlook.engine.budget.total, len(outlook.engine.running)
