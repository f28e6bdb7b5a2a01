"""The run directory: whole lines, each step once, one writer, one recipe."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rstar2.config import Recipe, RlConfig, StageConfig
from rstar2.errors import InfrastructureError, InvariantError, RecipeError, UserError
from rstar2.record import (
    RunDirectory,
    read_environment,
    read_evaluations,
    read_events,
    read_groups,
    read_metrics,
    stage_order,
)
from rstar2.record.read import busy_seconds, stage_label
from rstar2.types import (
    Choice,
    Estimate,
    Evaluation,
    Group,
    Problem,
    Reward,
    Selection,
    StopReason,
    Trajectory,
    Turn,
)


def recipe(**changes: object) -> Recipe:
    stages = tuple(StageConfig(name=f"stage{n}", steps=3, max_length=64) for n in (1, 2))
    return Recipe(name="test", rl=RlConfig(stages=stages)).model_copy(update=changes)


def trajectory(name: str, reward: float) -> Trajectory:
    turn = Turn(sampled_ids=(4, 5), logprobs=(-0.1, -0.2), versions=((1, 2),))
    return Trajectory(
        id=name,
        problem_id="p",
        group_id="g",
        seed=0,
        prompt_ids=(1, 2),
        turns=(turn,),
        stop=StopReason.ANSWERED,
        text="line\nbreak \u2028 and <b>",
        reward=Reward(reward, "1", "math"),
    )


def group(step: int) -> Group:
    rollouts = (trajectory("a", 1.0), trajectory("b", 0.0))
    return Group("g", Problem("p", "1 + 1?", "2"), step, rollouts)


SELECTION = Selection(
    "g",
    "roc",
    (
        Choice("a", True, "positive", 1.0, 0.5, 0.0, 1.8),
        Choice("b", False, "negative not drawn", 0.0, 0.5, 0.0, 1.0),
    ),
)


def evaluation(stage: str, step: int, mode: str = "greedy") -> Evaluation:
    half = Estimate(0.5, 0.4, 0.6, 100)
    return Evaluation(stage, step, mode, half, {"gcd": half}, 0.1, 0.2, 30.0, 2.0, 0.0)


def write_stage(run: RunDirectory, stage: str, steps: range) -> None:
    for step in steps:
        run.trajectories(stage, step, group(step), SELECTION)
        run.metrics(stage, step, {"reward": step / 10})


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    with RunDirectory.create_or_resume(tmp_path / "run", recipe()) as run:
        write_stage(run, "stage1", range(1, 3))
        run.evaluation(evaluation("stage1", 2))
        run.event("checkpoint", step=2)
    steps = read_metrics(run.path)
    assert [(m["stage"], m["step"], m["reward"]) for m in steps] == [
        ("stage1", 1, 0.1),
        ("stage1", 2, 0.2),
    ]
    lines = list(read_groups(run.path, "stage1"))
    assert lines[1].group == group(2)
    assert lines[1].selection == SELECTION
    assert read_evaluations(run.path) == [evaluation("stage1", 2)]
    assert [e["event"] for e in read_events(run.path)] == ["started", "checkpoint"]
    about = read_environment(run.path)
    assert about["seed"] == 0
    assert about["packages"]["torch"]


def test_a_run_that_recorded_a_retired_setting_resumes(tmp_path: Path) -> None:
    with RunDirectory.create_or_resume(tmp_path, recipe()):
        pass
    file = tmp_path / "recipe.yaml"
    values = yaml.safe_load(file.read_text())
    values["scheduler"] = {"policy": "reserve", "quantile": 0.95, "hold_s": 20.0}
    file.write_text(yaml.safe_dump(values))
    with RunDirectory.create_or_resume(tmp_path, recipe()) as run:
        assert run.resumed


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    with RunDirectory.create_or_resume(tmp_path, recipe()) as run:
        write_stage(run, "stage1", range(1, 4))
        run.evaluation(evaluation("stage1", 3))
        write_stage(run, "stage2", range(1, 3))
    with RunDirectory.create_or_resume(tmp_path, recipe()) as run:
        assert run.resumed
        assert run.rewind("stage1", 2) == 7  # 2 lines of step 3, 1 evaluation, 4 of stage 2
        write_stage(run, "stage1", range(3, 4))
        write_stage(run, "stage2", range(1, 4))
    assert [(m["stage"], m["step"]) for m in read_metrics(tmp_path)] == [
        (stage, step) for stage in ("stage1", "stage2") for step in (1, 2, 3)
    ]
    assert [line.step for line in read_groups(tmp_path, "stage1")] == [1, 2, 3]
    assert read_evaluations(tmp_path) == []


def test_rewinding_to_a_stage_end_keeps_a_complete_evaluation_only(tmp_path: Path) -> None:
    with RunDirectory.create_or_resume(tmp_path, recipe()) as run:
        write_stage(run, "stage1", range(1, 4))
        run.trajectories("eval-stage1-greedy", 3, group(3))
        run.evaluation(evaluation("stage1", 3))
        run.trajectories("eval-stage1-sampled", 3, group(3))  # killed before it was complete
    with RunDirectory.create_or_resume(tmp_path, recipe()) as run:
        run.rewind("stage1", 3)
        assert run.evaluated("stage1", "greedy") == evaluation("stage1", 3)
        assert run.evaluated("stage1", "sampled") is None
    assert len(list(read_groups(tmp_path, "eval-stage1-greedy"))) == 1
    assert list(read_groups(tmp_path, "eval-stage1-sampled")) == []


def test_a_step_cannot_be_recorded_twice(tmp_path: Path) -> None:
    with RunDirectory.create_or_resume(tmp_path, recipe()) as run:
        write_stage(run, "sft", range(1, 3))
    with RunDirectory.create_or_resume(tmp_path, recipe()) as run:
        with pytest.raises(InvariantError, match="rewind"):
            run.metrics("sft", 2, {})
        with pytest.raises(InvariantError, match="its stages are"):
            run.metrics("stage9", 1, {})


@pytest.mark.parametrize(
    "tail", [b'{"stage": "stage1", "st', b'{"stage": "stage1", "step": 3}', b"x"]
)
def test_a_torn_last_line_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    with RunDirectory.create_or_resume(tmp_path, recipe()) as run:
        write_stage(run, "stage1", range(1, 3))
    for name in ("metrics.jsonl", "trajectories/stage1.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(tail)
    assert len(read_metrics(tmp_path)) == 2
    with RunDirectory.create_or_resume(tmp_path, recipe()) as run:
        write_stage(run, "stage1", range(3, 4))
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2, 3]
    assert [line.step for line in read_groups(tmp_path, "stage1")] == [1, 2, 3]


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path: Path) -> None:
    from rstar2.record.files import cut_torn_line

    path = tmp_path / "x.jsonl"
    path.write_bytes(b"{}\n" + b"y" * 200_000)
    assert cut_torn_line(path) == 200_000
    assert path.read_bytes() == b"{}\n"
    path.write_bytes(b"y" * 200_000)
    cut_torn_line(path)
    assert path.read_bytes() == b""


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    with RunDirectory.create_or_resume(tmp_path, recipe()):
        with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on .*--run"):
            RunDirectory.create_or_resume(tmp_path, recipe())
        assert read_events(tmp_path)[-1]["event"] == "started"
    RunDirectory.create_or_resume(tmp_path, recipe()).close()


def test_a_file_system_without_locks_is_not_called_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=r"refuses flock \(No locks available\).*--run"):
        RunDirectory.create_or_resume(tmp_path, recipe())


def test_the_lock_dies_with_its_process_even_if_a_child_lives_on(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import os, signal, sys, time
        from rstar2.config import Recipe
        from rstar2.record import RunDirectory
        run = RunDirectory.create_or_resume({str(tmp_path / "run")!r}, Recipe(name="test"))
        run.metrics("sft", 1, {{"loss": 1.0}})
        child = os.fork()
        if child == 0:
            os.close(1)
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60
    )
    child = int(done.stdout)
    try:
        assert done.returncode == -signal.SIGKILL
        with RunDirectory.create_or_resume(tmp_path / "run", Recipe(name="test")) as run:
            assert [m["step"] for m in read_metrics(run.path)] == [1]
    finally:
        os.kill(child, signal.SIGKILL)


def test_another_recipe_is_refused_naming_what_changed(tmp_path: Path) -> None:
    RunDirectory.create_or_resume(tmp_path, recipe()).close()
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(RecipeError, match=r"seed: 0 -> 7(.|\n)*--fresh \(fresh=True in Python"):
        RunDirectory.create_or_resume(tmp_path, recipe(seed=7))
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["seed"] == 0


def test_a_setting_that_is_newer_than_the_run_has_its_default(tmp_path: Path) -> None:
    RunDirectory.create_or_resume(tmp_path, recipe()).close()
    file = tmp_path / "recipe.yaml"
    values = yaml.safe_load(file.read_text())
    del values["rl"]["roc"]["threshold"]
    file.write_text(yaml.safe_dump(values))
    RunDirectory.create_or_resume(tmp_path, recipe()).close()
    file.write_text(yaml.safe_dump({**values, "removed": 1}))
    with pytest.raises(RecipeError, match="removed: 1 -> -"):
        RunDirectory.create_or_resume(tmp_path, recipe())


def test_fresh_removes_the_earlier_run(tmp_path: Path) -> None:
    with RunDirectory.create_or_resume(tmp_path, recipe()) as run:
        write_stage(run, "stage1", range(1, 3))
    with RunDirectory.create_or_resume(tmp_path, recipe(seed=7), fresh=True) as run:
        assert not run.resumed
        assert read_metrics(tmp_path) == []
        assert list(read_groups(tmp_path, "stage1")) == []


def test_where_a_run_runs_may_change_and_secrets_are_not_written(tmp_path: Path) -> None:
    RunDirectory.create_or_resume(tmp_path, recipe()).close()
    elsewhere = recipe().codeenv.model_copy(
        update={"urls": ("http://10.0.0.1:1",), "token": "hush"}
    )
    RunDirectory.create_or_resume(tmp_path, recipe(codeenv=elsewhere)).close()
    assert "10.0.0.1" in (tmp_path / "recipe.yaml").read_text()
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"hush" not in path.read_bytes()


def test_foreign_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for fresh in (False, True):
        with pytest.raises(UserError, match="not a run directory"):
            RunDirectory.create_or_resume(tmp_path, recipe(), fresh=fresh)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="is a file"):
        RunDirectory.create_or_resume(tmp_path / "thesis.tex", recipe())
    with pytest.raises(UserError, match="cannot be written"):
        RunDirectory.create_or_resume("/proc/nowhere/run", recipe())


@pytest.mark.parametrize(("keep", "rollouts"), [("all", 2), ("kept", 1), ("none", 0)])
def test_what_is_kept_of_trajectories(tmp_path: Path, keep: str, rollouts: int) -> None:
    chosen = recipe().record.model_copy(update={"trajectories": keep})
    with RunDirectory.create_or_resume(tmp_path, recipe(record=chosen)) as run:
        write_stage(run, "stage1", range(1, 2))
    recorded = [t for line in read_groups(tmp_path, "stage1") for t in line.group.trajectories]
    assert len(recorded) == rollouts


def test_an_evaluation_of_nothing_is_not_recorded(tmp_path: Path) -> None:
    nothing = replace(evaluation("sft", 3), accuracy=Estimate(math.nan, 0.0, 1.0, 0))
    run = RunDirectory.create_or_resume(tmp_path, recipe())
    with run, pytest.raises(InfrastructureError, match="no problem could be graded"):
        run.evaluation(nothing)
    assert read_evaluations(tmp_path) == []


def test_stage_order_follows_the_recipe() -> None:
    order = stage_order(stage.name for stage in recipe().rl.stages)
    assert order.index("sft") < order.index("eval-sft-greedy") < order.index("stage1")
    assert order.index("eval-stage1-sampled") < order.index("filter-stage2") < order.index("stage2")


def test_work_is_the_steps_and_the_longest_mode_of_each_evaluation() -> None:
    steps = [{"time/step": 2.0}, {"time/step": 3, "time/evaluate": 1.5}, {"time/step": math.nan}]
    assert busy_seconds(steps, [("a", 4.0), ("a", 6.0), ("b", 1.0), ("b", None)]) == 13.5


def test_without_sft_the_policy_before_rl_is_the_base_model() -> None:
    assert stage_label({"sft": None}, "sft") == "base"
    assert stage_label({"sft": {"steps": 1}}, "sft") == "sft"
    assert stage_label({}, "sft") == "sft"  # recorded by an earlier version
    assert stage_label({"sft": None}, "stage1") == "stage1"
