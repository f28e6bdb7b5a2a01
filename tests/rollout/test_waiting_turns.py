"""Waiting turns of begun rollouts under `reserve`: their order, and what a decision costs."""

from __future__ import annotations

from rstar2.config import SchedulerConfig
from rstar2.rollout.forecast import LengthModel
from rstar2.rollout.reserve import ReservePolicy
from rstar2.rollout.scheduler import Placement, Scheduler, TurnRequest
from rstar2.rollout.state import SchedulerState
from rstar2.types import EngineCapacity, EngineLoad

KV, LIMIT = 1_000_000, 100


class CountingPolicy(ReservePolicy):
    """Counts the waiting turns that a decision looks at."""

    looked_at = 0

    def _continue(self, state: SchedulerState, name: str) -> Placement | None:
        self.looked_at += 1
        return super()._continue(state, name)


def scheduler(*slots: int) -> tuple[Scheduler, CountingPolicy]:
    made = Scheduler(SchedulerConfig())
    made.policy = policy = CountingPolicy(made.config, LengthModel())
    for index, most in enumerate(slots):
        made.join(f"e{index}", EngineCapacity(KV, most, KV), 0)
    return made, policy


def ask(made: Scheduler, name: str, prompt: int = 10) -> None:
    made.submit(TurnRequest(name, "g", prompt, LIMIT - prompt))


def placed(made: Scheduler) -> dict[str, str]:
    return {p.session: p.engine for p in made.decide().placements}


def test_a_long_queue_costs_no_more_than_a_short_one() -> None:
    made, policy = scheduler(500, 500)
    names = [f"g/{index}" for index in range(1000)]
    for name in names:
        ask(made, name)
    assert len(placed(made)) == 1000
    made.engine_lost("e0")
    policy.looked_at = 0
    assert placed(made) == {}, "500 turns wait for the other engine, which is full"
    assert policy.looked_at == 1
    running = next(name for name in names if made.engine_of(name) == "e1")
    made.turn_ended(running, 20)
    policy.looked_at = 0
    assert placed(made) == {"g/0": "e1"}, "the oldest waiting turn gets the slot"
    assert policy.looked_at == 2
    ask(made, running, prompt=25)
    placed(made)
    policy.looked_at = 0
    assert placed(made) == {}
    assert policy.looked_at == 2, "one turn for each engine that turns wait for"


def test_turns_of_a_lost_engine_and_of_a_full_one_start_in_the_order_of_their_rollouts() -> None:
    made, _ = scheduler(2, 2)
    for index in range(4):
        ask(made, f"g/{index}")
    engines = placed(made)
    first, second = (n for n in engines if engines[n] == "e0")
    third, fourth = (n for n in engines if engines[n] == "e1")
    made.turn_ended(fourth, 20)
    made.engine_lost("e0")
    assert placed(made) == {first: "e1"}, "the turn of the lost engine is older"
    ask(made, fourth, prompt=25)
    assert placed(made) == {}
    made.turn_ended(third, 20)
    made.end(third)
    assert placed(made) == {second: "e1"}, "it waits for any engine and is older than the fourth"
    made.turn_ended(first, 20)
    made.end(first)
    assert placed(made) == {fourth: "e1"}


def test_turn_that_waits_for_an_engine_which_is_lost_starts_elsewhere() -> None:
    made, _ = scheduler(1, 1)
    ask(made, "g/0")
    ask(made, "g/1")
    engines = placed(made)
    waiting = next(n for n in engines if engines[n] == "e0")
    made.turn_ended(waiting, 20)
    made.drain("e1")
    ask(made, "g/2")
    assert placed(made) == {"g/2": "e0"}
    ask(made, waiting, prompt=25)
    assert placed(made) == {}, "its engine is full"
    made.engine_lost("e0")
    made.join("e2", EngineCapacity(KV, 2, KV), 0)
    assert placed(made) == {waiting: "e2", "g/2": "e2"}


def test_waiting_turn_that_does_not_move_is_looked_at_again_after_a_report() -> None:
    made, policy = scheduler(1)
    ask(made, "g/0")
    placed(made)
    made.turn_ended("g/0", 20)
    ask(made, "g/1")
    assert placed(made) == {"g/1": "e0"}
    ask(made, "g/0", prompt=25)
    assert placed(made) == {}
    assert policy._outlook(made.state, "e0").stays == "g/0"
    made.load_reported("e0", EngineLoad(10, 1, 0, 0, 0))
    assert policy._outlook(made.state, "e0").stays == ""


def report(made: Scheduler, steps: int, waiting: int) -> None:
    made.load_reported("e0", EngineLoad(10, 3 - waiting, waiting, 0, 0, steps))


def completions(made: Scheduler, *names: str) -> list[int]:
    state = made.state
    return [state.estimated_completion(state.sessions[name]) for name in names]


def test_turns_in_an_engines_own_queue_do_not_advance() -> None:
    made, _ = scheduler(3)
    names = ("g/0", "g/1", "g/2")
    for name in names:
        ask(made, name)
    placed(made)
    report(made, steps=100, waiting=0)
    assert completions(made, *names) == [0, 0, 0], "the steps may have been made before"
    report(made, steps=120, waiting=0)
    assert completions(made, *names) == [20, 20, 20]
    report(made, steps=130, waiting=1)
    assert completions(made, *names) == [30, 30, 20], "the last one waits"
    engine = made.state.engines["e0"]
    assert engine.running_tokens == 3 * 10 + 30 + 30 + 20
    report(made, steps=7, waiting=0)
    assert completions(made, *names) == [30, 30, 20], "the engine's count began anew"
    report(made, steps=12, waiting=0)
    assert completions(made, *names) == [35, 35, 25]
    made.turn_ended("g/0", 50)
    ask(made, "g/0", prompt=60)
    placed(made)
    assert engine.steps == 35, "the report counts, not the turn that has ended"
    report(made, steps=500, waiting=0)
    assert completions(made, *names) == [50, 90, 90], "it started since the last report"
    report(made, steps=510, waiting=0)
    assert completions(made, "g/0") == [60]


