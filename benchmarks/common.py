"""Shared by all benchmarks: interleaved repetitions, the table, --quick and --json, exit codes.

    our figure, the baseline (peer), their ratio and the target, measured in one run
    --quick   finishes within a minute
    --json    {"name", "rows": [{"case", "ours", "peer", "ratio", "target", "ok"}], "ok", ...}
    exit code 1 when a target is missed

The output includes machine, versions and seed: a figure without them means nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One comparison. `target` reads like ">= 5" or "< 10" and applies to `ratio`.

    Without a peer the target applies to `ours`. Without a target the row is informative only.
    """

    case: str
    ours: float
    peer: float | None = None
    target: str | None = None
    unit: str = ""
    against: str = ""

    @property
    def ratio(self) -> float | None:
        return self.ours / self.peer if self.peer else None

    @property
    def ok(self) -> bool | None:
        if self.target is None:
            return None
        sign, bound = self.target.split()
        value = self.ours if self.peer is None else self.ratio
        assert value is not None, f"{self.case}: a target needs a value"
        return {
            ">=": value >= float(bound), ">": value > float(bound),
            "<=": value <= float(bound), "<": value < float(bound), "==": value == float(bound),
        }[sign]  # fmt: skip


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="Finish within a minute.")
    parser.add_argument("--json", action="store_true", help="Print JSON on stdout.")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def interleave(
    measures: Mapping[str, Callable[[], float]],
    repetitions: int,
    progress: Callable[[str], None] | None = None,
) -> dict[str, list[float]]:
    """Run every measure once per repetition: changes of the machine's speed affect all alike."""
    values: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repetitions):
        for name, measure in measures.items():
            if progress is not None:
                progress(name)
            values[name].append(measure())
    return values


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Median and range of the repetitions: 412 (390-431)."""
    return f"{median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


def machine() -> dict[str, Any]:
    """Describe the machine that the figures come from."""
    names = ("rstar2", "numpy", "sympy", "torch", "uvicorn", "msgspec")
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "versions": {name: installed for name in names if (installed := _version(name))},
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def finish(
    name: str, rows: Sequence[Row], args: argparse.Namespace, notes: Mapping[str, Any] | None = None
) -> int:
    """Print the table or the JSON; return 0 if every target was met, else 1."""
    ok = all(row.ok is not False for row in rows)
    facts = {"machine": machine(), "seed": args.seed, "quick": args.quick, **(notes or {})}
    if args.json:
        body = [{**asdict(row), "ratio": row.ratio, "ok": row.ok} for row in rows]
        json.dump({"name": name, "rows": body, "ok": ok, **facts}, sys.stdout)
        print()
        return 0 if ok else 1
    table = Table("case", "ours", "peer", "ratio", "target", "", title=name, box=None)
    for row in rows:
        table.add_row(
            row.case, f"{_number(row.ours)} {row.unit}",
            f"{_number(row.peer)} {row.against}" if row.peer is not None else "",
            f"{row.ratio:.2f}" if row.ratio is not None else "", row.target or "",
            {True: "[green]ok[/]", False: "[red]missed[/]", None: ""}[row.ok],
        )  # fmt: skip
    console = Console()
    console.print(table)
    console.print(json.dumps(facts), style="dim", highlight=False, markup=False)
    return 0 if ok else 1


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def say(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)


_STYLE = (
    "text{font:10px sans-serif;fill:#555}.grid{stroke:#ddd}.axis{stroke:#999}path{fill:none;"
    "stroke-width:1.6}.faint{opacity:.3}"
    + "".join(
        f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}"
        for i, c in enumerate(("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#475569"))
    )
)


def write_chart(chart: str, names: Sequence[str], path: Path) -> None:
    """Write a chart of rstar2.report.svg to its own file, with its style and a legend."""
    legend = "".join(
        f'<text x="{52 + 92 * (i % 4)}" y="{11 + 11 * (i // 4)}" class="f{i}">{name}</text>'
        for i, name in enumerate(names)
    )
    head = f"<style>{_STYLE}</style>{legend}"
    start = chart.index(">") + 1
    opened = chart[:start].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    path.write_text(opened + head + chart[start:])
