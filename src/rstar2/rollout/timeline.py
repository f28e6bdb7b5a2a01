"""Timelines of trajectories on engines, as SVG, HTML and Chrome trace.

The simulator and recorded runs both give spans (engine, trajectory, state, start, end). `svg` draws
for every engine the number of trajectories in each state over time, and below it the trajectories
as bars (an even sample if there are too many). `page` is the drawing as one HTML file without
scripts. `chrome_trace` exports all spans for Perfetto (ui.perfetto.dev) or chrome://tracing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

import msgspec

STATES = {
    "generating": "#3b82c4",
    "tool": "#d9b44a",
    "queued": "#b9bec6",
    "preempted": "#c8503c",
}
"""States of a trajectory and their colours, stacked from the bottom in this order."""
OTHER = "#8d6cab"

WIDTH, LEFT, RIGHT, AREA, GAP, BAR = 960, 92, 12, 64, 22, 7


class TimelineSpan(NamedTuple):
    """A trajectory was in one state on (or waiting for) an engine, from `start` to `end`."""

    engine: str
    trajectory: str
    state: str
    start: float
    end: float


def chrome_trace(spans: Iterable[TimelineSpan]) -> str:
    """Spans as a Chrome trace: one process per engine, one thread per trajectory."""
    engines: dict[str, int] = {}
    trajectories: dict[tuple[int, str], int] = {}
    events: list[dict[str, Any]] = []
    for span in spans:
        engine = engines.setdefault(span.engine or "no engine", len(engines) + 1)
        thread = trajectories.setdefault((engine, span.trajectory), len(trajectories) + 1)
        events.append(
            {
                "name": span.state,
                "cat": "rollout",
                "ph": "X",
                "ts": round(span.start * 1e6, 1),
                "dur": round((span.end - span.start) * 1e6, 1),
                "pid": engine,
                "tid": thread,
            }
        )
    named = [
        {"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}}
        for name, number in engines.items()
    ] + [
        {"name": "thread_name", "ph": "M", "pid": engine, "tid": number, "args": {"name": name}}
        for (engine, name), number in trajectories.items()
    ]
    return msgspec.json.encode({"traceEvents": named + events}).decode()


def counts(spans: Sequence[TimelineSpan], times: Sequence[float]) -> dict[str, list[int]]:
    """How many spans of each state are open at each of the times."""
    open_spans: dict[str, list[int]] = {}
    for state in dict.fromkeys([*STATES, *(span.state for span in spans)]):
        starts = sorted(span.start for span in spans if span.state == state)
        ends = sorted(span.end for span in spans if span.state == state)
        open_spans[state] = [bisect_right(starts, t) - bisect_right(ends, t) for t in times]
    return {state: values for state, values in open_spans.items() if any(values) or state in STATES}


def svg(
    spans: Sequence[TimelineSpan], *, title: str = "", bars: int = 24, points: int = 240
) -> str:
    """The timelines of all engines, one below the other, with at most `bars` trajectories each."""
    end = max((span.end for span in spans), default=1.0) or 1.0
    by_engine: dict[str, list[TimelineSpan]] = {}
    for span in spans:
        by_engine.setdefault(span.engine, []).append(span)
    parts: list[str] = []
    top = 34.0
    for engine in sorted(by_engine, key=_natural):
        parts.append(_area(engine or "no engine", by_engine[engine], end, top, points))
        top += AREA + 6
        drawn, height = _bars(by_engine[engine], end, top, bars)
        parts.append(drawn)
        top += height + GAP
    parts.append(_axis(end, top))
    legend = "".join(
        f'<rect x="{LEFT + i * 110}" y="14" width="10" height="10" fill="{colour}"/>'
        f'<text x="{LEFT + 14 + i * 110}" y="23">{state}</text>'
        for i, (state, colour) in enumerate(STATES.items())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 24:g}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="currentColor" role="img">'
        f"<title>{escape(title)}</title>{legend}{''.join(parts)}</svg>"
    )


def page(spans: Sequence[TimelineSpan], *, title: str, text: str = "", bars: int = 24) -> str:
    """A self-contained HTML page with the drawing; no scripts, no network access."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>"
        "body{font:15px system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;"
        "color:#222;background:#fff}svg{width:100%;height:auto}pre{overflow-x:auto}"
        "@media(prefers-color-scheme:dark){body{color:#ddd;background:#16181c}}"
        f"</style></head><body><h1>{escape(title)}</h1><pre>{escape(text)}</pre>"
        f"{svg(spans, title=title, bars=bars)}</body></html>"
    )


def _natural(name: str) -> tuple[bool, str, int]:
    """Sort key: engine-2 before engine-10, and spans without an engine last."""
    head = name.rstrip("0123456789")
    return not name, head, int(name[len(head) :] or 0)


def _x(time: float, end: float) -> float:
    return LEFT + time / end * (WIDTH - LEFT - RIGHT)


def _area(name: str, spans: Sequence[TimelineSpan], end: float, top: float, points: int) -> str:
    """The stacked counts of all states over time."""
    times = [end * (i + 0.5) / points for i in range(points)]
    stacked = counts(spans, times)
    most = max((sum(column) for column in zip(*stacked.values(), strict=True)), default=0) or 1
    below = [0] * points
    shapes: list[str] = []
    for state, values in stacked.items():
        above = [b + v for b, v in zip(below, values, strict=True)]
        if above != below:
            line = [(t, AREA - AREA * v / most) for t, v in zip(times, above, strict=True)]
            back = [(t, AREA - AREA * v / most) for t, v in zip(times, below, strict=True)]
            path = " ".join(f"{_x(t, end):.1f},{top + y:.1f}" for t, y in [*line, *back[::-1]])
            shapes.append(f'<polygon points="{path}" fill="{STATES.get(state, OTHER)}"/>')
        below = above
    return (
        f'<text x="4" y="{top + 12:g}">{escape(name)}</text>'
        f'<text x="4" y="{top + 26:g}" opacity=".6">at most {most}</text>' + "".join(shapes)
    )


def _bars(spans: Sequence[TimelineSpan], end: float, top: float, limit: int) -> tuple[str, float]:
    """One row per trajectory, in the order of their starts; an even sample if too many."""
    names = list(dict.fromkeys(s.trajectory for s in sorted(spans, key=lambda s: s.start)))
    if len(names) > limit:
        names = [names[i * len(names) // limit] for i in range(limit)] if limit else []
    rows = {name: row for row, name in enumerate(names)}
    drawn = []
    for span in spans:
        row = rows.get(span.trajectory)
        if row is None:
            continue
        left, right = _x(span.start, end), _x(span.end, end)
        label = f"{span.trajectory}: {span.state} {span.start:.2f}-{span.end:.2f} s"
        drawn.append(
            f'<rect x="{left:.1f}" y="{top + row * BAR:.1f}" width="{max(0.3, right - left):.1f}" '
            f'height="{BAR - 1}" fill="{STATES.get(span.state, OTHER)}">'
            f"<title>{escape(label)}</title></rect>"
        )
    return "".join(drawn), len(names) * BAR


def _axis(end: float, top: float) -> str:
    marks = "".join(
        f'<text x="{_x(end * i / 5, end):.1f}" y="{top + 8:g}" text-anchor="middle">'
        f"{end * i / 5:.4g} s</text>"
        for i in range(6)
    )
    return f'<g opacity=".7">{marks}</g>'
