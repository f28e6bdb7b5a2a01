"""Scheduling policies of other systems behind the same interface, for comparison.

None of them reserves KV: they hand turns to engines, which queue what they cannot run and preempt
what outgrows the cache. All of them use only engines with the required weights and tolerate the
loss of engines.

| policy | a new rollout goes to | later turns | as in |
|---|---|---|---|
| static_split | the next engine, by whole groups | same engine, after all its rollouts ended their turns | the paper's account of static assignment |
| round_robin | the next engine | the next engine | AReaL |
| least_requests | the engine with the fewest rollouts | same engine | verl, vllm-router |
| sticky_hash | the engine its name hashes to | same engine | consistent hashing on the session |
| aimd | the engine with the lowest share of its cap, if below it | same engine | prime-rl |

`aimd` (additive increase, multiplicative decrease) caps the rollouts per engine. The cap starts at
KV / limit. It is multiplied by 1.25 when the engine reports less than 60% of its KV in use and as
many turns as the cap have ended since the last change, and by 0.8 above 90% or on preemptions.
Above 80% no new rollout starts.
"""  # noqa: E501

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol
from zlib import crc32

from rstar2.config import SchedulerConfig
from rstar2.errors import InvariantError
from rstar2.rollout.forecast import LengthModel
from rstar2.rollout.reserve import ReservePolicy
from rstar2.rollout.state import Placement, SchedulerState
from rstar2.types import EngineLoad

AIMD_GROW, AIMD_CUT = 1.25, 0.8
AIMD_LOW, AIMD_HIGH, AIMD_TOO_HIGH = 0.6, 0.8, 0.9


class SchedulingPolicy(Protocol):
    """Chooses an engine for every turn. The other methods are events."""

    def decide(self, state: SchedulerState, now: float) -> list[Placement]:
        """Start, with `SchedulerState.start`, all turns that may start now."""
        ...

    def turn_ended(self, state: SchedulerState, name: str) -> None:
        """The session's turn has ended: its tools run, or the session is about to end."""
        ...

    def session_left(self, state: SchedulerState, name: str, engine: str) -> None:
        """The session has ended and is no longer on its engine."""
        ...

    def load_reported(self, state: SchedulerState, name: str, load: EngineLoad) -> None:
        """An engine reported its load."""
        ...


def make_policy(config: SchedulerConfig, lengths: LengthModel) -> SchedulingPolicy:
    """The policy with the name given in the recipe."""
    match config.policy:
        case "reserve":
            return ReservePolicy(config, lengths)
        case "worst_case":
            return ReservePolicy(config, lengths, worst_case=True)
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
    raise InvariantError(f"there is no policy {config.policy}")


class EagerPolicy(ABC):
    """Base of these policies: every waiting turn starts at once on the engine of `choose`."""

    def decide(self, state: SchedulerState, now: float) -> list[Placement]:
        placements: list[Placement] = []
        if not state.serving:
            return placements
        for name in state.pop_begun():
            engine = self.next_turn(state, name)
            if engine is None:
                state.enqueue(name)
            else:
                placements.append(state.start(name, engine, None))
        while (new := state.next_new()) is not None:
            engine = self.choose(state, new)
            if engine is None:
                break
            placements.append(state.start(new, engine, None))
        return placements

    @abstractmethod
    def choose(self, state: SchedulerState, name: str) -> str | None:
        """The engine where a rollout begins, or resumes after its engine is lost; None: wait."""

    def next_turn(self, state: SchedulerState, name: str) -> str | None:
        """The engine for a begun rollout's turn: the one with its prefix, while that serves."""
        home = state.sessions[name].engine
        return home if home is not None and state.serves(home) else self.choose(state, name)

    def turn_ended(self, state: SchedulerState, name: str) -> None:
        return

    def session_left(self, state: SchedulerState, name: str, engine: str) -> None:
        return

    def load_reported(self, state: SchedulerState, name: str, load: EngineLoad) -> None:
        engine = state.engines[name]
        engine.budget.used, engine.preemptions = load.kv_used, load.preemptions


