"""Trackers: copies of the metrics, which can be missing or break without ending a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rstar2.config import Recipe, load_recipe
from rstar2.errors import RecipeError
from rstar2.record import RunDirectory, read_events, read_metrics
from rstar2.track import check_trackers
from rstar2.types import Estimate, Evaluation

DASHBOARD = """
import json, pathlib
out = pathlib.Path({path!r})
def note(*what):
    with out.open("a") as file:
        print(json.dumps(what), file=file)
def init(project, name, config, resume):
    print("* welcome to the dashboard")
    note("init", project, name, config["name"], "token" in config["codeenv"], resume)
def log(values):
    if {breaks}: raise ConnectionError("the dashboard is gone")
    note("log", values)
def finish():
    note("finish")
"""


def recipe(*trackers: str) -> Recipe:
    return load_recipe("tiny", [f"record.trackers=[{', '.join(trackers)}]"]).recipe


def write_run(path: Path, made: Recipe) -> None:
    with RunDirectory.create_or_resume(path, made) as run:
        run.metrics("sft", 1, {"loss": 2.0, "note": "text", "odd": float("nan")})
        run.metrics("stage1", 1, {"reward": 0.25})
        run.metrics("stage2", 1, {"reward": 0.5})
        half = Estimate(0.5, 0.4, 0.6, 10)
        run.evaluation(Evaluation("stage2", 1, "greedy", half, {}, None, None, 80.0, 2.0, 0.0))


@pytest.fixture
def dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Path]:
    """A stand-in for trackio, with its interface, that records its calls."""

    def install(breaks: bool) -> Path:
        folder = tmp_path / "site"
        folder.mkdir()
        told = tmp_path / "told.jsonl"
        (folder / "trackio.py").write_text(DASHBOARD.format(path=str(told), breaks=breaks))
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(__import__("sys").modules, "trackio", raising=False)
        return told

    return install


def test_steps_of_all_stages_share_one_axis(
    tmp_path: Path, dashboard: Callable[[bool], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    told = dashboard(False)
    write_run(tmp_path / "run", recipe("trackio"))
    after = load_recipe("tiny").recipe.rl.stages[0].steps
    assert told.read_text().splitlines() == [
        '["init", "rstar2", "run", "tiny", false, "allow"]',
        '["log", {"sft/loss": 2.0, "sft/step": 1}]',
        '["log", {"rl/reward": 0.25, "rl/step": 1}]',
        f'["log", {{"rl/reward": 0.5, "rl/step": {after + 1}}}]',
        '["log", {"eval/greedy/accuracy": 0.5, "eval/greedy/mean_length": 80.0, '
        f'"eval/step": {after + 1}}}]',
        '["finish"]',
    ]
    assert capfd.readouterr().out == ""  # stdout is for the result


def test_a_tracker_that_breaks_is_dropped_and_the_run_continues(
    tmp_path: Path, dashboard: Callable[[bool], Path]
) -> None:
    dashboard(True)
    write_run(tmp_path / "run", recipe("trackio"))
    assert len(read_metrics(tmp_path / "run")) == 3
    failed = [e for e in read_events(tmp_path / "run") if e["event"] == "tracker_failed"]
    assert [e["tracker"] for e in failed] == ["trackio"]
    assert "the dashboard is gone" in failed[0]["error"]


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    if importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed here")
    with pytest.raises(RecipeError, match=r"wandb, which is not installed: .*rstar2\[track\]"):
        check_trackers(recipe("wandb"))


def test_tensorboard_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_run(tmp_path / "run", recipe("tensorboard"))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert "rl/reward" in events.Tags()["tensors"]
    assert len(events.Tensors("rl/reward")) == 2
