"""A step's rollouts through the real scheduler and modelled engines, by discrete events.

    scheduler.decide ──> engine.add ... engine.boundary ──> scheduler.turn_ended
          ^                                                       │
          └──── scheduler.submit <──── tools (their latency) <────┘

Deterministic: events at equal times are taken in the order in which they were made, and nothing
is drawn here. Every rollout ends exactly once, or the simulation raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from rstar2.config import SchedulerConfig
from rstar2.errors import InvariantError
from rstar2.rollout.scheduler import Request, Scheduler
from rstar2.rollout.simulate.engine import Outcome, SimulatedEngine
from rstar2.rollout.simulate.engine import Sequence as EngineSequence
from rstar2.rollout.simulate.workload import RolloutPlan, Workload
from rstar2.rollout.timeline import Span

REPORT_S = 1.0
"""How often engines tell their load, as metrics are polled."""


@dataclass(frozen=True, slots=True)
class Fault:
    """At `time` the engine dies; at `back` it serves again."""

    time: float
    engine: int
    back: float = inf


@dataclass(slots=True)
class _Rollout:
    """How far a rollout has come."""

    plan: RolloutPlan
    turn: int = 0
    held: int = 0
    computed: int = 0
    asked: float = 0.0
    sequence: EngineSequence | None = None
    ended: float | None = None


@dataclass(slots=True)
class Observed:
    """What was seen during a simulation."""

    waits: list[float] = field(default_factory=list)
    """Per turn: from asking to the first of its tokens being computed."""
    moves: int = 0
    evictions: int = 0
    turns: int = 0
    spans: list[Span] = field(default_factory=list)


class Simulation:
    """One policy, one workload."""

    def __init__(
        self,
        workload: Workload,
        config: SchedulerConfig,
        *,
        scheduler: Scheduler | None = None,
        faults: Iterable[Fault] = (),
        spans: bool = False,
    ) -> None:
        self.workload = workload
        self.scheduler = scheduler or Scheduler(config)
        self.engines = [
            SimulatedEngine(f"engine-{i}", workload.model) for i in range(workload.engines)
        ]
        self.now = 0.0
        self.observed = Observed()
        self._by_name = {engine.name: engine for engine in self.engines}
        self._spans = spans
        self._open: dict[str, tuple[str, str, float]] = {}
        self._rollouts = {plan.id: _Rollout(plan) for plan in workload.rollouts}
        if len(self._rollouts) != len(workload.rollouts):
            raise InvariantError("two rollouts have one name")
        self._left = len(self._rollouts)
        self._order = count()
        self._events: list[tuple[float, int, str, str]] = []
        for fault in faults:
            name = self.engines[fault.engine].name
            self._at(fault.time, "die", name)
            if fault.back < inf:
                self._at(fault.back, "back", name)

    def run(self) -> None:
        """Until every rollout has ended."""
        for engine in self.engines:
            if engine.name not in self.scheduler.engines:
                self._join(engine.name)
        for rollout in self._rollouts.values():
            rollout.held = rollout.plan.prompt
            self._submit(rollout)
        self._at(REPORT_S, "report", "")
        self._decide()
        while self._left:
            self._round()

    def _round(self) -> None:
        """Everything that happens at the next point in time, then the decisions."""
        time = self._events[0][0]
        self.now = time
        while self._events and self._events[0][0] <= time:
            _, _, kind, name = heappop(self._events)
            match kind:
                case "boundary":
                    if self._by_name[name].next_time <= time:
                        self._boundary(self._by_name[name])
                case "tools":
                    self._submit(self._rollouts[name])
                case "report":
                    self._report()
                case "die":
                    self._die(name)
                case "back":
                    self._join(name)
        self._decide()

    # ------------------------------------------------------------------ events

    def _at(self, time: float, kind: str, name: str) -> None:
        heappush(self._events, (time, next(self._order), kind, name))

    def _join(self, name: str) -> None:
        capacity = self.workload.model.capacity(self.workload.max_length)
        self.scheduler.join(name, capacity, 0)

    def _submit(self, rollout: _Rollout) -> None:
        plan = rollout.plan
        rollout.asked = self.now
        self._mark(plan.id, "queued", "")
        request = Request(plan.id, plan.group, rollout.held, plan.limit - rollout.held)
        self.scheduler.submit(request)

    def _decide(self) -> None:
        decision = self.scheduler.decide(self.now)
        for eviction in decision.evictions:
            self._by_name[eviction.engine].release(eviction.session)
        self.observed.evictions += len(decision.evictions)
        for placement in decision.placements:
            self.observed.moves += placement.moved
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
                self._at(engine.next_time, "boundary", engine.name)

    def _boundary(self, engine: SimulatedEngine) -> None:
        outcome = engine.boundary(self.now)
        for sequence in outcome.finished:
            self._finished(self._rollouts[sequence.session], sequence)
        self._mark_outcome(engine, outcome)
        if engine.next_time < inf:
            self._at(engine.next_time, "boundary", engine.name)

    def _finished(self, rollout: _Rollout, sequence: EngineSequence) -> None:
        """A turn has ended on its engine."""
        plan, turn = rollout.plan, rollout.plan.turns[rollout.turn]
        last = rollout.turn == len(plan.turns) - 1
        rollout.held += turn.sampled
        rollout.computed = sequence.computed
        rollout.sequence = None
        self.observed.turns += 1
        self.observed.waits.append(sequence.admitted_at - rollout.asked)
        truncated = last and plan.truncated
        self.scheduler.turn_ended(plan.id, rollout.held, truncated=truncated, now=self.now)
        if last:
            self._end(rollout)
            return
        self._mark(plan.id, "tool", "")
        rollout.held += turn.response
        rollout.turn += 1
        self._at(self.now + turn.tool_s, "tools", plan.id)

    def _end(self, rollout: _Rollout) -> None:
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
            self.scheduler.reported(name, self._by_name[name].load(self.now))
        self._at(self.now + REPORT_S, "report", "")

    def _die(self, name: str) -> None:
        """An engine dies: turns on it run again elsewhere, from their beginning."""
        lost = {sequence.session for sequence in self._by_name[name].die()}
        handed_back = self.scheduler.engine_lost(name)
        if lost != set(handed_back):
            raise InvariantError(f"{name} lost {len(lost)} turns, {len(handed_back)} came back")
        for session in handed_back:
            rollout = self._rollouts[session]
            assert rollout.sequence is not None
            rollout.computed = max(rollout.computed, rollout.sequence.computed)
            rollout.sequence = None
            self._mark(session, "queued", "")

    # ------------------------------------------------------------------ what was seen

    def _mark(self, session: str, state: str, engine: str) -> None:
        """The session is in another state from now on."""
        if not self._spans:
            return
        before = self._open.pop(session, None)
        if before is not None and self.now > before[2]:
            old_state, old_engine, start = before
            self.observed.spans.append(Span(old_engine, session, old_state, start, self.now))
        if state:
            self._open[session] = (state, engine or (before[1] if before else ""), self.now)

    def _mark_outcome(self, engine: SimulatedEngine, outcome: Outcome) -> None:
        if not self._spans:
            return
        for sequence in outcome.preempted:
            self._mark(sequence.session, "preempted", engine.name)
        for sequence in outcome.admitted:
            self._mark(sequence.session, "generating", engine.name)

    @property
    def ends(self) -> dict[str, float]:
        """When each rollout ended."""
        return {name: r.ended for name, r in self._rollouts.items() if r.ended is not None}


def simulate(
    workload: Workload, config: SchedulerConfig, *, faults: Sequence[Fault] = ()
) -> Simulation:
    """Run a workload under a policy to its end."""
    simulation = Simulation(workload, config, faults=faults)
    simulation.run()
    return simulation
