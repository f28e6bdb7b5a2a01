"""When a stage stops: hand-computed means, seconds and steps; a decision survives a resume."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rstar2.config import PlateauConfig, StageConfig, UntilConfig
from rstar2.pipeline.state import RunState
from rstar2.pipeline.stopping import (
    fitted_steps,
    plateaued,
    stage_complete,
    stage_end,
    watch_plateau,
)

TWO = PlateauConfig(window=2, gain=0.125)


@pytest.mark.parametrize(
    ("values", "flat"),
    [
        ((), False),
        ((0.5, 0.5, 0.5), False),  # one value short of two windows
        ((0.5, 0.5, 0.5, 0.5), True),  # 0.5 - 0.5 = 0
        ((0.125, 0.375, 0.25, 0.5), False),  # 0.375 - 0.25 = 0.125 is the gain
        ((0.125, 0.375, 0.25, 0.375), True),  # 0.3125 - 0.25 = 0.0625
        ((0.9, 0.7, 0.2, 0.2), True),  # a fall is no gain
        ((0.0, 0.0, 0.125, 0.375, 0.25, 0.5), False),  # only the last four count
    ],
)
def test_two_windows_of_two(values: tuple[float, ...], flat: bool) -> None:
    assert plateaued(values, TWO) is flat


def test_without_a_gain_only_a_fall_ends_a_stage() -> None:
    config = PlateauConfig(window=1)
    assert not plateaued((0.5, 0.5), config)
    assert plateaued((0.5, 0.4), config)


def stage(metric: str = "reward") -> StageConfig:
    plateau = PlateauConfig.model_validate({"metric": metric, "window": 2, "gain": 0.125})
    return StageConfig(name="s", steps=9, max_length=64, until=UntilConfig(plateau=plateau))


def test_a_stage_ends_at_its_plateau_or_after_its_steps() -> None:
    state = RunState(phase="s")
    for step, reward in enumerate([0.125, 0.375, 0.25, 0.5, 0.25], start=1):
        assert not stage_complete(stage(), state)
        state = watch_plateau(stage(), replace(state, step=step), {"reward": reward})
    assert state.recent == (0.375, 0.25, 0.5, 0.25)  # 0.375 - 0.3125 = 0.0625
    assert stage_complete(stage(), state)
    resumed = RunState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert stage_complete(stage(), resumed)
    assert not stage_complete(stage(), resumed.begin("next"))
    assert stage_complete(stage(), RunState(phase="s", step=9))


def test_steps_without_an_evaluation_do_not_count() -> None:
    state = RunState(phase="s")
    for metrics in ({"reward": 0.1}, {"evaluation/greedy": 0.5}, {"reward": 0.2}):
        state = watch_plateau(stage("evaluation/greedy"), state, metrics)
    assert state.recent == (0.5,)


def test_without_a_plateau_nothing_is_kept() -> None:
    plain = StageConfig(name="s", steps=2, max_length=64)
    state = watch_plateau(plain, RunState(phase="s", step=1), {"reward": 1.0})
    assert state.recent == ()
    assert not stage_complete(plain, state)


# --------------------------------------------------------------------------- time budgets


def stages(**steps: int) -> list[StageConfig]:
    return [StageConfig(name=name, steps=count, max_length=64) for name, count in steps.items()]


@pytest.mark.parametrize(
    ("name", "now_s", "end_s"),
    [
        ("short", 100.0, 400.0),  # 1000 - 100 - 2 x 150 = 600, half of it is 300
        ("long", 400.0, 850.0),  # the last stage has all but its evaluation: 1000 - 400 - 150
        ("long", 900.0, 900.0),  # too late: no time is left
    ],
)
def test_stages_share_the_time_that_evaluations_leave(
    name: str, now_s: float, end_s: float
) -> None:
    plan = stages(short=20, long=20)
    assert stage_end(plan, name, now_s=now_s, budget_s=1000.0, evaluation_s=150.0) == end_s


def test_stages_share_time_in_the_ratio_of_their_steps() -> None:
    plan = stages(first=10, second=30, third=0)
    ends = stage_end(plan, "first", now_s=0.0, budget_s=400.0, evaluation_s=0.0)
    assert ends == 100.0  # 10 of 40 steps
    assert stage_end(plan, "third", now_s=400.0, budget_s=400.0, evaluation_s=0.0) == 400.0


@pytest.mark.parametrize(
    ("done", "durations", "now_s", "steps"),
    [
        (0, [], 0.0, 60),  # nothing is measured yet: the first step is always taken
        (1, [10.0], 10.0, 10),  # 90 s hold nine more of 10 s
        (1, [12.0], 12.0, 8),  # 88 s hold seven more of 12 s
        (1, [1.0], 1.0, 60),  # the recipe's steps are the most
        (9, [10.0] * 9, 95.0, 9),  # 5 s hold no further step
        (9, [10.0] * 9, 130.0, 9),  # steps that were done stay
        (6, [90.0, 2.0, 2.0, 2.0, 2.0, 2.0], 96.0, 8),  # the slow first step is forgotten: 4 s, 2
    ],
)
def test_as_many_steps_as_fit(done: int, durations: list[float], now_s: float, steps: int) -> None:
    assert fitted_steps(60, done, durations, now_s=now_s, end_s=100.0) == steps


def test_a_resumed_stage_keeps_its_begin_and_the_next_one_has_its_own() -> None:
    state = RunState(phase="s", step=3, spent_s=31.5, begun_s=12.5)
    resumed = RunState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert resumed.begin("s") == state
    assert resumed.begin("next").begun_s is None
    assert resumed.begin("next").spent_s == 31.5
