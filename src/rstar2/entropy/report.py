"""An entropy analysis as entropy.html: tables, curves over training, and rollouts with their tokens
coloured by entropy. The page is self-contained, and the template escapes
all text of a run (autoescape).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from rstar2.entropy.classes import CLASSES, Token
from rstar2.entropy.table import Analysis, ClassRow, Point
from rstar2.files import write_file
from rstar2.report import svg
from rstar2.report.page import asset, page_template

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
LEVELS = 12
"""Levels of the heat scale: CSS classes, instead of a style per token, keep pages small."""
NAMES = {"after_ok": "after ok", "after_error": "after error"}
FIGURES: tuple[tuple[str, str, Callable[[ClassRow], float | None], Callable[[float], str]], ...] = (
    ("Entropy by class", "Nats per token.", lambda row: row.entropy, svg.number),
    (
        "High-entropy tokens by class",
        "Share of the top 20% in each class.",
        lambda row: row.top_share,
        svg.percent,
    ),
    (
        "Sampled tokens by class",
        "Share of all sampled tokens.",
        lambda row: row.share,
        svg.percent,
    ),
)
"""Title, note, figure of a class and number format of each chart over training."""


@dataclass(frozen=True, slots=True)
class HeatToken:
    """One token as the page shows it."""

    text: str
    level: int
    kind: str
    top: bool
    title: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One trajectory with its tokens coloured by entropy."""

    sample: str
    id: str
    prompt: str
    correct: bool
    turns: tuple[tuple[HeatToken, ...], ...]
    tools: tuple[str, ...]
    """The tool output after each turn; empty if there was none."""


def write_page(
    path: Path, analyses: Sequence[Analysis], course: Sequence[Point], heats: Sequence[HeatMap]
) -> None:
    """Write the page atomically."""
    template = page_template("rstar2.entropy", share=share, interval=interval, words=class_name)
    text = template.render(
        policy=POLICY,
        css=Markup(asset("rstar2.report", "page.css") + asset("rstar2.entropy", "heat.css")),
        analyses=analyses,
        classes=CLASSES,
        figures=list(figures(course)),
        heats=heats,
        levels=range(LEVELS),
    )
    write_file(path, text)


def pieces(tokens: Sequence[Token], turns: int, scale: float) -> tuple[tuple[HeatToken, ...], ...]:
    """The tokens of each turn, with their level on a scale from 0 to `scale` nats."""
    out: list[list[HeatToken]] = [[] for _ in range(turns)]
    for token in tokens:
        level = min(LEVELS - 1, int(LEVELS * token.entropy / scale)) if scale > 0 else 0
        title = f"{token.entropy:.3f} nats, logprob {token.logprob:.3f}, {class_name(token.kind)}"
        out[token.turn].append(HeatToken(token.piece, level, token.kind, token.top, title))
    return tuple(tuple(turn) for turn in out)


def figures(course: Sequence[Point]) -> list[tuple[str, str, Markup, tuple[tuple[str, int], ...]]]:
    """(title, note, chart, legend): how the classes change over training."""
    if len(course) < 2:
        return []
    spans, xs, offset = [], [], 0
    for stage in dict.fromkeys(point.stage for point in course):
        steps = [point.step for point in course if point.stage == stage]
        spans.append(svg.ChartSpan(stage, offset + 0.5, offset + steps[-1] + 0.5))
        xs += [float(offset + step) for step in steps]
        offset += steps[-1]
    legend = tuple((class_name(kind), index) for index, kind in enumerate(CLASSES))
    charts = []
    for title, note, figure, form in FIGURES:
        series = [
            svg.Series(
                class_name(kind), xs, [figure(point.analysis.row(kind)) for point in course], index
            )
            for index, kind in enumerate(CLASSES)
        ]
        chart = svg.line_chart(series, title=title, spans=spans, y_format=form, x_name="RL step")
        charts.append((title, note, chart, legend))
    return charts


def class_name(kind: str) -> str:
    return NAMES.get(kind, kind)


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def interval(row: ClassRow) -> str:
    if row.entropy is None:
        return "–"
    if row.low is None or row.high is None:
        return f"{row.entropy:.4f}"
    return f"{row.entropy:.4f} ({row.low:.3f}–{row.high:.3f})"
