"""The scheduler's state: plain data, and the few methods that may change it.

    submit ──> waiting ──start──> running ──turn_ended──> holding (its tools run)
                  ^                  │                        │  │
                  │<── engine lost ──┘                        │  └──end──> removed
                  └───────────────── submit ──────────────────┘

A rollout is a *session*: a sequence of turns with tool calls between them. Its `engine` is the one
that holds its prefix in the KV cache. Policies read this state and change it only through `start`
and `evict`, so that the invariants below hold under every policy.

Invariant 5 (`KvBudget`): the tokens reserved on an engine never exceed its capacity, and a
reservation is released exactly once; a second release is a bug and raises InvariantError.

The state has no clock. Every sequence of an engine advances by one token per step, so the steps
that the engine reports, or the longest turn that has ended, give the number of steps it has made
(`EngineState.steps`), and from that follows roughly how many tokens each running turn has
(`estimated_completion`). Turns in the engine's own queue do not advance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush, heapreplace
from itertools import count, islice
from math import inf

from rstar2.errors import InvariantError
from rstar2.rollout.speed import EngineSpeed, ToolWaits
from rstar2.types import EngineCapacity, EngineLoad, WeightVersion

Rank = tuple[int, int]
"""(group's ordinal, own ordinal): the smaller, the older."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn to run. `prompt_tokens` counts everything before the turn's first new token."""

    session: str
    group: str
    prompt_tokens: int
    max_new_tokens: int

    @property
    def limit(self) -> int:
        return self.prompt_tokens + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class Placement:
    """Run the session's turn on `engine` now. `moved`: another engine computed its prefix."""

    session: str
    engine: str
    reserved: int
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Eviction:
    """The session lost its reservation on `engine`, which should free its cached prefix."""

    session: str
    engine: str


class Phase(Enum):
    """The phase of a session."""

    WAITING = auto()
    RUNNING = auto()
    HOLDING = auto()


@dataclass(slots=True)
class SessionState:
    """One rollout, from its first submit to its end."""

    request: TurnRequest
    rank: Rank
    first_prompt: int
    phase: Phase = Phase.WAITING
    engine: str | None = None
    last_engine: str | None = None
    """The engine of its last turn: part of its prefix may still be cached there."""
    begun: bool = False
    tokens: int = 0
    """Tokens after the last turn, or in its next prompt."""
    queued_as: int = 0
    """The number of its waiting turn, in the order in which turns are queued (from 1)."""
    returned: bool = False
    """Its tools have just returned: its prefix is cached, as far as its room was kept."""
    truncated: bool = False
    intact: bool = True
    """False after a turn without a result: its length is not added to the length model."""
    start_step: int = 0
    """The engine's step count when the running turn started."""
    holding_since: float = 0.0
    """When its last turn ended."""

    @property
    def completion(self) -> int:
        return self.tokens - self.first_prompt

    def waits_at(self, home: str | None) -> bool:
        """Whether its turn waits with its prefix on `home`."""
        return self.phase is Phase.WAITING and self.engine == home


class KvBudget:
    """KV reservations of the sessions on one engine, in tokens."""

    def __init__(self, capacity: EngineCapacity) -> None:
        self.capacity = capacity
        self.total = capacity.kv_tokens // capacity.block_tokens * capacity.block_tokens
        """Tokens in whole blocks that the cache can hold."""
        self.reserved = 0
        self.used = 0
        """The engine's last reported KV use, minus what was released since."""
        self._held: dict[str, int] = {}

    def rounded(self, tokens: int) -> int:
        """`tokens`, rounded up to whole blocks."""
        block = self.capacity.block_tokens
        return -(-tokens // block) * block

    @property
    def free(self) -> int:
        """Tokens that are not reserved."""
        return self.total - self.reserved

    @property
    def sessions(self) -> tuple[str, ...]:
        """Sessions with a reservation, oldest first."""
        return tuple(self._held)

    def held(self, session: str) -> int:
        """Tokens reserved for this session; 0 if it has no reservation."""
        return self._held.get(session, 0)

    def fits(self, session: str, tokens: int) -> bool:
        """Whether the session's reservation could become `tokens`."""
        return tokens - self.held(session) <= self.free

    def resize(self, session: str, tokens: int) -> None:
        """Set the session's reservation to `tokens`, creating it if there is none."""
        if tokens <= 0:
            raise InvariantError(f"the reservation of {session} would be {tokens} tokens")
        growth = tokens - self.held(session)
        if growth > self.free:
            raise InvariantError(
                f"reserving {tokens} tokens for {session} would exceed the cache: "
                f"{self.reserved} of {self.total} are reserved"
            )
        self._held[session] = tokens
        self.reserved += growth

    def revise(self, tokens: Mapping[str, int]) -> None:
        """Replace all reservations at once; the set of sessions stays the same."""
        total = sum(tokens.values())
        if tokens.keys() != self._held.keys():
            raise InvariantError("a revision must name exactly the sessions with a reservation")
        if total > self.total or min(tokens.values(), default=1) <= 0:
            raise InvariantError(f"revised reservations add up to {total} of {self.total} tokens")
        self._held.update(tokens)
        self.reserved = total

    def shrink(self, most: int) -> None:
        """Reduce all reservations in proportion to at most this many tokens."""
        factor = max(0.0, (most - len(self._held)) / max(1, self.reserved))
        self.revise({s: max(1, int(factor * held)) for s, held in self._held.items()})

    def release(self, session: str) -> int:
        """End the session's reservation; returns its size."""
        if session not in self._held:
            raise InvariantError(f"{session} holds no reservation: released twice")
        tokens = self._held.pop(session)
        self.reserved -= tokens
        self.used = max(0, self.used - tokens)
        return tokens


@dataclass(slots=True)
class EngineState:
    """One engine as the scheduler sees it."""

    budget: KvBudget
    version: WeightVersion
    running: dict[str, int] = field(default_factory=dict)
    """Sessions whose turns run here; their tokens at the start minus the engine's steps then."""
    holding: dict[str, int] = field(default_factory=dict)
    """Sessions with their prefix here whose tools run, and their tokens."""
    holding_tokens: int = 0
    resident: dict[str, None] = field(default_factory=dict)
    """Sessions with their prefix here, in order of arrival."""
    steps: int = 0
    """A lower bound on the decoding steps made so far."""
    draining: bool = False
    preemptions: int = 0
    _reported: tuple[int, int] | None = None
    """The engine's own step count in its last report, and `steps` then."""
    _started: set[str] = field(default_factory=set)
    """Running turns that started since that report."""
    _before: int = 0
    """The sum over `running`."""

    def run(self, name: str, tokens: int) -> None:
        """A turn with so many tokens starts."""
        self._started.add(name)
        self.running[name] = tokens - self.steps
        self._before += self.running[name]

    def stop(self, name: str) -> None:
        """The turn no longer runs; nothing happens if it did not."""
        self._before -= self.running.pop(name, 0)
        self._started.discard(name)

    def turn_ended(self, step: int) -> None:
        """A turn ended after this step. An engine that reports its steps knows them better."""
        if self._reported is None:
            self.steps = max(self.steps, step)

    def hold(self, name: str, tokens: int) -> None:
        """The session's tools run."""
        self.holding[name] = tokens
        self.holding_tokens += tokens

    def end_hold(self, name: str) -> None:
        """Its tools no longer run; nothing happens if they did not."""
        self.holding_tokens -= self.holding.pop(name, 0)

    def advance(self, load: EngineLoad) -> dict[str, int]:
        """The engine reports its own count of steps; returns by how many a turn falls behind.

        Turns in its own queue, the last ones that started there, did not advance since the report
        before. Those that started since then are taken to start now: the steps may be older.
        """
        before, steps = self.steps, self.steps
        if self._reported is not None and load.steps >= self._reported[0]:
            before = self._reported[1]
            steps = max(steps, before + load.steps - self._reported[0])
        made, self.steps = steps - before, steps
        self._reported = (load.steps, steps)
        queued = islice(reversed(self.running), load.waiting)
        behind = dict.fromkeys(queued, made) | dict.fromkeys(self._started, steps)
        self._started.clear()
        return behind

    def set_back(self, name: str, steps: int) -> None:
        """The turn did not advance in so many of the engine's last steps."""
        self.running[name] -= steps
        self._before -= steps

    @property
    def running_tokens(self) -> int:
        """Tokens of all running turns by now, estimated from the engine's steps."""
        return self._before + len(self.running) * self.steps

    @property
    def has_slot(self) -> bool:
        return len(self.running) < self.budget.capacity.max_sequences


class SchedulerState:
    """Sessions, engines and the queue of waiting turns."""

    def __init__(self) -> None:
        self.version: WeightVersion = 0
        """The required weights: engines that serve other weights are stale."""
        self.engines: dict[str, EngineState] = {}
        self.serving: list[str] = []
        """The engines that may get turns: they have the required weights and are not draining."""
        self.sessions: dict[str, SessionState] = {}
        self.evictions: list[Eviction] = []
        self.speeds: dict[str, EngineSpeed] = {}
        """What was learnt of every engine's speed since it started."""
        self.waits = ToolWaits()
        self._begun: dict[str | None, list[tuple[int, Rank, str]]] = {}
        """Waiting turns of begun rollouts, a heap for every engine that has their prefix.

        First those whose tools have just returned. Of the others, those that came while new
        rollouts were left are in the order of their age, as are those without an engine; after them
        come those with the fewest tokens.
        """
        self._numbers: dict[str | None, list[tuple[int, str]]] = {}
        """The same turns, a heap for every engine by the number under which they were queued."""
        self._new: list[tuple[Rank, str]] = []
        self._turns = count(1)

    # ------------------------------------------------------------------ queries

    def serves(self, engine: str) -> bool:
        """Whether the engine may get turns: it has the required weights and is not draining."""
        known_engine = self.engines.get(engine)
        return known_engine is not None and self._may_serve(known_engine)

    def _may_serve(self, engine: EngineState) -> bool:
        return engine.version == self.version and not engine.draining

    def engines_changed(self) -> None:
        """List the engines that serve again: every decision looks at them, they rarely change."""
        self.serving = [name for name, e in self.engines.items() if self._may_serve(e)]

    def estimated_completion(self, session: SessionState) -> int:
        """Completion tokens that the session has by now, estimated from the engine's steps."""
        if session.phase is not Phase.RUNNING or session.engine is None:
            return session.completion
        steps = self.engines[session.engine].steps - session.start_step
        return min(session.completion + steps, session.request.limit - session.first_prompt)

    def steps_reported(self, engine_name: str, load: EngineLoad) -> None:
        """Advance the turns of an engine by the steps that it reports."""
        if not load.steps:
            return  # it does not count them
        engine = self.engines[engine_name]
        for name, steps in engine.advance(load).items():
            session = self.sessions[name]
            missed = min(steps, engine.steps - session.start_step)
            session.start_step += missed
            engine.set_back(name, missed)

    # ------------------------------------------------------------------ queue

    def enqueue(self, name: str) -> None:
        """Queue the session's turn."""
        session = self.sessions[name]
        session.returned = session.phase is Phase.HOLDING and session.engine is not None
        if session.phase is not Phase.WAITING or not session.queued_as:  # else it keeps its number
            session.phase, session.queued_as = Phase.WAITING, next(self._turns)
        if session.engine is not None:
            self.engines[session.engine].end_hold(name)
        if session.begun:
            queue = self._begun.setdefault(session.engine, [])
            heappush(queue, self._entry(session, name))
            self.oldest_turn(session.engine)  # drops the numbers of turns that no longer wait
            heappush(self._numbers.setdefault(session.engine, []), (session.queued_as, name))
        else:
            heappush(self._new, (session.rank, name))

    def waits_for_room(self, name: str) -> None:
        """The first waiting turn of its engine, which has just returned, found no room there.

        It waits with the others.
        """
        session = self.sessions[name]
        session.returned = False
        heapreplace(self._begun[session.engine], self._entry(session, name))

    def _entry(self, session: SessionState, name: str) -> tuple[int, Rank, str]:
        if session.returned:
            return -1, session.rank, name
        oldest_first = session.engine is None or len(self._new) > 0
        return 0 if oldest_first else session.tokens, session.rank, name

    def pop_begun(self) -> list[str]:
        """Remove and return the turns of begun rollouts, oldest first.

        The caller puts back with `enqueue` what cannot start.
        """
        # a turn that has moved may still have an entry with the engine that it left
        entries = sorted({(rank, name) for q in self._begun.values() for _, rank, name in q})
        self._begun.clear()
        self._numbers.clear()
        return [name for rank, name in entries if self._current(rank, name)]

    def first_begun(self) -> list[tuple[Rank, str | None]]:
        """The first waiting turn of every engine that has prefixes of waiting turns.

        Each with its engine; None stands for the turns whose prefix is on no engine.
        """
        heads = [(self.next_begun(home), home) for home in list(self._begun)]
        return [(head[0], home) for head, home in heads if head is not None]

    def next_begun(self, home: str | None) -> tuple[Rank, str] | None:
        """The first waiting turn with its prefix on `home`. It stays until it starts."""
        queue = self._begun.get(home, [])
        while queue:
            _, rank, name = queue[0]
            if self._current(rank, name) and self.sessions[name].engine == home:
                return rank, name
            heappop(queue)
        self._begun.pop(home, None)
        self._numbers.pop(home, None)
        return None

    def waits_for(self, home: str) -> bool:
        """Whether a turn may wait with its prefix on `home`; False is certain."""
        return home in self._begun

    def oldest_turn(self, home: str | None) -> float:
        """The number of the waiting turn with its prefix on `home` that was queued first."""
        numbers = self._numbers.get(home, [])
        while numbers:
            number, name = numbers[0]
            session = self.sessions.get(name)
            if session is not None and session.queued_as == number and session.waits_at(home):
                return number
            heappop(numbers)
        return inf

    @property
    def new(self) -> int:
        """Rollouts that have not begun, including some that have ended without beginning."""
        return len(self._new)

    def next_new(self) -> str | None:
        """The oldest rollout that has not begun. It stays in the queue until it starts."""
        while self._new:
            rank, name = self._new[0]
            if self._current(rank, name):
                return name
            heappop(self._new)
        return None

    def _current(self, rank: Rank, name: str) -> bool:
        """Whether a queue entry is still a waiting turn (its session may have ended)."""
        session = self.sessions.get(name)
        return session is not None and session.rank == rank and session.phase is Phase.WAITING

    # ------------------------------------------------------------------ transitions

    def start(self, name: str, engine_name: str, reserve: int | None) -> Placement:
        """Run the session's turn on the engine. `reserve=None` keeps its reservation as it is."""
        session, engine = self.sessions[name], self.engines[engine_name]
        if session.phase is not Phase.WAITING:
            raise InvariantError(f"{name} was started while it is {session.phase.name}")
        if not self.serves(engine_name):
            raise InvariantError(f"{name} was started on {engine_name}, which may not serve")
        moved = session.begun and session.last_engine != engine_name
        if session.engine is not None and session.engine != engine_name:
            self.evict(name)
        if reserve is not None:
            engine.budget.resize(name, reserve)
        engine.run(name, session.tokens)
        engine.resident[name] = None
        session.engine, session.phase, session.begun = engine_name, Phase.RUNNING, True
        session.last_engine = engine_name
        session.start_step = engine.steps
        return Placement(name, engine_name, engine.budget.held(name), moved)

    def evict(self, name: str) -> None:
        """Take the session off its engine and release its reservation there."""
        session = self.sessions[name]
        if session.engine is None or session.phase is Phase.RUNNING:
            raise InvariantError(f"{name} cannot be evicted: it is on no engine, or it runs")
        self.release_home(name)
        self.evictions.append(Eviction(name, session.engine))
        session.engine = None
        if session.phase is Phase.WAITING:
            self.enqueue(name)

    def release_home(self, name: str) -> None:
        """Release everything the session holds on its engine."""
        home = self.sessions[name].engine
        if home is None:
            return
        engine = self.engines[home]
        engine.stop(name)
        engine.end_hold(name)
        del engine.resident[name]
        if engine.budget.held(name):
            engine.budget.release(name)

    def remove_engine(self, engine_name: str) -> list[str]:
        """Remove an engine; returns the sessions whose running turns must run again."""
        engine = self.engines.pop(engine_name)
        self.engines_changed()
        for name in engine.resident:
            self.sessions[name].engine = None
        self._numbers.pop(engine_name, None)
        for _, rank, name in self._begun.pop(engine_name, []):
            if self._current(rank, name):
                self.enqueue(name)
        handed_back = sorted(engine.running, key=lambda name: self.sessions[name].rank)
        for name in handed_back:
            self.enqueue(name)
        return handed_back

    def hold(self, name: str, now: float) -> None:
        """The session's turn has ended: its tools run, or the session is about to end."""
        session = self.sessions[name]
        session.phase, session.holding_since = Phase.HOLDING, now
        if session.engine is not None:
            self.engines[session.engine].stop(name)
            self.engines[session.engine].hold(name, session.tokens)
