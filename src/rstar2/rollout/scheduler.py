"""Decides which waiting turn runs on which engine: pure, over plain state, no I/O, no clock.

The same object drives a real run (`fleet.py` carries out its decisions) and a simulation. Its
methods are events (a turn is submitted or has ended, an engine has died or reported its load);
`decide` returns what to start. `state.py` draws the life of a session and keeps the invariants
that hold under every policy. `reserve.py` is our policy; `policies.py` has those to compare with.

Invariants under every policy:
- A session is in exactly one phase. Each of its turns is placed once, or again after its engine
  was lost.
- Reserved KV never exceeds an engine's cache, and each reservation is released once (`KvBudget`).
- Engines that serve other weights than the required ones, or that are draining, get no turns.
"""

from __future__ import annotations

from dataclasses import dataclass

from rstar2.config import SchedulerConfig
from rstar2.errors import EngineError, InvariantError
from rstar2.rollout.forecast import LengthModel
from rstar2.rollout.policies import make_policy
from rstar2.rollout.speed import EngineSpeed
from rstar2.rollout.state import (
    EngineState,
    Eviction,
    KvBudget,
    Phase,
    Placement,
    SchedulerState,
    SessionState,
    TurnRequest,
)
from rstar2.types import EngineCapacity, EngineLoad, WeightVersion

