"""An entropy analysis on the terminal: tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rstar2.entropy.classes import CLASSES
from rstar2.entropy.report import class_name, share
from rstar2.entropy.table import Analysis, ClassRow, Point
from rstar2.report.table import plain_table

SHOWN_GRAMS = 6


def entropy_tables(analyses: Sequence[Analysis], course: Sequence[Point] = ()) -> Group:
    """All tables, one below the other."""
    over_training = (_entropies(course), _tops(course)) if course else ()
    return Group(_overall(analyses), _classes(analyses), *over_training, _grams(analyses))


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = plain_table(title)
    for name in texts:
        table.add_column(name, overflow="fold", no_wrap=name == "class")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _overall(analyses: Sequence[Analysis]) -> Table:
    """One row per sample."""
    numbers = ("rollouts", "tokens", "entropy", "threshold\nof top 20%")
    words = ("reconsidering words\nin top 20%", "in all\ntokens")
    table = _table("sampled tokens", ["sample"], (*numbers, *words))
    for a in analyses:
        table.add_row(
            a.label, str(a.trajectories), str(a.tokens), f"{a.entropy:.4f}", f"{a.cut:.3f}",
            share(a.markers), share(a.markers_base),
        )  # fmt: skip
    return table


def _classes(analyses: Sequence[Analysis]) -> Table:
    """One row per sample and class that occurs."""
    shares = ("tokens", "share of\nentropy", "share of\ntop 20%", "top 20%\nrate")
    table = _table("by class of token", ["sample", "class"], ["entropy (95%)", *shares])
    for a in analyses:
        for row in a.rows:
            if row.tokens:
                table.add_row(
                    a.label, class_name(row.name), _interval(row), share(row.share),
                    share(row.entropy_share), share(row.top_share), share(row.top_rate),
                )  # fmt: skip
    return table


def _interval(row: ClassRow) -> str:
    if row.entropy is None or row.low is None or row.high is None:
        return "–" if row.entropy is None else f"{row.entropy:.4f}"
    return f"{row.entropy:.4f} {row.low:.3f}–{row.high:.3f}"


def _entropies(course: Sequence[Point]) -> Table:
    return _over_training(
        "entropy over training",
        course,
        lambda row: "–" if row.entropy is None else f"{row.entropy:.3f}",
    )


def _tops(course: Sequence[Point]) -> Table:
    return _over_training(
        "share of the top 20% over training", course, lambda row: f"{100 * row.top_share:.0f}%"
    )


def _over_training(title: str, course: Sequence[Point], figure: Callable[[ClassRow], str]) -> Table:
    """One row per analysed step, one column per class."""
    table = _table(title, ["step"], ["all", *map(class_name, CLASSES)])
    for point in course:
        a = point.analysis
        table.add_row(
            f"{point.stage} {point.step}", f"{a.entropy:.4f}", *(figure(row) for row in a.rows)
        )
    return table


def _grams(analyses: Sequence[Analysis], length: int = 2) -> Table:
    """The most frequent n-grams that begin at a high-entropy token, by class."""
    table = _table(
        f"most frequent {length}-grams that begin at a high-entropy token",
        ["sample", "class", "n-grams and their number"],
        [],
    )
    for a in analyses:
        for kind in CLASSES:
            most = a.grams.get(kind, {}).get(length, ())[:SHOWN_GRAMS]
            if most:
                words = ", ".join(f"\u201c{on_one_line(g.text)}\u201d {g.count}" for g in most)
                table.add_row(a.label, class_name(kind), Text(words))
    return table


def on_one_line(text: str) -> str:
    """An n-gram with its line ends as signs."""
    return text.replace("\n", "\u23ce")
