"""The simulator: hand-computed steps, conservation, determinism, and a bound that holds."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar2.config import SchedulerConfig
from rstar2.errors import DataError
from rstar2.rollout.simulate.compare import (
    FACTORS,
    POLICIES,
    PolicyResult,
    cases_of,
    check_targets,
    first_responses,
    measure,
    run_cases,
    summarize,
    table,
)
from rstar2.rollout.simulate.engine import EngineSequence, SimulatedEngine
from rstar2.rollout.simulate.lower_bound import lower_bound
from rstar2.rollout.simulate.model import EngineModel, MeasuredStep, fit_engine, from_hardware
from rstar2.rollout.simulate.simulation import Simulation
from rstar2.rollout.simulate.suites import HELD_IN, PROMPTS, held_out
from rstar2.rollout.simulate.workload import (
    SHAPES,
    EngineCrash,
    RolloutPlan,
    TurnPlan,
    Workload,
    draw_workload,
)

MODEL = EngineModel(
    "test",
    kv_tokens=4096,
    block_tokens=16,
    max_sequences=32,
    batch_tokens=512,
    step_s=0.01,
    sequence_s=0.001,
    context_s=1e-6,
    prefill_s=1e-4,
    pair_s=1e-8,
)


def config(policy: str) -> SchedulerConfig:
    return SchedulerConfig.model_validate({"policy": policy})


def plan(name: str, prompt: int, *turns: tuple[int, float, int], limit: int = 1024) -> RolloutPlan:
    made = tuple(TurnPlan(*turn) for turn in turns)
    return RolloutPlan(name, name.split("/")[0], prompt, made, limit)


def alone(sequence: EngineSequence, model: EngineModel = MODEL) -> tuple[SimulatedEngine, float]:
    engine = SimulatedEngine("e", model)
    engine.add(sequence, 0.0)
    now = 0.0
    while engine.next_time < inf:
        now = engine.next_time
        engine.finish_steps(now)
    return engine, now


# --------------------------------------------------------------------------- engine model


def test_one_sequence_alone_by_hand() -> None:
    engine, now = alone(EngineSequence("s", "g", prompt=100, new=4, shared_tokens=100))
    prefill = 0.01 + 100 * 1e-4 + (100 * 99 // 2) * 1e-8
    decode = sum(0.01 + 0.001 + 1e-6 * context for context in (101, 102, 103))
    assert now == pytest.approx(prefill + decode)
    assert engine.tally.decoded == 4
    assert engine.tally.prefilled == 100
    assert engine.tally.steps == 4


def test_long_prompts_are_computed_in_chunks() -> None:
    engine, now = alone(EngineSequence("s", "g", prompt=1000, new=1, shared_tokens=0))
    assert engine.tally.steps == 2
    assert now == pytest.approx(2 * 0.01 + 1000 * 1e-4 + (1000 * 999 // 2) * 1e-8)


def test_many_steps_at_once_equal_single_steps() -> None:
    """Cutting a run of steps short by arrivals that change nothing must not change time."""
    model = replace(MODEL, max_sequences=1)
    smooth, end = alone(EngineSequence("s", "g", 100, 500, 0), model)
    engine = SimulatedEngine("e", model)
    engine.add(EngineSequence("s", "g", 100, 500, 0), 0.0)
    engine.finish_steps(0.0)
    now = 0.0
    for tick in range(40):
        if tick % 3 == 0:
            engine.add(EngineSequence(f"w{tick}", "g", 50, 1, 0), now + 1e-4)
        now = engine.next_time
        if engine.finish_steps(now).finished:
            break
    assert now == pytest.approx(end)
    assert smooth.tally.decoded == 500


def test_cached_prefix_is_not_computed_again() -> None:
    engine = SimulatedEngine("e", MODEL)
    first = EngineSequence("s", "g", prompt=96, new=33, shared_tokens=96)
    engine.add(first, 0.0)
    while engine.next_time < inf:
        now = engine.next_time
        engine.finish_steps(now)
    # 128 of its 129 tokens have KV: eight whole blocks
    again = EngineSequence("s", "g", prompt=149, new=1, shared_tokens=96, computed=first.computed)
    engine.add(again, now)
    before = engine.tally.prefilled
    while engine.next_time < inf:
        engine.finish_steps(engine.next_time)
    assert engine.tally.prefilled - before == 149 - 128
    assert engine.tally.recomputed == 0


def test_group_prompt_is_computed_once() -> None:
    engine = SimulatedEngine("e", MODEL)
    for name in ("a", "b", "c"):
        engine.add(EngineSequence(name, "g", prompt=160, new=4, shared_tokens=160), 0.0)
    while engine.next_time < inf:
        engine.finish_steps(engine.next_time)
    # whole blocks before the last token are shared: 144 of 160
    assert engine.tally.prefilled == 160 + 2 * 16


def test_overflow_preempts_the_youngest_and_computes_it_again() -> None:
    model = replace(MODEL, kv_tokens=512)
    engine = SimulatedEngine("e", model)
    for name in ("old", "young"):
        engine.add(EngineSequence(name, name, prompt=100, new=300, shared_tokens=0), 0.0)
    ended: list[str] = []
    while engine.next_time < inf:
        outcome = engine.finish_steps(engine.next_time)
        ended += [sequence.session for sequence in outcome.finished]
        assert {s.session for s in outcome.preempted} <= {"young"}
    assert ended == ["old", "young"]
    assert engine.tally.preemptions == 1
    assert engine.tally.recomputed > 0
    assert engine.tally.decoded == 600
    assert engine.tally.kv_peak <= 1.0


def test_fit_finds_the_figures_that_made_the_steps() -> None:
    rows = [
        MeasuredStep(b, b * c, MODEL.step(b, b * c, p), p)
        for b in (1, 4, 16)
        for c in (10, 400)
        for p in (0, 128)
    ]
    fitted = fit_engine(EngineModel("bare", kv_tokens=4096), rows)
    assert fitted.worst_error < 1e-6
    assert fitted.model.step(7, 900, 30) == pytest.approx(MODEL.step(7, 900, 30))


def test_engine_model_survives_json_and_refuses_unknown_keys(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(MODEL.to_json())
    assert EngineModel.from_json(path) == MODEL
    path.write_text(json.dumps({"name": "x", "kv_tokens": 100, "speed": 3}))
    with pytest.raises(DataError, match="unknown key 'speed'"):
        EngineModel.from_json(path)
    rows = [{"batch": b, "context": 10 * b, "seconds": 0.01 * b} for b in (1, 2, 3, 4)]
    path.write_text(json.dumps({"name": "x", "kv_tokens": 100, "rows": rows}))
    assert EngineModel.from_json(path).step(5, 50) == pytest.approx(0.05)


def test_kv_of_the_papers_engines_from_memory_figures() -> None:
    model = from_hardware(memory_share=0.9)
    per_token = 2 * 40 * 8 * 128 * 2
    free = 4 * (192e9 * 0.9 - 6e9) - 14.8e9 * 2
    assert per_token == 163_840
    assert model.kv_tokens == int(free / per_token) // 16 * 16 == 3_891_600


# --------------------------------------------------------------------------- whole simulations

workloads = st.builds(
    lambda rollouts, engines, kv: Workload(
        "random",
        tuple(replace(r, id=f"{r.group}/{i}") for i, r in enumerate(rollouts)),
        (replace(MODEL, kv_tokens=kv),) * engines,
    ),
    st.lists(
        st.builds(
            lambda group, turns: plan(f"{group}/0", 20 + 7 * group, *turns),
            st.integers(0, 3),
            st.lists(
                st.tuples(st.integers(1, 150), st.floats(0, 3), st.integers(1, 60)),
                min_size=1,
                max_size=4,
            ).map(lambda turns: [*turns[:-1], (turns[-1][0], 0.0, 0)]),
        ),
        min_size=1,
        max_size=24,
    ),
    st.integers(1, 3),
    st.sampled_from([1024, 1600, 4096]),
)


@settings(max_examples=120, deadline=None)
@given(workload=workloads, policy=st.sampled_from(POLICIES))
def test_every_rollout_ends_once_and_nothing_beats_the_bound(
    workload: Workload, policy: str
) -> None:
    simulation = Simulation(workload, config(policy))
    simulation.run()
    assert len(simulation.ends) == len(workload.rollouts)
    bound = lower_bound(workload)
    assert simulation.now >= bound.seconds * (1 - 1e-9)
    wanted = sum(turn.sampled for r in workload.rollouts for turn in r.turns)
    assert sum(engine.tally.decoded for engine in simulation.engines) == wanted
    assert simulation.log.turns == sum(len(r.turns) for r in workload.rollouts)
    for name in simulation.scheduler.engines:
        budget = simulation.scheduler.budget(name)
        assert budget.reserved == 0
        assert budget.sessions == ()


@settings(max_examples=60, deadline=None)
@given(
    workload=workloads,
    policy=st.sampled_from(POLICIES),
    deaths=st.lists(
        st.tuples(st.floats(0.01, 8.0), st.integers(0, 2), st.floats(0.01, 2.0)), max_size=4
    ),
)
def test_deaths_lose_no_rollout(
    workload: Workload, policy: str, deaths: list[tuple[float, int, float]]
) -> None:
    crashes: dict[int, EngineCrash] = {}
    for time, engine, away in deaths:  # one death an engine: a second could hit it while away
        index = engine % len(workload.engines)
        crashes[index] = EngineCrash(time, index, time + away)
    workload = replace(workload, crashes=tuple(crashes.values()))
    simulation = Simulation(workload, config(policy))
    simulation.run()
    assert len(simulation.ends) == len(workload.rollouts)
    assert simulation.now >= lower_bound(workload).seconds * (1 - 1e-9)


@pytest.mark.parametrize("policy", POLICIES)
def test_same_seed_same_result(policy: str) -> None:
    shape = replace(SHAPES["short-slow-heavy"], problems=4, group=8, engines=2, memory_share=0.08)

    def once(seed: int) -> PolicyResult:
        return measure(
            draw_workload(shape, seed), config(policy), before=draw_workload(shape, seed + 1)
        )

    assert once(3) == once(3)
    assert once(3) != once(4)


def test_bound_of_one_rollout_is_what_it_takes_alone() -> None:
    rollout = plan("g/0", 160, (10, 2.0, 30), (5, 0.0, 0))
    workload = Workload("one", (rollout,), (MODEL,))
    simulation = Simulation(workload, config("worst_case"))
    simulation.run()
    bound = lower_bound(workload)
    # beyond the bound: the whole prompt and the part of a block that cannot be reused
    extra = simulation.now - bound.longest_s
    assert bound.seconds >= 15 * 0.01 + 2.0
    assert 0 <= extra < 0.05


def test_more_engines_than_work_bound_by_the_longest() -> None:
    rollouts = tuple(plan(f"g/{i}", 20, (50 + i, 0.0, 0)) for i in range(4))
    bound = lower_bound(Workload("few", rollouts, (MODEL,) * 16))
    assert bound.seconds == bound.longest_s > bound.work_s


def test_admission_by_cost_preempts_where_it_is_cheap_and_not_where_it_is_expensive() -> None:
    # small engines: 2 x 142K tokens for 160 rollouts of about 5K
    shape = replace(SHAPES["short-fast-heavy"], problems=20, group=8, engines=2, memory_share=0.1)
    workload, before = draw_workload(shape, 0), draw_workload(shape, 1)
    chosen = ("reserve", "least_requests", "static_split")
    results = {p: measure(workload, config(p), before=before) for p in chosen}
    assert results["reserve"].cold_makespan_s is not None
    assert results["static_split"].makespan_s > 1.3 * results["reserve"].makespan_s
    assert results["reserve"].makespan_s < results["least_requests"].makespan_s

    def slow_prefill(given: Workload) -> Workload:
        return replace(
            given, engines=tuple(replace(m, prefill_s=50 * m.prefill_s) for m in given.engines)
        )

    dear = measure(slow_prefill(workload), config("reserve"), before=slow_prefill(before))
    assert dear.preemptions < results["reserve"].preemptions / 2


# --------------------------------------------------------------------------- unequal engines


def test_bound_of_unequal_engines_lies_between_those_of_equal_ones() -> None:
    rollouts = tuple(plan(f"g/{i}", 20, (150 + i, 0.5, 10), (60, 0.0, 0)) for i in range(40))

    def bound(*engines: EngineModel) -> float:
        return lower_bound(Workload("w", rollouts, engines)).work_s

    slow = MODEL.slowed(3)
    mixed = bound(MODEL, slow)
    assert bound(MODEL, MODEL) < mixed < bound(slow, slow)
    # by the work alone the slow engine does a third of what the other does
    assert mixed == pytest.approx(bound(MODEL) * 3 / 4, rel=0.1)


def test_slow_engine_gets_less_and_nothing_that_it_would_finish_last() -> None:
    shape = replace(HELD_IN["slow-engine"], problems=6, group=8, engines=2, slower=(1, 8))
    workload, before = draw_workload(shape, 0), draw_workload(shape, 1)
    ours = measure(workload, config("reserve"), before=before)
    theirs = measure(workload, config("least_requests"), before=before)
    assert ours.makespan_s < 0.6 * theirs.makespan_s


def test_no_few_rollouts_are_held_back_to_end_last() -> None:
    """All start at once and end late: the few that the forecast leaves no room for must not wait
    until then. With a forecast from an easier problem they did, and took 40% longer."""
    shape = replace(HELD_IN["group-512"], group=64, engines=1, kv_tokens=112_500)
    workload, before = draw_workload(shape, 0), draw_workload(shape, 1)
    ours = measure(workload, config("reserve"), before=before)
    theirs = measure(workload, config("least_requests"), before=before)
    assert ours.makespan_s < 1.05 * theirs.makespan_s


def test_long_prompts_do_not_wait_for_short_ones() -> None:
    """ThunderAgent starts the smallest first; ours starts rollouts in their order."""
    shape = replace(
        HELD_IN["h100-stage3"],
        problems=40,
        group=2,
        engines=1,
        mean=1500,
        prompts=(700, 8000),
        kv_tokens=60_000,
    )
    workload, before = draw_workload(shape, 0), draw_workload(shape, 1)
    ours = measure(workload, config("reserve"), before=before).first_p99_s
    theirs = measure(workload, config("thunder_agent"), before=before).first_p99_s
    assert ours[8192] <= 4 * ours[1024]
    assert theirs[8192] / theirs[1024] > ours[8192] / ours[1024]


# --------------------------------------------------------------------------- suites


def test_suites_have_the_workloads_of_the_issue_and_random_ones() -> None:
    assert len(HELD_IN) == 12
    assert held_out(0) == held_out(0)
    assert held_out(0) != held_out(1)
    for shape in (
        *HELD_IN.values(),
        *PROMPTS.values(),
        *held_out(0).values(),
        *held_out(1).values(),
    ):
        workload = draw_workload(shape, 0)
        assert min(m.kv_tokens for m in workload.engines) >= workload.max_length, shape.name


def test_finished_simulations_are_kept_in_a_file_and_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    shape = replace(SHAPES["stage1"], problems=1, group=2, engines=1)
    done: list[str] = []

    def run(*seeds: int) -> list[PolicyResult]:
        cases = cases_of([shape], ("least_requests", "mean_cap"), seeds, 1.0, True, tuned=True)
        return run_cases(
            cases, jobs=1, done=lambda result, number, total: done.append(result.policy), file=file
        )

    first = run(3)
    assert [r.policy for r in first] == ["least_requests", "mean_cap"]
    assert len(done) == 1 + len(FACTORS)
    assert run(3) == first
    assert len(done) == 1 + len(FACTORS)
    run(3, 4)
    assert len(done) == 2 * (1 + len(FACTORS))
    file.write_text("not a result\n")
    with pytest.raises(DataError, match="line 1 is no result"):
        run(3)


# --------------------------------------------------------------------------- reading results


def result(policy: str, makespan: float, preemptions: int = 0) -> PolicyResult:
    shape = replace(SHAPES["stage1"], problems=1, group=2, engines=1)
    simulation = Simulation(draw_workload(shape, 0), config("least_requests"))
    simulation.run()
    made = summarize(simulation, policy)
    return replace(made, workload="w", makespan_s=makespan, bound_s=100.0, preemptions=preemptions)


def test_target_check_compares_with_the_best_other_policy() -> None:
    results = [result("reserve", 120.0), result("aimd", 100.0, 3), result("static_split", 150.0)]
    (check,) = check_targets(results)
    assert check.best == "aimd"
    assert check.missed == ("20.0% behind aimd",)
    (good,) = check_targets([result("reserve", 105.0), result("aimd", 104.0)])
    assert good.missed == ()
    shown = table(results + [replace(r, workload="v") for r in results])
    assert "1.200" in shown
    assert "1.000 (3)" in shown
    assert "geometric mean" in shown


def test_first_responses_are_shown_where_prompts_differ() -> None:
    mixed = replace(result("reserve", 100.0), first_p99_s={1024: 10.0, 8192: 25.0, 1 << 30: 30.0})
    shown = first_responses([mixed, result("aimd", 100.0)])
    assert "| workload | policy  | 1K   | 8K   | longer | longest / shortest |" in shown
    assert "| w        | reserve | 10.0 | 25.0 | 30.0   | 3.00               |" in shown
    assert "aimd" not in shown
    assert first_responses([result("aimd", 100.0)]) == ""
