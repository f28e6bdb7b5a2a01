"""Views: what people see, and that they are never flooded."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rstar2.config import Recipe, load_recipe
from rstar2.pipeline.progress import (
    HISTORY,
    LiveView,
    PlainView,
    ProgressView,
    QuietView,
    StageKind,
    evaluation_line,
    make_view,
    percent,
    sparkline,
)
from rstar2.report.table import accuracy, clock
from rstar2.types import Estimate, Evaluation, encode

METRICS: Mapping[str, Any] = {
    "reward": 0.812,
    "failing_calls_in_correct": 0.031,
    "response_length": 91.6,
    "truncated": 0.012,
    "no_answer": 0.004,
    "groups/used": 16,
    "groups/dropped": 5,
    "groups/refilled": 4,
    "rollouts/lost": 3,
    "time/step": 4.0,
    "time/generate": 2.0,
    "time/tools": 0.4,
    "time/learn": 1.6,
    "accuracy/gcd": 0.9,
    "accuracy/lcm": 0.2,
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def recipe() -> Recipe:
    return load_recipe("tiny").recipe


def evaluation() -> Evaluation:
    return Evaluation(
        "sft", 640, "greedy", Estimate(0.3, 0.25, 0.35, 240), {}, None, None, 88, 2, 0
    )


def drive(view: ProgressView) -> None:
    """Everything a pipeline may say, oddities included."""
    view.open(recipe(), Path("runs/x"))
    view.stage("sft", StageKind.SFT, 10, 3)
    view.step(4, {"loss": 1.25, "lr": 0.001})
    view.step(5, {"loss": None})
    view.stage("eval-sft", StageKind.EVALUATION, 0)
    view.progress(0, 0)
    view.progress(3, 480, "problems")
    view.evaluation(evaluation())
    view.stage("stage1", StageKind.RL, 30)
    view.progress(7, 16, "groups")
    view.step(1, {})
    view.step(2, {**METRICS, "failing_calls_in_correct": None, "entropy": math.nan})
    view.step(3, METRICS)
    view.stage("filter-stage3", StageKind.FILTER, 100)
    view.note("3 of 100 problems are hard")
    view.close()
    view.close()


def frame(view: LiveView, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(view)
    return out.getvalue()


def live(clock: Clock | None = None) -> tuple[LiveView, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    return LiveView(console, clock or Clock()), out


def test_the_live_view_shows_the_stage_and_its_numbers() -> None:
    clock = Clock()
    view, out = live(clock)
    view.open(recipe(), Path("runs/x"))
    view.evaluation(evaluation())
    view.stage("stage1", StageKind.RL, 30)
    for step in (1, 2, 3):
        clock.now += 4.0
        view.step(step, METRICS)
    view.progress(7, 16, "groups")
    shown = frame(view)
    view.close()
    for text in ("✓ sft 30.0%", "● stage1", "○ stage2", "3/30", "1:48 left", "groups 7/16"):
        assert text in shown
    for text in ("81.2%", "3.1%", "92", "1.2%", "no answer 0.4%", "5 dropped, 4 refilled"):
        assert text in shown
    for text in ("3 rollouts lost", "generate 50%", "tools 10%", "learn 40%", "gcd", "90%", "20%"):
        assert text in shown
    assert "sft: greedy 30.0% (25–35)" in out.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_the_live_view_stays_within_the_terminal(width: int) -> None:
    view, _ = live()
    view.open(recipe(), Path("runs/x"))
    view.stage("stage1", StageKind.RL, 30)
    view.step(3, METRICS)
    assert all(len(line) <= width for line in frame(view, width).splitlines())
    view.close()


def test_views_take_whatever_the_pipeline_says() -> None:
    for view in (live()[0], PlainView(io.StringIO(), Clock()), QuietView()):
        drive(view)


def test_a_resumed_run_shows_what_it_has_reached(tmp_path: Path) -> None:
    (tmp_path / "evaluations.jsonl").write_bytes(encode(evaluation()) + b"\n")
    view, _ = live()
    view.open(recipe(), tmp_path)
    shown = frame(view)
    view.close()
    assert "✓ sft 30.0%" in shown
    assert "loading the model" in shown


def test_the_terminal_is_given_back() -> None:
    view, out = live()
    drive(view)
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h")  # the cursor


def test_plain_lines_are_rationed_but_the_last_step_is_shown() -> None:
    out, clock = io.StringIO(), Clock()
    view = PlainView(out, clock)
    view.stage("stage1", StageKind.RL, 1000)
    for step in range(1, 1001):
        clock.now += 0.05
        view.step(step, METRICS)
        view.progress(1, 16)
    lines = out.getvalue().splitlines()
    assert len(lines) <= 1 + 50 / 5 + 1
    assert "stage1 1000/1000: reward 81.2%, tool-error rate in correct rollouts 3.1%" in lines[-1]
    assert "\x1b" not in out.getvalue()


def test_plain_where_there_is_no_terminal() -> None:
    assert isinstance(make_view(io.StringIO()), PlainView)


def test_sparklines_show_the_whole_past() -> None:
    assert sparkline([0.0, 0.5, 1.0], 0, 1) == "▁▅█"
    assert sparkline([]) == sparkline([math.nan]) == ""
    assert sparkline([3.0, 3.0]) == "▁▁"
    rising = sparkline(range(1000))
    assert len(rising) == HISTORY
    assert (rising[0], rising[-1]) == ("▁", "█")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65, "1:05"), (3725, "1:02:05")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_rewards_that_are_no_shares_are_numbers() -> None:
    wide = Estimate(2.5, -0.25, 5.0, 20)
    made = Evaluation("s", 1, "greedy", wide, {}, None, None, 80.0, 2.0, 0.0)
    assert "s: greedy 2.5 (-0.25 to 5), tool-error rate" in evaluation_line(made)
    assert (percent(0.5), percent(-1.25), percent(None)) == ("50.0%", "-1.25", "–")
    assert accuracy(wide).plain == "2.5 -0.25 to 5"
