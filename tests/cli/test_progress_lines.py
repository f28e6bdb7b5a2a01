"""Progress and estimates of commands that run for minutes or hours."""

from __future__ import annotations

from pathlib import Path

import pytest

from rstar2.cli import main
from rstar2.cli.simulate import ROLLOUT_S, SimulationProgress
from rstar2.rollout.simulate.compare import PolicyResult


class Result:
    """The fields of a PolicyResult that a line shows."""

    workload, policy, makespan_s = "stage2", "reserve", 413.26


def test_simulations_are_counted_and_estimated_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    progress = SimulationProgress([60 / ROLLOUT_S] * 3, jobs=2)
    assert capsys.readouterr().err == "3 simulations on 2 processes, about 1 min 30 s\n"
    assert progress.line().startswith("0 of 3 simulations done, about 1 min 30 s left")
    result: PolicyResult = Result()  # type: ignore[assignment]
    progress.done(result, 2, 3)  # the first was in the file of results
    assert capsys.readouterr().err == "[2/3] stage2 reserve: 413.3 s, about 0 s left\n"
    progress.done(result, 3, 3)
    assert capsys.readouterr().err == "[3/3] stage2 reserve: 413.3 s\n"


def test_view_without_runs_says_where_they_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["view"])
    assert end.value.code == 2
    assert "there is no runs/ here" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    with pytest.raises(SystemExit):
        main(["view"])
    assert "runs is not a run directory and has none inside" in capsys.readouterr().err
