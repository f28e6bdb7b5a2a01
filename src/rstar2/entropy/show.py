"""An analysis as Markdown tables, which read well in a terminal too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rstar2.entropy.classes import CLASSES
from rstar2.entropy.table import Analysis, ClassRow, Point

NAMES = {"after_ok": "after ok", "after_error": "after error"}
SHOWN_GRAMS = 6


def tables(analyses: Sequence[Analysis], course: Sequence[Point] = ()) -> str:
    """All tables, one below the other."""
    parts = [overall(analyses), classes(analyses)]
    if course:
        parts.append(over_training(course))
    return "\n\n".join("\n".join(part) for part in (*parts, grams(analyses))) + "\n"


def overall(analyses: Iterable[Analysis]) -> Iterator[str]:
    """One row per sample."""
    yield "| sample | rollouts | tokens | entropy | cut of top 20% | second looks, top 20% / all |"
    yield "|---|---|---|---|---|---|"
    for a in analyses:
        yield (
            f"| {a.label} | {a.trajectories} | {a.tokens} | {a.entropy:.4f} | {a.cut:.3f} | "
            f"{share(a.markers)} / {share(a.markers_base)} |"
        )


def classes(analyses: Iterable[Analysis]) -> Iterator[str]:
    """One row per sample and class that occurs."""
    yield (
        "| sample | class | share of tokens | entropy (95%) | share of entropy | "
        "share of top 20% | top 20% rate |"
    )
    yield "|---|---|---|---|---|---|---|"
    for a in analyses:
        for row in a.rows:
            if row.tokens:
                yield (
                    f"| {a.label} | {name(row.name)} | {share(row.share)} | {interval(row)} | "
                    f"{share(row.entropy_share)} | {share(row.top_share)} | {share(row.top_rate)} |"
                )


def over_training(points: Iterable[Point]) -> Iterator[str]:
    """One row per step looked at: entropy of each class, and its share of the top 20%."""
    names = " | ".join(name(kind) for kind in CLASSES)
    yield f"| step | entropy | {names} | top 20%: {names.replace(' | ', ', ')} |"
    yield "|---|---|" + "---|" * (len(CLASSES) + 1)
    for point in points:
        a = point.analysis
        values = " | ".join("–" if r.entropy is None else f"{r.entropy:.3f}" for r in a.rows)
        tops = ", ".join(f"{100 * r.top_share:.0f}%" for r in a.rows)
        yield f"| {point.stage} {point.step} | {a.entropy:.4f} | {values} | {tops} |"


def grams(analyses: Iterable[Analysis], length: int = 2) -> Iterator[str]:
    """What uncertain tokens of each class begin most often."""
    yield f"| sample | class | most frequent {length}-grams that begin at an uncertain token |"
    yield "|---|---|---|"
    for a in analyses:
        for kind in CLASSES:
            found = a.grams.get(kind, {}).get(length, ())[:SHOWN_GRAMS]
            if found:
                words = ", ".join(f"`{quoted(g.text)}` {g.count}" for g in found)
                yield f"| {a.label} | {name(kind)} | {words} |"


def name(kind: str) -> str:
    return NAMES.get(kind, kind)


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def interval(row: ClassRow) -> str:
    if row.entropy is None:
        return "–"
    if row.low is None or row.high is None:
        return f"{row.entropy:.4f}"
    return f"{row.entropy:.4f} ({row.low:.3f}–{row.high:.3f})"


def quoted(text: str) -> str:
    """A gram on one line, without what Markdown would take for its own."""
    return text.replace("\n", "⏎").replace("|", "¦").replace("`", "'")
