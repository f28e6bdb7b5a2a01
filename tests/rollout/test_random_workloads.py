"""Invariants 3 and 5 of the scheduler under random workloads, cancellations and engine deaths."""

from __future__ import annotations

import random
from typing import get_args

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rstar2.config import SchedulerConfig
from rstar2.rollout.forecast import LengthModel
from rstar2.rollout.scheduler import Phase, Scheduler, TurnRequest
from rstar2.types import EngineCapacity

POLICIES = get_args(SchedulerConfig.model_fields["policy"].annotation)


class Workload:
    """Random rollouts driven through the scheduler, its promises checked after every event."""

    def __init__(
        self,
        seed: int,
        policy: str,
        engines: int,
        rollouts: int,
        block: int,
        slots: int | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.reserving = policy in ("reserve", "worst_case")
        self.made = Scheduler(
            SchedulerConfig(policy=policy),
            LengthModel(least=4),
        )
        self.limit = 120
        self.capacities = {
            f"e{i}": EngineCapacity(
                kv := self.random.randint(128, 400), slots or self.random.randint(1, 8), kv, block
            )
            for i in range(engines)
        }
        for name, cap in self.capacities.items():
            self.made.join(name, cap, 0)
        self.left = {f"g{i // 4}/{i}": self.random.randint(1, 4) for i in range(rollouts)}
        self.tokens = {name: self.random.randint(1, 20) for name in self.left}
        self.state = dict.fromkeys(self.left, "asleep")
        self.ended: list[str] = []
        self.oldest_waits = 0

    def submit(self, name: str) -> None:
        tokens = self.tokens[name]
        self.made.submit(TurnRequest(name, name.split("/")[0], tokens, self.limit - tokens))
        self.state[name] = "waiting"

    def decide(self) -> None:
        decision = self.made.decide()
        for placement in decision.placements:
            assert self.state[placement.session] == "waiting"
            self.state[placement.session] = "running"
            assert self.made.engine_of(placement.session) == placement.engine
        self.check()

    def check(self) -> None:
        for name in self.made.engines:
            budget, cap = self.made.budget(name), self.capacities[name]
            held = [budget.held(s) for s in budget.sessions]
            assert sum(held) == budget.reserved <= cap.kv_tokens
            assert all(h > 0 for h in held)
            if self.reserving:
                assert self.made.running(name) <= cap.max_sequences
        for name, state in self.state.items():
            phase = self.made.phase(name)
            expected = {"waiting": Phase.WAITING, "running": Phase.RUNNING, "tool": Phase.HOLDING}
            assert phase is expected.get(state), (name, state, phase)

    def event(self) -> None:
        """One thing happens to one rollout."""
        active = [n for n, s in self.state.items() if s in ("asleep", "running", "tool")]
        name = self.random.choice(active)
        if self.state[name] in ("asleep", "tool"):
            self.submit(name)
        else:
            self.left[name] -= 1
            new = self.random.randint(1, self.limit - self.tokens[name])
            self.tokens[name] += new if self.random.random() < 0.3 else min(new, 15)
            truncated = self.tokens[name] >= self.limit - 1
            self.made.turn_ended(name, self.tokens[name], truncated=truncated)
            self.state[name] = "tool"
            if truncated or not self.left[name]:
                self.end(name)

    def end(self, name: str) -> None:
        self.made.end(name)
        assert self.made.end(name) is None
        self.state[name] = "ended"
        self.ended.append(name)

    def kill(self) -> None:
        """An engine dies and rejoins at once."""
        name = self.random.choice(self.made.engines)
        handed_back = self.made.engine_lost(name)
        assert sorted(handed_back) == sorted(
            n for n, s in self.state.items() if s == "running" and self.made.engine_of(n) is None
        )
        for session in handed_back:
            self.state[session] = "waiting"
        self.made.join(name, self.capacities[name], 0)

    def cancel(self) -> None:
        living = [n for n, s in self.state.items() if s not in ("asleep", "ended")]
        if living:
            self.end(self.random.choice(living))

    def run(self, *, deaths: float, cancels: float) -> None:
        for _ in range(20_000):
            if all(s == "ended" for s in self.state.values()):
                break
            if any(s in ("asleep", "running", "tool") for s in self.state.values()):
                self.event()
            else:
                raise AssertionError(f"every rollout waits and nothing runs: {self.state}")
            if self.random.random() < deaths:
                self.kill()
            if self.random.random() < cancels:
                self.cancel()
            self.decide()
        assert sorted(self.ended) == sorted(self.state), "a rollout never ended"
        for name in self.made.engines:
            assert self.made.budget(name).reserved == 0


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(POLICIES),
    engines=st.integers(1, 4),
    rollouts=st.integers(1, 40),
    block=st.sampled_from([1, 16]),
    deaths=st.sampled_from([0.0, 0.02]),
    cancels=st.sampled_from([0.0, 0.02]),
)
def test_every_rollout_ends_once_and_kv_is_never_over_reserved(
    seed: int,
    policy: str,
    engines: int,
    rollouts: int,
    block: int,
    deaths: float,
    cancels: float,
) -> None:
    Workload(seed, policy, engines, rollouts, block).run(deaths=deaths, cancels=cancels)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), engines=st.integers(1, 3))
def test_no_new_rollout_starts_where_a_begun_one_waits(seed: int, engines: int) -> None:
    work = Workload(seed, "reserve", engines, 30, 1, slots=64)
    for name in work.state:
        work.submit(name)
    begun: list[str] = []
    for _ in range(200):
        decision = work.made.decide()
        for placement in decision.placements:
            work.state[placement.session] = "running"
        new = [p.session for p in decision.placements if p.session not in begun]
        begun += new
        full = {work.made.engine_of(n) for n in begun if work.state[n] == "waiting"}
        assert not any(p.session in new and p.engine in full for p in decision.placements)
        if all(s == "ended" for s in work.state.values()):
            break
        work.event()
    assert begun == [n for n in work.state if n in begun], "groups enter in order"
