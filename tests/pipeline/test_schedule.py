"""How long a learning-rate schedule is: from a reset of the optimizer to the next."""

from __future__ import annotations

import pytest

from rstar2.config import OptimizerConfig, RlConfig, StageConfig
from rstar2.learner.optim import lr_factor
from rstar2.pipeline.training import scheduled_updates


def stages(*resets: bool) -> RlConfig:
    """Stages a, b, c, ... of 10, 20, 30, ... steps with two updates each."""
    made = [
        StageConfig(name="abcd"[i], steps=10 * (i + 1), max_length=64, reset_optimizer=reset)
        for i, reset in enumerate(resets)
    ]
    return RlConfig(stages=tuple(made), minibatches=2)


@pytest.mark.parametrize(
    ("resets", "expected"),
    [
        ((False,), [20]),
        ((False, False, False), [120, 120, 120]),
        ((False, False, True), [60, 60, 60]),
        ((False, True, False, True), [20, 100, 100, 80]),
        ((True, True), [20, 40]),
    ],
)
def test_updates(resets: tuple[bool, ...], expected: list[int]) -> None:
    rl = stages(*resets)
    assert [scheduled_updates(rl, stage.name) for stage in rl.stages] == expected


def test_a_cosine_after_a_reset_ends_at_zero() -> None:
    """With the sum of all stages as horizon, the last stage would end at three quarters."""
    rl = stages(False, False, True)
    cosine = OptimizerConfig(schedule="cosine")
    assert lr_factor(60, cosine, scheduled_updates(rl, "c")) == pytest.approx(0.0)
    assert lr_factor(30, cosine, scheduled_updates(rl, "c")) == pytest.approx(0.5)
