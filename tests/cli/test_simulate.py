"""`rstar2 simulate` as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rstar2.cli import main
from rstar2.config import EngineConfig, Recipe, RlConfig, StageConfig
from rstar2.record import RunDirectory
from rstar2.types import Group, Problem, StopReason, Trajectory, Turn


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["simulate", *args])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("stage1", "--scale", "0.01", "--policies", "worst_case,least_requests", "--json")
    code, out, err = run(capsys, *args)
    assert code == 0, err
    output = json.loads(out)
    assert [row["policy"] for row in output["rows"]] == ["worst_case", "least_requests"]
    assert all(row["ratio"] >= 1 for row in output["rows"])


def test_unknown_names_are_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "stage9")
    assert code == 2
    assert "did you mean stage" in err
    code, _, err = run(capsys, "--policies", "robin")
    assert code == 2
    assert "round_robin" in err


def test_help_explains_policies_and_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for word in ("reserve", "static_split", "stage2", "lower bound", "--timeline"):
        assert word in out


def turn(start: float, sampled: int, response: int) -> Turn:
    """Ten tokens per second, independent of other turns."""
    return Turn(
        sampled_ids=(1,) * sampled,
        logprobs=(-1.0,) * sampled,
        versions=((0, sampled),),
        response_ids=(2,) * response,
        engine="embedded-0",
        started_s=start,
        generate_s=sampled / 10,
        tools_s=0.5 if response else 0.0,
    )


def trajectory(index: int) -> Trajectory:
    turns = (turn(0.0, 20 + index, 5), turn(4.0, 8, 0))
    return Trajectory(
        f"stage1/1/0/{index}", "p", "stage1/1/0", index, (7,) * 16, turns, StopReason.ANSWERED
    )


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    stages = (StageConfig(name="stage1", steps=2, max_length=256),)
    recipe = Recipe(name="t", rl=RlConfig(stages=stages), engine=EngineConfig(kv_tokens=512))
    with RunDirectory.create_or_resume(tmp_path / "run", recipe) as run:
        group = Group("stage1/1/0", Problem("p", "?", "1"), 1, tuple(map(trajectory, range(6))))
        run.trajectories("stage1", 1, group)
    return tmp_path / "run"


def test_recorded_step_is_simulated_and_drawn(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = tmp_path / "drawn"
    args = ("--trace", str(recorded), "--policies", "reserve,least_requests", "--json")
    code, out, err = run(capsys, *args, "--timeline", str(out_dir))
    assert code == 0, err
    assert "fitted to 12 recorded turns" in err
    rows = json.loads(out)["rows"]
    assert [row["sampled_tokens"] for row in rows] == [sum(28 + i for i in range(6))] * 2
    assert {p.suffix for p in out_dir.iterdir()} == {".html", ".json"}


def test_stage_that_was_not_recorded_is_named(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "--trace", str(recorded), "--stage", "stage7")
    assert code == 2
    assert "it has stage1" in err
