"""entropy.html: tables, curves over training, and trajectories with their tokens heat-mapped. One
self-contained page; everything from a run is escaped by the template (autoescape).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from rstar2.entropy import show
from rstar2.entropy.classes import CLASSES, Token
from rstar2.entropy.table import Analysis, Point
from rstar2.files import write_file
from rstar2.report import svg

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
LEVELS = 12
"""Steps of the heat scale: classes instead of one style per token keep pages small."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One token as the page shows it."""

    text: str
    level: int
    kind: str
    top: bool
    title: str


@dataclass(frozen=True, slots=True)
class Heat:
    """One trajectory."""

    sample: str
    id: str
    prompt: str
    correct: bool
    turns: tuple[tuple[Piece, ...], ...]
    tools: tuple[str, ...]
    """What came back after each turn; empty for none."""


def write_page(
    path: Path, analyses: Sequence[Analysis], course: Sequence[Point], heats: Sequence[Heat]
) -> None:
    """Write the page, whole or not at all."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"share": show.share, "interval": show.interval, "words": show.name}
    template = environment.from_string(_asset("rstar2.entropy", "page.html.jinja"))
    text = template.render(
        policy=POLICY,
        css=Markup(_asset("rstar2.report", "page.css") + _asset("rstar2.entropy", "heat.css")),
        analyses=analyses,
        classes=CLASSES,
        figures=list(figures(course)),
        heats=heats,
        levels=range(LEVELS),
    )
    write_file(path, text)


def pieces(tokens: Sequence[Token], turns: int, scale: float) -> tuple[tuple[Piece, ...], ...]:
    """The tokens of each turn, with how hot they are on a scale from 0 to `scale` nats."""
    out: list[list[Piece]] = [[] for _ in range(turns)]
    for token in tokens:
        level = min(LEVELS - 1, int(LEVELS * token.entropy / scale)) if scale > 0 else 0
        title = f"{token.entropy:.3f} nats, logprob {token.logprob:.3f}, {show.name(token.kind)}"
        out[token.turn].append(Piece(token.piece, level, token.kind, token.top, title))
    return tuple(tuple(turn) for turn in out)


def figures(course: Sequence[Point]) -> list[tuple[str, str, Markup, tuple[tuple[str, int], ...]]]:
    """(title, note, chart, legend): how the classes change over training."""
    if len(course) < 2:
        return []
    spans, xs, offset = [], [], 0
    for stage in dict.fromkeys(point.stage for point in course):
        steps = [point.step for point in course if point.stage == stage]
        spans.append(svg.Span(stage, offset + 0.5, offset + steps[-1] + 0.5))
        xs += [float(offset + step) for step in steps]
        offset += steps[-1]
    legend = tuple((show.name(kind), index) for index, kind in enumerate(CLASSES))
    charts = []
    for title, note, field, form in (
        ("Entropy by class", "Nats per token.", "entropy", svg.number),
        ("Who is uncertain", "Share of the top 20% that each class has.", "top_share", svg.percent),
        ("What is written", "Share of the sampled tokens.", "share", svg.percent),
    ):
        series = [
            svg.Series(
                show.name(kind), xs,
                [getattr(point.analysis.row(kind), field) for point in course], index,
            )
            for index, kind in enumerate(CLASSES)
        ]  # fmt: skip
        chart = svg.line_chart(series, title=title, spans=spans, y_format=form, x_name="RL step")
        charts.append((title, note, chart, legend))
    return charts


def _asset(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
