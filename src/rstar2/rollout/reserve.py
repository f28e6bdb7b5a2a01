"""Our policy: admission by expected cost. Pure; `state.py` draws the life of a session.

Rules, in the order in which they are applied:

1. **Order.** Turns of begun rollouts come before new rollouts. They start on the engine with their
   prefix as soon as it has a sequence slot and room: a turn that starts in a full cache is the next
   one that the engine preempts. Those whose tools have just returned start first, because their
   prefix is still cached; then, while new rollouts are left, the oldest, and afterwards those with
   the fewest tokens: they have the most steps left, so they would end last. Those whose prefix is
   on no engine (it died, or evicted them) wait for the first one with room. New rollouts are
   admitted in the order of their groups. If a new rollout would end last if it waited for room,
   new ones come first: they start wherever they have room, before turns that were queued later.
2. **Admission.** A new rollout is admitted to an engine if it saves more time there than it is
   expected to cost. It is the last to arrive, so it is the first that the engine preempts when the
   cache overflows. Until then it runs for some steps, and each of them saves its share of a step's
   fixed time: step_s / B, where B is the number of rollouts that the engine usually runs. It costs
   prefill_s for each token that is computed again because of it: its own, and those of rollouts
   that a full engine admits and preempts in turn. The forecast (`forecast.py`, from lengths learnt
   in this run; the limit where nothing is known) gives the steps and the tokens, load reports give
   step_s and prefill_s (`speed.py`). A rollout that would end last if it were held back, its tool
   calls included, also saves the time until an engine is expected to have room for it. Where
   recomputing is cheap the cache is filled to the brim; where it is expensive, nothing is admitted
   that is likely to overflow.
3. **Placement.** A new rollout goes to the engine that will be done first with what it has. An
   engine takes no rollout that it would finish after all others could be done: a slow engine near
   the end, or one that already has more than its share of the work.
4. **Moves.** Once no new rollout is left to balance the load, a turn moves to an engine that
   finishes it sooner, the time to compute its prefix there included.
5. **Tool calls.** While its tools run a rollout keeps its place, so that the next turn reuses its
   prefix, and its room, if the mean tool call takes less time than computing a whole cache: per
   token, holding costs the wait / KV and dropping costs prefill_s. As soon as a new rollout lacks
   the room, those whose tools run longer than pays (`ToolWaits`) lose their place, the longest wait
   first.
6. **Feedback.** Turns in an engine's own queue, the last ones that started there, do not advance
   with its steps. KV use that an engine reports above its forecast is subtracted from its capacity.
   KV use below the sum of its running rollouts shows how much of their prompts they share; half of
   that part is not counted twice. An engine with a queue of its own, or with turns that wait for
   room there, gets no new rollout, unless new ones come first (rule 1).

A rollout reserves its part of the expected peak. Reservations never exceed the cache: where the
expected peak does, all are reduced in proportion.

No starvation: no new rollout starts before a begun one that waits for room on the same engine,
unless it was queued before that turn; so those before it are finite. New rollouts are never
overtaken by younger ones. An engine on which nothing runs takes any rollout that it could hold
alone.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from math import ceil

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
from rstar2.rollout.outlook import EngineOutlook, FleetOutlook, UsualRollout, shared_prompts
from rstar2.rollout.state import Phase, Placement, Rank, SchedulerState, SessionState
from rstar2.types import EngineLoad

SHARING_MIN_RUNNING = 8
"""Running rollouts that a report needs before it says how much of their prompts they share."""
SHARING_SMOOTHING = 0.2
"""Weight of one report in the estimate of shared prompt tokens."""
SHARING_TRUST = 0.5
"""The part of the estimated sharing that is not counted twice."""
HEADROOM_STEPS = 32
"""A turn has room if it and all that run there can make this many steps."""
CHURN = 0.25
"""The part of a preempted rollout's tokens that is no longer cached when it resumes."""
SHORT = 0.8
"""Above this share of the cache at the expected peak, prefixes of waiting rollouts are evicted."""
UNEVEN = 1.15
"""A turn moves only to an engine that is expected to finish it this many times sooner."""
MOVE_STEPS = 50
"""A turn with fewer expected steps left stays, unless the recipe says otherwise."""
KEPT_DEMANDS = 256
"""Demands that are kept: the rollouts of a group start with the same one."""


