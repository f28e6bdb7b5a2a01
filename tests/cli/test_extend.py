"""`rstar2 extend`: the stage that it adds, what it refuses, and a real extension."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rstar2.cli import main
from rstar2.cli.extend import next_name, next_stage, with_stage
from rstar2.cli.train import execute
from rstar2.config import Recipe, load_recipe
from rstar2.errors import RecipeError
from rstar2.pipeline.progress import ProgressView
from rstar2.record import (
    RunDirectory,
    is_finished,
    read_evaluations,
    read_events,
    read_metrics,
    read_recipe,
)


def rstar2(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0), capsys.readouterr().err


async def done(recipe: Recipe, run: RunDirectory, view: ProgressView) -> None:
    """A pipeline that has nothing to do but a checkpoint."""
    (run.path / "checkpoints" / "step-00000065").mkdir(parents=True, exist_ok=True)


async def killed(recipe: Recipe, run: RunDirectory, view: ProgressView) -> None:
    raise RecipeError("it ended here")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    execute(load_recipe("tiny").recipe, tmp_path / "run", pipeline=done)
    return tmp_path / "run"


def test_the_new_stage_has_the_settings_of_the_last_and_its_own_schedule() -> None:
    recipe = load_recipe("tiny").recipe
    stage = next_stage(recipe, 7, ["lr=1e-4", "max_turns=2"])
    assert (stage.name, stage.steps, stage.lr, stage.max_turns) == ("stage4", 7, 1e-4, 2)
    assert stage.reset_optimizer
    assert stage.difficulty == recipe.rl.stages[-1].difficulty
    extended = with_stage(recipe, stage)
    assert extended.rl.stages[:-1] == recipe.rl.stages
    assert extended.model_copy(update={"rl": recipe.rl}) == recipe
    for wrong in ("lr", "lrr=1", "steps=3", "name=x", "max_length=-1"):
        with pytest.raises(RecipeError, match="--set"):
            next_stage(recipe, 7, [wrong])
    with pytest.raises(RecipeError, match=r"max_length"):
        with_stage(recipe, next_stage(recipe, 7, ["max_length=99999"]))


def test_names_continue_and_never_repeat() -> None:
    assert next_name(["stage1", "stage2"]) == "stage3"
    assert next_name(["stage3", "stage2"]) == "stage4"
    assert next_name(["short", "hard"]) == "hard-2"
    assert next_name(["short", "hard", "hard-2"]) == "hard-3"


def test_an_extension_is_recorded_and_resumed_by_the_same_command(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_finished(run)
    monkeypatch.setattr("rstar2.cli.train._real_pipeline", lambda recipe: killed)
    assert rstar2(capsys, "extend", str(run), "--steps", "5")[0] == 2
    assert not is_finished(run)
    assert [s["name"] for s in read_recipe(run)["rl"]["stages"]][-2:] == ["stage3", "stage4"]
    code, err = rstar2(capsys, "extend", str(run), "--steps", "6")
    assert code == 2
    assert "is being extended by 5 steps in stage stage4" in err
    monkeypatch.setattr("rstar2.cli.train._real_pipeline", lambda recipe: done)
    assert rstar2(capsys, "extend", str(run), "--steps", "5")[0] == 0
    assert is_finished(run)
    assert len(read_recipe(run)["rl"]["stages"]) == 4
    (added,) = [e for e in read_events(run) if e["event"] == "extended"]
    assert (added["stage"]["name"], added["stage"]["steps"]) == ("stage4", 5)
    assert rstar2(capsys, "extend", str(run), "--steps", "6")[0] == 0
    assert [s["steps"] for s in read_recipe(run)["rl"]["stages"]][-2:] == [5, 6]
    code, err = rstar2(capsys, "train", "tiny", "--run", str(run))
    assert (code, "was started with another recipe" in err) == (2, True)


def test_a_kill_between_the_event_and_the_recipe_is_harmless(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = (run / "recipe.yaml").read_bytes()
    monkeypatch.setattr("rstar2.cli.train._real_pipeline", lambda recipe: killed)
    assert rstar2(capsys, "extend", str(run), "--steps", "5")[0] == 2
    (run / "recipe.yaml").write_bytes(recipe)
    monkeypatch.setattr("rstar2.cli.train._real_pipeline", lambda recipe: done)
    assert rstar2(capsys, "extend", str(run), "--steps", "5")[0] == 0
    assert [s["name"] for s in read_recipe(run)["rl"]["stages"]][-2:] == ["stage3", "stage4"]


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda run: (run / "recipe.yaml").unlink(), "is not a run directory"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "no checkpoint left"),
        (lambda run: _event(run, "collapsed"), "training collapsed"),
        (lambda run: (run / "events.jsonl").write_text(""), "is not finished: resume it first"),
    ],
)
def test_what_cannot_be_extended_is_refused(
    run: Path, prepare: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(run)
    code, err = rstar2(capsys, "extend", str(run), "--steps", "5")
    assert code == 2
    assert reason in err


def _event(run: Path, name: str) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 0.0, "event": name}) + "\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_finished_run_trains_one_more_stage_and_keeps_what_it_has(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    metrics, evaluations = read_metrics(run), read_evaluations(run)
    assert rstar2(capsys, "extend", str(run), "--steps", "1")[0] == 0
    assert is_finished(run)
    assert read_metrics(run)[: len(metrics)] == metrics
    assert [(m["stage"], m["step"]) for m in read_metrics(run)[len(metrics) :]] == [
        ("filter-hard-2", 1),
        ("hard-2", 1),
    ]
    assert read_evaluations(run)[: len(evaluations)] == evaluations
    new = [(e.stage, e.mode) for e in read_evaluations(run)[len(evaluations) :]]
    assert sorted(new) == [("hard-2", "greedy"), ("hard-2", "sampled")]
    assert (run / "exports" / "hard-2" / "model.safetensors").is_file()
    assert "rewound" not in [e["event"] for e in read_events(run)]
