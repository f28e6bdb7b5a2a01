"""This checkout against an older one: the same benchmark of each, interleaved, as speed ratios.

    python benchmarks/versions.py OLD [codeenv engine learner viewer] [--rounds 3] [--full]

OLD is another checkout of this repository with its own .venv (`make install` there). Every round
runs each benchmark first in one checkout and then in the other; the order alternates. A row shows
the medians of `ours` in both checkouts and the median over rounds of the relative speed: above 1,
this checkout is faster. For units of time and memory the speed is old / new, for rates new / old.
The exit code is 1 if a relative speed is below 0.97.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import Row, arguments, finish, median, say

HERE = Path(__file__).resolve().parents[1]
NAMES = ("codeenv", "engine", "learner", "viewer")
LOWER_IS_BETTER = ("ms", "s", "MB", "µs", "us")
SLOWEST = ">= 0.97"
RUN_S = 1800.0
"""The longest that one benchmark may take in one checkout."""


def measure(checkout: Path, name: str, options: list[str]) -> dict[str, dict[str, Any]]:
    """Run one benchmark in one checkout; return its rows by case."""
    command = [str(checkout / ".venv/bin/python"), f"benchmarks/{name}.py", "--json", *options]
    done = subprocess.run(
        command, cwd=checkout, stdout=subprocess.PIPE, text=True, timeout=RUN_S, check=False
    )
    if done.returncode not in (0, 1):  # 1: a target was missed, which is not the question here
        raise SystemExit(f"{' '.join(command)} in {checkout}: exit code {done.returncode}")
    return {row["case"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}


def speed(old: list[float], new: list[float], unit: str) -> float:
    """The median over rounds of the new checkout's speed relative to the old one's."""
    pairs = zip(old, new, strict=True)
    lower_is_better = unit in LOWER_IS_BETTER
    return median([(a / b if lower_is_better else b / a) for a, b in pairs])


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("old", type=Path, help="Checkout to compare with (has its own .venv).")
    parser.add_argument("names", nargs="*", default=list(NAMES), help="Benchmarks to run.")
    parser.add_argument("--rounds", type=int, default=3, help="Runs per checkout.")
    parser.add_argument("--full", action="store_true", help="Run without --quick.")
    args = parser.parse_args()
    options = [] if args.full else ["--quick"]
    rows: list[Row] = []
    for name in args.names:
        values: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
        for number in range(args.rounds):
            order = (args.old, HERE) if number % 2 == 0 else (HERE, args.old)
            for checkout in order:
                say(f"{name}, round {number + 1} of {args.rounds}: {checkout.name}")
                for case, row in measure(checkout, name, options).items():
                    old, new = values.setdefault((case, row["unit"]), ([], []))
                    (new if checkout == HERE else old).append(row["ours"])
        for (case, unit), (old, new) in values.items():
            if len(old) != len(new) or not all(old + new):
                say(f"{name}: {case}: not measured in both checkouts")
                continue
            figures = f"{median(old):.4g} -> {median(new):.4g} {unit}"
            rows.append(Row(f"{name}: {case} ({figures})", speed(old, new, unit), None, SLOWEST))
    return finish("this checkout against an older one", rows, args)


if __name__ == "__main__":
    sys.exit(main())
