"""Hand-computed budgets and decisions of the scheduler."""

from __future__ import annotations

import math
import random

import pytest

from rstar2.config import SchedulerConfig
from rstar2.errors import EngineError, InvariantError
from rstar2.rollout.scheduler import Scheduler, TurnRequest
from rstar2.rollout.state import KvBudget, Phase
from rstar2.types import EngineCapacity, EngineLoad


def capacity(kv: int, sequences: int = 64, block: int = 1) -> EngineCapacity:
    return EngineCapacity(kv, sequences, kv, block)


def scheduler(*kvs: int, policy: str = "worst_case", **kwargs: int) -> Scheduler:
    made = Scheduler(SchedulerConfig(policy=policy))
    for index, kv in enumerate(kvs):
        made.join(f"e{index}", capacity(kv, **kwargs), 0)
    return made


def ask(made: Scheduler, session: str, prompt: int = 10, limit: int = 100) -> None:
    made.submit(TurnRequest(session, session.partition("/")[0], prompt, limit - prompt))


def placed(made: Scheduler) -> dict[str, str]:
    return {p.session: p.engine for p in made.decide().placements}


# --------------------------------------------------------------------------- budget


def test_budget_refuses_more_than_there_is_in_whole_blocks() -> None:
    budget = KvBudget(capacity(100, block=16))
    assert budget.total == 96
    assert budget.rounded(17) == 32
    budget.resize("a", 32)
    assert (budget.reserved, budget.free) == (32, 64)
    assert budget.fits("b", 64)
    assert not budget.fits("b", 65)
    assert budget.fits("a", 96)
    with pytest.raises(InvariantError, match="exceed the cache"):
        budget.resize("b", 65)
    assert budget.release("a") == 32


def test_budget_is_revised_as_a_whole() -> None:
    budget = KvBudget(capacity(100))
    budget.resize("a", 60)
    budget.resize("b", 40)
    budget.revise({"a": 10, "b": 90})
    assert (budget.held("a"), budget.held("b"), budget.reserved) == (10, 90, 100)
    with pytest.raises(InvariantError, match="revised"):
        budget.revise({"a": 20, "b": 90})
    with pytest.raises(InvariantError, match="exactly the sessions"):
        budget.revise({"a": 20})


def test_second_release_is_a_bug() -> None:
    budget = KvBudget(capacity(100))
    budget.resize("a", 10)
    budget.release("a")
    with pytest.raises(InvariantError, match="released twice"):
        budget.release("a")


# --------------------------------------------------------------------------- decisions


def test_as_many_as_fit_and_the_next_when_one_ends() -> None:
    made = scheduler(250)
    for name in ("g/0", "g/1", "g/2"):
        ask(made, name)
    assert placed(made) == {"g/0": "e0", "g/1": "e0"}
    made.turn_ended("g/0", 40)
    assert placed(made) == {}, "a tool's wait keeps the reservation"
    assert made.end("g/0") == "e0"
    assert placed(made) == {"g/2": "e0"}


def test_new_work_goes_to_the_emptiest_engine() -> None:
    made = scheduler(300, 200)
    for index in range(5):
        ask(made, f"g/{index}")
    assert list(placed(made).values()) == ["e0", "e1", "e0", "e1", "e0"]


def test_next_turn_stays_with_its_prefix_and_comes_before_new_work() -> None:
    made = scheduler(200, 100)
    for name in ("g/0", "g/1", "g/2", "h/0"):
        ask(made, name)
    assert placed(made) == {"g/0": "e0", "g/1": "e1", "g/2": "e0"}
    made.turn_ended("g/1", 30)
    made.end("g/2")
    ask(made, "g/1", prompt=40)
    assert placed(made) == {"g/1": "e1", "h/0": "e0"}


def test_sequence_limit_holds_back_what_kv_would_allow() -> None:
    made = scheduler(10_000, sequences=2)
    for index in range(3):
        ask(made, f"g/{index}")
    assert len(placed(made)) == 2


def taught(made: Scheduler, *lengths: int, times: int = 500) -> Scheduler:
    """The scheduler has seen these completion lengths equally often."""
    for _ in range(times):
        for length in lengths:
            made.lengths.observe(length)
    return made


def expensive(made: Scheduler) -> Scheduler:
    """Recomputing a token takes as long as a thousand steps, so no preemption ever pays."""
    for speed in made.state.speeds.values():
        speed.prefill_s = 1000 * speed.step_s
    return made


def test_unknown_lengths_reserve_the_limit() -> None:
    made = expensive(scheduler(250, policy="reserve"))
    for index in range(4):
        ask(made, f"g/{index}")
    assert [p.reserved for p in made.decide().placements] == [100, 100]


