"""Stages that end when a metric stops improving. Pure: recent values in, a verdict out.

The values are part of the run's state, so a resumed run takes the same decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rstar2.config import PlateauConfig, StageConfig
from rstar2.evaluate.metrics import mean
from rstar2.pipeline.state import RunState


def plateaued(values: tuple[float, ...], config: PlateauConfig) -> bool:
    """Whether the mean of the last window is less than `gain` above that of the one before."""
    window = config.window
    if len(values) < 2 * window:
        return False
    return mean(values[-window:]) - mean(values[-2 * window : -window]) < config.gain


def watch_plateau(stage: StageConfig, state: RunState, metrics: Mapping[str, float]) -> RunState:
    """Add a step's value of the watched metric; steps without one (no evaluation) add nothing."""
    if stage.until is None or stage.until.plateau.metric not in metrics:
        return state
    config = stage.until.plateau
    values = (*state.recent, metrics[config.metric])[-2 * config.window :]
    return replace(state, recent=values)


def stage_complete(stage: StageConfig, state: RunState) -> bool:
    """Whether a stage has had all of its steps, or its metric has reached a plateau."""
    if state.step >= stage.steps:
        return True
    return stage.until is not None and plateaued(state.recent, stage.until.plateau)