def test_turn_whose_prefix_is_lost_waits_for_room_and_no_new_rollout_overtakes_it() -> None:
    made = Scheduler(SchedulerConfig())
    for name in ("e0", "e1"):
        made.join(name, EngineCapacity(200, 8, 200), 0)
    made.submit(TurnRequest("a/0", "a", 10, 150))
    made.submit(TurnRequest("b/0", "b", 10, 150))
    engines = placed(made)
    made.turn_ended("b/0", 150)
    made.submit(TurnRequest("b/0", "b", 152, 8))
    assert placed(made) == {"b/0": engines["b/0"]}
    made.engine_lost(engines["b/0"])
    made.submit(TurnRequest("c/0", "c", 10, 20))
    assert placed(made) == {}, "10 + 152 tokens and 32 steps of both exceed 200"
    made.turn_ended("a/0", 20)
    made.end("a/0")
    assert next(iter(placed(made))) == "b/0"


def three_rollouts_with_tools(*, tool_s: float) -> Scheduler:
    """Rollouts a, b and c of 120, 120 and 100 tokens on an engine of 400, of which c runs again."""
    made = Scheduler(SchedulerConfig())
    made.join("e0", EngineCapacity(400, 3, 400), 0)
    for name in ("a", "b", "c"):
        made.submit(TurnRequest(name, name, 10, 390))
        made.decide()
        made.turn_ended(name, 100 if name == "c" else 120)
    made.submit(TurnRequest("c", "c", 100, 300), tool_s)
    assert placed(made) == {"c": "e0"}, "alone it always may"
    return made


def test_room_is_kept_for_tools_that_take_less_time_than_computing_a_prefix_again() -> None:
    made = three_rollouts_with_tools(tool_s=0.01)
    speed = made.state.speeds["e0"]
    assert 400 * speed.prefill_s > 0.02, "shorter waits count as 0.02 s"
    made.submit(TurnRequest("a", "a", 120, 280))
    assert placed(made) == {}, "100 + 120 tokens, 120 kept for b and 2 x 32 steps exceed 400"


def test_no_room_is_kept_for_tools_that_take_longer() -> None:
    made = three_rollouts_with_tools(tool_s=1.0)
    made.submit(TurnRequest("a", "a", 120, 280))
    assert placed(made) == {"a": "e0"}
    assert made.state.engines["e0"].holding_tokens == 120


def test_turn_that_has_just_returned_starts_before_those_that_wait_for_room() -> None:
    made = three_rollouts_with_tools(tool_s=0.01)
    made.submit(TurnRequest("a", "a", 120, 280))
    assert placed(made) == {}
    made.turn_ended("c", 110)
    made.end("c")
    made.submit(TurnRequest("b", "b", 130, 270))
    assert next(iter(placed(made))) == "b", "the prefix of a may have been evicted meanwhile"


def test_new_rollout_that_would_end_last_starts_before_turns_that_were_queued_after_it() -> None:
    made, policy = scheduler(2)
    for index in range(4):
        ask(made, f"g/{index}")
    assert set(placed(made)) == {"g/0", "g/1"}
    made.turn_ended("g/0", 20)
    ask(made, "g/0", prompt=25)
    policy._new_first = True
    assert placed(made) == {"g/2": "e0"}
    ask(made, "g/4")
    for name in ("g/1", "g/2"):
        made.turn_ended(name, 90)
        made.end(name)
    policy._new_first = True
    assert placed(made) == {"g/3": "e0", "g/0": "e0"}, "g/4 came after the turn of g/0"


def test_new_rollout_overtakes_no_turn_that_was_queued_before_it() -> None:
    """Neither if a turn that was queued later is the first of its queue."""
    made, policy = scheduler(2)
    for name in ("g/0", "g/1"):
        ask(made, name)
    placed(made)
    made.turn_ended("g/0", 20)
    ask(made, "g/2")
    assert placed(made) == {"g/2": "e0"}
    ask(made, "g/0", prompt=25)
    assert placed(made) == {}
    ask(made, "g/3")
    made.turn_ended("g/1", 20)
    ask(made, "g/1", prompt=25)
    policy._new_first = True
    assert placed(made) == {"g/1": "e0"}, "it has just returned; g/3 came after the turn of g/0"


def test_waiting_turn_keeps_its_place_in_time_when_its_engine_is_lost() -> None:
    made, policy = scheduler(1, 1)
    for name in ("g/0", "g/1"):
        ask(made, name)
    engine = placed(made)["g/0"]
    made.turn_ended("g/0", 20)
    ask(made, "g/2")
    assert placed(made) == {"g/2": engine}
    ask(made, "g/0", prompt=25)
    assert placed(made) == {}
    ask(made, "g/3")
    made.engine_lost(engine)
    made.turn_ended("g/1", 90)
    made.end("g/1")
    policy._new_first = True
    assert list(placed(made)) == ["g/0"], "g/3 was submitted later"


def test_whether_new_rollouts_come_first_is_decided_again_while_an_engine_is_silent() -> None:
    made, policy = scheduler(2, 2)
    idle = EngineLoad(0, 0, 0, 0, 0)
    made.load_reported("e1", idle, 0.0)
    policy._new_first = True
    made.load_reported("e1", idle, 1.0)
    assert not policy._new_first, "no new rollout waits"
