"""Report of an ablation: a Markdown table with intervals, and one SVG with the curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from rstar2.pipeline.ablation import FIGURES, AblationRun, over_seeds, summary
from rstar2.report.svg import HEIGHT, WIDTH, Series, line_chart, percent
from rstar2.types import Estimate

COLOURS = ("#6b7280", "#2563eb", "#dc2626", "#d97706", "#7c3aed", "#059669", "#db2777", "#0891b2")
SMOOTH = 5
SHARES = frozenset(FIGURES) - {"length, last quarter", "rollouts drawn", "rollouts kept"}

STYLE = """
text{font:11px system-ui,sans-serif;fill:#374151}.grid{stroke:#e5e7eb}.axis{stroke:#9ca3af}
.line{fill:none;stroke-width:1.8}.faint{opacity:.25;stroke-width:1}
.band{opacity:.12;stroke:none}.cursor{display:none}.title{font-weight:600;font-size:13px}
"""


def table(runs: Sequence[AblationRun]) -> str:
    """One row per variant: mean over seeds with its 95% interval, then differences to RoC."""
    rows = summary(runs)
    seeds = len({r.seed for r in runs})
    names = list(FIGURES)
    lines = [
        f"{seeds} seed{'s' if seeds > 1 else ''}; mean over seeds [95% interval, Student's t]; "
        "variants of a seed share their SFT weights.",
        "",
        "| variant | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for variant, row in rows.items():
        cells = [_cell(row[name]["mean"], name in SHARES) for name in names]
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    differences = {v: row for v, row in rows.items() if "minus roc" in row[names[0]]}
    if differences:
        lines += ["", "Difference to `roc` within seeds:", ""]
        lines += ["| variant | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
        for variant, row in differences.items():
            cells = [
                _cell(row[n]["minus roc"], n in SHARES, signed=True)
                if "minus roc" in row[n]
                else ""
                for n in names
            ]
            lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(runs: Sequence[AblationRun]) -> str:
    """Tool errors and reward by step, accuracy by step and by rollouts drawn, as one SVG."""
    variants = list(dict.fromkeys(r.variant for r in runs))
    charts = [
        ("Tool-error rate in correct rollouts, by step", _curves(runs, lambda r: r.failing)),
        ("Reward of rollouts, by step", _curves(runs, lambda r: r.reward)),
        ("Held-out sampled accuracy, by step", _points(runs, against_drawn=False)),
        ("Held-out sampled accuracy, by rollouts drawn", _points(runs, against_drawn=True)),
    ]
    columns, gap, top = 2, 24, 44
    cell_width, cell_height = WIDTH + gap, HEIGHT + gap + 16
    width = columns * cell_width + gap
    height = top + -(-len(charts) // columns) * cell_height
    colours = "".join(f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(COLOURS))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}"><style>{STYLE}{colours}</style>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
    ]
    for index, variant in enumerate(variants):
        x = gap + index * 130
        parts.append(
            f'<line x1="{x}" x2="{x + 20}" y1="22" y2="22" stroke-width="3" '
            f'stroke="{COLOURS[index % len(COLOURS)]}"/><text x="{x + 26}" y="26">{variant}</text>'
        )
    for index, (title, series) in enumerate(charts):
        x = gap + index % columns * cell_width
        y = top + index // columns * cell_height
        drawn = "by rollouts drawn" in title
        chart = str(
            line_chart(series, title=title, y_format=percent, x_name="drawn" if drawn else "step")
        )
        chart = chart.replace(
            "<svg ", f'<svg x="{x}" y="{y + 16}" width="{WIDTH}" height="{HEIGHT}" ', 1
        )
        parts.append(f'<text class="title" x="{x}" y="{y + 10}">{title}</text>{chart}')
    return "".join([*parts, "</svg>\n"])


def _curves(
    runs: Sequence[AblationRun], of: Callable[[AblationRun], Sequence[float | None]]
) -> list[Series]:
    """Mean over seeds per step, smoothed."""
    out = []
    for index, variant in enumerate(dict.fromkeys(r.variant for r in runs)):
        mine = [of(r) for r in runs if r.variant == variant]
        steps = range(min(len(values) for values in mine))
        means = [_mean([values[i] for values in mine]) for i in steps]
        out.append(
            Series(variant, [i + 1 for i in steps], means, index % len(COLOURS), smooth=SMOOTH)
        )
    return out


def _points(runs: Sequence[AblationRun], *, against_drawn: bool) -> list[Series]:
    """Held-out accuracy at every evaluation, mean over seeds with its interval."""
    out = []
    for index, variant in enumerate(dict.fromkeys(r.variant for r in runs)):
        mine = [r for r in runs if r.variant == variant]
        count = min(len(r.checkpoints) for r in mine)
        steps = [mine[0].checkpoints[i] for i in range(count)]
        estimates = [over_seeds([r.sampled[i] for r in mine]) for i in range(count)]
        xs = [fmean((0.0, *r.drawn)[s] for r in mine) for s in steps] if against_drawn else steps
        bands = len(mine) > 1
        out.append(
            Series(
                variant,
                [float(x) for x in xs],
                [e.mean for e in estimates],
                index % len(COLOURS),
                low=[max(0.0, e.low) for e in estimates] if bands else None,
                high=[min(1.0, e.high) for e in estimates] if bands else None,
            )
        )
    return out


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def _cell(estimate: Estimate, share: bool, *, signed: bool = False) -> str:
    if estimate.count == 0:
        return "–"
    sign = "+" if signed else ""

    def text(value: float) -> str:
        return f"{100 * value:{sign}.1f}%" if share else f"{value:{sign}.0f}"

    if math.isnan(estimate.low):
        return text(estimate.mean)
    return f"{text(estimate.mean)} [{text(estimate.low)}, {text(estimate.high)}]"
