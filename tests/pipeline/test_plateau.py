"""When a stage ends at a plateau: hand-computed means, and a decision that survives a resume."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rstar2.config import PlateauConfig, StageConfig, UntilConfig
from rstar2.pipeline.plateau import plateaued, stage_complete, watch_plateau
from rstar2.pipeline.state import RunState

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
