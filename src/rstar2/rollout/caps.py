"""Policies of other systems that cap the number of rollouts in flight, for comparison.

| policy | the cap | as in |
|---|---|---|
| aimd | per engine; follows its reported KV use | prime-rl's idea, one cap per engine |
| prime_rl | one for all engines, with trims, drain guard and escalation | prime-rl, as published |
| mean_cap | per engine: `cap_factor` x KV / mean final length | a rule of thumb |

A rollout starts on the engine with the lowest share of its cap (prime_rl: the fewest rollouts) and
stays there.

`aimd` (additive increase, multiplicative decrease): the cap starts at KV / limit. It is multiplied
by 1.25 when the engine reports less than 60% of its KV in use and as many turns as the cap have
ended since the last change, and by 0.8 above 90% or on preemptions. Above 80% no rollout starts.

`prime_rl` differs from the published controller in one point: where that cancels the youngest
rollouts and loses their work, this one starts none until enough have ended.
"""

from __future__ import annotations

from rstar2.rollout.baselines import EagerPolicy
from rstar2.rollout.forecast import LengthModel
from rstar2.rollout.state import SchedulerState
from rstar2.types import EngineLoad

AIMD_GROW, AIMD_CUT = 1.25, 0.8
AIMD_LOW, AIMD_HIGH, AIMD_TOO_HIGH = 0.6, 0.8, 0.9

TRIM_TARGET, TRIM_COOLDOWN = 0.7, 6
QUEUE_RATIO, QUEUE_POLLS, QUEUE_CUT = 0.5, 6, 0.9
PREEMPTION_CUT, ESCALATED_CUT, ESCALATION_POLLS = 0.8, 0.5, 6
BINDING = 0.9


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


class PrimeRl(EagerPolicy):
    """prime-rl's controller: one cap on all rollouts in flight.

    Per completion the cap grows by 1.25^(1 / in flight) while no engine queues, preempts or uses
    more than 60% of its KV, and the cap binds. Above 80% of KV it is trimmed to what 70% would
    hold, at most every six polls. Preemptions, or a queue of half the running requests for six
    polls, cut it (0.8 and 0.9; 0.5 if this repeats within six polls after the last drain); until
    the rollouts in flight have dropped to the new cap, no further cut is made.
    """

    def __init__(self) -> None:
        self._cap: float | None = None
        self._can_grow = False
        self._draining = False
        self._escalated = False
        self._grace = 0
        self._cooldown = 0
        self._queued_polls = 0
        self._loads: dict[str, EngineLoad] = {}
        self._preempted = False
        self._reported: set[str] = set()
        self._waited: dict[str, int] = {}

    def choose(self, state: SchedulerState, name: str) -> str | None:
        if self._cap is None:
            total = sum(engine.budget.total for engine in state.engines.values())
            self._cap = max(1.0, total / state.sessions[name].request.limit)
        if not state.sessions[name].begun and _in_flight(state) >= int(self._cap):
            return None
        return min(state.serving, key=lambda e: len(state.engines[e].resident))

    def session_left(self, state: SchedulerState, name: str, engine: str) -> None:
        in_flight = _in_flight(state) + 1
        if self._cap is not None and self._can_grow and in_flight >= BINDING * int(self._cap):
            self._cap *= AIMD_GROW ** (1 / in_flight)

    def load_reported(self, state: SchedulerState, name: str, load: EngineLoad) -> None:
        self._preempted |= load.preemptions > state.engines[name].preemptions
        super().load_reported(state, name, load)
        self._loads[name] = load
        self._reported.add(name)
        if self._reported >= state.engines.keys():
            self._reported.clear()
            self._poll(state)

    def _poll(self, state: SchedulerState) -> None:
        """All engines have reported."""
        loads = {name: load for name, load in self._loads.items() if name in state.engines}
        queued = sum(load.waiting for load in loads.values())
        use = max(load.kv_used / state.engines[name].budget.total for name, load in loads.items())
        lasting = any(load.waiting and self._waited.get(name) for name, load in loads.items())
        self._waited = {name: load.waiting for name, load in loads.items()}
        running = sum(load.running for load in loads.values())
        overloaded = running > 0 and queued > QUEUE_RATIO * running
        self._queued_polls = self._queued_polls + 1 if overloaded else 0
        queue = self._queued_polls >= QUEUE_POLLS
        preempted, self._preempted = self._preempted, False
        in_flight = _in_flight(state)
        self._recover(in_flight, preempted or queue)
        clear = not (preempted or queue or lasting) and use <= AIMD_LOW
        self._can_grow = clear and not queued and not self._draining
        if self._cap is None or self._draining:
            return
        if preempted or queue:
            usual = QUEUE_CUT if queue else PREEMPTION_CUT
            self._queued_polls = 0
            self._lower(in_flight * (ESCALATED_CUT if self._escalated else usual))
            self._draining = self._escalated = True
        elif use > AIMD_HIGH and in_flight and not self._cooldown:
            self._lower(in_flight * TRIM_TARGET / use)
            self._cooldown = TRIM_COOLDOWN

    def _recover(self, in_flight: int, overloaded: bool) -> None:
        if self._draining and self._cap is not None and in_flight <= self._cap and not overloaded:
            self._draining = False
            self._grace = ESCALATION_POLLS
        if not self._draining and self._escalated:
            self._grace -= 1
            self._escalated = self._grace > 0
        self._cooldown = max(0, self._cooldown - 1)

    def _lower(self, cap: float) -> None:
        assert self._cap is not None
        self._cap = max(1.0, min(self._cap, float(int(cap))))


def _in_flight(state: SchedulerState) -> int:
    return sum(len(engine.resident) for engine in state.engines.values())


class MeanLengthCap(EagerPolicy):
    """Admits while the rollouts of an engine are at most `factor` x KV / mean final length."""

    def __init__(self, lengths: LengthModel, factor: float) -> None:
        self.lengths = lengths
        self.factor = factor

    def choose(self, state: SchedulerState, name: str) -> str | None:
        session = state.sessions[name]
        known = self.lengths.mean
        length = session.request.limit if known is None else session.first_prompt + known
        shares = []
        for engine_name in state.serving:
            engine = state.engines[engine_name]
            cap = max(1.0, self.factor * engine.budget.total / length)
            share = len(engine.resident) / cap
            if share < 1 or session.begun:
                shares.append((share, engine_name))
        return min(shares)[1] if shares else None
