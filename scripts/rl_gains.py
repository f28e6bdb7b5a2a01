"""Print what RL changed on the held-out problems, as a Markdown table.

    python scripts/rl_gains.py RUN [RUN ...]

One row per run and mode of evaluation: the mean reward after SFT and after RL with 95% intervals
over problems, and between them the evaluations during RL (`evaluation.every`). Runs on several
kinds of problems have one more row per kind. `better` marks intervals that do not overlap.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rstar2.report.summary import percent, summarise
from rstar2.types import Estimate

HEAD = (
    "| run | seed | held-out problems | after SFT | during RL (step: mean) | after RL | |\n"
    "|---|---|---|---|---|---|---|"
)


def interval(estimate: Estimate) -> str:
    """`61% (55–67)`."""
    return f"{percent(estimate.mean)} ({100 * estimate.low:.0f}–{100 * estimate.high:.0f})"


def row(
    name: str, seed: object, shown: str, before: Estimate, after: Estimate, during: str = ""
) -> str:
    """One line of the table."""
    verdict = "better" if after.low > before.high else ""
    cells = (name, seed, shown, interval(before), during, interval(after), verdict)
    return f"| {' | '.join(map(str, cells))} |"


def rows(run: Path) -> list[str]:
    """The lines of one run."""
    summary = summarise(run)
    name, seed = str(summary.recipe["name"]), summary.recipe["seed"]
    lines = []
    for mode in summary.modes:
        ends = summary.first_and_last(mode)
        if ends is None:
            sys.exit(f"{run}: no evaluations before and after RL; has the run finished?")
        before, after = ends
        steps, means = summary.accuracy_curve(mode)
        inner = list(zip(steps, means, strict=True))[1:-1]
        during = ", ".join(
            f"{step:.0f}: {percent(mean)}" for step, mean in inner if mean is not None
        )
        shown = f"{before.accuracy.count} {mode}"
        lines.append(row(name, seed, shown, before.accuracy, after.accuracy, during))
        if len(before.kinds) > 1:
            lines += [
                row(name, seed, f"{kind} {mode}", estimate, after.kinds[kind])
                for kind, estimate in before.kinds.items()
            ]
    return lines


def main() -> None:
    """Print the table of the runs that the command line names."""
    if len(sys.argv) < 2:
        sys.exit("usage: python scripts/rl_gains.py RUN [RUN ...]")
    print(HEAD)
    for argument in sys.argv[1:]:
        print("\n".join(rows(Path(argument))))


if __name__ == "__main__":
    main()
