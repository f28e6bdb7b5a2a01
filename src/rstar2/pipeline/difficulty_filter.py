"""The difficulty filter: the current policy answers every problem before a stage.

    problems ──> groups (bounded in flight) ──> trajectories/filter-STAGE.jsonl   if recorded
                                            └─> filter-STAGE.jsonl                a short line each
    all groups ended ──> filter-STAGE.json with the problems that are kept

Invariants
- A group that has ended is recorded before the next event: kill -9 loses only groups in flight. The
  same command answers only the problems that have no line yet.
- A group whose rollouts were all lost is no result. It is drawn again, and an outage ends the run
  without a line for it (`answer_each`).
- Lines and result carry the version of the weights. Those of other weights are not used.
- Memory does not grow with the number of problems, except by two small numbers for each.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from rstar2.agent.loop import RolloutSpec
from rstar2.config import StageConfig
from rstar2.evaluate.run import answer_each, groups_at_once
from rstar2.files import write_file
from rstar2.pipeline.progress import StageKind
from rstar2.pipeline.state import RunState
from rstar2.pipeline.training import Training
from rstar2.problems.model_filters import Difficulty, difficulty
from rstar2.record import filter_stage
from rstar2.record.files import JsonLines
from rstar2.record.read import read_lines
from rstar2.record.solved import SolvedLine, solved_file
from rstar2.types import Group, WeightVersion


async def hard_problems(training: Training, stage: StageConfig, state: RunState) -> RunState:
    """Let the current policy answer every problem and keep those that it does not always solve."""
    assert stage.difficulty is not None
    file = training.run.path / f"{filter_stage(stage.name)}.json"
    known = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
    if known.get("version") != state.version:
        result = await _answer(training, stage, state.version)
        training.run.metrics(filter_stage(stage.name), 1, result.metrics())
        known = {"version": state.version, "kept": result.kept}
        write_file(file, msgspec.json.encode(known))
        solved_file(training.run.path, stage.name).unlink(missing_ok=True)
    kept = tuple(known["kept"])
    training.view.note(
        f"{stage.name}: {len(kept)} of {len(training.runtime.problems)} problems are hard"
    )
    return replace(state, kept={**state.kept, stage.name: kept})


async def _answer(training: Training, stage: StageConfig, version: WeightVersion) -> Difficulty:
    """Answer the problems that have no line yet; how often each problem was solved."""
    assert stage.difficulty is not None
    name, problems = filter_stage(stage.name), training.runtime.problems
    file = solved_file(training.run.path, stage.name)
    before = list(read_lines(file, SolvedLine))
    if any(line.version != version for line in before):  # of other weights
        file.unlink()
        before = []
    solved = {line.index: (line.correct, line.graded) for line in before}
    training.run.keep_groups(name, {f"{name}/1/{index}" for index in solved})
    lines = JsonLines(file)

    def ended(index: int, group: Group) -> None:
        ((correct, graded),) = difficulty([group]).solved
        training.run.trajectories(name, 1, group)
        training.run.flush()
        lines.append(SolvedLine(version, index, correct, graded))
        lines.flush()
        solved[index] = correct, graded
        training.view.progress(len(solved), len(problems), "problems")

    training.view.stage(name, StageKind.FILTER, len(problems), len(solved))
    try:
        await training.publish(version)
        await answer_each(
            training.runtime.runner,
            problems,
            name=name,
            step=1,
            seed=training.recipe.seed,
            samples=stage.difficulty.samples,
            spec=RolloutSpec(training.recipe.rl.sampling, stage.max_length, stage.max_turns),
            at_once=groups_at_once(training.recipe, stage.difficulty.samples),
            on_group=ended,
            skip=set(solved),
        )
    finally:
        lines.close()
    return Difficulty(tuple(solved[index] for index in range(len(problems))))
