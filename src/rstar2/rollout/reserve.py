"""Our policy: admission by reserved KV. Pure; see `state.py` for what a session goes through.

Rules, in the order in which they are applied:

1. A rollout is admitted to an engine if the KV cache holds it together with those that are there,
   to the end: the peak of what they are expected to hold (`forecast.py`, from lengths learnt in
   this run; the limit where nothing is known) plus a margin, so that it fits with probability
   `quantile`. It reserves its part of that peak, and reservations never exceed the cache. The
   variant `worst_case` reserves everyone's limit from the first turn to the end instead (the
   paper's rule): no prefix ever has to go, which deterministic runs rely on.
2. Turns of begun rollouts come before new rollouts, older rollouts before younger ones. They may
   use the margin. While one of them waits for KV no new rollout is admitted anywhere: nothing
   overtakes a begun rollout on its way to the end.
3. New rollouts enter in the order of their groups, so that groups finish together, each on the
   engine with the least work ahead among those that have room.
4. A turn runs where its prefix is, and waits there for a sequence slot: slots free sooner than a
   prefix is computed again. When more is expected of its engine than fits, it moves to one with
   room; without such an engine it waits. Once no new rollout is left to even things out, it also
   moves from an engine with much work ahead to one with little, if that pays for computing its
   prefix again.
5. A tool's wait keeps the reservation, so that the next turn finds its prefix, as long as nobody
   lacks the room. When somebody does, waits longer than `hold_s` give it up, longest first.
6. When an engine would stand still for idle reservations, those of younger rollouts give way.
7. Forecasts and reservations are made anew when the length table is, and as the engine advances.
   When more turns out to be expected than there is, all reservations there are cut in proportion
   and nothing new is admitted until it fits again.
8. What an engine reports to use beyond its forecast is taken from its capacity; what it uses less
   than its running rollouts would hold apart shows how much of their prompts they share, and is
   not reserved again. An engine that reports preemptions gets no new rollout until it reports none.

No starvation: by 2 and 6 the oldest rollout is never overtaken on its way and can displace every
idle reservation of an engine on which nothing runs; ages are fixed at the first submit, so each
rollout becomes the oldest after finitely many others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import NormalDist

import numpy as np

from rstar2.config import SchedulerConfig
from rstar2.rollout.forecast import POINTS, Demand, Forecast, Outlook, demands
from rstar2.rollout.lengths import LengthModel
from rstar2.rollout.state import EngineState, Phase, Placement, Request, Session, State
from rstar2.types import EngineLoad

ENOUGH, SMOOTHING, TRUST = 8, 0.2, 0.5
"""How many rollouts must run for a report to tell how much they share; the weight of one report;
and the part of what they share that is given away."""
UNEVEN = 1.15
"""Work ahead is uneven when one engine has so many times another's."""
RECOMPUTE = 1000
"""Computing a token anew costs about as much as decoding reads of so many tokens of context (a 14B
model on an MI300X: 1,100). Only moves that are not needed are weighed with it."""


@dataclass(slots=True)
class _Ahead:
    """What is expected of one engine. It lives as long as the engine's state does."""

    engine: EngineState
    forecast: Forecast
    demands: dict[str, Demand] = field(default_factory=dict)
    pressed: bool = False
    """Preemptions were reported."""
    excess: float = 0.0
    """KV that the engine reports to use beyond what was expected by now."""
    sharing: float = 0.0
    """The part of all prompts that rollouts of one group share, as far as reports show it."""
    refused: Request | None = None
    """Who found no room last; asked again only when something has changed here."""

    @property
    def room(self) -> float:
        return self.engine.budget.total - self.excess


