"""report.html: one self-contained page about a run. All text of the run is escaped, by the template
(autoescape) or by svg.py; the page loads nothing and sends nothing.
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
from rstar2.record import evaluation_stage, read_groups
from rstar2.record.read import busy_seconds
from rstar2.report import svg
from rstar2.report.latex import to_markup
from rstar2.report.segments import Segment, segments
from rstar2.report.summary import StageCurve, Summary, duration, summarise
from rstar2.report.table import main_evaluation, share
from rstar2.types import Estimate, Evaluation, Problem, Trajectory

FORBID = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Content security policy: markup that was not escaped could still load and send nothing."""

SMOOTH = 5
LEARNT, STILL_WRONG = 4, 1
"""Examples to show: problems that became correct, and problems that are still wrong."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its title, note and legend: (name, colour) of each line."""

    title: str
    note: str
    chart: Markup
    legend: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Headline:
    """One number at the top of the page, before and after RL."""

    name: str
    before: str
    after: str
    note: str = ""


def write_report(run: Path) -> Path:
    """Write report.html into the run directory atomically; returns its path."""
    path = run / "report.html"
    write_file(path, render(summarise(run)))
    return path


def render(summary: Summary) -> str:
    """The page as text."""
    template = page_template("rstar2.report", percent=svg.percent, share=share, duration=duration)
    return template.render(
        policy=FORBID,
        css=Markup(asset("rstar2.report", "page.css")),
        js=Markup(asset("rstar2.report", "page.js")),
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


def page_template(package: str, **filters: Callable[..., str]) -> jinja2.Template:
    """The page.html.jinja of a package: text is escaped, and an undefined name is an error.

    The filter `formulas` draws LaTeX as MathML.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"formulas": to_markup, **filters}
    return environment.from_string(asset(package, "page.html.jinja"))


def asset(package: str, name: str) -> str:
    """The text of a file that a package contains."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


# --------------------------------------------------------------------------- numbers


def headlines(summary: Summary) -> Iterator[Headline]:
    """The numbers at the top of the page."""
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
            "tool-error rate in correct rollouts",
            share(before.failing_calls_in_correct),
            share(after.failing_calls_in_correct),
            f"{mode} evaluation",
        )
        yield Headline(
            "tokens per rollout",
            f"{before.mean_length:.0f}",
            f"{after.mean_length:.0f}",
            f"{mode} evaluation, tool output included",
        )


def interval(estimate: Estimate) -> str:
    """The 95% interval and the number of problems as text."""
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
            "stage": summary.label(stage),
            "steps": curve.last if curve else None,
            "modes": list(by_mode.values()),
            "main": main_evaluation(by_mode),
            "seconds": curve.total("time/step") if curve else None,
        }


def _timings(summary: Summary) -> Iterator[dict[str, Any]]:
    """Seconds per stage, split into parts."""
    if summary.sft:
        total = summary.sft.total("time/step")
        yield {"name": "sft", "total": total, "parts": [("learn", total)]}
    for curve in summary.stages:
        parts = [(n, curve.total(f"time/{n}")) for n in ("generate", "tools", "grade", "learn")]
        total = curve.total("time/step")
        rest = max(0.0, total - sum(seconds for _, seconds in parts))
        yield {"name": curve.name, "total": total, "parts": [*parts, ("other", rest)]}
    for stage in summary.evaluated:
        total = busy_seconds(
            (), ((s, e.wall_s) for (s, _), e in summary.evaluations.items() if s == stage)
        )
        if total:
            name = f"evaluation of {summary.label(stage)}"
            yield {"name": name, "total": total, "parts": [("generate", total)]}
    during = sum(curve.total("time/evaluate") for curve in summary.stages)
    if during:
        yield {"name": "evaluation during RL", "total": during, "parts": [("generate", during)]}


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
    """The curves over all RL steps."""
    yield _reward_figure(summary)
    yield _accuracy_figure(summary)
    yield _curve(
        summary, "Tool-error rate", "Failed tool calls as a share of all tool calls.",
        {"failing_calls_in_correct": "in correct rollouts", "tool_errors": "in all rollouts"},
        svg.percent, (0.0, 0.1),
    )  # fmt: skip
    yield _curve(
        summary, "Response length", "Mean tokens per rollout, tool output included.",
        {"response_length": "tokens"}, svg.number, None,
    )  # fmt: skip
    yield _curve(
        summary, "Truncated and unanswered",
        "Rollouts cut at the length limit, and without an answer.",
        {"truncated": "truncated", "no_answer": "no answer"}, svg.percent, (0.0, 0.1),
    )  # fmt: skip
    yield _curve(
        summary, "Groups", "Groups per step. Groups with equal rewards are dropped and replaced.",
        {"groups/used": "used", "groups/dropped": "dropped", "groups/refilled": "replacements"},
        svg.number, None, smooth=0,
    )  # fmt: skip
    yield _curve(
        summary, "Entropy", "Mean entropy of the policy per sampled token, in nats.",
        {"entropy": "entropy"}, svg.number, None,
    )  # fmt: skip
    yield _curve(
        summary, "Seconds per step", "Time of a step by part.",
        {"time/generate": "generate", "time/tools": "tools", "time/learn": "learn"},
        svg.number, None, smooth=0,
    )  # fmt: skip
    if summary.sft:
        loss = svg.Series("loss", summary.sft.x(), summary.sft.y("loss"), 3, smooth=9)
        chart = svg.line_chart([loss], title="SFT loss", log=True)
        yield Figure("SFT loss", "Logarithmic scale.", chart)


