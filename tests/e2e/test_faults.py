"""What a run does when parts of it fail: it continues, or stops with its best weights."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rstar2.config import Recipe
from rstar2.engine.make import make_engines
from rstar2.pipeline import runtime
from rstar2.pipeline.controller import TrainingResult, run
from rstar2.pipeline.progress import QuietView, StageKind
from rstar2.record import (
    RunDirectory,
    read_evaluations,
    read_events,
    read_groups,
    read_metrics,
)
from tests.e2e.miniature import miniature

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

STAGE = {"name": "only", "max_length": 128, "max_turns": 3, "steps": 3}


@dataclass
class Watcher(QuietView):
    """Calls back once, at the first sign of progress in a stage."""

    stage_name: str = ""
    then: Callable[[], None] = lambda: None
    at: str = ""
    notes: list[str] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)

    def steps(self, total: int) -> None:
        self.totals.append(total)

    def stage(self, name: str, kind: StageKind, total: int, done: int = 0) -> None:
        self.at = name

    def progress(self, done: int, total: int, unit: str = "rollouts") -> None:
        if self.at == self.stage_name:
            self.stage_name = ""
            self.then()

    def note(self, text: str) -> None:
        self.notes.append(text)


def recipe_from(finished: Path, directory: Path, **rl: Any) -> Recipe:
    """RL alone, from the weights that SFT made in a finished run."""
    base = miniature(directory)
    return miniature(
        directory,
        sft=None,
        rl=base.rl.model_dump() | {"stages": [STAGE]} | rl,
        model={"path": str(finished / "exports" / "sft"), "max_length": 128},
        evaluation=base.evaluation.model_dump() | {"count": 2, "samples": 1},
    )


def execute(recipe: Recipe, path: Path, view: Watcher) -> TrainingResult:
    with RunDirectory.create_or_resume(path, recipe) as directory:
        return asyncio.run(run(recipe, directory, view))


def test_killed_engine_comes_back_and_no_rollout_is_lost(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Any] = []
    make = make_engines

    def remember(*args: Any) -> list[Any]:
        engines.extend(make(*args))
        return engines

    monkeypatch.setattr(runtime, "make_engines", remember)

    def kill_engine() -> None:
        os.kill(engines[0].pid, signal.SIGKILL)

    view = Watcher(stage_name="only", then=kill_engine)
    execute(recipe_from(finished, tmp_path / "data"), tmp_path / "run", view)
    steps = [m for m in read_metrics(tmp_path / "run") if m["stage"] == "only"]
    assert [m["step"] for m in steps] == [1, 2, 3]
    assert sum(m["engine/deaths"] for m in steps) == 1, "counted in its step alone"
    assert sum(m["rollouts/lost"] for m in steps) == 0


def test_collapse_ends_training_and_the_best_weights_are_kept(
    finished: Path, tmp_path: Path
) -> None:
    recipe = recipe_from(finished, tmp_path / "data", collapse={"window": 2, "entropy_floor": 9.0})
    view = Watcher()
    result = execute(recipe, tmp_path / "run", view)
    assert "entropy" in result.collapsed
    assert result.rl_steps == 2, "the third step is not taken"
    assert set(result.exports) == {"best", "only"}
    assert any("collapsed" in note for note in view.notes)
    again = execute(recipe, tmp_path / "run", Watcher())
    assert (again.rl_steps, again.collapsed) == (2, result.collapsed), "nor by the same command"


def test_one_step_ahead_every_step_is_done_once_with_bounded_staleness(
    finished: Path, tmp_path: Path
) -> None:
    """Staleness 1, with an engine killed on the way: weights change under running rollouts."""
    recipe = recipe_from(finished, tmp_path / "data", staleness=1)
    recipe = recipe.model_copy(update={"deterministic": False})
    execute(recipe, tmp_path / "run", Watcher())
    steps = [m for m in read_metrics(tmp_path / "run") if m["stage"] == "only"]
    assert [m["step"] for m in steps] == [1, 2, 3]
    assert all(m["staleness/max"] <= 1 for m in steps)
    assert sum(m["rollouts/lost"] + m["groups/stale"] for m in steps) == 0
    groups = list(read_groups(tmp_path / "run", "only"))
    assert len({line.group.id for line in groups}) == len(groups), "no group is learnt from twice"
    for line in groups:
        sampled = {v for t in line.group.trajectories for u in t.turns for v, n in u.versions if n}
        assert sampled <= {line.step - 2, line.step - 1, line.step}, "of the step before, or now"


def test_a_stage_out_of_time_ends_and_the_run_is_complete(finished: Path, tmp_path: Path) -> None:
    """A budget that is over when RL starts leaves one step, its evaluation and its export."""
    recipe = recipe_from(finished, tmp_path / "data").model_copy(update={"minutes": 0.01})
    view = Watcher()
    result = execute(recipe, tmp_path / "run", view)
    assert [m["step"] for m in read_metrics(result.path) if m["stage"] == "only"] == [1]
    assert (result.rl_steps, view.totals) == (1, [1])
    assert view.notes[-1] == "only: out of time after 1 of 3 steps"
    (over,) = [event for event in read_events(result.path) if event["event"] == "budget"]
    assert (over["stage"], over["step"], over["minutes"]) == ("only", 1, 0.01)
    assert {e.stage for e in read_evaluations(result.path)} == {"sft", "only"}
    assert "only" in result.exports
    again = execute(recipe, tmp_path / "run", view)  # nothing is left to do
    assert again.rl_steps == 1
