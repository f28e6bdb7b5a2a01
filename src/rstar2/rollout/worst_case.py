"""The paper's rule: a rollout reserves its limit, from its first turn to its end.

Rollouts cannot outgrow their reservations, so an engine never preempts, no prefix is ever evicted
and no rollout moves, unless its engine is lost. Deterministic runs need this. Much KV stays unused.

Turns of begun rollouts come before new rollouts. While one of them waits for KV (its engine was
lost), no new rollout is admitted. New rollouts are admitted in the order of their groups, each to
the engine with the smallest reserved share.
"""

from __future__ import annotations

from rstar2.rollout.state import Placement, SchedulerState
from rstar2.types import EngineLoad


class WorstCase:
    """Reserves every rollout's limit."""

    def turn_ended(self, state: SchedulerState, name: str) -> None:
        return

    def session_left(self, state: SchedulerState, name: str, engine: str) -> None:
        return

    def load_reported(self, state: SchedulerState, name: str, load: EngineLoad) -> None:
        engine = state.engines[name]
        engine.budget.used, engine.preemptions = load.kv_used, load.preemptions

    def decide(self, state: SchedulerState, now: float) -> list[Placement]:
        """Start all turns that may start now."""
        placements: list[Placement] = []
        blocked = False
        for name in state.pop_begun():
            home = state.sessions[name].engine
            placement = None
            if home is not None and state.serves(home):
                if state.engines[home].has_slot:
                    placement = state.start(name, home, None)
            elif not blocked:  # a rollout that lacks KV is not overtaken by another that does
                placement = self._admit(state, name)
                blocked = placement is None
            if placement is None:
                state.enqueue(name)
            else:
                placements.append(placement)
        while not blocked and (new := state.next_new()) is not None:
            placement = self._admit(state, new)
            if placement is None:
                break
            placements.append(placement)
        return placements

    def _admit(self, state: SchedulerState, name: str) -> Placement | None:
        """Start a rollout on the emptiest engine with room for its limit."""
        limit = state.sessions[name].request.limit
        best: tuple[float, int] | None = None
        target = ""
        for engine_name in state.serving:
            engine = state.engines[engine_name]
            budget = engine.budget
            if not engine.has_slot or budget.rounded(limit) > budget.free:
                continue
            fullness = (budget.reserved / budget.total, len(engine.running))
            if best is None or fullness < best:
                best, target = fullness, engine_name
        if best is None:
            return None
        return state.start(name, target, state.engines[target].budget.rounded(limit))
