"""Rival policies behind the same interface, as other systems place their rollouts.

None of them promises KV: they hand turns to engines, which queue what they cannot run and preempt
what outgrows the cache. All keep to engines with the required weights and survive their deaths.

| policy | a new rollout goes to | later turns | as in |
|---|---|---|---|
| static_split | the next engine, by whole groups | same engine, once all its rollouts have ended theirs | the paper's account of static assignment |
| round_robin | the next engine | the next engine | AReaL |
| least_requests | the engine with the fewest rollouts | same engine | verl, vllm-router |
| sticky_hash | the engine its name hashes to | same engine | consistent hashing on the session |
| aimd | the engine with the lowest share of its cap, if below it | same engine | prime-rl |

`aimd` caps the rollouts of an engine: from KV / limit, x 1.25 when the engine reports less than
60% of its KV in use and the cap's worth of turns has ended since; nothing new above 80%; x 0.8
above 90% and on preemptions.
"""  # noqa: E501

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol
from zlib import crc32

from rstar2.config import SchedulerConfig
from rstar2.errors import InvariantError
from rstar2.rollout.lengths import LengthModel
from rstar2.rollout.reserve import Reserve
from rstar2.rollout.state import Placement, State
from rstar2.types import EngineLoad

AIMD_GROW, AIMD_CUT = 1.25, 0.8
AIMD_LOW, AIMD_HIGH, AIMD_TOO_HIGH = 0.6, 0.8, 0.9


class Policy(Protocol):
    """Who goes where. Events tell what has happened, `decide` answers what may start."""

    def decide(self, state: State, now: float) -> list[Placement]:
        """Start (with `State.start`) whatever may start now."""
        ...

    def held(self, state: State, name: str) -> None:
        """The session's turn has ended; its tools work, or it is about to end."""
        ...

    def left(self, state: State, name: str, engine: str) -> None:
        """The session has ended: it is not on its engine any more."""
        ...

    def reported(self, state: State, name: str, load: EngineLoad) -> None:
        """An engine has told its load."""
        ...


def make_policy(config: SchedulerConfig, lengths: LengthModel) -> Policy:
    """The policy that a recipe names."""
    match config.policy:
        case "reserve":
            return Reserve(config, lengths)
        case "worst_case":
            return Reserve(config, lengths, worst_case=True)
        case "static_split":
            return StaticSplit()
        case "round_robin":
            return RoundRobin()
        case "least_requests":
            return LeastRequests()
        case "sticky_hash":
            return StickyHash()
        case "aimd":
            return Aimd()
    raise InvariantError(f"no policy {config.policy}")


class Eager(ABC):
    """Base of the rivals: every waiting turn starts at once where `choose` says, if anywhere."""

    def decide(self, state: State, now: float) -> list[Placement]:
        placements: list[Placement] = []
        if not state.serving:
            return placements
        for name in state.take_begun():
            engine = self.next_turn(state, name)
            if engine is None:
                state.wait(name)
            else:
                placements.append(state.start(name, engine, None))
        while (name_ := state.next_new()) is not None:
            engine = self.choose(state, name_)
            if engine is None:
                break
            placements.append(state.start(name_, engine, None))
        return placements

    @abstractmethod
    def choose(self, state: State, name: str) -> str | None:
        """Where a rollout begins, or goes on when its engine is lost; None: not now."""

    def next_turn(self, state: State, name: str) -> str | None:
        """Where a begun rollout's turn runs: at home, while that serves."""
        home = state.sessions[name].engine
        return home if home is not None and state.serves(home) else self.choose(state, name)

    def held(self, state: State, name: str) -> None:
        return

    def left(self, state: State, name: str, engine: str) -> None:
        return

    def reported(self, state: State, name: str, load: EngineLoad) -> None:
        engine = state.engines[name]
        engine.budget.used, engine.preemptions = load.kv_used, load.preemptions


class RoundRobin(Eager):
    """Every turn goes to the next engine."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, state: State, name: str) -> str | None:
        engines = state.serving
        self._turn += 1
        return engines[(self._turn - 1) % len(engines)]

    def next_turn(self, state: State, name: str) -> str | None:
        return self.choose(state, name)


class LeastRequests(Eager):
    """Begin where the fewest rollouts are; stay."""

    def choose(self, state: State, name: str) -> str | None:
        return min(state.serving, key=lambda e: len(state.engines[e].homed))


class StickyHash(Eager):
    """The highest hash of (session, engine) wins, so that a lost engine moves only its own."""

    def choose(self, state: State, name: str) -> str | None:
        return max(state.serving, key=lambda e: crc32(f"{name}|{e}".encode()))


class StaticSplit(Eager):
    """Groups are dealt out in turn; an engine's next turns start when all of them can."""

    def __init__(self) -> None:
        self._engine_of: dict[str, str] = {}
        self._dealt = 0
        self._open: set[str] = set()
        """Engines on which every rollout has ended its turn and its tools have."""

    def choose(self, state: State, name: str) -> str | None:
        group = state.sessions[name].request.group
        engine = self._engine_of.get(group)
        if engine is None or not state.serves(engine):
            engines = state.serving
            engine = self._engine_of[group] = engines[self._dealt % len(engines)]
            self._dealt += 1
        return engine

    def decide(self, state: State, now: float) -> list[Placement]:
        # who is done with the turn is seen before any of them starts the next one
        self._open = {name for name, e in state.engines.items() if not e.running and not e.holding}
        homed = sum(len(engine.homed) for engine in state.engines.values())
        if not self._open and homed == len(state.sessions):
            return []  # everybody waits for somebody
        return super().decide(state, now)

    def next_turn(self, state: State, name: str) -> str | None:
        home = state.sessions[name].engine
        if home is None or not state.serves(home):
            return self.choose(state, name)
        return home if home in self._open else None


class Aimd(Eager):
    """A cap on the rollouts of each engine that follows its reported KV use."""

    def __init__(self) -> None:
        self._cap: dict[str, float] = {}
        self._use: dict[str, float] = {}
        self._turns: dict[str, int] = {}

    def choose(self, state: State, name: str) -> str | None:
        limit = state.sessions[name].request.limit
        open_: list[tuple[float, str]] = []
        for engine in state.serving:
            found = state.engines[engine]
            cap = self._cap.setdefault(engine, max(1.0, found.budget.total / limit))
            share = len(found.homed) / cap
            begun = state.sessions[name].begun
            if begun or (share < 1 and self._use.get(engine, 0.0) < AIMD_HIGH):
                open_.append((share, engine))
        return min(open_)[1] if open_ else None

    def held(self, state: State, name: str) -> None:
        home = state.sessions[name].engine
        if home is not None:
            self._turns[home] = self._turns.get(home, 0) + 1

    def reported(self, state: State, name: str, load: EngineLoad) -> None:
        engine = state.engines[name]
        preempted = load.preemptions > engine.preemptions
        super().reported(state, name, load)
        use = self._use[name] = load.kv_used / engine.budget.total
        cap = self._cap.get(name)
        if cap is None:
            return
        if preempted or use > AIMD_TOO_HIGH:
            self._cap[name] = max(1.0, min(cap, len(engine.homed)) * AIMD_CUT)
            self._turns[name] = 0
        elif use < AIMD_LOW and self._turns.get(name, 0) >= cap and len(engine.homed) >= 0.9 * cap:
            self._cap[name] = cap * AIMD_GROW
            self._turns[name] = 0
