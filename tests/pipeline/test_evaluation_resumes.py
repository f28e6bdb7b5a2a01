"""An evaluation inside a run that was killed resumes with the problems that have no answer yet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rstar2.config import Recipe
from rstar2.errors import InfrastructureError
from rstar2.pipeline.stages import evaluation
from rstar2.pipeline.state import RunState
from rstar2.pipeline.training import Training
from rstar2.record import RunDirectory, read_evaluations, read_groups
from rstar2.record.read import problem_number
from rstar2.types import Group, Problem
from tests.pipeline.scripted_runner import KilledError, ScriptedRunner

RECIPE = Recipe(
    name="evaluated",
    engine={"max_sequences": 16},
    rl={"stages": [{"name": "hard", "steps": 4, "max_length": 64}]},
    evaluation={"greedy": False, "samples": 2},
)
PROBLEMS = tuple(Problem(str(i), "?", "1") for i in range(60))
STAGE = "eval-hard-sampled"
ENDED = RunState().begin("hard").finish("hard")


class Parts(Training):
    """The parts of a `Training` that evaluations and `restore` use."""

    def __init__(self, run: RunDirectory, runner: ScriptedRunner, state: RunState) -> None:
        nothing = dict.fromkeys(("stage", "progress", "note", "evaluation"), lambda *args: None)
        self.run, self.recipe, self.state = run, RECIPE, state
        self._spent_s = 0.0
        self.view: Any = SimpleNamespace(**nothing)
        self.runtime: Any = SimpleNamespace(heldout=PROBLEMS, runner=runner)

    async def publish(self, version: int) -> dict[str, float]:
        return {}

    async def _load_latest(self) -> Any:
        return SimpleNamespace(state=self.state.to_dict(), torn=[], path=Path("0"))


async def evaluated(path: Path, runner: ScriptedRunner, saved: RunState = ENDED) -> None:
    """Restore the newest checkpoint, then evaluate the stage."""
    with RunDirectory.create_or_resume(path, RECIPE) as run:
        training = Parts(run, runner, saved)
        await training.restore()
        await evaluation(training, "hard", ENDED)


def recorded(path: Path) -> list[str]:
    return [line.group.problem.id for line in read_groups(path, STAGE)]


async def test_it_answers_what_is_missing_and_gives_the_same_figures(tmp_path: Path) -> None:
    await evaluated(tmp_path / "whole", ScriptedRunner())
    with pytest.raises(KilledError):
        await evaluated(tmp_path / "killed", ScriptedRunner(dies_after=40))
    before = recorded(tmp_path / "killed")
    assert len(before) == 40, "recorded as they ended, though an earlier one was still running"
    again = ScriptedRunner()
    await evaluated(tmp_path / "killed", again)
    assert sorted(map(str, again.asked)) == sorted({str(i) for i in range(60)} - set(before))
    assert recorded(tmp_path / "killed") == [str(i) for i in range(60)]
    (whole,), (resumed,) = (read_evaluations(tmp_path / name) for name in ("whole", "killed"))
    assert resumed.accuracy == whole.accuracy
    assert resumed.mean_length == whole.mean_length


async def test_one_slow_problem_does_not_keep_the_others_off_the_record(tmp_path: Path) -> None:
    """Problem 0 never ends: whatever ends after it is on record all the same, and read in order."""

    class FirstHangs(ScriptedRunner):
        async def run(self, problem: Problem, **about: Any) -> Group:
            if problem.id == "0":
                await asyncio.Event().wait()
            return await super().run(problem, **about)

    with pytest.raises(KilledError):
        await evaluated(tmp_path, FirstHangs(dies_after=40))
    before = recorded(tmp_path)
    assert len(before) == 40
    assert before == sorted(before, key=int)
    assert "0" not in before


async def test_an_outage_ends_the_evaluation_and_the_lost_problems_are_answered_again(
    tmp_path: Path,
) -> None:
    dead = ScriptedRunner(loses=lambda index, ended: ended >= 30)
    with pytest.raises(InfrastructureError, match="8 groups of eval-hard-sampled in a row"):
        await evaluated(tmp_path, dead)
    assert read_evaluations(tmp_path) == []
    before = recorded(tmp_path)
    assert len(before) == 30
    again = ScriptedRunner()
    await evaluated(tmp_path, again)
    assert sorted(again.asked) == sorted(set(range(60)) - set(map(int, before)))
    (figures,) = read_evaluations(tmp_path)
    assert figures.accuracy.count == 60


async def test_a_group_without_its_line_in_the_index_is_answered_again(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        await evaluated(tmp_path, ScriptedRunner(dies_after=40))
    index = tmp_path / "index" / f"{STAGE}.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines[:-1]))
    torn = problem_number(msgspec.json.decode(lines[-1])["group"])
    done = {int(problem) for problem in recorded(tmp_path)} - {torn}
    again = ScriptedRunner()
    await evaluated(tmp_path, again)
    assert sorted(again.asked) == sorted(set(range(60)) - done)
    assert recorded(tmp_path) == [str(i) for i in range(60)]


async def test_answers_of_weights_that_are_trained_again_are_not_used(tmp_path: Path) -> None:
    """The newest checkpoint is in the middle of the stage: its last weights are lost."""
    with pytest.raises(KilledError):
        await evaluated(tmp_path, ScriptedRunner(dies_after=40))
    again = ScriptedRunner()
    await evaluated(tmp_path, again, saved=RunState().begin("hard"))
    assert sorted(again.asked) == list(range(60))
    assert recorded(tmp_path) == [str(i) for i in range(60)]
