"""The policies for comparison, decision by decision, and every policy when an engine is lost."""

from __future__ import annotations

from typing import get_args

import pytest

from rstar2.config import SchedulerConfig
from rstar2.rollout.scheduler import Scheduler, TurnRequest
from rstar2.types import EngineCapacity, EngineLoad

POLICIES = get_args(SchedulerConfig.model_fields["policy"].annotation)


def scheduler(policy: str, *kvs: int) -> Scheduler:
    made = Scheduler(SchedulerConfig.model_validate({"policy": policy}))
    for index, kv in enumerate(kvs):
        made.join(f"e{index}", EngineCapacity(kv, 64, kv), 0)
    return made


def ask(made: Scheduler, session: str, prompt: int = 10, limit: int = 100) -> None:
    made.submit(TurnRequest(session, session.partition("/")[0], prompt, limit - prompt))


def placed(made: Scheduler) -> dict[str, str]:
    return {p.session: p.engine for p in made.decide().placements}


def load(kv: int, preemptions: int = 0) -> EngineLoad:
    return EngineLoad(kv, 1, 0, preemptions, 0)


def test_round_robin_moves_with_every_turn() -> None:
    made = scheduler("round_robin", 1000, 1000)
    for index in range(3):
        ask(made, f"g/{index}")
    assert placed(made) == {"g/0": "e0", "g/1": "e1", "g/2": "e0"}
    made.turn_ended("g/0", 20)
    ask(made, "g/0", prompt=25)
    (placement,) = made.decide().placements
    assert (placement.engine, placement.moved) == ("e1", True)


def test_least_requests_counts_rollouts_and_stays() -> None:
    made = scheduler("least_requests", 1000, 1000)
    for index in range(4):
        ask(made, f"g/{index}")
    assert list(placed(made).values()) == ["e0", "e1", "e0", "e1"]
    made.turn_ended("g/1", 20)
    made.end("g/1")
    ask(made, "g/4")
    assert placed(made) == {"g/4": "e1"}
    made.turn_ended("g/0", 20)
    ask(made, "g/0", prompt=25)
    assert placed(made) == {"g/0": "e0"}


def test_hash_sends_a_name_to_the_same_engine_and_spreads_names() -> None:
    first, second = scheduler("sticky_hash", 1000, 1000), scheduler("sticky_hash", 1000, 1000)
    for made in (first, second):
        for index in range(40):
            ask(made, f"g/{index}")
    one, other = placed(first), placed(second)
    assert one == other
    assert 8 < sum(engine == "e0" for engine in one.values()) < 32


def test_static_split_deals_groups_and_waits_for_the_slowest() -> None:
    made = scheduler("static_split", 1000, 1000)
    for name in ("a/0", "a/1", "b/0", "c/0"):
        ask(made, name)
    assert placed(made) == {"a/0": "e0", "a/1": "e0", "b/0": "e1", "c/0": "e0"}
    made.turn_ended("a/0", 20)
    ask(made, "a/0", prompt=25)
    assert placed(made) == {}, "a/1 and c/0 still run"
    made.turn_ended("a/1", 20)
    made.turn_ended("c/0", 20)
    made.end("c/0")
    assert placed(made) == {}, "the tools of a/1 still run"
    ask(made, "a/1", prompt=25)
    assert placed(made) == {"a/0": "e0", "a/1": "e0"}


def test_aimd_starts_with_the_worst_case_and_follows_kv_use() -> None:
    made = scheduler("aimd", 1000)
    for index in range(40):
        ask(made, f"g/{index}")
    assert len(placed(made)) == 10  # 1000 / 100
    for index in range(10):
        made.turn_ended(f"g/{index}", 20)
        ask(made, f"g/{index}", prompt=25)
    assert len(placed(made)) == 10
    made.load_reported("e0", load(500))
    assert len(placed(made)) == 3, "12.5: a quarter more"
    made.load_reported("e0", load(850))
    made.end("g/0")
    assert placed(made) == {}, "nothing new above 80%"
    made.load_reported("e0", load(950))  # cut to 0.8 x 12
    made.load_reported("e0", load(500))
    for index in range(1, 4):
        made.end(f"g/{index}")
    assert len(placed(made)) == 1, "9.6: nine others are there"


def test_aimd_cuts_on_preemptions() -> None:
    made = scheduler("aimd", 1000)
    for index in range(20):
        ask(made, f"g/{index}")
    assert len(placed(made)) == 10
    made.load_reported("e0", load(700, preemptions=2))
    made.end("g/0")
    made.end("g/1")
    assert placed(made) == {}, "eight are there, and eight is the cap"
    made.end("g/2")
    assert len(placed(made)) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs_the_turns_of_a_lost_engine_elsewhere(policy: str) -> None:
    made = scheduler(policy, 1000, 1000)
    names = [f"g{i // 2}/{i}" for i in range(8)]
    for name in names:
        ask(made, name)
    first = placed(made)
    assert set(first) == set(names)
    lost = made.engine_lost("e1")
    assert set(lost) == {name for name, engine in first.items() if engine == "e1"}
    assert set(placed(made)) == set(lost)
    assert all(made.engine_of(name) == "e0" for name in names)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_uses_stale_or_draining_engines(policy: str) -> None:
    made = scheduler(policy, 1000, 1000, 1000)
    made.require(1)
    made.weights_updated("e1", 1)
    made.weights_updated("e2", 1)
    made.drain("e2")
    for index in range(6):
        ask(made, f"g{index}/0")
    assert set(placed(made).values()) == {"e1"}


@pytest.mark.parametrize("policy", POLICIES)
def test_without_an_engine_everything_waits(policy: str) -> None:
    made = scheduler(policy)
    ask(made, "g/0")
    assert placed(made) == {}
    made.join("late", EngineCapacity(1000, 64, 1000), 0)
    assert placed(made) == {"g/0": "late"}
