"""The difficulty filter streams: bounded in flight, recorded as groups end, resumed after kills."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rstar2.config import Recipe, StageConfig
from rstar2.errors import InfrastructureError
from rstar2.pipeline.difficulty_filter import hard_problems
from rstar2.pipeline.state import RunState
from rstar2.record import RunDirectory, filter_stage, read_groups
from rstar2.record.read import read_lines, read_metrics
from rstar2.record.solved import SolvedLine, solved_file, unfinished_filters
from rstar2.types import Problem
from tests.pipeline.scripted_runner import KilledError, ScriptedRunner

STAGE = StageConfig(name="hard", steps=1, max_length=64, difficulty={"samples": 2})
RECIPE = Recipe(
    name="filtered",
    engine={"max_sequences": 16},
    rl={"stages": [STAGE]},
)
PROBLEMS = tuple(Problem(str(i), "?", "1") for i in range(200))


def training_of(run: RunDirectory, runner: ScriptedRunner) -> Any:
    """The parts of a `Training` that the filter uses."""

    async def publish(version: int) -> None: ...

    nothing = SimpleNamespace(
        stage=lambda *args: None, progress=lambda *args: None, note=lambda text: None
    )
    runtime = SimpleNamespace(problems=PROBLEMS, runner=runner)
    return SimpleNamespace(run=run, recipe=RECIPE, runtime=runtime, view=nothing, publish=publish)


async def filtered(path: Path, runner: ScriptedRunner, version: int = 3) -> tuple[int, ...]:
    """Run or resume the filter as a run does: rewind, then answer what is missing."""
    with RunDirectory.create_or_resume(path, RECIPE) as run:
        run.rewind("sft", 0, keep=unfinished_filters(path, ["hard"], version))
        state = await hard_problems(training_of(run, runner), STAGE, RunState(version=version))
    return state.kept["hard"]


def recorded(path: Path) -> list[str]:
    return [line.group.problem.id for line in read_groups(path, filter_stage("hard"))]


async def test_a_killed_filter_resumes_without_repeating_finished_groups(tmp_path: Path) -> None:
    first = ScriptedRunner(dies_after=90)
    with pytest.raises(KilledError):
        await filtered(tmp_path, first)
    done = {line.index for line in read_lines(solved_file(tmp_path, "hard"), SolvedLine)}
    assert len(done) == 90
    second = ScriptedRunner()
    kept = await filtered(tmp_path, second)
    assert sorted(second.asked) == sorted(set(range(200)) - done)
    assert kept == tuple(i for i in range(200) if i % 3)
    assert sorted(recorded(tmp_path), key=int) == [str(i) for i in range(200)]
    assert not solved_file(tmp_path, "hard").exists()


async def test_an_outage_ends_the_filter_and_the_lost_problems_are_answered_again(
    tmp_path: Path,
) -> None:
    """The engines die for good after 30 groups: no problem may count as hard because of it."""
    dead = ScriptedRunner(loses=lambda index, ended: ended >= 30)
    with pytest.raises(InfrastructureError, match=r"8 groups of filter-hard in a row.*engine"):
        await filtered(tmp_path, dead)
    assert not (tmp_path / "filter-hard.json").exists()
    done = {line.index for line in read_lines(solved_file(tmp_path, "hard"), SolvedLine)}
    assert len(done) == 30
    second = ScriptedRunner()
    kept = await filtered(tmp_path, second)
    assert sorted(second.asked) == sorted(set(range(200)) - done)
    assert kept == tuple(i for i in range(200) if i % 3)


async def test_a_lost_group_is_drawn_again_after_all_others(tmp_path: Path) -> None:
    seen: set[int] = set()

    def first_time(index: int, ended: int) -> bool:
        new = index not in seen
        seen.add(index)
        return new and index % 50 == 0

    runner = ScriptedRunner(loses=first_time)
    assert await filtered(tmp_path, runner) == tuple(i for i in range(200) if i % 3)
    assert sorted(runner.asked[-4:]) == [0, 50, 100, 150]
    assert len(runner.asked) == 204


async def test_an_engine_that_dies_at_the_very_end_is_an_outage_too(tmp_path: Path) -> None:
    runner = ScriptedRunner(loses=lambda index, ended: index == 199)
    with pytest.raises(InfrastructureError, match="problem 199 was lost twice, to engine x2"):
        await filtered(tmp_path, runner)
    again = ScriptedRunner()
    assert await filtered(tmp_path, again) == tuple(i for i in range(200) if i % 3)
    assert again.asked == [199]


async def test_a_problem_that_can_never_be_graded_is_kept_and_does_not_stop_the_run(
    tmp_path: Path,
) -> None:
    runner = ScriptedRunner(loses=lambda index, ended: index % 20 == 3, lost_to="grader_deadline")
    kept = await filtered(tmp_path, runner)
    assert kept == tuple(i for i in range(200) if i % 3 or i % 20 == 3)
    assert len(runner.asked) == 210
    (figures,) = read_metrics(tmp_path)
    assert figures["problems/ungraded"] == 10


async def test_only_as_many_groups_as_the_engines_can_use_are_in_flight(tmp_path: Path) -> None:
    runner = ScriptedRunner()
    await filtered(tmp_path, runner)
    assert runner.most == 16  # one engine with 16 sequences, twice as many rollouts, 2 a group


async def test_groups_of_other_weights_are_answered_again(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        await filtered(tmp_path, ScriptedRunner(dies_after=50), version=2)
    runner = ScriptedRunner()
    await filtered(tmp_path, runner, version=3)
    assert sorted(runner.asked) == list(range(200))
    assert len(recorded(tmp_path)) == 200


async def test_a_group_that_was_written_but_not_counted_is_recorded_once(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        await filtered(tmp_path, ScriptedRunner(dies_after=50))
    file = solved_file(tmp_path, "hard")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))  # killed between the two writes
    await filtered(tmp_path, ScriptedRunner())
    assert sorted(recorded(tmp_path), key=int) == [str(i) for i in range(200)]
