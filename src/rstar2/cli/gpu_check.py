"""`rstar2 gpu-check`: everything that a run on GPUs needs, checked on this machine."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rstar2 import extras
from rstar2.files import write_file
from rstar2.gpu_check.checks import CheckOutcome, CheckReport, all_checks, run_checks
from rstar2.gpu_check.facts import Machine
from rstar2.machine import describe as describe_machine

WIDTH = 80
INDENT = 24


def gpu_check(
    out: Annotated[
        Path, typer.Option("--out", help="Directory of the report to share.", metavar="DIR")
    ] = Path("gpu-check"),
    cpu: Annotated[
        bool,
        typer.Option(
            "--cpu", help="Run the checks that a machine without a GPU can run, with vLLM for CPUs."
        ),
    ] = False,
) -> None:
    """Check driver, torch, NCCL, flash attention, vLLM, weight updates and one RL step.

    It takes about ten minutes on a machine with a GPU. Every check is one line: what was seen, what
    failed and the way out. The exit code is 1 if a check failed.
    """
    extras.need("torch", "transformers", feature="gpu-check")
    from rstar2.gpu_check.real import ThisMachine

    reports = asyncio.run(examine(ThisMachine(), cpu=cpu))
    text_file, json_file = write_report(out, reports)
    typer.echo(f"\n{summary(reports)}")
    typer.echo(f"report: {text_file} and {json_file}", err=True)
    raise typer.Exit(any(report.outcome is CheckOutcome.FAILED for report in reports))


async def examine(machine: Machine, *, cpu: bool) -> list[CheckReport]:
    """Run all checks on a machine and show each when it is done."""

    def show(report: CheckReport) -> None:
        for line in report_lines(report):
            typer.echo(line)

    def started(name: str) -> None:
        typer.echo(f"checking {name} ...", err=True)

    try:
        return await run_checks(all_checks(cpu=cpu), machine, started, show)
    finally:
        await machine.close()


def report_lines(report: CheckReport) -> list[str]:
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
    """The last line: how many checks passed, failed and were skipped, and what to repair first."""
    failed = [report for report in reports if report.outcome is CheckOutcome.FAILED]
    passed = sum(report.outcome is CheckOutcome.PASSED for report in reports)
    skipped = sum(report.outcome is CheckOutcome.SKIPPED for report in reports)
    counts = f"{passed} ok, {len(failed)} failed, {skipped} skipped"
    if not failed:
        return counts
    return f"{counts}; the first to repair: {failed[0].name}"


def write_report(directory: Path, reports: Sequence[CheckReport]) -> tuple[Path, Path]:
    """Write gpu-check.txt and gpu-check.json; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    described = describe_machine()
    when = datetime.now(UTC).isoformat(timespec="seconds")
    text = [f"rstar2 gpu-check, {when}"]
    text += [f"{name}: {value}" for name, value in described.items()]
    text += [
        "",
        *(line for report in reports for line in report_lines(report)),
        "",
        summary(reports),
    ]
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
