"""What the scheduler knows, as plain state, and the few moves that may change it.

    submit ──> waiting ──start──> running ──turn_ended──> holding (the tool works)
                  ^                  │                        │  │
                  │<── engine lost ──┘                        │  └──end──> gone
                  └───────────────── submit ──────────────────┘

A rollout is a *session*: a sequence of turns with tool calls between them. Its `engine` is where
its prefix was computed last (its home). Policies read this state and change it only through
`start` and `evict`, so that every policy keeps the ledger's promises.

There is no clock in here, but a pulse: as all sequences of an engine advance by one token per
step, the longest turn that has ended tells how many steps an engine has made, and with that about
how many tokens each of the running turns has by now (`reached`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush

from rstar2.errors import InvariantError
from rstar2.rollout.kv_budget import KvBudget
from rstar2.types import WeightVersion

Rank = tuple[int, int]
"""(group's ordinal, own ordinal): smaller is older."""


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
    """Run the session's turn on `engine` now. `moved`: its prefix was computed elsewhere."""

    session: str
    engine: str
    reserved: int
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Eviction:
    """The session's reservation on `engine` is gone: its cached prefix should go too."""

    session: str
    engine: str


class Phase(Enum):
    """Where a session stands."""

    WAITING = auto()
    RUNNING = auto()
    HOLDING = auto()


@dataclass(slots=True)
class Session:
    """One rollout from its first submit to its end."""

    request: Request
    rank: Rank
    first_prompt: int
    phase: Phase = Phase.WAITING
    engine: str | None = None
    last: str | None = None
    """Where it ran last: something of its prefix may still be cached there."""
    begun: bool = False
    tokens: int = 0
    """Known to be held: after the last turn, or as its next prompt."""
    truncated: bool = False
    whole: bool = True
    """False after a turn without a result: such a session teaches nothing about lengths."""
    started_at: int = 0
    """The engine's pulse when the running turn started."""
    since: float = 0.0
    """When it began to hold."""

    @property
    def completion(self) -> int:
        return self.tokens - self.first_prompt


@dataclass(slots=True)
class EngineState:
    """One engine as the scheduler sees it."""

    budget: KvBudget
    version: WeightVersion
    running: set[str] = field(default_factory=set)
    holding: set[str] = field(default_factory=set)
    """Sessions at home here whose tools work."""
    homed: dict[str, None] = field(default_factory=dict)
    """Sessions whose prefix is here, in the order of their arrival."""
    pulse: int = 0
    leaving: bool = False
    preemptions: int = 0

    @property
    def has_slot(self) -> bool:
        return len(self.running) < self.budget.capacity.max_sequences


class State:
    """Sessions, engines and who waits."""

    def __init__(self) -> None:
        self.version: WeightVersion = 0
        """The weights that engines must serve; others are stale."""
        self.engines: dict[str, EngineState] = {}
        self.sessions: dict[str, Session] = {}
        self.evictions: list[Eviction] = []
        self._begun: list[tuple[Rank, str]] = []
        self._new: list[tuple[Rank, str]] = []

    # ------------------------------------------------------------------ what can be read

    def serves(self, engine: str) -> bool:
        """Whether the engine may get turns: it has the required weights and is not leaving."""
        found = self.engines.get(engine)
        return found is not None and found.version == self.version and not found.leaving

    @property
    def serving(self) -> list[str]:
        return [name for name in self.engines if self.serves(name)]

    def reached(self, session: Session) -> int:
        """Completion tokens that the session has by now, as far as can be told."""
        if session.phase is not Phase.RUNNING or session.engine is None:
            return session.completion
        steps = self.engines[session.engine].pulse - session.started_at
        return min(session.completion + steps, session.request.limit - session.first_prompt)

    # ------------------------------------------------------------------ who waits

    def wait(self, name: str) -> None:
        """The session's turn wants to run."""
        session = self.sessions[name]
        session.phase = Phase.WAITING
        if session.engine is not None:
            self.engines[session.engine].holding.discard(name)
        heappush(self._begun if session.begun else self._new, (session.rank, name))

    def take_begun(self) -> list[str]:
        """Turns of begun rollouts, oldest first; put back with `wait` what cannot start."""
        taken = [name for rank, name in sorted(self._begun) if self._current(rank, name)]
        self._begun.clear()
        return taken

    def next_new(self) -> str | None:
        """The oldest rollout that has not begun; it stays in the queue until it starts."""
        while self._new:
            rank, name = self._new[0]
            if self._current(rank, name):
                return name
            heappop(self._new)
        return None

    def _current(self, rank: Rank, name: str) -> bool:
        """Whether a queue entry still stands for a waiting turn (its session may have ended)."""
        session = self.sessions.get(name)
        return session is not None and session.rank == rank and session.phase is Phase.WAITING

    # ------------------------------------------------------------------ moves

    def start(self, name: str, engine_name: str, reserve: int | None) -> Placement:
        """The session's turn runs on the engine and reserves so much (None: as before)."""
        session, engine = self.sessions[name], self.engines[engine_name]
        if session.phase is not Phase.WAITING:
            raise InvariantError(f"{name} was started while it is {session.phase.name}")
        if not self.serves(engine_name):
            raise InvariantError(f"{name} was started on {engine_name}, which must not serve")
        moved = session.begun and session.last != engine_name
        if session.engine is not None and session.engine != engine_name:
            self.evict(name)
        if reserve is not None:
            engine.budget.resize(name, reserve)
        engine.running.add(name)
        engine.homed[name] = None
        session.engine, session.phase, session.begun = engine_name, Phase.RUNNING, True
        session.last = engine_name
        session.started_at = engine.pulse
        return Placement(name, engine_name, engine.budget.held(name), moved)

    def evict(self, name: str) -> None:
        """The session gives up its home and what it reserved there."""
        session = self.sessions[name]
        if session.engine is None or session.phase is Phase.RUNNING:
            raise InvariantError(f"{name} has nothing to give up, or runs")
        self.leave_home(name)
        self.evictions.append(Eviction(name, session.engine))
        session.engine = None

    def leave_home(self, name: str) -> None:
        """Release whatever the session holds on its engine."""
        home = self.sessions[name].engine
        if home is None:
            return
        engine = self.engines[home]
        engine.running.discard(name)
        engine.holding.discard(name)
        del engine.homed[name]
        if engine.budget.held(name):
            engine.budget.release(name)

    def lose(self, engine_name: str) -> list[str]:
        """Forget an engine; returns the sessions whose running turns have to run again."""
        engine = self.engines.pop(engine_name)
        for name in engine.homed:
            self.sessions[name].engine = None
        handed_back = sorted(engine.running, key=lambda name: self.sessions[name].rank)
        for name in handed_back:
            self.wait(name)
        return handed_back

    def hold(self, name: str, now: float) -> None:
        """The session's turn is over: it waits for its tools, or is about to end."""
        session = self.sessions[name]
        session.phase, session.since = Phase.HOLDING, now
        if session.engine is not None:
            self.engines[session.engine].running.discard(name)
            self.engines[session.engine].holding.add(name)