class Reserve:
    """Reserves what rollouts are expected to need, or with `worst_case` what they may need."""

    def __init__(
        self, config: SchedulerConfig, lengths: LengthModel, *, worst_case: bool = False
    ) -> None:
        self.lengths = lengths
        self.hold_s = inf if worst_case else config.hold_s
        self.worst_case = worst_case
        self._z = 0.0 if worst_case else max(0.0, NormalDist().inv_cdf(config.quantile))
        self._width = 1
        self._ahead: dict[str, _Ahead] = {}
        self._idle: deque[tuple[float, str]] = deque()
        """Sessions in the order in which they began to hold; outdated entries included."""

    # ------------------------------------------------------------------ events

    def held(self, state: State, name: str) -> None:
        """The session waits for its tools."""
        self._idle.append((state.sessions[name].since, name))

    def left(self, state: State, name: str, engine: str) -> None:
        """The session is not on the engine any more."""
        ahead = self._ahead.get(engine)
        if ahead is not None and (demand := ahead.demands.pop(name, None)) is not None:
            ahead.forecast.remove(demand)
            ahead.refused = None

    def reported(self, state: State, name: str, load: EngineLoad) -> None:
        """An engine has told its load."""
        ahead = self._fresh(state, name)
        engine = ahead.engine
        engine.budget.used = load.kv_used
        # an engine at rest may repeat its last figure: what nobody uses is nobody's excess
        excess = load.kv_used - float(ahead.forecast.mean[0]) if load.running else 0.0
        ahead.excess = max(0.0, excess)
        if not load.waiting and len(engine.running) >= ENOUGH and not self.worst_case:
            seen = self._sharing(state, engine, load.kv_used)
            ahead.sharing += SMOOTHING * (seen - ahead.sharing)
        ahead.refused = None
        ahead.pressed = load.preemptions > engine.preemptions
        engine.preemptions = load.preemptions

    def _sharing(self, state: State, engine: EngineState, used: int) -> float:
        """Which part of their prompts the running rollouts share, as they use so little."""
        running = [state.sessions[name] for name in engine.running]
        prompts = sum(s.first_prompt for s in running)
        apart = sum(engine.budget.rounded(s.first_prompt + state.reached(s)) for s in running)
        return min(1.0, max(0.0, (apart - used) / prompts))

    # ------------------------------------------------------------------ decisions

    def decide(self, state: State, now: float) -> list[Placement]:
        """Everything that may start now."""
        if not self.worst_case and self.lengths.outdated:
            self.lengths.refresh(state.reached(s) for s in state.sessions.values() if s.begun)
        placements: list[Placement] = []
        blocked = self._continue(state, placements)
        if blocked and self._expire(state, now):
            blocked = self._continue(state, placements)
        while not blocked and (name := state.next_new()) is not None:
            placement = self._admit(state, name)
            if placement is None and self._expire(state, now):
                placement = self._admit(state, name)
            if placement is None:
                break
            placements.append(placement)
        return placements

    def _continue(self, state: State, placements: list[Placement]) -> bool:
        """Start turns of begun rollouts; True when one of them waits for KV."""
        blocked = False
        for name in state.take_begun():
            session = state.sessions[name]
            home = session.engine
            placement = None
            if home is not None and state.serves(home) and not self._overfull(state, home):
                placement = self._rebalance(state, name, home)
                if placement is None and state.engines[home].has_slot:
                    placement = state.start(name, home, None)
            elif not blocked:  # who lacks KV is not overtaken by others that do
                placement = self._admit(state, name) or self._displace(state, name, session)
                blocked = placement is None
            if placement is None:
                state.wait(name)
            else:
                placements.append(placement)
        return blocked

    def _admit(self, state: State, name: str) -> Placement | None:
        """Start a rollout on another engine than it is on, if one has the room for all of it."""
        session = state.sessions[name]
        self._see_limit(session.request.limit)
        demand: Demand | None = None
        found = [
            ahead
            for engine in state.serving
            if engine != session.engine and state.engines[engine].has_slot
            if not (ahead := self._fresh(state, engine)).pressed or not ahead.demands
            if ahead.refused != session.request
        ]
        last = state.engines.get(session.last or "")
        for ahead in sorted(found, key=lambda a: (a.engine is not last, _preference(a))):
            if demand is None:
                demand = self._demand(session, ahead)
            if self._fits(ahead, demand):
                return self._start(state, name, ahead, demand)
            ahead.refused = session.request
        return None

    def _rebalance(self, state: State, name: str, home: str) -> Placement | None:
        """Move a turn to an engine with much less work ahead, where that ends all of it sooner."""
        if self.worst_case or len(state.engines) < 2 or state.next_new() is not None:
            return None
        session, here = state.sessions[name], self._fresh(state, home)
        others = [
            self._fresh(state, e) for e in state.serving if e != home and state.engines[e].has_slot
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

    def _fits(self, ahead: _Ahead, demand: Demand) -> bool:
        """Whether the rollout fits with the margin; an empty engine takes any."""
        if not ahead.demands:
            return True
        forecast = ahead.forecast
        part = max(1, ceil(demand.mean[forecast.fullest]))
        if forecast.peak_mean + part > ahead.room or not ahead.engine.budget.fits("", part):
            return False
        return forecast.peak_with(demand) <= ahead.room

    def _start(self, state: State, name: str, ahead: _Ahead, demand: Demand) -> Placement:
        """Reserve the rollout's part of the peak and run its turn."""
        engine_name = next(n for n, e in state.engines.items() if e is ahead.engine)
        home = state.sessions[name].engine
        if home is not None:
            self.left(state, name, home)
        ahead.forecast.add(demand)
        ahead.refused = None
        part = max(1, ceil(demand.mean[ahead.forecast.fullest]))
        placement = state.start(name, engine_name, min(part, ahead.engine.budget.free))
        ahead.demands[name] = demand
        return placement

    # ------------------------------------------------------------------ forecasts

    def _see_limit(self, limit: int) -> None:
        """Forecasts reach as far as the longest limit seen."""
        if limit > self._width * POINTS:
            self._width = -(-limit // POINTS)

    def _demand(self, session: Session, ahead: _Ahead) -> Demand:
        return self._demands([_outlook(session, session.completion, ahead)], ahead).row(0)

    def _demands(self, outlooks: list[Outlook], ahead: _Ahead) -> Demand:
        budget = ahead.engine.budget
        if self.worst_case:
            zeros = np.zeros((len(outlooks), POINTS))
            limits = np.array([[float(budget.rounded(o.limit))] for o in outlooks])
            return Demand(zeros + limits, zeros, zeros)
        block = budget.capacity.block_tokens
        return demands(self.lengths, outlooks, width=self._width, block=block)

    def _fresh(self, state: State, name: str) -> _Ahead:
        """The engine's forecast, made anew if the engine, the table or the steps have moved on."""
        engine = state.engines[name]
        ahead = self._ahead.get(name)
        if ahead is None or ahead.engine is not engine:
            ahead = self._ahead[name] = _Ahead(engine, Forecast(self._width, 0, 0, z=self._z))
        forecast = ahead.forecast
        moved_on = (
            engine.pulse - forecast.made_at >= forecast.width
            or self.lengths.tables != forecast.table
        )
        if self._width != forecast.width or (moved_on and not self.worst_case):
            self._renew(state, ahead)
        return ahead

    def _renew(self, state: State, ahead: _Ahead) -> None:
        """Forecast from where everybody is by now, and share the peak out anew."""
        engine, old = ahead.engine, ahead.forecast
        forecast = Forecast(self._width, engine.pulse, self.lengths.tables, z=self._z)
        names = list(ahead.demands)
        sessions = [state.sessions[name] for name in names]
        outlooks = [_outlook(s, state.reached(s), ahead) for s in sessions]
        if names:
            found = self._demands(outlooks, ahead)
            ahead.demands = {name: found.row(index) for index, name in enumerate(names)}
            forecast.add(found.total)
            budget = engine.budget
            available = budget.total - len(names)  # everyone keeps one token at least
            cut = min(1.0, available / max(1.0, forecast.peak_mean))
            parts = np.maximum(1, (cut * found.mean[:, forecast.fullest]).astype(int)).tolist()
            budget.revise(dict(zip(names, parts, strict=True)))
        ahead.forecast, ahead.refused = forecast, None
        ahead.excess = max(0.0, ahead.excess - max(0.0, float(forecast.mean[0] - old.mean[0])))

    def _overfull(self, state: State, name: str) -> bool:
        """Whether more is expected of the engine than it can hold."""
        ahead = self._ahead[name]
        if ahead.forecast.peak_mean <= ahead.room:
            return False
        ahead = self._fresh(state, name)
        return ahead.forecast.peak_mean > ahead.room and len(ahead.demands) > 1

    # ------------------------------------------------------------------ making room

    def _expire(self, state: State, now: float) -> bool:
        """End the reservations of waits longer than `hold_s`; True when there were any."""
        ended = False
        while self._idle and self._idle[0][0] + self.hold_s <= now:
            since, name = self._idle.popleft()
            session = state.sessions.get(name)
            if session is None or session.phase is not Phase.HOLDING or session.since != since:
                continue
            if session.engine is not None:
                self._evict(state, name)
                ended = True
        return ended

    def _displace(self, state: State, name: str, session: Session) -> Placement | None:
        """Let idle reservations of younger rollouts give way on an engine where nothing runs."""
        home = session.engine
        for engine_name in sorted(state.serving, key=lambda e: e != home):
            ahead = self._fresh(state, engine_name)
            if ahead.engine.running:
                continue
            ahead.excess = 0.0  # nothing runs: nothing is used beyond what is held
            ahead.refused = None
            younger = sorted(
                ((state.sessions[n].rank, n) for n in ahead.demands if n != name), reverse=True
            )
            for rank, other in younger:
                if engine_name == home and ahead.forecast.peak_mean <= ahead.room:
                    break
                if engine_name != home and self._fits(ahead, self._demand(session, ahead)):
                    break
                if rank < session.rank:
                    break
                self._evict(state, other)
            if engine_name == home:
                if ahead.forecast.peak_mean <= ahead.room or len(ahead.demands) == 1:
                    return state.start(name, home, None)
            elif self._fits(ahead, demand := self._demand(session, ahead)):
                return self._start(state, name, ahead, demand)
        return None

    def _evict(self, state: State, name: str) -> None:
        engine = state.sessions[name].engine
        assert engine is not None
        state.evict(name)
        self.left(state, name, engine)


def _outlook(session: Session, completion: int, ahead: _Ahead) -> Outlook:
    shared = int(TRUST * ahead.sharing * session.first_prompt)
    return Outlook(session.first_prompt, completion, session.request.limit, shared)


def _preference(ahead: _Ahead) -> tuple[float, int]:
    """The least work ahead first; among equals fewer running turns, then who joined first."""
    return ahead.forecast.work / ahead.engine.budget.total, len(ahead.engine.running)
