"""Write report.html of an evaluation: self-contained, styled like a run's report, all escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import yaml
from markupsafe import Markup

from rstar2.evaluate.scores import BenchmarkScore, GradedAnswer
from rstar2.evaluate.store import EvalResults, read_answers, read_problems, read_results
from rstar2.files import write_file
from rstar2.record import read_environment
from rstar2.report import svg
from rstar2.report.page import FORBID, Figure, asset, page_template
from rstar2.report.segments import Segment, segments
from rstar2.report.summary import duration
from rstar2.report.table import share
from rstar2.types import Problem

SHOWN = 3
"""Most right and most wrong answers shown per benchmark."""
SEARCHED = 400
"""Answers that are searched for them."""
LISTED = 200
"""Problems listed one by one, hardest first."""


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """One answer as the page shows it."""

    problem: Problem
    correct: bool
    answer: str | None
    stop: str
    tokens: int
    segments: tuple[Segment, ...]


def write_page(path: Path) -> Path:
    """Write report.html from the files in the directory."""
    results = read_results(path)
    shown = {name: list(examples(path, name)) for name in results.scores}
    page = path / "report.html"
    write_file(page, render(results, read_environment(path), shown).encode())
    return page


def render(
    results: EvalResults, environment: dict[str, Any], shown: dict[str, list[ShownAnswer]]
) -> str:
    """Render the page as HTML."""
    template = page_template("rstar2.evaluate", percent=svg.percent, share=share, duration=duration)
    return template.render(
        policy=FORBID,
        css=Markup(asset("rstar2.report", "page.css")),
        js=Markup(asset("rstar2.report", "page.js")),
        results=results,
        scores=list(results.scores.values()),
        figures=[f for f in figures(list(results.scores.values())) if f.chart],
        shown=shown,
        listed=LISTED,
        environment=environment,
        settings=yaml.safe_dump(msgspec.to_builtins(results.settings), sort_keys=False),
    )


def figures(scores: Sequence[BenchmarkScore]) -> Iterator[Figure]:
    """pass@k over k, and accuracy by kind."""
    series = [
        svg.Series(
            score.benchmark,
            [float(k) for k in score.passes],
            [e.mean for e in score.passes.values()],
            index % 8,
            low=[e.low for e in score.passes.values()],
            high=[e.high for e in score.passes.values()],
        )
        for index, score in enumerate(scores)
        if len(score.passes) > 1
    ]
    if series:
        legend = tuple((s.name, s.colour) for s in series)
        chart = svg.line_chart(
            series, title="pass@k", y_format=svg.percent, y_range=(0.0, 1.0), x_name="k"
        )
        yield Figure(
            "pass@k",
            "Unbiased estimate that at least one of k answers is right. Bands are 95% intervals.",
            chart,
            legend,
        )
    for score in scores:
        if len(score.kinds) > 1:
            rows = [
                svg.Dumbbell(kind, None, (e.mean, e.low, e.high)) for kind, e in score.kinds.items()
            ]
            yield Figure(
                f"{score.benchmark} by kind",
                f"avg@{score.samples} with 95% intervals.",
                svg.dumbbell_chart(rows, title=f"{score.benchmark} by kind"),
            )


def examples(path: Path, benchmark: str) -> Iterator[ShownAnswer]:
    """A few wrong answers, then a few right ones, each to a different problem."""
    problems = {problem.id: problem for problem in read_problems(path, benchmark)}
    by_verdict: dict[bool, dict[str, GradedAnswer]] = {False: {}, True: {}}
    for answer in islice(read_answers(path, benchmark), SEARCHED):
        kept = by_verdict[answer.trajectory.correct]
        if len(kept) < SHOWN and answer.problem_id in problems:
            kept.setdefault(answer.problem_id, answer)
    for answer in (*by_verdict[False].values(), *by_verdict[True].values()):
        trajectory = answer.trajectory
        yield ShownAnswer(
            problems[answer.problem_id],
            trajectory.correct,
            trajectory.answer,
            trajectory.stop.value.replace("_", " "),
            answer.tokens,
            tuple(segments(trajectory)),
        )
