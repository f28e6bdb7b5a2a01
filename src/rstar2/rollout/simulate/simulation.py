"""Discrete-event simulation: one RL step's rollouts, the real scheduler, simulated engines.

    scheduler.decide ──> engine.add ... engine.finish_steps ──> scheduler.turn_ended
          ^                                                           │
          └────── scheduler.submit <────── tools (their latency) <────┘

Deterministic: events at equal times are handled in the order of their creation, and there are no
random draws. Every rollout ends exactly once, or the simulation raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from rstar2.config import SchedulerConfig
from rstar2.errors import InvariantError
from rstar2.rollout.scheduler import Scheduler, TurnRequest
from rstar2.rollout.simulate.engine import EngineSequence, SimulatedEngine, StepEvents
from rstar2.rollout.simulate.workload import RolloutPlan, Workload
from rstar2.rollout.timeline import TimelineSpan

REPORT_S = 1.0
"""Interval of the engines' load reports, as when metrics are polled."""


@dataclass(slots=True)
class _SimulatedRollout:
    """The progress of one rollout."""

    plan: RolloutPlan
    turn: int = 0
    held: int = 0
    computed: int = 0
    asked: float = 0.0
    sequence: EngineSequence | None = None
    ended: float | None = None


@dataclass(slots=True)
class SimulationLog:
    """What a simulation recorded."""

    waits: list[float] = field(default_factory=list)
    """Per turn: seconds from the request to the start of its computation."""
    moves: int = 0
    evictions: int = 0
    turns: int = 0
    first_s: dict[str, float] = field(default_factory=dict)
    """Per rollout: seconds until its first turn had ended."""
    spans: list[TimelineSpan] = field(default_factory=list)


