"""report.html: one self-contained page over a run directory. Everything from the run is escaped,
by the template (autoescape) or by svg.py; the page loads nothing and talks to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from rstar2.files import write_file
from rstar2.report import svg
from rstar2.report.examples import choose_examples
from rstar2.report.summary import StageCurve, Summary, duration, summarise
from rstar2.report.table import main_evaluation, share
from rstar2.types import Estimate, Evaluation

FORBID = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Content security policy: even markup that slipped through could load and send nothing."""

SMOOTH = 5


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its words; `legend` holds (name, colour) of each line."""

    title: str
    note: str
    chart: Markup
    legend: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Headline:
    """One number of the head of the page, before and after."""

    name: str
    before: str
    after: str
    note: str = ""


def write_report(run: Path) -> Path:
    """Write report.html into the run directory, whole or not at all; returns its path."""
    path = run / "report.html"
    write_file(path, render(summarise(run)))
    return path


def render(summary: Summary) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"percent": svg.percent, "share": share, "duration": duration}
    template = environment.from_string(_asset("page.html.jinja"))
    return template.render(
        policy=FORBID,
        css=Markup(_asset("page.css")),
        js=Markup(_asset("page.js")),
        s=summary,
        headlines=list(headlines(summary)),
        rows=list(_rows(summary)),
        figures=[f for f in figures(summary) if f.chart],
        kinds=kinds_figure(summary),
        kind_rows=list(_kind_rows(summary)),
        kind_figures=[f for f in kind_figures(summary) if f.chart],
        examples=choose_examples(summary),
        timings=list(_timings(summary)),
        facts=_facts(summary),
        recipe=yaml.safe_dump(summary.recipe, sort_keys=False, allow_unicode=True),
    )


def _asset(name: str) -> str:
    return resources.files("rstar2.report").joinpath(name).read_text(encoding="utf-8")


# --------------------------------------------------------------------------- numbers


def headlines(summary: Summary) -> Iterator[Headline]:
    """What a reader wants to know first."""
    for mode in summary.modes:
        if ends := summary.first_and_last(mode):
            first, last = ends[0].accuracy, ends[1].accuracy
            yield Headline(
                f"{mode} accuracy", svg.percent(first.mean), svg.percent(last.mean), interval(last)
            )
    mode = "sampled" if "sampled" in summary.modes else next(iter(summary.modes), "")
    if ends := summary.first_and_last(mode):
        before, after = ends
        yield Headline(
            "failing calls in correct answers",
            share(before.failing_calls_in_correct),
            share(after.failing_calls_in_correct),
            f"{mode} answers",
        )
        yield Headline(
            "tokens an answer",
            f"{before.mean_length:.0f}",
            f"{after.mean_length:.0f}",
            f"{mode} answers, tool output included",
        )


def interval(estimate: Estimate) -> str:
    """The 95% interval in words."""
    return (
        f"95% interval {svg.percent(estimate.low)} to {svg.percent(estimate.high)}, "
        f"{estimate.count} held-out problems"
    )


def _rows(summary: Summary) -> Iterator[dict[str, Any]]:
    curves = {c.name: c for c in (*summary.stages, *([summary.sft] if summary.sft else []))}
    for stage in summary.evaluated:
        by_mode: dict[str, Evaluation | None] = {
            mode: summary.evaluations.get((stage, mode)) for mode in summary.modes
        }
        curve = curves.get(stage)
        yield {
            "stage": stage,
            "steps": curve.last if curve else None,
            "modes": list(by_mode.values()),
            "main": main_evaluation(by_mode),
            "seconds": curve.total("time/step") if curve else None,
        }


def _timings(summary: Summary) -> Iterator[dict[str, Any]]:
    """Seconds per stage, split by what they went to."""
    if summary.sft:
        total = summary.sft.total("time/step")
        yield {"name": "sft", "total": total, "parts": [("learn", total)]}
    for curve in summary.stages:
        parts = [(n, curve.total(f"time/{n}")) for n in ("generate", "tools", "grade", "learn")]
        total = curve.total("time/step")
        rest = max(0.0, total - sum(seconds for _, seconds in parts))
        yield {"name": curve.name, "total": total, "parts": [*parts, ("other", rest)]}
    for stage in summary.evaluated:
        total = sum(e.wall_s for (name, _), e in summary.evaluations.items() if name == stage)
        if total:
            yield {"name": f"evaluation of {stage}", "total": total, "parts": [("generate", total)]}


def _facts(summary: Summary) -> list[tuple[str, str]]:
    about = summary.environment
    packages = about.get("packages", {})
    facts = {
        "rstar2": about.get("rstar2"),
        "commit": (about.get("commit") or "")[:12],
        "seed": about.get("seed"),
        "python": about.get("python"),
        **{name: packages.get(name) for name in ("torch", "transformers", "vllm")},
        "processor": about.get("cpu"),
        "cores": about.get("cores"),
        "memory": f"{about.get('memory_gb')} GB",
        "GPU": about.get("gpu"),
        "system": about.get("platform"),
        "command": " ".join(str(word) for word in about.get("command", [])),
    }
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


# --------------------------------------------------------------------------- charts


def figures(summary: Summary) -> Iterator[Figure]:
    """The curves of the whole run."""
    yield _curve(
        summary, "Reward", "Share of right answers among the rollouts drawn.",
        {"reward": "reward"}, svg.percent, (0.0, 1.0),
    )  # fmt: skip
    yield _curve(
        summary, "Failing tool calls", "Share of the calls; inside right answers it says how clean "
        "success is.",
        {"failing_calls_in_correct": "in correct answers", "tool_errors": "in all answers"},
        svg.percent, (0.0, 0.1),
    )  # fmt: skip
    yield _curve(
        summary, "Response length", "Mean tokens of a rollout, tool output included.",
        {"response_length": "tokens"}, svg.number, None,
    )  # fmt: skip
    yield _curve(
        summary, "Truncated and unanswered", "Rollouts cut at the length limit, or without answer.",
        {"truncated": "truncated", "no_answer": "no answer"}, svg.percent, (0.0, 0.1),
    )  # fmt: skip
    yield _curve(
        summary, "Groups", "Problems used in each step; dropped ones (all right or all wrong) are "
        "refilled.",
        {"groups/used": "used", "groups/dropped": "dropped", "groups/refilled": "refilled"},
        svg.number, None, smooth=0,
    )  # fmt: skip
    yield _curve(
        summary, "Entropy", "Of the policy, per sampled token.", {"entropy": "entropy"},
        svg.number, None,
    )  # fmt: skip
    yield _curve(
        summary, "Seconds a step", "Where the time of a step went.",
        {"time/generate": "generate", "time/tools": "tools", "time/learn": "learn"},
        svg.number, None, smooth=0,
    )  # fmt: skip
    if summary.sft:
        loss = svg.Series("loss", summary.sft.x(), summary.sft.y("loss"), 3, smooth=9)
        chart = svg.line_chart([loss], title="SFT loss", log=True)
        yield Figure("SFT loss", "Format only, before any reward; logarithmic.", chart)


def _curve(
    summary: Summary,
    title: str,
    note: str,
    metrics: dict[str, str],
    y_format: Callable[[float], str],
    y_range: tuple[float, float] | None,
    smooth: int = SMOOTH,
) -> Figure:
    series = [
        _joined(summary.stages, metric, name, colour, smooth)
        for colour, (metric, name) in enumerate(metrics.items())
    ]
    series = [s for s in series if any(y is not None for y in s.y)]
    chart = svg.line_chart(
        series, title=title, spans=_spans(summary.stages), y_format=y_format, y_range=y_range,
        x_name="RL step",
    )  # fmt: skip
    legend = tuple((s.name, s.colour) for s in series) if len(series) > 1 else ()
    return Figure(title, note, chart, legend)


def _joined(
    stages: tuple[StageCurve, ...], metric: str, name: str, colour: int, smooth: int
) -> svg.Series:
    xs = [x for stage in stages for x in stage.x()]
    ys = [y for stage in stages for y in stage.y(metric)]
    return svg.Series(name, xs, ys, colour, smooth=smooth)


def _spans(stages: tuple[StageCurve, ...]) -> list[svg.Span]:
    return [svg.Span(s.name, s.offset + 0.5, s.offset + s.last + 0.5) for s in stages]


def kinds_figure(summary: Summary) -> Figure | None:
    """Accuracy of each kind before and after RL."""
    mode = next(iter(summary.modes), "")
    ends = summary.first_and_last(mode)
    if not ends or not summary.kinds:
        return None
    first, last = ends

    def triple(evaluation: Evaluation, kind: str) -> tuple[float, float, float] | None:
        found = evaluation.kinds.get(kind)
        return (found.mean, found.low, found.high) if found else None

    rows = [svg.Dumbbell(kind, triple(first, kind), triple(last, kind)) for kind in summary.kinds]
    return Figure(
        f"{mode.capitalize()} accuracy by kind",
        "Held-out problems, with 95% intervals.",
        svg.dumbbell_chart(rows, title="accuracy by kind"),
        ((f"after {first.stage}", 7), (f"after {last.stage}", 1)),
    )


def _kind_rows(summary: Summary) -> Iterator[tuple[str, list[float | None]]]:
    """(kind, its accuracy after each evaluated stage), in the first mode."""
    mode = next(iter(summary.modes), "")
    for kind in summary.kinds:
        found = [summary.evaluations.get((stage, mode)) for stage in summary.evaluated]
        estimates = [e.kinds.get(kind) if e else None for e in found]
        yield kind, [e.mean if e else None for e in estimates]


def kind_figures(summary: Summary) -> Iterator[Figure]:
    """Small multiples: the reward of each kind during RL."""
    kinds = dict.fromkeys(
        name
        for stage in summary.stages
        for step in stage.steps
        for name in step
        if name.startswith("accuracy/")
    )
    for metric in kinds:
        name = metric.removeprefix("accuracy/")
        series = _joined(summary.stages, metric, name, 0, SMOOTH)
        chart = svg.line_chart(
            [series], title=name, spans=_spans(summary.stages), y_format=svg.percent,
            y_range=(0.0, 1.0), x_name="RL step",
        )  # fmt: skip
        yield Figure(name, "", chart)
