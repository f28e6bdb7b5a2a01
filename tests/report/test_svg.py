"""Charts: numbers land where they should, gaps stay gaps, texts are harmless."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from rstar2.report import svg


def parse(markup: str) -> ElementTree.Element:
    return ElementTree.fromstring(markup)


def path_points(markup: str) -> list[list[tuple[float, float]]]:
    """The strokes of all paths, as lists of points."""
    strokes = []
    for path in parse(markup).iter("path"):
        for stroke in path.attrib["d"].split("M")[1:]:
            pairs = re.findall(r"(-?[\d.]+) (-?[\d.]+)", stroke)
            strokes.append([(float(x), float(y)) for x, y in pairs])
    return strokes


def test_points_are_scaled_to_the_plot() -> None:
    chart = svg.line_chart([svg.Series("a", [0, 1, 2], [0.0, 0.5, 1.0])], title="t", y_range=(0, 1))
    (stroke,) = path_points(chart)
    assert stroke[0] == (svg.LEFT, svg.HEIGHT - svg.BOTTOM)
    assert stroke[-1] == (svg.WIDTH - svg.RIGHT, svg.TOP)
    assert stroke[1][1] == pytest.approx((svg.TOP + svg.HEIGHT - svg.BOTTOM) / 2)


def test_unknown_values_leave_gaps() -> None:
    chart = svg.line_chart([svg.Series("a", range(5), [1.0, 2.0, None, math.nan, 3.0])], title="t")
    assert [len(stroke) for stroke in path_points(chart)] == [2, 1]


def test_no_points_no_chart() -> None:
    assert svg.line_chart([svg.Series("a", [1, 2], [None, math.nan])], title="t") == ""
    assert svg.line_chart([], title="t") == ""


@pytest.mark.parametrize(
    "ys", [[5.0, 5.0], [0.0, 0.0], [-3.0, 2.0], [1e-9, 1e9], [1e300, 1e301]], ids=str
)
@pytest.mark.parametrize("log", [False, True])
def test_any_finite_values_make_a_chart(ys: list[float], log: bool) -> None:
    chart = svg.line_chart([svg.Series("a", [1, 2], ys)], title="t", log=log)
    for stroke in path_points(chart):
        assert all(svg.TOP - 1 <= y <= svg.HEIGHT - svg.BOTTOM + 1 for _, y in stroke)


def test_a_band_goes_around_its_line() -> None:
    series = svg.Series("a", [0, 1], [0.5, 0.5], low=[0.4, 0.4], high=[0.6, 0.6])
    chart = parse(svg.line_chart([series], title="t", y_range=(0, 1)))
    (band,) = chart.iter("polygon")
    heights = [float(point.split(",")[1]) for point in band.attrib["points"].split()]
    assert heights == sorted(heights)  # the upper edge first, then the lower
    assert len(heights) == 4


def test_names_are_escaped_everywhere() -> None:
    evil = '"><script>alert(1)</script>'
    series = svg.Series(evil, [0, 1], [0, 1])
    charts = [
        svg.line_chart([series], title=evil, spans=[svg.ChartSpan(evil, 0, 1)], x_name=evil),
        svg.dumbbell_chart([svg.Dumbbell(evil, (0, 0, 0.1), (1, 0.9, 1))], title=evil),
    ]
    for chart in charts:
        assert "<script" not in chart
        parse(chart)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (0, 60, [0, 20, 40, 60]), (3, 3, [3])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert svg.ticks(low, high) == pytest.approx(expected)


def test_log_ticks() -> None:
    assert svg.log_ticks(0.25, 4.2) == pytest.approx([0.5, 1, 2])
    assert svg.log_ticks(1e-4, 10) == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1, 10])
    assert svg.log_ticks(3.1, 3.3) == [3.1, 3.3]


def test_running_mean_skips_what_is_unknown() -> None:
    assert svg.running_mean([1.0, None, 3.0, 5.0], 3) == [1.0, 2.0, 4.0, 4.0]
    assert svg.running_mean([None, None], 3) == [None, None]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.956, "95.6%"), (1.0, "100%"), (0.0, "0%"), (0.0004, "0%"), (0.005, "0.5%")],
)
def test_percent(value: float, text: str) -> None:
    assert svg.percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(12345, "12k"), (123.4, "123"), (0.5, "0.5"), (0.00004, "4e-5"), (0, "0")]
)
def test_number(value: float, text: str) -> None:
    assert svg.number(value) == text