def test_cheap_recomputation_admits_more_than_fits_to_the_end() -> None:
    lengths = tuple(range(5, 85, 5))
    dear = expensive(taught(scheduler(1000, policy="reserve"), *lengths))
    cheap = taught(scheduler(1000, policy="reserve"), *lengths)
    for speed in cheap.state.speeds.values():
        speed.prefill_s = speed.step_s / 10_000
    for made in (dear, cheap):
        for index in range(60):
            ask(made, f"g/{index}")
    few, many = len(placed(dear)), len(placed(cheap))
    assert many > 1.2 * few
    assert cheap.budget("e0").reserved <= 1000


def test_known_lengths_admit_more_than_the_worst_case() -> None:
    made = expensive(taught(scheduler(1000, policy="reserve"), 20))
    for index in range(60):
        ask(made, f"g/{index}")
    # each holds at most 10 + 20 tokens (32 at an interval's end): far more than ten fit
    count = len(placed(made))
    assert 1000 / 100 < 25 <= count <= 1000 / 30


def test_rollouts_that_peak_at_different_times_share_the_room() -> None:
    """The forecast knows that half of the rollouts end before the others are long."""
    together = expensive(taught(scheduler(20_000, policy="reserve", sequences=999), 80))
    mixed = expensive(taught(scheduler(20_000, policy="reserve", sequences=999), 5, 80))
    for made in (together, mixed):
        for index in range(800):
            ask(made, f"g/{index}")
    few, many = len(placed(together)), len(placed(mixed))
    assert few <= 20_000 / 90
    assert many > 1.5 * few


def _full_engine() -> Scheduler:
    """Three rollouts with 300 tokens each on e0; the next turn of g/0 has 320 and does not fit."""
    made = scheduler(1000, policy="reserve")
    for name in ("g/0", "g/1", "g/2"):
        ask(made, name, limit=330)
    assert placed(made) == dict.fromkeys(("g/0", "g/1", "g/2"), "e0")
    made.turn_ended("g/0", 300)  # after 290 steps, so the others have 300 tokens too
    ask(made, "g/0", prompt=320, limit=330)
    ask(made, "h/0", limit=330)
    assert placed(made) == {}, "320 + 2 x 300 + 3 x 32 steps exceed 1000, and h/0 is new"
    return made


def test_turns_wait_for_room_and_the_one_with_most_left_starts_first() -> None:
    made = _full_engine()
    made.turn_ended("g/1", 300)
    ask(made, "g/1", prompt=305, limit=330)
    assert placed(made) == {"g/1": "e0"}, "with 305 + 300 + 2 x 32; then g/0 still does not fit"
    made.turn_ended("g/2", 300)
    made.end("g/2")
    assert placed(made)["g/0"] == "e0"


def test_turns_that_wait_for_room_leave_an_engine_that_is_lost() -> None:
    for back in (False, True):
        made = _full_engine()
        made.engine_lost("e0")
        name = "e0" if back else "e1"
        made.join(name, capacity(1000), 0)
        begun = dict.fromkeys(("g/0", "g/1", "g/2"), name)
        assert begun.items() <= placed(made).items()


def test_turn_moves_off_a_slow_engine_once_nothing_new_is_left() -> None:
    made = scheduler(40_000, 40_000, policy="reserve")
    for index in range(2):
        ask(made, f"g/{index}", limit=20_000)
    assert placed(made) == {"g/0": "e0", "g/1": "e1"}
    made.state.speeds["e1"].step_s *= 10
    made.turn_ended("g/1", 30)
    ask(made, "h/0", limit=20_000)
    made.turn_ended("g/0", 30)
    ask(made, "g/0", prompt=40, limit=20_000)
    assert placed(made) == {"g/0": "e0", "h/0": "e0"}, "a slow engine takes nothing it ends last"
    ask(made, "g/1", prompt=40, limit=20_000)
    decision = made.decide()
    assert [(p.engine, p.moved) for p in decision.placements] == [("e0", True)]
    assert [(e.session, e.engine) for e in decision.evictions] == [("g/1", "e1")]


def test_an_engine_that_joins_late_gets_work_although_nothing_is_known_of_its_speed() -> None:
    """Only work measures it: taken for slower than the others, it would stay idle for good."""
    made = taught(scheduler(4000, policy="reserve"), 30)
    for second in range(5):  # a hundred times as fast as an engine of unknown speed
        load = EngineLoad(50, 1, 0, 0, 0, steps=5000 * second)
        made.load_reported("e0", load, float(second))
    assert made.state.speeds["e0"].learnt
    made.join("e1", capacity(4000), 0)
    for index in range(4):
        ask(made, f"g/{index}")
    assert sorted(placed(made).values()) == ["e0", "e0", "e1", "e1"]
    made.engine_lost("e1")
    made.join("e1", capacity(4000), 0)
    assert made.state.speeds["e1"].seconds(4, 100) == made.state.speeds["e0"].seconds(4, 100)


