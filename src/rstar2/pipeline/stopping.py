"""When an RL stage stops: after its steps, at a plateau, or when its share of the time is used.

All functions are pure. Plateaus: recent values in, a verdict out. The values are part of the run's
state, so a resumed run takes the same decision. Time budgets (`minutes`): seconds in, steps out.
Run seconds count the time in which a run has worked, from its start. The time in which it was
stopped does not count, nor do steps that a kill lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rstar2.config import PlateauConfig, StageConfig
from rstar2.evaluate.metrics import mean
from rstar2.pipeline.state import RunState

RECENT_STEPS = 5
"""Steps whose mean duration is the estimate for the next ones."""


# --------------------------------------------------------------------------- plateaus


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


# --------------------------------------------------------------------------- time budgets


def stage_end(
    stages: Sequence[StageConfig], name: str, *, now_s: float, budget_s: float, evaluation_s: float
) -> float:
    """The run second at which a stage that begins now ends.

    The stages that are left each need time for an evaluation; they share the rest of the budget in
    the ratio of their steps.
    """
    here = [stage.name for stage in stages].index(name)
    left = stages[here:]
    free_s = max(0.0, budget_s - now_s - len(left) * evaluation_s)
    steps = sum(stage.steps for stage in left)
    return now_s + free_s * stages[here].steps / max(1, steps)


def fitted_steps(
    planned: int, done: int, durations: Sequence[float], *, now_s: float, end_s: float
) -> int:
    """Steps that a stage will have: those done, and as many of the planned ones as still fit.

    Without a measured step all are planned, so every stage takes at least one.
    """
    if not durations:
        return planned
    step_s = mean(durations[-RECENT_STEPS:])
    return min(planned, done + max(0, int((end_s - now_s) // step_s)))
