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


ENGINE = {"name": "small", "kv_tokens": 4096, "step_s": 0.01, "prefill_s": 1e-4}


def own_files(tmp_path: Path) -> tuple[Path, Path, Path]:
    lines = [
        {"group": f"p{i // 4}", "prompt": 50, "turns": [[40 + i, 0.5, 10], [30]]} for i in range(16)
    ]
    rollouts = tmp_path / "mine.jsonl"
    rollouts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fast, slow = tmp_path / "fast.json", tmp_path / "slow.json"
    fast.write_text(json.dumps(ENGINE))
    slow.write_text(json.dumps(ENGINE | {"name": "slow", "step_s": 0.05}))
    return rollouts, fast, slow


def test_own_rollouts_on_unequal_engines_with_a_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts, fast, slow = own_files(tmp_path)
    args = ("--rollouts", str(rollouts), "--engine", str(fast), "--policies", "reserve,least_kv")
    code, out, err = run(capsys, *args, "--engine", str(slow), "--crash", "1@1-2", "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [row["policy"] for row in rows] == ["reserve", "least_kv"]
    assert rows[0]["sampled_tokens"] >= sum(70 + i for i in range(16))
    assert all(row["ratio"] >= 1 for row in rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--crash", "1@5-2"), "restarts after its crash"),
        (("--crash", "one"), "give ENGINE@SECONDS"),
        (("--crash", "7@5"), "the last is 0"),
        (("--trace", "x"), "either --trace or --rollouts"),
        (("--suite", "held"), None),
    ],
)
def test_bad_options_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], message: str | None
) -> None:
    rollouts, fast, _ = own_files(tmp_path)
    given = () if message is None else ("--rollouts", str(rollouts), "--engine", str(fast))
    code, _, err = run(capsys, *given, *change)
    assert code == 2
    assert (message or "choose held-in, held-out or prompts") in err.replace("\n", " ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"group": "p", "prompt": 0, "turns": [[3]]}', "prompt is 0"),
        ('{"group": "p", "prompt": 5, "turns": []}', "turns is empty"),
        ('{"group": "p", "prompt": 5, "turns": [[3], [3]]}', "turn 0 is"),
        ('{"group": "p", "prompt": 5, "turns": [[3]], "limit": 4}', "limit is 4"),
        ('{"group": "p", "prompt": 5, "turns": [[3]], "size": 4}', "size"),
    ],
)
def test_bad_lines_of_own_rollouts_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    _, fast, _ = own_files(tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(line + "\n")
    code, _, err = run(capsys, "--rollouts", str(bad), "--engine", str(fast))
    assert code == 2
    assert "line 1" in err
    assert message in err


def test_a_suite_is_simulated_with_progress_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.jsonl"
    args = ("--suite", "held-in", "very-little-kv", "--scale", "0.25", "--results", str(file))
    code, out, err = run(capsys, *args, "--policies", "reserve,round_robin")
    assert code == 0, err
    assert "[2/2] very-little-kv round_robin" in err
    assert "very-little-kv" in out
    code, again, err = run(capsys, *args, "--policies", "reserve,round_robin")
    assert again == out
    assert "very-little-kv" not in err, "nothing was simulated again"
