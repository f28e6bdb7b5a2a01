"""Charts as inline SVG: they need no script and no network; colours come from CSS variables.

`line_chart` and `dumbbell_chart` return markup that is safe to put into a page: every text is
escaped here. A line chart holds its numbers in `data-chart`; page.js reads them for tooltips.
Classes `s0`..`s7` take their colour from the CSS variables `--s0`..`--s7`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from markupsafe import Markup, escape

from rstar2.report.summary import percent as percent

Number = float | None

WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 20, 26


@dataclass(frozen=True, slots=True)
class Series:
    """One line. None and NaN leave a gap; `low` and `high` draw a band (an interval) around it."""

    name: str
    x: Sequence[float]
    y: Sequence[Number]
    colour: int = 0
    low: Sequence[Number] | None = None
    high: Sequence[Number] | None = None
    smooth: int = 0
    """Draw a running mean over this many points, with the raw line faint behind it."""


@dataclass(frozen=True, slots=True)
class ChartSpan:
    """A named range of the x axis: a stage."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values onto pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        width = self.high - self.low or 1.0
        return self.start + (value - self.low) / width * (self.end - self.start)


def number(value: float) -> str:
    """A number in as few characters as are readable."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 10_000:
        return f"{value / 1000:.0f}k"
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) < 0.001:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.3g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that span [low, high]."""
    width = high - low
    if width <= 0 or not math.isfinite(width):
        return [low]
    raw = width / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within [low, high]; only the powers if there are many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    wanted = (1, 2, 5) if high / low < 200 else (1,)
    marks = [m * 10.0**e for e in exponents for m in wanted if low <= m * 10.0**e <= high]
    return marks or [low, high]


def running_mean(values: Sequence[Number], window: int) -> list[Number]:
    """The mean of the known values within half a window on each side of each point."""
    half = window // 2
    out: list[Number] = []
    for index in range(len(values)):
        known = [v for v in values[max(0, index - half) : index + half + 1] if _known(v)]
        out.append(math.fsum(known) / len(known) if known else None)
    return out


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    spans: Sequence[ChartSpan] = (),
    y_format: Callable[[float], str] = number,
    y_range: tuple[float, float] | None = None,
    x_name: str = "step",
    log: bool = False,
) -> Markup:
    """A line chart with optional bands and named ranges; an empty string if there are no points.

    `y_range` is widened by data outside it; `log` puts a positive y axis on a logarithmic scale.
    """
    drawn = [s for s in series if any(_known(y) for y in s.y)]
    if not drawn:
        return Markup("")
    raise_to = math.log10 if log else float
    xs = [x for s in drawn for x in s.x] + [b for span in spans for b in (span.start, span.end)]
    ys = [y for s in drawn for part in (s.y, s.low or (), s.high or ()) for y in part if _known(y)]
    low, high = _extent(ys, y_range, log)
    sx = Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    scale = Scale(raise_to(low), raise_to(high), HEIGHT - BOTTOM, TOP)

    def sy(value: float) -> float:
        return scale(raise_to(max(value, low) if log else value))

    y_ticks = log_ticks(low, high) if log else ticks(low, high)
    parts = [_spans(spans, sx), _grid(y_ticks, sy, y_format), _x_axis(sx, x_name)]
    parts += [_series(s, sx, sy) for s in drawn]
    parts.append(
        Markup('<line class="cursor" y1="{}" y2="{}" hidden=""/>').format(TOP, HEIGHT - BOTTOM)
    )
    data = {
        "x": [LEFT, WIDTH - RIGHT, sx.low, sx.high],
        "xName": x_name,
        "spans": [[s.name, s.start, s.end] for s in spans],
        "series": [
            {
                "name": s.name,
                "colour": s.colour,
                "x": [float(x) for x in s.x],
                "t": [y_format(float(y)) if _known(y) else None for y in s.y],
            }
            for s in drawn
        ],
    }
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}" data-chart="{}">{}</svg>'
    ).format(WIDTH, HEIGHT, title, json.dumps(data), Markup("").join(parts))


@dataclass(frozen=True, slots=True)
class Dumbbell:
    """One row of a dumbbell chart: (mean, low, high) before and after."""

    name: str
    before: tuple[float, float, float] | None
    after: tuple[float, float, float] | None


def dumbbell_chart(rows: Sequence[Dumbbell], *, title: str) -> Markup:
    """Shares (0..1) before and after, one row each, with their intervals."""
    left, row_height, top = 96, 26, 8
    height = top + row_height * len(rows) + 24
    sx = Scale(0.0, 1.0, left, WIDTH - 40)
    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            Markup(
                '<line class="grid" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>'
                '<text class="tick" x="{0}" y="{3}" text-anchor="middle">{4}</text>'
            ).format(_px(sx(tick)), top, height - 22, height - 8, percent(tick))
        )
    for index, row in enumerate(rows):
        y = top + row_height * (index + 0.5)
        parts.append(
            Markup('<text class="label" x="{}" y="{}" text-anchor="end">{}</text>').format(
                left - 8, _px(y + 4), row.name
            )
        )
        if row.before and row.after:
            parts.append(
                Markup('<line class="link" x1="{}" x2="{}" y1="{y}" y2="{y}"/>').format(
                    _px(sx(row.before[0])), _px(sx(row.after[0])), y=_px(y)
                )
            )
        for colour, part in ((7, row.before), (1, row.after)):
            if part:
                parts.append(_whisker(part, sx, y, colour))
        if row.after:
            parts.append(
                Markup('<text class="value" x="{}" y="{}">{}</text>').format(
                    WIDTH - 34, _px(y + 4), percent(row.after[0])
                )
            )
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    ).format(WIDTH, height, title, Markup("").join(parts))


