"""The index of groups: equal to what the lines say, whatever was killed or rewound between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rstar2.config import Recipe, RlConfig, StageConfig
from rstar2.record import RunDirectory
from rstar2.record.index import GroupEntry, index_entry
from rstar2.record.read import read_lines
from rstar2.types import (
    Choice,
    Group,
    Outcome,
    Problem,
    Reward,
    Selection,
    StopReason,
    TokenSegment,
    TokenValues,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

STAGES = tuple(StageConfig(name=f"stage{n}", steps=9, max_length=64) for n in (1, 2))
RECIPE = Recipe(name="test", rl=RlConfig(stages=STAGES))


def group(name: str, step: int) -> Group:
    call, result = ToolCall("c", "python", {"code": "1/0"}), ToolResult("c", Outcome.EXCEPTION)
    first = Turn(
        (4, 5), (-0.1, -0.2), ((1, 2),), (call,), (result,), (7, 8, 9),
        entropies=(0.25, 0.75), engine="e0", queue_s=0.5, generate_s=1.25, tools_s=0.125,
    )  # fmt: skip
    rollout = Trajectory(
        f"{name}/0", "p", name, 0, (1, 2), (first, Turn((6,), (-0.1,), ((1, 1),))),
        StopReason.ANSWERED, reward=Reward(1.0, "2", "math"), started_at=3.0, wall_s=2.0,
    )  # fmt: skip
    other = replace(rollout, id=f"{name}/1~2", reward=Reward(0.0, None, "math"), turns=())
    return Group(name, Problem("p", "1 + 1?", "2", kind="sum"), step, (rollout, other))


def selection(name: str) -> Selection:
    choices = (
        Choice(f"{name}/0", True, "drawn", 1.0, 1.0, 0.0, 1.0),
        Choice(f"{name}/1~2", False, "not drawn", 0.0, 0.5, 1.0, 1.0),
    )
    return Selection(name, "roc", choices)


def write(run: RunDirectory, step: int) -> None:
    for number in range(2):
        name = f"stage1/{step}/{number}"
        run.trajectories("stage1", step, group(name, step), selection(name) if number else None)
    run.tokens("stage1", step, [TokenValues(f"stage1/{step}/1/0", (-0.1,), (-0.2,))])
    run.metrics("stage1", step, {"reward": 0.5})


def from_lines(path: Path) -> list[GroupEntry]:
    entries, at = [], 0
    for line in (path / "trajectories" / "stage1.jsonl").read_bytes().splitlines(keepends=True):
        entries.append(index_entry(line, at))
        at += len(line)
    return entries


def from_index(path: Path) -> list[GroupEntry]:
    return list(read_lines(path / "index" / "stage1.jsonl", GroupEntry))


def test_written_and_derived_entries_are_equal(tmp_path: Path) -> None:
    with RunDirectory.create_or_resume(tmp_path / "run", RECIPE) as run:
        write(run, 1)
    entries = from_index(tmp_path / "run")
    assert entries == from_lines(tmp_path / "run")
    first, second = entries
    assert (first.used, second.used) == (False, True)
    assert [r.kept for r in second.rollouts] == [True, False]
    rollout, empty = second.rollouts
    assert (rollout.tokens, rollout.sampled, rollout.outcomes) == (6, 3, ("exception",))
    assert rollout.entropy == pytest.approx(0.5)
    assert rollout.turns[0].engine == "e0"
    assert rollout.turns[0].generate_s == 1.25
    assert (empty.name, empty.tokens, empty.entropy) == ("1~2", 0, None)


def test_all_segments_of_a_rollout_are_indexed(tmp_path: Path) -> None:
    name = "stage1/1/0"
    made = group(name, 1)
    first, other = made.trajectories
    segments = (TokenSegment((3,), first.turns), TokenSegment((4,), first.turns[1:]))
    made = replace(made, trajectories=(replace(first, more_segments=segments), other))
    with RunDirectory.create_or_resume(tmp_path / "run", RECIPE) as run:
        run.trajectories("stage1", 1, made, selection(name))
    (entry,) = from_index(tmp_path / "run")
    assert entry == from_lines(tmp_path / "run")[0]
    rollout = entry.rollouts[0]
    assert (rollout.tokens, rollout.sampled, len(rollout.turns)) == (13, 7, 5)
    assert rollout.outcomes == ("exception", "exception")


def test_rewinding_keeps_index_and_lines_together(tmp_path: Path) -> None:
    with RunDirectory.create_or_resume(tmp_path / "run", RECIPE) as run:
        for step in (1, 2, 3):
            write(run, step)
    with RunDirectory.create_or_resume(tmp_path / "run", RECIPE) as run:
        run.rewind("stage1", 1)
        write(run, 2)
    entries = from_index(tmp_path / "run")
    assert entries == from_lines(tmp_path / "run")
    assert [e.step for e in entries] == [1, 1, 2, 2]
    steps = [line["step"] for line in read_lines(tmp_path / "run/tokens/stage1.jsonl", dict)]
    assert steps == [1, 2]


def test_token_values_are_left_out_where_the_recipe_says_so(tmp_path: Path) -> None:
    record = RECIPE.record.model_copy(update={"tokens": False})
    recipe = RECIPE.model_copy(update={"record": record})
    with RunDirectory.create_or_resume(tmp_path / "run", recipe) as run:
        write(run, 1)
    assert not (tmp_path / "run" / "tokens").exists()