__all__ = ["Decision", "Eviction", "Phase", "Placement", "Scheduler", "TurnRequest"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. Carry out the evictions first."""

    placements: tuple[Placement, ...] = ()
    evictions: tuple[Eviction, ...] = ()


class Scheduler:
    """Takes events and returns decisions; the policy comes from the configuration."""

    def __init__(self, config: SchedulerConfig, lengths: LengthModel | None = None) -> None:
        self.config = config
        self.lengths = lengths or LengthModel()
        self.state = SchedulerState()
        self.policy = make_policy(config, self.lengths)
        self._groups: dict[str, int] = {}
        self._group_sizes: dict[str, int] = {}
        self._ordinal = 0
        self._largest: int | None = None
        """KV tokens of the largest engine; None while there is no engine."""
        self._unmeasured: set[str] = set()
        """Engines whose speed is not known yet; they are taken to be as fast as another one."""

    # ------------------------------------------------------------------ engines

    def join(self, engine: str, capacity: EngineCapacity, version: WeightVersion) -> None:
        """An engine has started. It gets turns once it serves the required weights."""
        if engine in self.state.engines:
            raise InvariantError(f"engine {engine} joined twice")
        self.state.engines[engine] = EngineState(KvBudget(capacity), version)
        self.state.engines_changed()
        self.state.speeds[engine] = EngineSpeed()
        self._unmeasured.add(engine)
        self._assume_speeds()
        self._largest = max(self._largest or 0, self.state.engines[engine].budget.total)

    def weights_updated(self, engine: str, version: WeightVersion) -> None:
        """The engine now serves these weights."""
        self.state.engines[engine].version = version
        self.state.engines_changed()

    def require(self, version: WeightVersion) -> None:
        """Only engines that serve `version` get turns from now on."""
        self.state.version = version
        self.state.engines_changed()

    def drain(self, engine: str) -> None:
        """The engine finishes its turns and gets no new ones; call `engine_lost` afterwards."""
        self.state.engines[engine].draining = True
        self.state.engines_changed()

    def engine_lost(self, engine: str) -> tuple[str, ...]:
        """The engine died or was removed: its reservations end, its running turns wait again.

        Returns the sessions whose turns were returned to the queue. A second call does nothing.
        """
        if engine not in self.state.engines:
            return ()
        self._unmeasured.discard(engine)
        handed_back = tuple(self.state.remove_engine(engine))
        totals = [e.budget.total for e in self.state.engines.values()]
        self._largest = max(totals, default=None)
        return handed_back

    def _assume_speeds(self) -> None:
        """Until an engine has been measured it counts as fast as another: only work measures it."""
        if not self._unmeasured:
            return
        speeds = self.state.speeds
        self._unmeasured = {name for name in self._unmeasured if not speeds[name].learnt}
        known = next((speeds[name] for name in self.state.engines if speeds[name].learnt), None)
        if known is not None:
            for name in self._unmeasured:
                speeds[name].assume(known)

    def load_reported(self, engine: str, load: EngineLoad, now: float = 0.0) -> None:
        """An engine reported its load. Reports of unknown (lost) engines are ignored."""
        if engine in self.state.engines:
            self.state.speeds[engine].report(load, now)
            self._assume_speeds()
            self.policy.load_reported(self.state, engine, load)

    # ------------------------------------------------------------------ sessions

    def submit(self, request: TurnRequest, now: float = 0.0) -> None:
        """Queue a turn: the session's first, or the next one after its tools returned."""
        largest = self._largest
        if largest is not None and request.limit > largest:
            raise EngineError(
                f"rollout {request.session} may need {request.limit} KV tokens, but the largest "
                f"engine holds {largest}: raise engine.kv_tokens or lower max_length"
            )
        session = self.state.sessions.get(request.session)
        if session is None:
            group = self._groups.setdefault(request.group, self._ordinal)
            self._group_sizes[request.group] = self._group_sizes.get(request.group, 0) + 1
            session = SessionState(request, (group, self._ordinal), request.prompt_tokens)
            self._ordinal += 1
            self.state.sessions[request.session] = session
        elif session.phase is not Phase.HOLDING:
            raise InvariantError(f"{request.session} submitted while it is {session.phase.name}")
        elif session.intact:
            self.state.waits.observe(now - session.holding_since)
        session.request = request
        session.tokens = request.prompt_tokens
        self.state.enqueue(request.session)

    def turn_ended(
        self, name: str, tokens: int, *, truncated: bool = False, now: float = 0.0
    ) -> None:
        """The turn has ended and the session has `tokens`; it keeps its reservation for now."""
        session = self.state.sessions.get(name)
        if session is None or session.phase is not Phase.RUNNING or session.engine is None:
            raise InvariantError(f"{name} ended a turn that was not running")
        engine = self.state.engines[session.engine]
        engine.turn_ended(session.start_step + tokens - session.request.prompt_tokens)
        session.tokens, session.truncated = tokens, truncated
        self.state.hold(name, now)
        self.policy.turn_ended(self.state, name)

    def turn_failed(self, name: str) -> None:
        """The turn ended without a result (error, deadline, cancelled); the reservation stays."""
        self.state.sessions[name].intact = False
        self.state.hold(name, 0.0)

    def end(self, name: str) -> str | None:
        """End the rollout; returns the engine that may free its prefix. Idempotent."""
        session = self.state.sessions.get(name)
        if session is None:
            return None
        if session.intact and session.begun and session.phase is Phase.HOLDING:
            self.lengths.observe(session.completion, truncated=session.truncated)
        self.state.release_home(name)
        del self.state.sessions[name]
        if session.engine is not None:
            self.policy.session_left(self.state, name, session.engine)
        group = session.request.group
        self._group_sizes[group] -= 1
        if not self._group_sizes[group]:
            del self._group_sizes[group], self._groups[group]
        return session.engine

    # ------------------------------------------------------------------ decisions

    def decide(self, now: float = 0.0) -> Decision:
        """All turns that may start now, and the evictions that make room for them."""
        placements = tuple(self.policy.decide(self.state, now))
        evictions, self.state.evictions = tuple(self.state.evictions), []
        return Decision(placements, evictions)

    # ------------------------------------------------------------------ queries

    @property
    def version(self) -> WeightVersion:
        return self.state.version

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(self.state.engines)

    def knows(self, engine: str) -> bool:
        """Whether the engine has joined and has not been lost since."""
        return engine in self.state.engines

    @property
    def waiting(self) -> int:
        return sum(s.phase is Phase.WAITING for s in self.state.sessions.values())

    def running(self, engine: str) -> int:
        return len(self.state.engines[engine].running)

    def budget(self, engine: str) -> KvBudget:
        return self.state.engines[engine].budget

    def phase(self, session: str) -> Phase | None:
        """The session's phase; None if it is unknown or has ended."""
        known_session = self.state.sessions.get(session)
        return None if known_session is None else known_session.phase

    def engine_of(self, session: str) -> str | None:
        """The engine that holds the session's prefix; None if there is none."""
        known_session = self.state.sessions.get(session)
        return None if known_session is None else known_session.engine
