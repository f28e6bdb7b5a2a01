"""Time budgets: how many steps of an RL stage fit into `minutes`. Pure: seconds in, steps out.

Run seconds count the time in which a run has worked, from its start. The time in which it was
stopped does not count, nor do steps that a kill lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from rstar2.config import StageConfig
from rstar2.evaluate.metrics import mean

RECENT_STEPS = 5
"""Steps whose mean duration is the estimate for the next ones."""


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