class RoundRobin(EagerPolicy):
    """Every turn goes to the next engine."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, state: SchedulerState, name: str) -> str | None:
        engines = state.serving
        self._turn += 1
        return engines[(self._turn - 1) % len(engines)]

    def next_turn(self, state: SchedulerState, name: str) -> str | None:
        return self.choose(state, name)


class LeastRequests(EagerPolicy):
    """A rollout begins on the engine with the fewest rollouts and stays there."""

    def choose(self, state: SchedulerState, name: str) -> str | None:
        return min(state.serving, key=lambda e: len(state.engines[e].resident))


class StickyHash(EagerPolicy):
    """Highest hash of (session, engine): a lost engine moves only its own rollouts."""

    def choose(self, state: SchedulerState, name: str) -> str | None:
        return max(state.serving, key=lambda e: crc32(f"{name}|{e}".encode()))


class StaticSplit(EagerPolicy):
    """Groups are dealt out in turn; an engine's next turns start when all of them are ready."""

    def __init__(self) -> None:
        self._engine_of: dict[str, str] = {}
        self._dealt = 0
        self._open: set[str] = set()
        """Engines without running turns and running tools."""

    def choose(self, state: SchedulerState, name: str) -> str | None:
        group = state.sessions[name].request.group
        engine = self._engine_of.get(group)
        if engine is None or not state.serves(engine):
            engines = state.serving
            engine = self._engine_of[group] = engines[self._dealt % len(engines)]
            self._dealt += 1
        return engine

    def decide(self, state: SchedulerState, now: float) -> list[Placement]:
        # computed before any of the next turns starts
        self._open = {name for name, e in state.engines.items() if not e.running and not e.holding}
        resident = sum(len(engine.resident) for engine in state.engines.values())
        if not self._open and resident == len(state.sessions):
            return []  # every rollout waits for another one
        return super().decide(state, now)

    def next_turn(self, state: SchedulerState, name: str) -> str | None:
        home = state.sessions[name].engine
        if home is None or not state.serves(home):
            return self.choose(state, name)
        return home if home in self._open else None


class Aimd(EagerPolicy):
    """A cap on the rollouts of each engine that follows its reported KV use."""

    def __init__(self) -> None:
        self._cap: dict[str, float] = {}
        self._use: dict[str, float] = {}
        self._turns: dict[str, int] = {}

    def choose(self, state: SchedulerState, name: str) -> str | None:
        limit = state.sessions[name].request.limit
        open_: list[tuple[float, str]] = []
        for engine in state.serving:
            candidate = state.engines[engine]
            cap = self._cap.setdefault(engine, max(1.0, candidate.budget.total / limit))
            share = len(candidate.resident) / cap
            begun = state.sessions[name].begun
            if begun or (share < 1 and self._use.get(engine, 0.0) < AIMD_HIGH):
                open_.append((share, engine))
        return min(open_)[1] if open_ else None

    def turn_ended(self, state: SchedulerState, name: str) -> None:
        home = state.sessions[name].engine
        if home is not None:
            self._turns[home] = self._turns.get(home, 0) + 1

    def load_reported(self, state: SchedulerState, name: str, load: EngineLoad) -> None:
        engine = state.engines[name]
        preempted = load.preemptions > engine.preemptions
        super().load_reported(state, name, load)
        use = self._use[name] = load.kv_used / engine.budget.total
        cap = self._cap.get(name)
        if cap is None:
            return
        if preempted or use > AIMD_TOO_HIGH:
            self._cap[name] = max(1.0, min(cap, len(engine.resident)) * AIMD_CUT)
            self._turns[name] = 0
        elif (
            use < AIMD_LOW and self._turns.get(name, 0) >= cap and len(engine.resident) >= 0.9 * cap
        ):
            self._cap[name] = cap * AIMD_GROW
            self._turns[name] = 0