def test_short_turns_never_move() -> None:
    made = scheduler(400, 400, policy="reserve")
    for index in range(2):
        ask(made, f"g/{index}")
    made.decide()
    made.state.speeds["e1"].step_s *= 10
    made.turn_ended("g/1", 60)
    ask(made, "g/1", prompt=80)
    assert placed(made) == {"g/1": "e1"}, "20 steps are left at most"


def test_older_rollout_of_a_lost_engine_is_not_overtaken() -> None:
    made = scheduler(200)
    for name in ("g/0", "g/1"):
        ask(made, name)
    assert set(placed(made)) == {"g/0", "g/1"}
    made.engine_lost("e0")
    made.join("e0", capacity(150), 0)
    assert placed(made) == {"g/0": "e0"}, "there is room for one"
    made.turn_ended("g/0", 30)
    ask(made, "h/0")
    decision = made.decide()
    assert decision.placements == (), "g/0 is older than g/1, which waits"
    made.end("g/0")
    assert placed(made) == {"g/1": "e0"}


def test_long_tool_waits_lose_their_reservation_when_another_rollout_lacks_it() -> None:
    made = expensive(scheduler(200, policy="reserve"))  # nothing known: the limit is expected
    for name in ("g/0", "g/1"):
        ask(made, name)
    assert len(placed(made)) == 2
    made.turn_ended("g/0", 30, now=10.0)
    assert made.decide(100.0).evictions == (), "no turn waits"
    ask(made, "h/0")
    assert made.decide(10.0 + made.config.hold_s - 1).placements == ()
    decision = made.decide(10.0 + made.config.hold_s)
    assert [e.session for e in decision.evictions] == ["g/0"]
    assert [p.session for p in decision.placements] == ["h/0"]
    made.end("g/1")
    ask(made, "g/0", prompt=40)
    (again,) = made.decide(50.0).placements
    assert (again.session, again.engine, again.moved) == ("g/0", "e0", False)


def test_no_prefix_is_evicted_where_the_cache_is_not_short() -> None:
    made = scheduler(10_000, policy="reserve")
    for name in ("g/0", "g/1"):
        ask(made, name)
    assert len(placed(made)) == 2
    made.turn_ended("g/0", 30, now=10.0)
    made.load_reported("e0", EngineLoad(100, 1, 1, 0, 0))  # a queue, for another reason than KV
    ask(made, "h/0")
    decision = made.decide(1e6)
    assert decision.placements == ()
    assert decision.evictions == ()


def test_worst_case_reservations_stay_however_long_the_tools_take() -> None:
    made = scheduler(200)
    for name in ("g/0", "g/1", "h/0"):
        ask(made, name)
    assert len(placed(made)) == 2
    made.turn_ended("g/0", 30, now=0.0)
    assert made.decide(1e6).evictions == ()


def test_what_an_engine_reports_to_use_is_not_given_away() -> None:
    made = expensive(taught(scheduler(1000, policy="reserve"), 20))
    made.load_reported("e0", EngineLoad(900, 5, 0, 0, 0))
    for index in range(60):
        ask(made, f"g/{index}")
    assert len(placed(made)) <= 4
    made.load_reported("e0", EngineLoad(0, 0, 0, 0, 0))
    assert len(placed(made)) >= 20


def test_an_idle_engine_uses_nothing_even_if_it_repeats_its_last_report() -> None:
    made = taught(scheduler(1000, policy="reserve"), 20)
    made.load_reported("e0", EngineLoad(1000, 0, 0, 0, 0))
    for index in range(60):
        ask(made, f"g/{index}")
    assert len(placed(made)) >= 20


def test_prompts_that_reports_show_to_be_shared_are_not_reserved_again() -> None:
    made = taught(scheduler(2000, policy="reserve"), 20)
    for index in range(64):
        ask(made, f"g/{index}", prompt=50)
    alone = len(placed(made))
    for _ in range(30):  # all of them hold 50 tokens, of which 40 are one and the same
        made.load_reported("e0", EngineLoad(40 + 10 * alone, alone, 0, 0, 0))
    made.turn_ended("g/0", 60)  # the engine has advanced, so its forecast is recomputed
    together = alone + len(placed(made))
    assert together > 1.4 * alone


def test_engine_with_a_queue_of_its_own_gets_nothing_new() -> None:
    made = scheduler(300, policy="reserve")
    ask(made, "g/0")
    assert placed(made) == {"g/0": "e0"}
    made.load_reported("e0", EngineLoad(100, 1, 1, 3, 0))
    ask(made, "g/1")
    assert placed(made) == {}
    made.load_reported("e0", EngineLoad(100, 2, 0, 3, 0))
    assert placed(made) == {"g/1": "e0"}


