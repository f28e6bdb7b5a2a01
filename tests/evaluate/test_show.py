"""Tables of an evaluation: every figure is readable in 80 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, Group
from rich.table import Table

from rstar2.evaluate.compare import Paired
from rstar2.evaluate.scores import BenchmarkScore
from rstar2.evaluate.show import compare_table, score_table
from rstar2.evaluate.store import EvalResults, EvalSettings
from rstar2.types import Estimate


def results(samples: int) -> EvalResults:
    names = ("arithmetic", "math500", "a-benchmark-of-my-own")
    estimate = Estimate(0.9542, 0.9321, 0.9988, 500)
    settings = EvalSettings(
        "tiny-seed0/stage3", "", "embedded", {}, samples, 0.6, 1.0, 0, 30720, 30, 0
    )
    scores = {
        name: BenchmarkScore(
            benchmark=name, samples=samples, average=estimate, majority=estimate,
            passes={str(samples): estimate},
            tokens=Estimate(12345.6, 12000.0, 13000.0, 500), mean_turns=12.34, tool_use=1.0,
            calls=11.11, tool_errors=0.1234, failing_calls_in_correct=0.0456, valid_calls=0.9,
            truncated=0.0789, kinds={}, problems=(), wall_s=7384.0,
            stops={"answered": 480, "max_length": 20}, outcomes={"ok": 5000, "error": 55},
        )
        for name in names
    }  # fmt: skip
    return EvalResults(settings, scores, complete=True)


def shown(table: Group | Table, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("samples", [1, 16])
def test_scores_fit(width: int, samples: int) -> None:
    text = shown(score_table(results(samples)), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    for figure in ("95.4% 93–100", "12346", "12.34", "12.3%", "4.6%", "7.9%", "2:03:04"):
        assert figure in text, figure
    assert text.count("95.4%") == (9 if samples > 1 else 3)


@pytest.mark.parametrize("width", [80, 120])
def test_comparisons_fit(width: int) -> None:
    difference = Estimate(-0.1234, -0.2346, 0.0123, 500)
    tokens = Estimate(-1234.5, -2000.0, 100.0, 500)
    row = Paired("a-benchmark-of-my-own", 500, 0.9542, 0.8308, difference, 0.0004, 12, 74, tokens)
    text = shown(compare_table(results(1), results(1), [row]), width)
    assert "…" not in text
    for figure in ("95.4%", "83.1%", "-12.3 -23.5 to +1.2", "<0.001", "12", "74", "-1234"):
        assert figure in text, figure