class Simulation:
    """One workload under one policy."""

    def __init__(
        self,
        workload: Workload,
        config: SchedulerConfig,
        *,
        scheduler: Scheduler | None = None,
        spans: bool = False,
        report_s: float = REPORT_S,
    ) -> None:
        self.workload = workload
        self.scheduler = scheduler or Scheduler(config)
        self.engines = [
            SimulatedEngine(f"engine-{i}", model) for i, model in enumerate(workload.engines)
        ]
        self.now = 0.0
        self.log = SimulationLog()
        self._by_name = {engine.name: engine for engine in self.engines}
        self._spans = spans
        self._report_s = report_s
        self._open: dict[str, tuple[str, str, float]] = {}
        self._rollouts = {plan.id: _SimulatedRollout(plan) for plan in workload.rollouts}
        if len(self._rollouts) != len(workload.rollouts):
            raise InvariantError("two rollouts have the same id")
        self._left = len(self._rollouts)
        self._order = count()
        self._events: list[tuple[float, int, str, str]] = []
        for crash in workload.crashes:
            name = self.engines[crash.engine].name
            self._at(crash.time, "crash", name)
            if crash.restart < inf:
                self._at(crash.restart, "restart", name)

    def run(self) -> None:
        """Run until every rollout has ended."""
        for engine in self.engines:
            if engine.name not in self.scheduler.engines:
                self._join(engine.name)
        for rollout in self._rollouts.values():
            rollout.held = rollout.plan.prompt
            self._submit(rollout)
        self._at(self._report_s, "report", "")
        self._decide()
        while self._left:
            self._next_events()

    def _next_events(self) -> None:
        """Handle all events of the next point in time, then decide."""
        time = self._events[0][0]
        self.now = time
        while self._events and self._events[0][0] <= time:
            _, _, kind, name = heappop(self._events)
            match kind:
                case "steps":
                    if self._by_name[name].next_time <= time:
                        self._finish_steps(self._by_name[name])
                case "tools":
                    self._submit(self._rollouts[name])
                case "report":
                    self._report()
                case "crash":
                    self._crash(name)
                case "restart":
                    self._join(name)
        self._decide()

    # ------------------------------------------------------------------ events

    def _at(self, time: float, kind: str, name: str) -> None:
        heappush(self._events, (time, next(self._order), kind, name))

    def _join(self, name: str) -> None:
        capacity = self._by_name[name].model.capacity(self.workload.max_length)
        self.scheduler.join(name, capacity, 0)

    def _submit(self, rollout: _SimulatedRollout) -> None:
        plan = rollout.plan
        rollout.asked = self.now
        self._mark(plan.id, "queued", "")
        request = TurnRequest(plan.id, plan.group, rollout.held, plan.limit - rollout.held)
        self.scheduler.submit(request, self.now)

    def _decide(self) -> None:
        decision = self.scheduler.decide(self.now)
        for eviction in decision.evictions:
            self._by_name[eviction.engine].release(eviction.session)
        self.log.evictions += len(decision.evictions)
        for placement in decision.placements:
            self.log.moves += placement.moved
            rollout = self._rollouts[placement.session]
            plan = rollout.plan
            rollout.sequence = EngineSequence(
                plan.id,
                plan.group,
                rollout.held,
                plan.turns[rollout.turn].sampled,
                plan.prompt,
                rollout.computed,
            )
            self._mark(plan.id, "queued", placement.engine)
            engine = self._by_name[placement.engine]
            before = engine.next_time
            engine.add(rollout.sequence, self.now)
            if engine.next_time != before:
                self._at(engine.next_time, "steps", engine.name)

    def _finish_steps(self, engine: SimulatedEngine) -> None:
        events = engine.finish_steps(self.now)
        for sequence in events.finished:
            self._finished(self._rollouts[sequence.session], sequence)
        self._mark_events(engine, events)
        if engine.next_time < inf:
            self._at(engine.next_time, "steps", engine.name)

    def _finished(self, rollout: _SimulatedRollout, sequence: EngineSequence) -> None:
        """A turn has finished on its engine."""
        plan, turn = rollout.plan, rollout.plan.turns[rollout.turn]
        last = rollout.turn == len(plan.turns) - 1
        rollout.held += turn.sampled
        rollout.computed = sequence.computed
        rollout.sequence = None
        self.log.turns += 1
        self.log.waits.append(sequence.admitted_at - rollout.asked)
        self.log.first_s.setdefault(plan.id, self.now)
        truncated = last and plan.truncated
        self.scheduler.turn_ended(plan.id, rollout.held, truncated=truncated, now=self.now)
        if last:
            self._end(rollout)
            return
        self._mark(plan.id, "tool", "")
        rollout.held += turn.response
        rollout.turn += 1
        self._at(self.now + turn.tool_s, "tools", plan.id)

    def _end(self, rollout: _SimulatedRollout) -> None:
        if rollout.ended is not None:
            raise InvariantError(f"{rollout.plan.id} ended twice")
        rollout.ended = self.now
        self._left -= 1
        self._mark(rollout.plan.id, "", "")
        engine = self.scheduler.end(rollout.plan.id)
        if engine is not None:
            self._by_name[engine].release(rollout.plan.id)

    def _report(self) -> None:
        for name in self.scheduler.engines:
            self.scheduler.load_reported(name, self._by_name[name].load(self.now), self.now)
        self._at(self.now + self._report_s, "report", "")

    def _crash(self, name: str) -> None:
        """An engine crashes: its turns run again on other engines, from their beginning."""
        lost = {sequence.session for sequence in self._by_name[name].crash()}
        handed_back = self.scheduler.engine_lost(name)
        if lost != set(handed_back):
            raise InvariantError(
                f"{name} lost {len(lost)} turns, the scheduler returned {len(handed_back)}"
            )
        for session in handed_back:
            rollout = self._rollouts[session]
            assert rollout.sequence is not None
            rollout.computed = max(rollout.computed, rollout.sequence.computed)
            rollout.sequence = None
            self._mark(session, "queued", "")

    # ------------------------------------------------------------------ log

    def _mark(self, session: str, state: str, engine: str) -> None:
        """Record that the session enters a state now; an empty state ends it."""
        if not self._spans:
            return
        before = self._open.pop(session, None)
        if before is not None and self.now > before[2]:
            old_state, old_engine, start = before
            self.log.spans.append(TimelineSpan(old_engine, session, old_state, start, self.now))
        if state:
            self._open[session] = (state, engine or (before[1] if before else ""), self.now)

    def _mark_events(self, engine: SimulatedEngine, events: StepEvents) -> None:
        if not self._spans:
            return
        for sequence in events.preempted:
            self._mark(sequence.session, "preempted", engine.name)
        for sequence in events.admitted:
            self._mark(sequence.session, "generating", engine.name)

    @property
    def ends(self) -> dict[str, float]:
        """The time at which each rollout ended."""
        return {name: r.ended for name, r in self._rollouts.items() if r.ended is not None}


def simulate(workload: Workload, config: SchedulerConfig) -> Simulation:
    """Simulate a workload under a policy to its end."""
    simulation = Simulation(workload, config)
    simulation.run()
    return simulation
