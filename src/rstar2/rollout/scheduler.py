"""Which waiting turn goes to which engine now: decided over plain state, without I/O or clock.

The same object drives a real run (`fleet.py` turns its decisions into calls) and a simulation.
It takes events (a turn is submitted, has ended, an engine has died, has told its load) and
answers with decisions. `state.py` draws what a session goes through and keeps the promises that
hold under every policy; `reserve.py` is our policy, `policies.py` are those to compare with.

Invariants, whatever the policy:
- A session is in one phase; each of its turns is placed once, or again after its engine was lost.
- Reserved KV never exceeds an engine's cache and is released once (`kv_budget.py`).
- Engines with other weights than the required ones, and those that are leaving, get nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from rstar2.config import SchedulerConfig
from rstar2.errors import EngineError, InvariantError
from rstar2.rollout.kv_budget import KvBudget
from rstar2.rollout.lengths import LengthModel
from rstar2.rollout.policies import make_policy
from rstar2.rollout.state import (
    EngineState,
    Eviction,
    Phase,
    Placement,
    Request,
    Session,
    State,
)
from rstar2.types import EngineCapacity, EngineLoad, WeightVersion

__all__ = ["Decision", "Eviction", "Phase", "Placement", "Request", "Scheduler"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now; evictions come first."""

    placements: tuple[Placement, ...] = ()
    evictions: tuple[Eviction, ...] = ()


class Scheduler:
    """Every method is an event; `decide` answers what may start."""

    def __init__(self, config: SchedulerConfig, lengths: LengthModel | None = None) -> None:
        self.config = config
        self.lengths = lengths or LengthModel()
        self.state = State()
        self.policy = make_policy(config, self.lengths)
        self._groups: dict[str, int] = {}
        self._group_sizes: dict[str, int] = {}
        self._ordinal = 0
        self._largest: int | None = None
        """KV of the largest engine; None while there is none."""

    # ------------------------------------------------------------------ engines

    def join(self, engine: str, capacity: EngineCapacity, version: WeightVersion) -> None:
        """An engine can take work, as far as its version is the required one."""
        if engine in self.state.engines:
            raise InvariantError(f"engine {engine} joined twice")
        self.state.engines[engine] = EngineState(KvBudget(capacity), version)
        self._largest = max(self._largest or 0, self.state.engines[engine].budget.total)

    def updated(self, engine: str, version: WeightVersion) -> None:
        """The engine now serves these weights."""
        self.state.engines[engine].version = version

    def require(self, version: WeightVersion) -> None:
        """From now on only engines that serve `version` get turns."""
        self.state.version = version

    def leave(self, engine: str) -> None:
        """The engine is to go: it ends its turns and gets no others; then call `engine_lost`."""
        self.state.engines[engine].leaving = True

    def engine_lost(self, engine: str) -> tuple[str, ...]:
        """The engine died or left: its reservations end, its running turns wait again.

        Returns the sessions whose turns were handed back. A second call does nothing.
        """
        if engine not in self.state.engines:
            return ()
        handed_back = tuple(self.state.lose(engine))
        left = [e.budget.total for e in self.state.engines.values()]
        self._largest = max(left, default=None)
        return handed_back

    def reported(self, engine: str, load: EngineLoad) -> None:
        """An engine has told its load; one that is gone by now is not listened to."""
        if engine in self.state.engines:
            self.policy.reported(self.state, engine, load)

    # ------------------------------------------------------------------ sessions

    def submit(self, request: Request) -> None:
        """A turn wants to run: the session's first, or the next after a tool's wait."""
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
            session = Session(request, (group, self._ordinal), request.prompt_tokens)
            self._ordinal += 1
            self.state.sessions[request.session] = session
        elif session.phase is not Phase.HOLDING:
            raise InvariantError(f"{request.session} submitted while it is {session.phase.name}")
        session.request = request
        session.tokens = request.prompt_tokens
        self.state.wait(request.session)

    def turn_ended(
        self, name: str, tokens: int, *, truncated: bool = False, now: float = 0.0
    ) -> None:
        """The turn is over and the session holds `tokens`; it keeps its reservation for now."""
        session = self.state.sessions.get(name)
        if session is None or session.phase is not Phase.RUNNING or session.engine is None:
            raise InvariantError(f"{name} ended a turn that was not running")
        engine = self.state.engines[session.engine]
        engine.pulse = max(
            engine.pulse, session.started_at + tokens - session.request.prompt_tokens
        )
        session.tokens, session.truncated = tokens, truncated
        self.state.hold(name, now)
        self.policy.held(self.state, name)

    def turn_failed(self, name: str, *, now: float = 0.0) -> None:
        """The turn ended without a result (error, deadline, cancelled): hold what it held."""
        self.state.sessions[name].whole = False
        self.state.hold(name, now)

    def end(self, name: str) -> str | None:
        """The rollout is over: returns the engine whose cache may forget it. Idempotent."""
        session = self.state.sessions.get(name)
        if session is None:
            return None
        if session.whole and session.begun and session.phase is Phase.HOLDING:
            self.lengths.observe(session.completion, truncated=session.truncated)
        self.state.leave_home(name)
        del self.state.sessions[name]
        if session.engine is not None:
            self.policy.left(self.state, name, session.engine)
        group = session.request.group
        self._group_sizes[group] -= 1
        if not self._group_sizes[group]:
            del self._group_sizes[group], self._groups[group]
        return session.engine

    # ------------------------------------------------------------------ decisions

    def decide(self, now: float = 0.0) -> Decision:
        """Everything that may start now, and what has to make room for it."""
        placements = tuple(self.policy.decide(self.state, now))
        evictions, self.state.evictions = tuple(self.state.evictions), []
        return Decision(placements, evictions)

    # ------------------------------------------------------------------ what can be seen

    @property
    def version(self) -> WeightVersion:
        return self.state.version

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(self.state.engines)

    def knows(self, engine: str) -> bool:
        """Whether the engine has joined and was not lost since."""
        return engine in self.state.engines

    @property
    def waiting(self) -> int:
        return sum(s.phase is Phase.WAITING for s in self.state.sessions.values())

    def stale(self, engine: str) -> bool:
        """Whether the engine is known but serves other weights than required."""
        found = self.state.engines.get(engine)
        return found is not None and found.version != self.state.version

    def running(self, engine: str) -> int:
        return len(self.state.engines[engine].running)

    def budget(self, engine: str) -> KvBudget:
        return self.state.engines[engine].budget

    def phase(self, session: str) -> Phase | None:
        """Where a session stands; None if it is unknown or over."""
        found = self.state.sessions.get(session)
        return None if found is None else found.phase

    def engine_of(self, session: str) -> str | None:
        """Who holds the session's prefix."""
        found = self.state.sessions.get(session)
        return None if found is None else found.engine