# --------------------------------------------------------------------------- parts


def _known(value: Number) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _extent(
    ys: Sequence[float], y_range: tuple[float, float] | None, log: bool
) -> tuple[float, float]:
    low, high = min(ys), max(ys)
    if log:
        positive = [y for y in ys if y > 0] or [1.0]
        return min(positive), max(max(positive), min(positive) * 1.1)
    if y_range is not None:
        return min(low, y_range[0]), max(high, y_range[1])
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (0.0 if low >= 0 and low < 0.6 * high else low - room), high + room


def _spans(spans: Sequence[ChartSpan], sx: Scale) -> Markup:
    parts = []
    for index, span in enumerate(spans):
        start, end = sx(span.start), sx(span.end)
        parts.append(
            Markup(
                '<rect class="span{}" x="{}" y="{}" width="{}" height="{}"/>'
                '<text class="span-name" x="{}" y="{}" text-anchor="middle">{}</text>'
            ).format(
                index % 2,
                _px(start),
                TOP,
                _px(max(0.0, end - start)),
                HEIGHT - TOP - BOTTOM,
                _px((start + end) / 2),
                TOP - 6,
                span.name if end - start > 7 * len(span.name) else "",
            )
        )
    return Markup("").join(parts)


def _grid(
    marks: Sequence[float], sy: Callable[[float], float], y_format: Callable[[float], str]
) -> Markup:
    return Markup("").join(
        Markup(
            '<line class="grid" x1="{}" x2="{}" y1="{y}" y2="{y}"/>'
            '<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>'
        ).format(LEFT, WIDTH - RIGHT, LEFT - 6, _px(sy(t) + 3.5), y_format(t), y=_px(sy(t)))
        for t in marks
    )


def _x_axis(sx: Scale, name: str) -> Markup:
    marks = [t for t in ticks(sx.low, sx.high, 5) if t == int(t)]
    labels = Markup("").join(
        Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            _px(sx(t)), HEIGHT - 10, number(t)
        )
        for t in marks
    )
    axis = Markup('<line class="axis" x1="{}" x2="{}" y1="{y}" y2="{y}"/>').format(
        LEFT, WIDTH - RIGHT, y=HEIGHT - BOTTOM
    )
    caption = Markup('<text class="tick name" x="{}" y="{}" text-anchor="end">{}</text>').format(
        LEFT - 6, HEIGHT - 10, name
    )
    return axis + labels + caption


def _series(s: Series, sx: Scale, sy: Callable[[float], float]) -> Markup:
    parts = []
    if s.low is not None and s.high is not None:
        edges = [
            (x, a, b)
            for x, a, b in zip(s.x, s.low, s.high, strict=True)
            if a is not None and b is not None and _known(a) and _known(b)
        ]
        around = [(sx(x), sy(b)) for x, _, b in edges] + [
            (sx(x), sy(a)) for x, a, _ in reversed(edges)
        ]
        points = " ".join(f"{_px(x)},{_px(y)}" for x, y in around)
        parts.append(Markup('<polygon class="band f{}" points="{}"/>').format(s.colour, points))
    if s.smooth > 1:
        parts.append(_path(s.x, s.y, sx, sy, f"line faint s{s.colour}"))
        parts.append(_path(s.x, running_mean(s.y, s.smooth), sx, sy, f"line s{s.colour}"))
    else:
        parts.append(_path(s.x, s.y, sx, sy, f"line s{s.colour}"))
    return Markup("").join(parts)


def _path(
    xs: Sequence[float], ys: Sequence[Number], sx: Scale, sy: Callable[[float], float], kind: str
) -> Markup:
    words, pen_down, alone = [], False, []
    for x, y in zip(xs, ys, strict=True):
        if y is None or not _known(y):
            pen_down = False
            continue
        words.append(f"{'L' if pen_down else 'M'}{_px(sx(x))} {_px(sy(y))}")
        alone.append((sx(x), sy(y)))
        pen_down = True
    path = Markup('<path class="{}" d="{}"/>').format(kind, "".join(words))
    if len(alone) == 1:
        path += Markup('<circle class="dot {}" cx="{}" cy="{}" r="3"/>').format(
            kind, _px(alone[0][0]), _px(alone[0][1])
        )
    return path


def _whisker(part: tuple[float, float, float], sx: Scale, y: float, colour: int) -> Markup:
    mean, low, high = part
    return Markup(
        '<line class="whisker s{c}" x1="{}" x2="{}" y1="{y}" y2="{y}"/>'
        '<circle class="point f{c}" cx="{}" cy="{y}" r="4.5"><title>{}</title></circle>'
    ).format(
        _px(sx(low)),
        _px(sx(high)),
        _px(sx(mean)),
        escape(f"{percent(mean)} ({percent(low)} to {percent(high)})"),
        c=colour,
        y=_px(y),
    )