def test_draining_engine_finishes_its_turns_and_gets_no_others() -> None:
    made = scheduler(200, 200)
    ask(made, "g/0")
    assert placed(made) == {"g/0": "e0"}
    made.drain("e0")
    made.turn_ended("g/0", 30)
    ask(made, "g/0", prompt=40)
    (placement,) = made.decide().placements
    assert (placement.engine, placement.moved) == ("e1", True)
    assert made.engine_lost("e0") == ()


def test_engine_steps_give_the_length_of_running_turns() -> None:
    made = scheduler(1000)
    ask(made, "g/0")
    ask(made, "g/1")
    made.decide()
    made.turn_ended("g/0", 60)
    state = made.state
    assert state.engines["e0"].steps == 50
    assert state.estimated_completion(state.sessions["g/1"]) == 50
    assert state.estimated_completion(state.sessions["g/0"]) == 50


def test_stale_engines_get_nothing_until_updated() -> None:
    made = scheduler(100, 100)
    made.require(1)
    made.weights_updated("e1", 1)
    ask(made, "g/0")
    ask(made, "g/1")
    assert placed(made) == {"g/0": "e1"}
    assert made.state.serving == ["e1"]
    made.weights_updated("e0", 1)
    assert placed(made) == {"g/1": "e0"}


def test_the_list_of_serving_engines_follows_every_change() -> None:
    made = scheduler(100, 100, 100)

    def serving() -> list[str]:
        assert made.state.serving == [e for e in made.engines if made.state.serves(e)]
        return made.state.serving

    assert serving() == ["e0", "e1", "e2"]
    made.drain("e1")
    assert serving() == ["e0", "e2"]
    made.engine_lost("e0")
    assert serving() == ["e2"]
    made.require(1)
    assert serving() == []
    made.weights_updated("e2", 1)
    made.join("e0", capacity(100), 1)
    assert serving() == ["e2", "e0"]


def test_lost_engine_hands_its_turns_back() -> None:
    made = scheduler(200, 200)
    for index in range(4):
        ask(made, f"g/{index}")
    assert sorted(placed(made).values()) == ["e0", "e0", "e1", "e1"]
    handed_back = made.engine_lost("e0")
    assert len(handed_back) == 2
    assert made.engine_lost("e0") == ()
    assert placed(made) == {}
    made.end("g/0")
    made.end("g/1")
    made.end("g/2")
    made.end("g/3")
    assert made.budget("e1").reserved == 0


def test_rollout_that_fits_no_engine_is_refused_with_the_way_out() -> None:
    made = scheduler(90)
    with pytest.raises(EngineError, match=r"raise engine\.kv_tokens"):
        ask(made, "g/0", limit=100)


def test_two_turns_of_one_session_at_once_are_a_bug() -> None:
    made = scheduler(100)
    ask(made, "g/0")
    with pytest.raises(InvariantError, match="submitted while"):
        ask(made, "g/0")


def test_end_is_idempotent_and_releases_once() -> None:
    made = scheduler(100)
    ask(made, "g/0")
    made.decide()
    assert made.end("g/0") == "e0"
    assert made.end("g/0") is None
    assert made.budget("e0").reserved == 0


@pytest.mark.parametrize("seed", range(6))
def test_the_oldest_waiting_turn_of_every_engine_is_known(seed: int) -> None:
    """After every event, whatever moved, was evicted, ended or lost its engine since."""
    rng, made = random.Random(seed), scheduler(90, 90, 90, policy="reserve")
    state, names = made.state, [f"g{i}/{i}" for i in range(30)]
    waited = 0
    for now in range(600):
        name = rng.choice(names)
        phase = made.phase(name)
        if phase is None:
            ask(made, name, prompt=4, limit=60)
        elif phase is Phase.HOLDING and rng.random() < 0.7:
            ask(made, name, prompt=state.sessions[name].tokens + 2, limit=60)
        elif phase is Phase.HOLDING:
            made.end(name)
        elif phase is Phase.RUNNING:
            made.turn_ended(name, state.sessions[name].tokens + 3, now=float(now))
        elif rng.random() < 0.02 and len(made.engines) > 1:
            made.engine_lost(rng.choice(made.engines))
        if rng.random() < 0.7:
            made.decide(float(now))
        for home in (None, *made.engines):
            numbers = [s.queued_as for s in state.sessions.values() if s.begun and s.waits_at(home)]
            assert state.oldest_turn(home) == min(numbers, default=math.inf)
            waited += len(numbers)
    assert waited > 600