def _reward_figure(summary: Summary) -> Figure:
    """Rewards of 0 to 1 as shares, other rewards as numbers."""
    rewards = [y for stage in summary.stages for y in stage.y("reward") if y is not None]
    if all(0.0 <= reward <= 1.0 for reward in rewards):
        note = "Mean reward of all rollouts of a step."
        return _curve(summary, "Reward", note, {"reward": "reward"}, svg.percent, (0.0, 1.0))
    note = "Mean over all rollouts of a step."
    return _curve(summary, "Reward", note, {"reward": "reward"}, svg.number, None)


def _accuracy_figure(summary: Summary) -> Figure:
    """Held-out accuracy over RL steps, where it was measured at more than two of them."""
    series = [
        svg.Series(mode, *summary.accuracy_curve(mode), colour)
        for colour, mode in enumerate(summary.modes)
    ]
    series = [s for s in series if len(s.x) > 2]
    chart = svg.line_chart(
        series, title="Held-out accuracy", spans=_spans(summary.stages), y_format=svg.percent,
        y_range=(0.0, 1.0), x_name="RL step",
    )  # fmt: skip
    legend = tuple((s.name, s.colour) for s in series) if len(series) > 1 else ()
    return Figure(
        "Held-out accuracy", "Share of held-out problems answered correctly.", chart, legend
    )


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


def _spans(stages: tuple[StageCurve, ...]) -> list[svg.ChartSpan]:
    return [svg.ChartSpan(s.name, s.offset + 0.5, s.offset + s.last + 0.5) for s in stages]


def kinds_figure(summary: Summary) -> Figure | None:
    """Accuracy of each kind before and after RL."""
    mode = next(iter(summary.modes), "")
    ends = summary.first_and_last(mode)
    if not ends or not summary.kinds:
        return None
    first, last = ends

    def triple(evaluation: Evaluation, kind: str) -> tuple[float, float, float] | None:
        estimate = evaluation.kinds.get(kind)
        return (estimate.mean, estimate.low, estimate.high) if estimate else None

    rows = [svg.Dumbbell(kind, triple(first, kind), triple(last, kind)) for kind in summary.kinds]
    return Figure(
        f"{mode.capitalize()} accuracy by kind",
        "Held-out problems, with 95% intervals.",
        svg.dumbbell_chart(rows, title="accuracy by kind"),
        (
            (f"after {summary.label(first.stage)}", 7),
            (f"after {summary.label(last.stage)}", 1),
        ),
    )


def _kind_rows(summary: Summary) -> Iterator[tuple[str, list[float | None]]]:
    """(kind, its accuracy after each evaluated stage), in the first mode."""
    mode = next(iter(summary.modes), "")
    for kind in summary.kinds:
        evaluations = [summary.evaluations.get((stage, mode)) for stage in summary.evaluated]
        estimates = [e.kinds.get(kind) if e else None for e in evaluations]
        yield kind, [e.mean if e else None for e in estimates]


def kind_figures(summary: Summary) -> Iterator[Figure]:
    """One small chart per kind of problem: its reward during RL."""
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


# --------------------------------------------------------------------------- examples


@dataclass(frozen=True, slots=True)
class ExampleRollout:
    """One trajectory as an example shows it."""

    stage: str
    correct: bool
    answer: str | None
    stop: str
    tokens: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """One held-out problem and its rollouts before and after RL."""

    problem: Problem
    before: ExampleRollout
    after: ExampleRollout


def choose_examples(summary: Summary) -> list[Example]:
    """Problems that RL made correct, each of another kind, then one that is still wrong."""
    mode = next((m for m in summary.modes if summary.first_and_last(m)), None)
    ends = summary.first_and_last(mode) if mode else None
    if mode is None or ends is None:
        return []
    first, last = ends[0].stage, ends[1].stage
    before = dict(_by_problem(summary.path, evaluation_stage(first, mode)))
    learnt: dict[str, Example] = {}
    wrong: list[Example] = []
    for problem_id, (problem, after) in _by_problem(summary.path, evaluation_stage(last, mode)):
        if problem_id not in before:
            continue
        earlier = before[problem_id][1]
        example = Example(
            problem,
            _example_rollout(summary.label(first), earlier),
            _example_rollout(summary.label(last), after),
        )
        if after.correct and not earlier.correct:
            learnt.setdefault(problem.kind or problem_id, example)
        elif not after.correct and len(wrong) < STILL_WRONG:
            wrong.append(example)
    return [*_varied(list(learnt.values())), *wrong]


def _varied(examples: list[Example]) -> list[Example]:
    """Up to LEARNT examples, half of them with a tool error before RL if there are enough."""
    failed = [e for e in examples if any(s.failed for s in e.before.segments)]
    others = [e for e in examples if e not in failed]
    half = LEARNT // 2
    chosen = failed[:half] + others[: LEARNT - min(half, len(failed))]
    return (chosen + failed[half:])[:LEARNT]


def _by_problem(run: Path, stage: str) -> Iterator[tuple[str, tuple[Problem, Trajectory]]]:
    for line in read_groups(run, stage):
        if line.group.trajectories:
            yield line.group.problem.id, (line.group.problem, line.group.trajectories[0])


def _example_rollout(stage: str, trajectory: Trajectory) -> ExampleRollout:
    return ExampleRollout(
        stage=stage,
        correct=trajectory.correct,
        answer=trajectory.reward.answer if trajectory.reward else None,
        stop=trajectory.stop.value.replace("_", " "),
        tokens=trajectory.completion_tokens,
        segments=tuple(segments(trajectory)),
    )
