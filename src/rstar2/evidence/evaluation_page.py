"""The parts of a claim's page that show its evaluations: tables, and accuracy between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from rstar2.evidence.claim import ACCURACY, PASS, Claim
from rstar2.evidence.evaluations import CellEvaluation
from rstar2.evidence.results import CURVES, CellResult
from rstar2.evidence.verdict import Recorded
from rstar2.report.chart_sheet import COLOURS
from rstar2.report.svg import Series
from rstar2.types import Estimate


def evaluation_tables(claim: Claim, cells: Recorded) -> str:
    """Accuracy of every cell on every benchmark, then how the arms answered."""
    listed = "\n".join(
        f"- `{name}`: {evaluation.title}" for name, evaluation in claim.evaluations.items()
    )
    return "\n\n".join(
        (
            "The model that each cell ends with, with 95% intervals over problems. A sampled "
            "evaluation gives pass@1 as the mean over all its answers. A dash is not planned, or "
            "not measured yet.",
            listed,
            _accuracies(claim, cells),
            "How the models answered, means over seeds:",
            _behaviour(claim, cells),
            _training_tokens(claim, cells),
        )
    )


def _figures(claim: Claim) -> Iterator[tuple[str, str, str]]:
    """(evaluation, figure, title) of every column."""
    for name, evaluation in claim.evaluations.items():
        if not evaluation.samples:
            yield name, ACCURACY, f"`{name}`"
            continue
        for count in sorted({1, evaluation.samples}):
            yield name, f"{PASS}{count}", f"`{name}` {PASS}{count}"


def _accuracies(claim: Claim, cells: Recorded) -> str:
    figures = list(_figures(claim))
    lines = [
        "| cell | " + " | ".join(title for _, _, title in figures) + " |",
        "|---|" + "---|" * len(figures),
    ]
    for arm in claim.arms:
        for seed in claim.seeds_of(arm):
            result = cells.get((arm, seed))
            made = {} if result is None else result.evaluations
            row = [
                _share(made[name].estimate(figure)) if name in made else "–"
                for name, figure, _ in figures
            ]
            lines.append(f"| `{arm}/{seed}` | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _behaviour(claim: Claim, cells: Recorded) -> str:
    lines = [
        "| arm | evaluation | seeds | tokens per answer | answers with a call | calls per answer | "
        "failing calls | truncated |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in claim.arms:
        mine = [result for (name, _), result in sorted(cells.items()) if name == arm]
        for name in claim.evaluations:
            made = [result.evaluations[name] for result in mine if name in result.evaluations]
            if made:
                row = [
                    f"{_mean(made, 'tokens'):.0f}",
                    f"{100 * _mean(made, 'tool_use'):.1f}%",
                    f"{_mean(made, 'calls'):.2f}",
                    _optional_share(made, "tool_errors"),
                    f"{100 * _mean(made, 'truncated'):.1f}%",
                ]
                lines.append(f"| `{arm}` | `{name}` | {len(made)} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _training_tokens(claim: Claim, cells: Recorded) -> str:
    """Tokens that the policy sampled for training, by arm: what equal budgets are judged by."""
    parts = []
    for arm in claim.arms:
        totals = [_sampled(result) for (name, _), result in cells.items() if name == arm]
        if any(totals):
            parts.append(f"`{arm}` {fmean(totals):,.0f}")
    return f"Tokens sampled in RL, mean over seeds: {', '.join(parts) or 'none yet'}."


def _sampled(result: CellResult) -> float:
    columns = result.numbers.columns
    pairs = zip(columns["rollouts/drawn"], columns["sampled_length"], strict=True)
    return sum((drawn or 0.0) * (length or 0.0) for drawn, length in pairs)


def _share(value: Estimate) -> str:
    return f"{100 * value.mean:.1f}% ({100 * value.low:.1f} to {100 * value.high:.1f})"


def _mean(evaluations: Sequence[CellEvaluation], key: str) -> float:
    return fmean(e.about[key] or 0.0 for e in evaluations)


def _optional_share(evaluations: Sequence[CellEvaluation], key: str) -> str:
    known = [value for e in evaluations if (value := e.about[key]) is not None]
    return f"{100 * fmean(known):.1f}%" if known else "–"


def heldout_series(claim: Claim, cells: Recorded) -> list[Series]:
    """Greedy accuracy on the held-out problems before, between and after the steps, by arm."""
    out = []
    for index, arm in enumerate(claim.arms):
        mine = [_curve(result) for (name, _), result in sorted(cells.items()) if name == arm]
        steps = sorted({step for curve in mine for step in curve})
        if len(steps) > 1:
            means = [fmean(curve[step] for curve in mine if step in curve) for step in steps]
            out.append(Series(arm, steps, means, index % len(COLOURS)))
    return out


def _curve(result: CellResult) -> dict[int, float]:
    """Greedy accuracy by number of steps done."""
    column = result.numbers.columns.get(CURVES[0], [])
    curve = {step: value for step, value in enumerate(column, start=1) if value is not None}
    ends = [v["accuracy"] for k, v in result.numbers.heldout.items() if k.endswith("/greedy")]
    if curve and ends[0] is not None and ends[-1] is not None:
        curve |= {0: ends[0], len(column): ends[-1]}
    return curve
