"""Which waiting turn goes to which engine now: decided over plain state, without I/O or clock.

The same object drives a real run (`fleet.py` turns its decisions into calls) and a simulation.

    submit ──> waiting ──decide──> running ──turn_ended──> holding (the tool works)
                  ^                   │                        │  │
                  │<── engine_lost ───┘                        │  └──end──> gone
                  └────────────────── submit ──────────────────┘

A rollout is a *session*: a sequence of turns with tool calls between them. It reserves KV for its
whole expected length on one engine when its first turn is placed, keeps the reservation while a
tool works (the prefix stays cached), and gives it back once, at its end.

Rules, in the order in which they are applied:

1. The tokens reserved on an engine never exceed its capacity (`KvBudget`), nor its running turns
   the sequences it can batch. Engines with other weights than the required ones get nothing.
2. Turns of begun rollouts come before new rollouts, older rollouts before younger ones. While a
   begun rollout waits for KV, no new one is admitted: nothing overtakes its way to the end.
3. New rollouts enter in the order of their groups, so that groups finish together.
4. A turn runs where its prefix is, if its (re-estimated) reservation fits there, and waits there
   for a sequence slot: slots free sooner than a prefix is computed again. Where it does not fit, it
   moves to the engine with the largest free share; else it waits.
5. A tool's wait keeps the reservation until the engine would stand idle for it: when nothing runs
   on an engine, idle reservations of younger rollouts give way to an older waiting turn.

No starvation follows from 2, 3 and 5: the oldest rollout is never overtaken on its way, and once
nothing runs on its engine it can displace every idle reservation there, so it gets to run; ages
are fixed at the first submit, so each rollout becomes the oldest after finitely many others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush

from rstar2.config import SchedulerConfig
from rstar2.errors import EngineError, InvariantError
from rstar2.rollout.kv_budget import KvBudget
from rstar2.rollout.lengths import LengthModel
from rstar2.types import EngineCapacity, WeightVersion


@dataclass(frozen=True, slots=True)
class Request:
    """A turn that wants to run. `prompt_tokens` is everything up to the turn's first new token."""

    session: str
    group: str
    prompt_tokens: int
    max_new_tokens: int

    @property
    def limit(self) -> int:
        return self.prompt_tokens + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class Placement:
    """Run the session's turn on `engine` now. `moved`: its prefix was cached elsewhere."""

    session: str
    engine: str
    reserved: int
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Eviction:
    """The session's reservation on `engine` is gone: its cached prefix should go too."""

    session: str
    engine: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now; evictions come first."""

    placements: tuple[Placement, ...] = ()
    evictions: tuple[Eviction, ...] = ()


class Phase(Enum):
    """Where a session stands."""

    WAITING = auto()
    RUNNING = auto()
    HOLDING = auto()


@dataclass(slots=True)
class _Session:
    request: Request
    rank: tuple[int, int]
    """(group's ordinal, own ordinal): smaller is older."""
    first_prompt: int
    phase: Phase = Phase.WAITING
    engine: str | None = None
    """Who holds its reservation."""
    begun: bool = False
    tokens: int = 0
    truncated: bool = False
    whole: bool = True
    """False after a turn without a result: such a session teaches nothing about lengths."""


@dataclass(slots=True)
class _Engine:
    budget: KvBudget
    version: WeightVersion
    running: set[str] = field(default_factory=set)


class Scheduler:
    """Admission by reserved KV. Every method is an event; `decide` answers what may start."""

    def __init__(self, config: SchedulerConfig, lengths: LengthModel | None = None) -> None:
        self.config = config
        self.lengths = lengths or LengthModel(config.quantile)
        self.version: WeightVersion = 0
        """The weights that engines must serve; others are stale."""
        self._engines: dict[str, _Engine] = {}
        self._sessions: dict[str, _Session] = {}
        self._groups: dict[str, int] = {}
        self._group_sizes: dict[str, int] = {}
        self._ordinal = 0
        self._begun: list[tuple[tuple[int, int], str]] = []
        self._new: list[tuple[tuple[int, int], str]] = []
        self._evictions: list[Eviction] = []

    # ------------------------------------------------------------------ engines

    def join(self, engine: str, capacity: EngineCapacity, version: WeightVersion) -> None:
        """An engine can take work, as far as its version is the required one."""
        if engine in self._engines:
            raise InvariantError(f"engine {engine} joined twice")
        self._engines[engine] = _Engine(KvBudget(capacity), version)

    def updated(self, engine: str, version: WeightVersion) -> None:
        """The engine now serves these weights."""
        self._engines[engine].version = version

    def require(self, version: WeightVersion) -> None:
        """From now on only engines that serve `version` get turns."""
        self.version = version

    def engine_lost(self, engine: str) -> tuple[str, ...]:
        """The engine died or left: its reservations end, its running turns wait again.

        Returns the sessions whose turns were handed back. A second call does nothing.
        """
        lost = self._engines.pop(engine, None)
        if lost is None:
            return ()
        for name in lost.budget.sessions:
            self._sessions[name].engine = None
        handed_back = sorted(lost.running, key=lambda name: self._sessions[name].rank)
        for name in handed_back:
            self._wait(name)
        return tuple(handed_back)

    # ------------------------------------------------------------------ sessions

    def submit(self, request: Request) -> None:
        """A turn wants to run: the session's first, or the next after a tool's wait."""
        largest = max((e.budget.total for e in self._engines.values()), default=None)
        if largest is not None and request.limit > largest:
            raise EngineError(
                f"rollout {request.session} may need {request.limit} KV tokens, but the largest "
                f"engine holds {largest}: raise engine.kv_tokens or lower max_length"
            )
        session = self._sessions.get(request.session)
        if session is None:
            group = self._groups.setdefault(request.group, self._ordinal)
            self._group_sizes[request.group] = self._group_sizes.get(request.group, 0) + 1
            session = _Session(request, (group, self._ordinal), request.prompt_tokens)
            self._ordinal += 1
            self._sessions[request.session] = session
        elif session.phase is not Phase.HOLDING:
            raise InvariantError(f"{request.session} submitted while it is {session.phase.name}")
        session.request = request
        session.tokens = request.prompt_tokens
        self._wait(request.session)

    def turn_ended(self, name: str, tokens: int, *, truncated: bool = False) -> None:
        """The turn is over and the session holds `tokens`; it keeps its reservation for now."""
        session = self._running(name)
        session.tokens, session.truncated = tokens, truncated
        session.phase = Phase.HOLDING
        assert session.engine is not None
        engine = self._engines[session.engine]
        engine.running.discard(name)
        if tokens > engine.budget.held(name):
            if engine.budget.fits(name, tokens):
                engine.budget.resize(name, tokens)
            else:  # it outgrew its reservation and there is no room: it must not stay cached
                self._evict(name, session)

    def turn_failed(self, name: str) -> None:
        """The turn ended without a result (error, deadline, cancelled): hold what it held."""
        session = self._sessions[name]
        if session.phase is Phase.RUNNING and session.engine is not None:
            self._engines[session.engine].running.discard(name)
        session.phase, session.whole = Phase.HOLDING, False

    def end(self, name: str) -> str | None:
        """The rollout is over: returns the engine whose cache may forget it. Idempotent."""
        session = self._sessions.pop(name, None)
        if session is None:
            return None
        if session.whole and session.begun and session.phase is Phase.HOLDING:
            self.lengths.observe(session.tokens - session.first_prompt, truncated=session.truncated)
        group = session.request.group
        self._group_sizes[group] -= 1
        if not self._group_sizes[group]:
            del self._group_sizes[group], self._groups[group]
        if session.engine is not None:
            engine = self._engines[session.engine]
            engine.running.discard(name)
            engine.budget.release(name)
        return session.engine

    # ------------------------------------------------------------------ decisions

    def decide(self) -> Decision:
        """Everything that may start now, and what has to make room for it."""
        placements: list[Placement] = []
        still_waiting: list[tuple[tuple[int, int], str]] = []
        while self._begun:
            entry = heappop(self._begun)
            if not self._current(entry):
                continue
            placement = self._place(entry[1]) or self._displace(entry[1])
            if placement is None:
                still_waiting.append(entry)
            else:
                placements.append(placement)
        for entry in still_waiting:
            heappush(self._begun, entry)
        while self._new and not still_waiting:
            entry = self._new[0]
            if self._current(entry):
                placement = self._place(entry[1])
                if placement is None:
                    break
                placements.append(placement)
            heappop(self._new)
        evictions, self._evictions = tuple(self._evictions), []
        return Decision(tuple(placements), evictions)

    def expected(self, name: str) -> int:
        """Tokens to reserve for the session now: between what its turn needs and its limit."""
        session = self._sessions[name]
        request = session.request
        if self.config.policy == "worst_case":
            return request.limit
        return self.lengths.expect(
            prompt=session.first_prompt,
            completion=request.prompt_tokens - session.first_prompt,
            limit=request.limit,
        )

    def _place(self, name: str) -> Placement | None:
        """Start the turn where it fits: at home, else on the emptiest other engine."""
        session = self._sessions[name]
        tokens = self.expected(name)
        home = session.engine
        if home is not None and self._serves(home) and self.budget(home).fits(name, tokens):
            free_slot = self._has_slot(home)
            return self._start(name, home, tokens, moved=False) if free_slot else None
        fitting = [e for e in self._engines if self._fits(e, name, tokens)]
        if not fitting:
            return None
        target = max(fitting, key=self._preference)
        if home is not None:
            self._evict(name, session)
        return self._start(name, target, tokens, moved=session.begun)

    def _displace(self, name: str) -> Placement | None:
        """Let idle reservations of younger rollouts give way on an engine where nothing runs."""
        session = self._sessions[name]
        tokens = self.expected(name)
        home = session.engine
        for engine_name in sorted(self._engines, key=lambda e: e != home):
            engine = self._engines[engine_name]
            if engine.running or not self._serves(engine_name):
                continue
            younger = [
                (other.rank, n, other)
                for n in engine.budget.sessions
                if (other := self._sessions[n]).rank > session.rank
            ]
            room = sum(engine.budget.held(n) for _, n, _ in younger)
            need = engine.budget.rounded(tokens) - engine.budget.held(name)
            if need > engine.budget.free + room:
                continue
            for _, other_name, other in sorted(younger, reverse=True):
                if need <= engine.budget.free:
                    break
                self._evict(other_name, other)
            return self._place(name)
        return None

    def _fits(self, engine: str, name: str, tokens: int) -> bool:
        return (
            self._serves(engine)
            and self._has_slot(engine)
            and self.budget(engine).fits(name, tokens)
        )

    def _serves(self, engine: str) -> bool:
        return self._engines[engine].version == self.version

    def _has_slot(self, engine: str) -> bool:
        found = self._engines[engine]
        return len(found.running) < found.budget.capacity.max_sequences

    def _preference(self, engine_name: str) -> tuple[float, int]:
        """The larger free share first; among equals fewer running turns, then who joined first."""
        engine = self._engines[engine_name]
        return engine.budget.free / engine.budget.total, -len(engine.running)

    def _start(self, name: str, engine_name: str, tokens: int, *, moved: bool) -> Placement:
        session, engine = self._sessions[name], self._engines[engine_name]
        engine.budget.resize(name, tokens)
        engine.running.add(name)
        session.engine, session.phase, session.begun = engine_name, Phase.RUNNING, True
        return Placement(name, engine_name, engine.budget.held(name), moved)

    def _evict(self, name: str, session: _Session) -> None:
        assert session.engine is not None
        self._engines[session.engine].budget.release(name)
        self._evictions.append(Eviction(name, session.engine))
        session.engine = None

    def _wait(self, name: str) -> None:
        session = self._sessions[name]
        session.phase = Phase.WAITING
        heappush(self._begun if session.begun else self._new, (session.rank, name))

    def _current(self, entry: tuple[tuple[int, int], str]) -> bool:
        """Whether a queue entry still stands for a waiting turn (its session may have ended)."""
        session = self._sessions.get(entry[1])
        return session is not None and session.rank == entry[0] and session.phase is Phase.WAITING

    def _running(self, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None or session.phase is not Phase.RUNNING:
            raise InvariantError(f"{name} ended a turn that was not running")
        return session

    # ------------------------------------------------------------------ what can be seen

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(self._engines)

    @property
    def waiting(self) -> int:
        return sum(s.phase is Phase.WAITING for s in self._sessions.values())

    def stale(self, engine: str) -> bool:
        """Whether the engine is known but serves other weights than required."""
        return engine in self._engines and self._engines[engine].version != self.version

    def running(self, engine: str) -> int:
        return len(self._engines[engine].running)

    def budget(self, engine: str) -> KvBudget:
        return self._engines[engine].budget

    def phase(self, session: str) -> Phase | None:
        """Where a session stands; None if it is unknown or over."""
        found = self._sessions.get(session)
        return None if found is None else found.phase

    def engine_of(self, session: str) -> str | None:
        """Who holds the session's prefix."""
        found = self._sessions.get(session)
        return None if found is None else found.engine
