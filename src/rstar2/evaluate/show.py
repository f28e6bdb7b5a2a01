"""Evaluations on the terminal: progress bar, table of scores, table of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from rstar2.evaluate.compare import Paired
from rstar2.evaluate.scores import BenchmarkScore, GradedAnswer
from rstar2.evaluate.store import EvalResults
from rstar2.report.table import accuracy, clock, plain_table, share
from rstar2.types import Estimate

LINES = 10
"""Progress lines printed if stderr is not a terminal."""


class AnswerProgress:
    """A progress bar on a terminal, a few lines elsewhere: answers and their accuracy."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console, self._total, self._done = console, total, done
        self._new = self._right = self._tokens = 0
        self._bar = Progress(
            TextColumn("answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done)

    def answered(self, answer: GradedAnswer) -> None:
        """Count one more answer."""
        self._new += 1
        self._right += answer.trajectory.correct
        self._tokens += answer.tokens
        figures = f"{self._right / self._new:.1%} right, {self._tokens / self._new:.0f} tokens"
        count = self._done + self._new
        self._bar.update(self._task, completed=count, description=figures)
        step = max(1, self._total // LINES)
        if not self._console.is_terminal and (count % step == 0 or count == self._total):
            self._console.print(f"{count} of {self._total} answers: {figures}")

    def __enter__(self) -> Self:
        self._bar.start()
        if self._done:
            self._console.print(f"{self._done} of {self._total} answers are already recorded")
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()


def score_table(results: EvalResults) -> Group:
    """Accuracy per benchmark, then how it was reached; both fit 80 columns."""
    settings, scores = results.settings, list(results.scores.values())
    k = settings.samples
    names = ["problems", f"avg@{k}", *([f"maj@{k}", f"pass@{k}"] if k > 1 else []), "time"]
    accuracies = _table(
        f"{settings.model}: {k} answer{'s' if k > 1 else ''} per problem, temperature "
        f"{settings.temperature:g}, {settings.max_length} tokens, {settings.max_turns} turns",
        names,
    )
    for score in scores:
        more = (score.majority, score.passes[str(k)]) if k > 1 else ()
        accuracies.add_row(
            Text(score.benchmark, style="bold"),
            str(score.average.count),
            *(accuracy(e) if e.count else Text("-") for e in (score.average, *more)),
            clock(score.wall_s),
        )
    names = ["tokens", "turns", "calls", "tool\nerrors", "tool errors\nin correct", "truncated"]
    rollouts = _table("", names)
    for score in scores:
        rollouts.add_row(
            Text(score.benchmark, style="bold"),
            f"{score.tokens.mean:.0f}",
            f"{score.mean_turns:.2f}",
            f"{score.calls:.2f}",
            share(score.tool_errors),
            share(score.failing_calls_in_correct),
            share(score.truncated),
        )
    details = (Text(_details(score), style="dim") for score in scores)
    return Group(accuracies, rollouts, *details)


def _table(title: str, columns: Sequence[str]) -> Table:
    """An empty table with one row per benchmark."""
    table = plain_table(title)
    table.add_column("set", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _details(score: BenchmarkScore) -> str:
    parts = [_counts("ended", score.stops), _counts("calls", score.outcomes)]
    if score.settled:
        parts.append(_counts("grades changed", score.settled))
    if score.missing:
        parts.append(f"{score.missing} answers missing")
    return f"{score.benchmark}: " + "; ".join(part for part in parts if part)


def _counts(name: str, counts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{key.replace('_', ' ')} {n}" for key, n in counts.items())
    return f"{name}: {listed}" if listed else ""


def compare_table(first: EvalResults, second: EvalResults, rows: Sequence[Paired]) -> Table:
    """B compared with A, one row per benchmark."""
    table = _table(
        f"A: {first.settings.model}   B: {second.settings.model}",
        ("problems", "A", "B", "B - A", "p", "better", "worse", "tokens"),
    )
    for row in rows:
        table.add_row(
            Text(row.benchmark, style="bold"),
            str(row.problems),
            f"{row.first:.1%}",
            f"{row.second:.1%}",
            _difference(row.difference),
            f"{row.p:.3f}" if row.p >= 0.001 else "<0.001",
            str(row.better),
            str(row.worse),
            f"{row.tokens.mean:+.0f}",
        )
    return table


def _difference(estimate: Estimate) -> Text:
    """Percentage points with their interval."""
    bounds = f" {100 * estimate.low:+.1f} to {100 * estimate.high:+.1f}"
    return Text(f"{100 * estimate.mean:+.1f}", style="bold").append(bounds, style="dim not bold")