class ReservePolicy:
    """Admits a rollout where it is expected to save more time than it costs."""

    def __init__(self, config: SchedulerConfig, lengths: LengthModel) -> None:
        self.lengths = lengths
        self.hold_s = config.hold_s
        self.move_steps = MOVE_STEPS if config.move_steps is None else config.move_steps
        self._width = 1
        self._outlooks: dict[str, EngineOutlook] = {}
        self._usual = UsualRollout()
        self._new_first = False
        """New rollouts start before turns of begun ones that were queued after them."""
        self._reported: set[str] = set()
        """Engines that have reported since `_new_first` was decided."""
        self._kept_demands: dict[tuple[int, int, int, RolloutProgress], KvDemand] = {}
        self._idle: deque[tuple[float, str]] = deque()
        """Sessions in the order in which their tools started, outdated entries included."""

    # ------------------------------------------------------------------ events

    def turn_ended(self, state: SchedulerState, name: str) -> None:
        """The session's tools run, or it is about to end."""
        self._usual.turn_ended(name)
        self._idle.append((state.sessions[name].holding_since, name))

    def session_left(self, state: SchedulerState, name: str, engine: str) -> None:
        """The session is no longer on the engine."""
        if name not in state.sessions:
            self._usual.ended(name)
        outlook = self._outlooks.get(engine)
        if outlook is not None and (demand := outlook.demands.pop(name, None)) is not None:
            outlook.forecast.remove(demand)
            outlook.refused = None

    def load_reported(self, state: SchedulerState, name: str, load: EngineLoad) -> None:
        """An engine reported its load."""
        state.steps_reported(name, load)
        outlook = self._outlook(state, name)
        engine = outlook.engine
        engine.budget.used = load.kv_used
        # an idle engine may repeat its last figure: without running turns there is no excess
        excess = load.kv_used - outlook.forecast.now if load.running else 0.0
        outlook.excess = max(0.0, excess)
        if not load.waiting and len(engine.running) >= SHARING_MIN_RUNNING:
            sharing = shared_prompts(state, engine, load.kv_used)
            outlook.sharing += SHARING_SMOOTHING * (sharing - outlook.sharing)
        outlook.refused, outlook.stays = None, ""
        outlook.queued = load.waiting > 0
        engine.preemptions = load.preemptions
        if not self._reported or name in self._reported:  # once per round of reports
            self._new_first = self._comes_first(state)
            self._reported.clear()
        self._reported.add(name)

    # ------------------------------------------------------------------ decisions

    def decide(self, state: SchedulerState, now: float) -> list[Placement]:
        """Start all turns that may start now."""
        if self.lengths.outdated:
            self.lengths.refresh(
                state.estimated_completion(s) for s in state.sessions.values() if s.begun
            )
        if self._new_first:
            return self._admit_new(state, now) + self._continue_begun(state)
        return self._continue_begun(state) + self._admit_new(state, now)

    def _admit_new(self, state: SchedulerState, now: float) -> list[Placement]:
        """Start new rollouts, in their order, until one does not start."""
        placements: list[Placement] = []
        while (new := state.next_new()) is not None:
            placement = self._admit(state, new)
            if placement is None and self._evict_expired(state, now):
                placement = self._admit(state, new)
            if placement is None:
                break
            placements.append(placement)
        return placements

    def _continue_begun(self, state: SchedulerState) -> list[Placement]:
        """Start waiting turns of begun rollouts.

        A turn that has just returned and finds no room joins the others. Once one of these cannot
        start, the rest of its queue is not looked at: a long queue costs no more than a short one.
        """
        placements: list[Placement] = []
        queues = state.first_begun()
        heapify(queues)
        while queues:
            _, home = heappop(queues)
            head = state.next_begun(home)
            if head is None:
                continue
            placement = self._continue(state, head[1])
            if placement is not None:
                placements.append(placement)
            elif state.sessions[head[1]].returned:
                state.waits_for_room(head[1])
            else:
                continue
            if (head := state.next_begun(home)) is not None:
                heappush(queues, (head[0], home))
        return placements

    def _continue(self, state: SchedulerState, name: str) -> Placement | None:
        """Start the next turn of a begun rollout; None if there is no sequence slot or no room."""
        session = state.sessions[name]
        home = session.engine
        if home is not None and state.serves(home):
            here = self._outlook(state, home)
            has_room = self._has_room(state, session, here)
            if here.stays == name and not here.engine.has_slot:
                return None
            placement = self._move(state, name, home)
            if placement is None and has_room:
                return state.start(name, home, None)
            here.stays = name
            return placement
        self._extend_to(session.request.limit)
        open_ = [self._outlook(state, e) for e in _open(state, session.request.limit)]
        targets = [outlook for outlook in open_ if self._has_room(state, session, outlook)]
        if not targets:
            return None
        demand = self._demand(session, targets[0])
        now = demand.start
        target = min(
            targets,
            key=lambda o: (
                o.forecast.now + now > o.room,
                o.name != session.last_engine,
                o.drain_s,
                len(o.demands),
            ),
        )
        return self._start(state, name, target, demand)

    def _has_room(
        self, state: SchedulerState, session: SessionState, outlook: EngineOutlook
    ) -> bool:
        """Whether the turn and all that run there can make HEADROOM_STEPS; alone it always may.

        The room of those whose tools run is free only if the mean tool call takes longer than
        computing a whole cache.
        """
        engine = outlook.engine
        running = len(engine.running)
        if not running or not engine.has_slot:
            return engine.has_slot
        shared = SHARING_TRUST * outlook.sharing * session.first_prompt * running
        growth = HEADROOM_STEPS * (running + 1)
        holds = state.waits.mean <= outlook.speed.prefill_s * outlook.total
        kept = engine.holding_tokens if holds else 0
        return engine.running_tokens + kept + session.tokens - shared + growth <= outlook.total

    def _admit(self, state: SchedulerState, name: str) -> Placement | None:
        """Start a new rollout where that pays."""
        session = state.sessions[name]
        request = session.request
        self._extend_to(request.limit)
        outlooks = [self._outlook(state, engine) for engine in state.serving]
        homeless, limit = state.next_begun(None), request.limit
        candidates = [
            (outlook.drain_s, len(outlook.demands), place)
            for place, outlook in enumerate(outlooks)
            if len(outlook.engine.running) < outlook.slots and limit <= outlook.total
            if outlook.refused is None or outlook.refused != request
            if self._takes_new(state, session, outlook, homeless)
        ]
        if not candidates:
            return None
        heapify(candidates)  # the first one mostly takes it
        demand = self._new_demand(session, outlooks[candidates[0][2]])
        fleet = self._usual.fleet(state, outlooks, demand)
        while candidates:
            outlook = outlooks[heappop(candidates)[2]]
            pays = self._new_first or self._pays(state, outlook, demand, fleet)
            if pays and not self._usual.too_late(state, outlook, outlooks, fleet):
                return self._start(state, name, outlook, demand)
            outlook.refused = request
        return None

    def _takes_new(
        self,
        state: SchedulerState,
        session: SessionState,
        outlook: EngineOutlook,
        homeless: tuple[Rank, str] | None,
    ) -> bool:
        """Whether no begun rollout waits for room there; an empty engine takes any.
        Where new ones come first: whether it has room, and the turns that wait were queued later.
        """
        if self._new_first:
            return self._has_room(state, session, outlook) and all(
                session.queued_as < state.oldest_turn(home) for home in (None, outlook.name)
            )
        if not outlook.demands:
            return True
        if outlook.queued or (homeless is None and not state.waits_for(outlook.name)):
            return not outlook.queued
        heads = (homeless, state.next_begun(outlook.name))
        waiting = [state.sessions[head[1]] for head in heads if head is not None]
        return all(s.request.limit > outlook.total for s in waiting)

    def _comes_first(self, state: SchedulerState) -> bool:
        """Whether the next new rollout would end last if it waited for room.

        With it, all prefixes no longer fit the cache together: a share of them is computed again
        for every turn, so the others would end later. Engines count as fast as the fastest.
        """
        new = state.next_new()
        if new is None or not state.serving:
            return False
        session = state.sessions[new]
        self._extend_to(session.request.limit)
        outlooks = [self._outlook(state, engine) for engine in state.serving]
        demand = self._new_demand(session, outlooks[0])
        fleet = self._usual.fleet(state, outlooks, demand)
        fastest = min(outlooks, key=lambda o: self._usual.step_s(state, o))
        step_s = self._usual.step_s(state, fastest)
        steps = demand.alive_sum * self._width / self._usual.turns
        turn_s = steps * step_s / self._usual.batch(state, fastest)
        cached = sum(o.total for o in outlooks) / max(1.0, len(state.sessions) * self._usual.size)
        again_s = max(0.0, 1.0 - cached) * self._usual.size * fastest.speed.prefill_s
        return self._usual.ends_last(state, step_s, fleet, fleet.done_s * (1.0 + again_s / turn_s))

    def _pays(
        self, state: SchedulerState, outlook: EngineOutlook, demand: KvDemand, fleet: FleetOutlook
    ) -> bool:
        """Whether the rollout saves more time than it costs; an empty engine takes any."""
        if not outlook.demands or outlook.forecast.never_full(demand, outlook.room):
            return True
        steps, lost = outlook.forecast.if_added(demand, outlook.room, CHURN * self._usual.turns)
        speed = outlook.speed
        usual_s = self._usual.step_s(state, outlook)
        saved_s = steps * speed.step_s / self._usual.batch(state, outlook)
        if self._usual.ends_last(state, usual_s, fleet, fleet.done_s):
            saved_s += min(fleet.wait_s, steps * usual_s)
        return saved_s > lost * speed.prefill_s

    def _move(self, state: SchedulerState, name: str, home: str) -> Placement | None:
        """Move a turn to an engine that finishes it much sooner, once no new rollout is left."""
        if len(state.engines) < 2 or state.next_new() is not None:
            return None
        session, here = state.sessions[name], self._outlook(state, home)
        longest = -(-(session.request.limit - session.tokens) // self._width) * self._width
        if longest < self.move_steps:
            return None
        steps = self._demand(session, here).alive_sum * self._width  # the same on every engine
        if steps < self.move_steps:
            return None
        stay = max(steps * here.step_s, here.drain_s)
        if stay < UNEVEN * steps * min(state.speeds[e].step_s for e in state.serving):
            return None  # not even an empty engine would be so much faster
        open_ = _open(state, session.request.limit)
        others = (self._outlook(state, engine) for engine in open_ if engine != home)
        target = min(others, key=lambda o: o.pace, default=None)
        if target is None:
            return None
        demand = self._demand(session, target)
        work = demand.mean_sum * self._width / target.total
        again = session.tokens * target.speed.prefill_s
        there = max(steps * target.step_s, target.drain_s + work * target.step_s) + again
        if stay < UNEVEN * there or target.forecast.now + demand.start > target.room:
            return None
        return self._start(state, name, target, demand)

    def _start(
        self, state: SchedulerState, name: str, outlook: EngineOutlook, demand: KvDemand
    ) -> Placement:
        """Reserve the rollout's part of the peak and start its turn."""
        home = state.sessions[name].engine
        if home is not None:
            self.session_left(state, name, home)
        outlook.forecast.add(demand)
        outlook.refused = None
        budget = outlook.engine.budget
        part = max(1, min(ceil(demand.mean[outlook.forecast.fullest]), budget.total // 2))
        if part > budget.free:
            budget.shrink(budget.total - part)
        placement = state.start(name, outlook.name, min(part, budget.free))
        outlook.demands[name] = demand
        return placement

    # ------------------------------------------------------------------ forecasts

    def _extend_to(self, limit: int) -> None:
        """Extend forecasts to the longest limit seen."""
        if limit > self._width * POINTS:
            self._width = -(-limit // POINTS)

    def _new_demand(self, session: SessionState, outlook: EngineOutlook) -> KvDemand:
        """The demand of a new rollout, whose size is kept as the usual one."""
        demand = self._demand(session, outlook)
        self._usual.size = demand.mean_sum / max(1e-9, demand.alive_sum)
        return demand

    def _demand(self, session: SessionState, outlook: EngineOutlook) -> KvDemand:
        progress = _progress(session, session.completion, outlook)
        block = outlook.engine.budget.capacity.block_tokens
        key = (self.lengths.tables, self._width, block, progress)
        demand = self._kept_demands.get(key)
        if demand is None:
            if len(self._kept_demands) >= KEPT_DEMANDS:
                self._kept_demands.clear()
            demand = self._kept_demands[key] = self._demands([progress], outlook).rows[0]
        return demand

    def _demands(self, rollouts: list[RolloutProgress], outlook: EngineOutlook) -> KvDemand:
        block = outlook.engine.budget.capacity.block_tokens
        return kv_demands(self.lengths, rollouts, width=self._width, block=block)

    def _outlook(self, state: SchedulerState, name: str) -> EngineOutlook:
        """The engine's forecast, recomputed if engine, length table or steps have changed."""
        engine = state.engines[name]
        outlook = self._outlooks.get(name)
        if outlook is None or outlook.engine is not engine:
            outlook = self._outlooks[name] = EngineOutlook(
                name, engine, state.speeds[name], KvForecast(self._width, 0, 0)
            )
        forecast = outlook.forecast
        if (
            self._width != forecast.width
            or engine.steps - forecast.made_at >= forecast.width
            or self.lengths.tables != forecast.table
        ):
            self._recompute(state, outlook)
        return outlook

    def _recompute(self, state: SchedulerState, outlook: EngineOutlook) -> None:
        """Recompute the forecast from the current lengths and redistribute the reservations."""
        engine, old = outlook.engine, outlook.forecast
        forecast = KvForecast(self._width, engine.steps, self.lengths.tables)
        names = list(outlook.demands)
        sessions = [state.sessions[name] for name in names]
        progress = [_progress(s, state.estimated_completion(s), outlook) for s in sessions]
        if names:
            demand = self._demands(progress, outlook)
            outlook.demands = dict(zip(names, demand.rows, strict=True))
            forecast.add(demand.total)
            budget = engine.budget
            available = budget.total - len(names)  # every session keeps at least one token
            factor = min(1.0, available / max(1.0, forecast.peak_mean))
            parts = np.maximum(1, (factor * demand.mean[:, forecast.fullest]).astype(int)).tolist()
            budget.revise(dict(zip(names, parts, strict=True)))
        outlook.forecast, outlook.refused = forecast, None
        outlook.excess = max(0.0, outlook.excess - max(0.0, forecast.now - old.now))

    # ------------------------------------------------------------------ making room

    def _evict_expired(self, state: SchedulerState, now: float) -> bool:
        """Evict sessions whose tools run for longer than pays, where the cache is short."""
        evicted = False
        kept: list[tuple[float, str]] = []
        short: dict[str, bool] = {}
        while self._idle:
            since, name = self._idle[0]
            session = state.sessions.get(name)
            idle = session is not None and session.phase is Phase.HOLDING
            if session is not None and idle and session.holding_since == since:
                home = session.engine
                if home is not None and home not in short:
                    short[home] = self._short(state, home)
                if home is not None and not short[home]:
                    kept.append((since, name))
                elif home is not None:
                    fill_s = state.speeds[home].prefill_s * state.engines[home].budget.total
                    if since + state.waits.hold_s(fill_s, self.hold_s) > now:
                        break
                    self._evict(state, name)
                    del short[home]
                    evicted = True
            self._idle.popleft()
        self._idle.extendleft(reversed(kept))
        return evicted

    def _short(self, state: SchedulerState, name: str) -> bool:
        """Whether the engine is expected to need most of its cache."""
        outlook = self._outlook(state, name)
        return outlook.forecast.peak_mean > SHORT * outlook.room

    def _evict(self, state: SchedulerState, name: str) -> None:
        engine = state.sessions[name].engine
        assert engine is not None
        state.evict(name)
        self.session_left(state, name, engine)


def _open(state: SchedulerState, limit: int) -> list[str]:
    """The engines with a sequence slot that could hold a rollout of this length alone."""
    engines = state.engines
    return [n for n in state.serving if (e := engines[n]).has_slot and limit <= e.budget.total]


def _progress(session: SessionState, completion: int, outlook: EngineOutlook) -> RolloutProgress:
    shared = int(SHARING_TRUST * outlook.sharing * session.first_prompt)
    return RolloutProgress(session.first_prompt, completion, session.request.limit, shared)
