"""Several line charts with one legend as one SVG file, for pages of docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

from rstar2.report.svg import HEIGHT, WIDTH

COLOURS = (
    *("#6b7280", "#2563eb", "#dc2626", "#d97706", "#7c3aed"),
    *("#059669", "#db2777", "#0891b2", "#65a30d"),
)
STYLE = """
text{font:11px system-ui,sans-serif;fill:#374151}.grid{stroke:#e5e7eb}.axis{stroke:#9ca3af}
.line{fill:none;stroke-width:1.8}.faint{opacity:.25;stroke-width:1}
.band{opacity:.12;stroke:none}.cursor{display:none}.title{font-weight:600;font-size:13px}
"""
COLUMNS, LEGEND_COLUMNS = 2, 4
GAP, TITLE, LEGEND_LINE = 24, 16, 18


def chart_sheet(charts: Mapping[str, Markup], legend: Sequence[str]) -> str:
    """Charts by title, two in a row, below a legend of their lines in order of colour."""
    top = 30 + LEGEND_LINE * -(-len(legend) // LEGEND_COLUMNS)
    width = COLUMNS * (WIDTH + GAP) + GAP
    height = top + -(-len(charts) // COLUMNS) * (HEIGHT + GAP + TITLE)
    colours = "".join(f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(COLOURS))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{STYLE}{colours}</style>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
    ]
    for index, name in enumerate(legend):
        x = GAP + index % LEGEND_COLUMNS * (width // LEGEND_COLUMNS)
        y = 20 + LEGEND_LINE * (index // LEGEND_COLUMNS)
        parts.append(
            f'<line x1="{x}" x2="{x + 20}" y1="{y - 4}" y2="{y - 4}" stroke-width="3" '
            f'stroke="{COLOURS[index % len(COLOURS)]}"/>'
            f'<text x="{x + 26}" y="{y}">{escape(name)}</text>'
        )
    for index, (title, chart) in enumerate(charts.items()):
        x = GAP + index % COLUMNS * (WIDTH + GAP)
        y = top + index // COLUMNS * (HEIGHT + GAP + TITLE)
        place = f'<svg x="{x}" y="{y + TITLE}" width="{WIDTH}" height="{HEIGHT}" '
        parts.append(f'<text class="title" x="{x}" y="{y + 10}">{escape(title)}</text>')
        parts.append(str(chart).replace("<svg ", place, 1))
    return "".join([*parts, "</svg>\n"])
