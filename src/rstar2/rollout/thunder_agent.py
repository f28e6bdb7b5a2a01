"""ThunderAgent's scheduling, for comparison: pauses and resumes rollouts between their turns.

As published (its router in mode `tr`, defaults): an engine counts the tokens of the rollouts
assigned to it, of those whose tools run too, plus 100 per rollout. Every 5 s it first resumes
paused rollouts whose tokens fit: turns of begun rollouts, then new rollouts, then rollouts whose
tools run, each with the fewest tokens first; the largest of the chosen go to the engine with the
most room. Then, where an engine counts more than its KV, it pauses rollouts with the fewest tokens
first: those whose tools run at once, the others after their turn. A new rollout starts at once if
nothing is paused and an engine has room. A rollout that is paused for 30 minutes resumes.

"Fewest tokens first" among new rollouts makes long prompts wait for all short ones (its issue 45).
"""

from __future__ import annotations

from rstar2.rollout.state import Phase, Placement, SchedulerState
from rstar2.types import EngineLoad

CHECK_S = 5.0
BUFFER = 100
LONGEST_PAUSE_S = 1800.0


class ThunderAgent:
    """Pauses the smallest rollouts of an engine that is too full, resumes the smallest first."""

    def __init__(self, check_s: float = CHECK_S, buffer: int = BUFFER) -> None:
        self._check_s = check_s
        self._buffer = buffer
        self._checked = 0.0
        self._paused: dict[str, float] = {}
        """Rollouts without an engine, and since when."""
        self._marked: set[str] = set()
        """Rollouts that are paused when their turn ends."""
        self._assigned: dict[str, str] = {}
        """Rollouts that were resumed while their tools run, and where their next turn runs."""
        self._queued = False
        """New rollouts are queued: until all have started, they start only at a check."""

    # ------------------------------------------------------------------ events

    def turn_ended(self, state: SchedulerState, name: str) -> None:
        if name in self._marked:
            self._pause(state, name, state.sessions[name].holding_since)

    def session_left(self, state: SchedulerState, name: str, engine: str) -> None:
        self._forget(name)

    def load_reported(self, state: SchedulerState, name: str, load: EngineLoad) -> None:
        engine = state.engines[name]
        engine.budget.used, engine.preemptions = load.kv_used, load.preemptions

    # ------------------------------------------------------------------ decisions

    def decide(self, state: SchedulerState, now: float) -> list[Placement]:
        placements: list[Placement] = []
        if not state.serving:
            return placements
        lost = False
        for name in state.pop_begun():
            home = state.sessions[name].engine or self._assigned.pop(name, None)
            if home is not None and state.serves(home):
                placements.append(state.start(name, home, None))
            else:
                lost |= name not in self._paused
                self._paused.setdefault(name, now)
                state.enqueue(name)
        due = now - self._checked >= self._check_s or now < self._checked
        if due or lost or not _busy(state):
            self._checked = now
            for name in [n for n in (*self._paused, *self._assigned) if n not in state.sessions]:
                self._forget(name)
            placements += self._resume(state, now)
            for engine in state.serving:
                self._pause_until_it_fits(state, engine, now)
        elif not self._paused and not self._queued:
            placements += self._start_new(state)
        self._queued &= state.next_new() is not None
        return placements

    def _start_new(self, state: SchedulerState) -> list[Placement]:
        """Start new rollouts in their order while the engine with the fewest tokens has room."""
        placements = []
        free = {name: self._free(state, name) for name in state.serving}
        while (new := state.next_new()) is not None:
            needed = state.sessions[new].tokens + self._buffer
            engine = max(free, key=lambda e: free[e])
            if free[engine] < needed and state.engines[engine].resident:
                self._queued = True
                break
            free[engine] -= needed
            placements.append(state.start(new, engine, None))
        return placements

    def _resume(self, state: SchedulerState, now: float) -> list[Placement]:
        free = {name: self._free(state, name) for name in state.serving}
        waiting = [
            (_priority(session.begun, session.phase), _tokens(state, name), session.rank, name)
            for name, session in state.sessions.items()
            if session.engine is None and name not in self._assigned
        ]
        chosen, room = [], sum(max(0, tokens) for tokens in free.values())
        for priority, tokens, _, name in sorted(waiting):
            overdue = now - self._paused.get(name, now) > LONGEST_PAUSE_S
            if tokens + self._buffer <= room or overdue or not _busy(state):
                chosen.append((priority == 2, -tokens, name))
                room -= tokens + self._buffer
        placements: list[Placement] = []
        for acting, negative, name in sorted(chosen):
            engine = max(free, key=lambda e: free[e])
            needed = self._buffer - negative
            if free[engine] < needed and state.engines[engine].resident:
                continue
            free[engine] -= needed
            self._paused.pop(name, None)
            if acting:
                self._assigned[name] = engine
            else:
                placements.append(state.start(name, engine, None))
        return placements

    def _pause_until_it_fits(self, state: SchedulerState, engine: str, now: float) -> None:
        over = -self._free(state, engine)
        sizes = sorted((_tokens(state, s), s) for s in state.engines[engine].resident)
        for phase in (Phase.HOLDING, Phase.RUNNING):
            for tokens, name in sizes:
                if over <= 0:
                    return
                if state.sessions[name].phase is not phase or name in self._marked:
                    continue
                over -= tokens + self._buffer
                if phase is Phase.HOLDING:
                    self._pause(state, name, now)
                else:
                    self._marked.add(name)

    # ------------------------------------------------------------------ parts

    def _pause(self, state: SchedulerState, name: str, now: float) -> None:
        self._marked.discard(name)
        self._paused[name] = now
        if state.sessions[name].engine is not None:
            state.evict(name)

    def _forget(self, name: str) -> None:
        self._paused.pop(name, None)
        self._marked.discard(name)
        self._assigned.pop(name, None)

    def _free(self, state: SchedulerState, name: str) -> int:
        """Tokens that the engine has room for; those marked for a pause count as gone."""
        engine = state.engines[name]
        here = [s for s in engine.resident if s not in self._marked]
        here += [s for s, e in self._assigned.items() if e == name and s in state.sessions]
        return engine.budget.total - sum(_tokens(state, s) + self._buffer for s in here)


def _tokens(state: SchedulerState, name: str) -> int:
    session = state.sessions[name]
    return session.first_prompt + state.estimated_completion(session)


def _busy(state: SchedulerState) -> bool:
    return any(engine.resident for engine in state.engines.values())


def _priority(begun: bool, phase: Phase) -> int:
    """Begun rollouts with a turn to run, new rollouts, rollouts whose tools run."""
    if phase is Phase.HOLDING:
        return 2
    return 0 if begun else 1
