"""Routing policies of other systems, for comparison. `caps.py` and `thunder_agent.py` have more.

None of them reserves KV: they hand turns to engines, which queue what they cannot run and preempt
what outgrows the cache. All of them use only engines with the required weights and tolerate the
loss of engines.

| policy | a new rollout goes to | later turns | as in |
|---|---|---|---|
| static_split | the next engine, by whole groups | same engine, after all its rollouts ended their turns | the paper's account of static assignment |
| round_robin | the next engine | the next engine | AReaL |
| least_requests | the engine with the fewest rollouts | same engine | verl, vllm-router |
| least_kv | the engine that reports the smallest share of its KV in use | same engine | llm-d, Dynamo |
| sticky_hash | the engine its name hashes to | same engine | consistent hashing on the session |
"""  # noqa: E501

from __future__ import annotations

from abc import ABC, abstractmethod
from zlib import crc32

from rstar2.rollout.state import Placement, SchedulerState
from rstar2.types import EngineLoad


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


class LeastKv(EagerPolicy):
    """A rollout begins on the engine with the smallest share of its KV in use and stays there."""

    def __init__(self) -> None:
        self._placed: dict[str, int] = {}
        """Tokens of the rollouts that began on an engine since its last report."""

    def choose(self, state: SchedulerState, name: str) -> str | None:
        def share(engine: str) -> float:
            budget = state.engines[engine].budget
            return (budget.used + self._placed.get(engine, 0)) / budget.total

        chosen = min(state.serving, key=share)
        self._placed[chosen] = self._placed.get(chosen, 0) + state.sessions[name].tokens
        return chosen

    def load_reported(self, state: SchedulerState, name: str, load: EngineLoad) -> None:
        super().load_reported(state, name, load)
        self._placed[name] = 0
