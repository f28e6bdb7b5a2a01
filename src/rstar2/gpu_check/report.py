"""The report of a check: lines for the terminal, and files to share."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from rstar2 import machine
from rstar2.files import write_file
from rstar2.gpu_check.checks import CheckOutcome, CheckReport

WIDTH = 80
INDENT = 24


def lines(report: CheckReport) -> list[str]:
    """One check in at most 80 columns: outcome, what was seen, the way out."""
    head = f"{report.outcome:<8}{report.name:<{INDENT - 8}}"
    text = " ".join(report.text.split())
    wrapped = textwrap.wrap(text, WIDTH - INDENT) or [""]
    rest = [" " * INDENT + line for line in wrapped[1:]]
    if report.way_out:
        advice = textwrap.wrap(f"way out: {report.way_out}", WIDTH - INDENT)
        rest += [" " * INDENT + line for line in advice]
    return [head + wrapped[0], *rest]


def summary(reports: Sequence[CheckReport]) -> str:
    """The last line: what failed first, or that all is well."""
    failed = [report for report in reports if report.outcome is CheckOutcome.FAILED]
    passed = sum(report.outcome is CheckOutcome.PASSED for report in reports)
    skipped = sum(report.outcome is CheckOutcome.SKIPPED for report in reports)
    counts = f"{passed} ok, {len(failed)} failed, {skipped} skipped"
    if not failed:
        return counts
    return f"{counts}; the first to repair: {failed[0].name}"


def write(directory: Path, reports: Sequence[CheckReport]) -> tuple[Path, Path]:
    """Write gpu-check.txt and gpu-check.json; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    described = machine.describe()
    when = datetime.now(UTC).isoformat(timespec="seconds")
    text = [f"rstar2 gpu-check, {when}"]
    text += [f"{name}: {value}" for name, value in described.items()]
    text += ["", *(line for report in reports for line in lines(report)), "", summary(reports)]
    text_file, json_file = directory / "gpu-check.txt", directory / "gpu-check.json"
    write_file(text_file, "\n".join(text) + "\n")
    values = {"time": when, "machine": described, "checks": [_values(r) for r in reports]}
    write_file(json_file, msgspec.json.format(msgspec.json.encode(values)).decode() + "\n")
    return text_file, json_file


def _values(report: CheckReport) -> dict[str, object]:
    return {
        "name": report.name,
        "outcome": str(report.outcome),
        "text": report.text,
        "way_out": report.way_out,
        "seconds": report.seconds,
        "facts": report.facts,
    }
