"""Lists of rollouts against plain loops over what is recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rstar2.errors import UserError
from rstar2.record import read_groups
from rstar2.types import Trajectory
from rstar2.viewer import query
from rstar2.viewer.query import Filter, rollouts
from rstar2.viewer.run import ViewedRun
from tests.viewer.nasty import write_plain


@pytest.fixture(scope="module")
def real(runs: dict[str, Path], read_run: Callable[[Path], ViewedRun]) -> ViewedRun:
    return read_run(runs["real"])


def everything(run: ViewedRun) -> dict[str, Trajectory]:
    return {
        t.id: t
        for stage in (reader.stage for reader in run.catalog.readers.values())
        for line in read_groups(run.path, stage)
        for t in line.group.trajectories
    }


def said(trajectory: Trajectory) -> str:
    codes = [call.shown for turn in trajectory.turns for call in turn.calls]
    return "\n".join([trajectory.text, *codes]).casefold()


def matching(run: ViewedRun, **asked: str) -> list[str]:
    """All matches, page by page."""
    ids: list[str] = []
    start: int | None = 0
    while start is not None:
        page = rollouts(run, Filter.parse({**asked, "start": str(start), "limit": "7"}))
        ids += [row["id"] for row in page["rows"]]
        start = page["next"]
    assert len(set(ids)) == len(ids)
    return ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, lambda t: True),
        ({"reward": "1"}, lambda t: t.correct),
        ({"reward": "0", "stage": "short"}, lambda t: not t.correct and t.id.startswith("short/")),
        ({"outcome": "failed"}, lambda t: t.failed_calls > 0),
        ({"outcome": "syntax_error"}, lambda t: "syntax_error" in [r.outcome for r in t.results]),
        ({"stop": "max_length"}, lambda t: t.truncated),
        ({"step": "2", "stage": "hard"}, lambda t: t.id.startswith("hard/2/")),
        ({"least": "50", "most": "70"}, lambda t: 50 <= t.completion_tokens <= 70),
        ({"text": "PRINT(1)"}, lambda t: "print(1)" in said(t)),
        ({"text": "coin 45"}, lambda t: t.problem_id == "coin-45"),
        ({"text": '"code": "'}, lambda t: '"code": "' in said(t)),
        ({"text": "nowhere at all"}, lambda t: False),
    ],
)  # fmt: skip
def test_a_filter_finds_exactly_what_a_loop_finds(
    real: ViewedRun, asked: dict[str, str], wanted: Callable[[Trajectory], bool]
) -> None:
    expected = {name for name, trajectory in everything(real).items() if wanted(trajectory)}
    assert set(matching(real, **asked)) == expected


@pytest.mark.slow
def test_kept_is_what_resampling_said(real: ViewedRun) -> None:
    kept = {
        choice.trajectory_id
        for stage in real.stage_names
        for line in read_groups(real.path, stage)
        if line.selection
        for choice in line.selection.choices
        if choice.kept
    }
    assert set(matching(real, kept="yes")) == kept


@pytest.mark.slow
@pytest.mark.parametrize("sort", ["longest", "entropy", "failed", "turns", "slowest"])
def test_orders_are_orders(real: ViewedRun, sort: str) -> None:
    column = {
        "longest": "tokens",
        "entropy": "entropy",
        "failed": "failed",
        "turns": "turns",
        "slowest": "wall",
    }[sort]
    page = rollouts(real, Filter.parse({"sort": sort, "limit": "200"}))
    values = [row[column] for row in page["rows"]]
    assert values == sorted(values, reverse=True)


@pytest.mark.slow
def test_newest_begins_at_the_end_of_the_run_and_oldest_at_its_beginning(real: ViewedRun) -> None:
    newest, oldest = matching(real, sort="newest"), matching(real, sort="oldest")
    assert newest[0].startswith("eval-hard-sampled/")
    assert oldest[0].startswith("eval-sft-greedy/24/"), "groups are recorded as they end"
    assert sorted(newest) == sorted(oldest)


def test_a_search_that_runs_out_of_time_says_where_to_continue(
    tmp_path: Path, read_run: Callable[[Path], ViewedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_run(write_plain(tmp_path / "run", steps=3))
    monkeypatch.setattr(query, "SEARCH_S", 0.0)
    page = rollouts(run, Filter.parse({"text": "think"}))
    assert page["rows"] == []
    assert page["next"] == page["searched"] == 0
    ticks = iter(range(1000))
    monkeypatch.setattr(query, "SEARCH_S", 4.0)
    monkeypatch.setattr(query, "monotonic", lambda: float(next(ticks)))
    ids: list[str] = []
    start = 0
    while start is not None:
        page = rollouts(run, Filter.parse({"text": "think 2", "start": str(start)}))
        ids += [row["id"] for row in page["rows"]]
        start = page["next"]
    assert len(ids) == 6


@pytest.mark.parametrize(
    "asked", [{"reward": "2"}, {"stop": "x"}, {"outcome": "x"}, {"step": "-1"}, {"sort": "x"}]
)
def test_an_invalid_filter_value_is_named(asked: dict[str, str]) -> None:
    (name,) = asked
    with pytest.raises(UserError, match=name):
        Filter.parse(asked)
