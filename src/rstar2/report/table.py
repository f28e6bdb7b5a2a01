"""The end table on the terminal: the evaluation after each stage."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rstar2.report.summary import Summary, percent, summarise
from rstar2.types import Estimate, Evaluation

MOST_BARS = 4
"""Columns with bars that fit beside each other in 80 columns."""


def end_table(run: Path) -> Group:
    """Accuracy with intervals, tool-error rates and lengths by stage; then accuracy by kind."""
    summary = summarise(run)
    parts: list[Table | Text] = [stage_table(summary)]
    if summary.kinds:
        parts += [Text(), kind_table(summary)]
    return Group(*parts)


def stage_table(summary: Summary) -> Table:
    """One row per stage."""
    title = f"{summary.recipe.get('name')}, seed {summary.recipe.get('seed')}"
    table = plain_table(title)
    table.add_column("after", no_wrap=True)
    for name in ("steps", *summary.modes):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("tool errors\nin correct", "tool\nerrors", "mean\nlength", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    curves = (*summary.stages, *([summary.sft] if summary.sft else []))
    steps = {curve.name: curve for curve in curves}
    for stage in summary.evaluated:
        by_mode = {m: summary.evaluations.get((stage, m)) for m in summary.modes}
        shown = main_evaluation(by_mode)
        curve = steps.get(stage)
        table.add_row(
            Text(summary.label(stage), style="bold"),
            str(curve.last) if curve else "-",
            *(accuracy(e.accuracy) if e else Text("-") for e in by_mode.values()),
            share(shown.failing_calls_in_correct),
            share(shown.tool_errors),
            f"{shown.mean_length:.0f}",
            clock(curve.total("time/step")) if curve else "-",
        )
    return table


def kind_table(summary: Summary) -> Table:
    """Accuracy per kind of problem, one column per stage."""
    mode = summary.modes[0]
    table = plain_table(f"{mode} accuracy by kind")
    table.add_column("kind", no_wrap=True)
    stages = [s for s in summary.evaluated if (s, mode) in summary.evaluations]
    for stage in stages:
        table.add_column(summary.label(stage), justify="right", no_wrap=True)
    for kind in summary.kinds:
        cells = [summary.evaluations[stage, mode].kinds.get(kind) for stage in stages]
        shown = accuracy_bar if len(stages) <= MOST_BARS else accuracy_text
        table.add_row(kind, *(Text("-") if c is None else shown(c.mean) for c in cells))
    return table


def plain_table(title: str) -> Table:
    """An empty table with a title and a rule below its head."""
    return Table(
        title=title or None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        padding=(0, 1, 0, 0),
    )


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def main_evaluation(by_mode: dict[str, Evaluation | None]) -> Evaluation:
    """The evaluation whose tool errors and lengths are shown: sampled, as in training."""
    return by_mode.get("sampled") or next(e for e in by_mode.values() if e is not None)


def accuracy(estimate: Estimate) -> Text:
    """95.4% with its interval; rewards that are no shares as numbers."""
    if estimate.low >= 0.0 and estimate.high <= 1.0:
        mean = f"{100 * estimate.mean:.1f}%"
        bounds = f" {100 * estimate.low:.0f}–{100 * estimate.high:.0f}"
    else:
        mean, bounds = f"{estimate.mean:.3g}", f" {estimate.low:.3g} to {estimate.high:.3g}"
    return Text(mean, style="bold").append(bounds, style="dim not bold")


def share(value: float | None) -> str:
    """A share as a percentage; a dash if it is undefined."""
    return "-" if value is None else percent(value)


def bar(share: float, width: int, style: str = "cyan") -> Text:
    """A bar filled to `share`."""
    full = round(max(0.0, min(1.0, share)) * width)
    return Text().append("━" * full, style).append("─" * (width - full), "bright_black")


def accuracy_colour(value: float) -> str:
    """Green, yellow or red."""
    return "green" if value >= 0.85 else "yellow" if value >= 0.5 else "red"


def accuracy_text(value: float) -> Text:
    """A percentage in its colour."""
    return Text(percent(value), style=accuracy_colour(value))


def accuracy_bar(value: float) -> Text:
    """A percentage after a small bar."""
    text = bar(value, 6, accuracy_colour(value))
    return text.append(f" {percent(value):>6}", style="default")
