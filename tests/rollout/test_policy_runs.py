"""benchmarks/policy_runs.py: which measured runs are compared, and what a prediction is made of."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rstar2.config import SchedulerConfig
from rstar2.rollout.scheduler import Scheduler, TurnRequest
from rstar2.rollout.simulate.model import EngineModel, MeasuredStep
from rstar2.rollout.simulate.simulation import Simulation
from rstar2.rollout.simulate.workload import RolloutPlan, TurnPlan, Workload
from rstar2.rollout.thunder_agent import ThunderAgent
from rstar2.types import EngineLoad

runs: Any = import_module("benchmarks.policy_runs")

SETTING = runs.Setting(model="test", kv="scarce", kv_tokens=1024, rollouts=24, seed=0)
ROLLOUTS = tuple(
    RolloutPlan(f"g{i // 8}/{i}", f"g{i // 8}", 40, (TurnPlan(60, 0.1, 10), TurnPlan(80)), 512)
    for i in range(24)
)
MODEL = EngineModel("test", 1024, 32, 64, 2048, step_s=0.01, sequence_s=0.001, prefill_s=1e-4)


def steps(model: EngineModel) -> tuple[MeasuredStep, ...]:
    rows = [(batch, 50 * batch, prefill) for batch in (1, 4, 9, 16) for prefill in (0, 8, 30)]
    return tuple(MeasuredStep(b, c, model.step(b, c, p), p) for b, c, p in rows)


def run(policy: str, repetition: int = 0, process: int = 1, wall_s: float = 10.0) -> Any:
    return runs.PolicyRun(
        setting=SETTING,
        process=process,
        kv_tokens=1024,
        repetition=repetition,
        policy=policy,
        wall_s=wall_s,
        preemptions=0,
        idle_share=0.0,
        moved=0,
        rollouts=ROLLOUTS,
        steps=steps(MODEL),
    )


def test_a_rival_is_compared_with_the_mean_of_our_runs_around_it() -> None:
    made = [run("reserve", wall_s=8.0), run("aimd", wall_s=9.0), run("reserve", wall_s=12.0)]
    known = runs.comparisons(made)
    assert list(known) == [(0, "aimd")]
    assert known[0, "aimd"].ratio == pytest.approx(0.9)


def test_an_interrupted_comparison_does_not_count() -> None:
    cut = [run("reserve"), run("aimd")]
    resumed = [run("reserve", process=2), run("aimd", process=2), run("reserve", process=2)]
    assert runs.comparisons(cut) == {}
    assert runs.comparisons([*cut, resumed[0]]) == {}
    assert runs.comparisons([*cut, *resumed])[0, "aimd"].run is resumed[1]


def test_runs_with_other_rollouts_and_warm_ups_are_not_compared() -> None:
    assert runs.comparisons([run("reserve", 0), run("aimd", 1), run("reserve", 1)]) == {}
    warm = [run("reserve", runs.WARM_UP), run("aimd", runs.WARM_UP), run("reserve", runs.WARM_UP)]
    assert runs.comparisons(warm) == {}


def test_the_file_returns_the_runs_of_its_setting(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    assert runs.read_runs(file, SETTING) == []
    made = [run("reserve"), run("mean_cap:2")]
    for one in made:
        runs.append_run(file, one)
    assert runs.read_runs(file, SETTING) == made
    other = runs.Setting(model="test", kv="ample", kv_tokens=4096, rollouts=24, seed=0)
    assert runs.read_runs(file, other) == []
    with file.open("ab") as output:
        output.write(b'{"setting"\n')
    with pytest.raises(SystemExit, match="line 3"):
        runs.read_runs(file, SETTING)


def test_steps_are_averaged_over_windows_in_which_the_engine_is_busy() -> None:
    def load(running: int, made: int) -> EngineLoad:
        return EngineLoad(100 * running, running, 0, 0, 0, made, 5 * made, 3 * made)

    reports = [(0.5 * i, load(running=4, made=10 * i)) for i in range(5)]
    first, second = runs.mean_steps(reports)
    assert first == MeasuredStep(batch=5, context=400, seconds=0.05, prefill=3)
    assert second == first
    idle = [reports[0], reports[1], (0.9, load(0, 15)), *reports[2:4]]
    assert runs.mean_steps(idle) == []


def test_a_prediction_is_fitted_to_our_runs_next_to_it_and_not_to_itself() -> None:
    slow = steps(MODEL.slowed(2.0))
    made = [run("reserve"), run("least_requests"), run("reserve")]
    made = [
        runs.msgspec.structs.replace(one, steps=slow) if one.policy != "reserve" else one
        for one in made
    ]
    warm_up = run("reserve", runs.WARM_UP)
    predicted = runs.predictions([warm_up, *made])
    assert [p.run.policy for p in predicted] == ["reserve", "least_requests", "reserve"]
    for prediction in predicted:
        assert prediction.fit.median_error < 1e-6
        assert prediction.fit.model.step_s == pytest.approx(MODEL.step_s)
    assert runs.predictions([warm_up, made[1]]) == []  # nothing to fit a model to


def test_policies_are_named_with_their_factor() -> None:
    assert runs.make_scheduler("mean_cap:2.5").config.cap_factor == 2.5
    assert runs.learns("mean_cap:2.5")
    assert not runs.learns("thunder_agent")


def first_report(report_s: float) -> float:
    """When the engines of a simulation report for the first time."""
    reported: list[float] = []

    class Listening(Scheduler):
        def load_reported(self, engine: str, load: EngineLoad, now: float = 0.0) -> None:
            reported.append(now)

    config = SchedulerConfig(policy="least_requests")
    workload = Workload("test", ROLLOUTS, (MODEL,))
    Simulation(workload, config, scheduler=Listening(config), report_s=report_s).run()
    return reported[0]


def test_simulated_engines_report_as_often_as_real_ones() -> None:
    assert first_report(1.0) == 1.0
    assert first_report(0.25) == 0.25


def test_thunder_agent_counts_a_buffer_for_each_rollout() -> None:
    started = []
    for buffer in (100, 6):
        scheduler = Scheduler(SchedulerConfig(policy="thunder_agent"))
        scheduler.policy = ThunderAgent(buffer=buffer)
        scheduler.join("engine", MODEL.capacity(512), 0)
        for plan in ROLLOUTS:
            scheduler.submit(TurnRequest(plan.id, plan.group, plan.prompt, 472))
        started.append(len(scheduler.decide().placements))
    assert started == [1024 // 140, 1024 // 46]
