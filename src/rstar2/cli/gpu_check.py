"""`rstar2 gpu-check`: everything that a run on GPUs needs, checked on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from rstar2 import extras
from rstar2.gpu_check.checks import CheckOutcome, CheckReport, all_checks, run_checks
from rstar2.gpu_check.facts import Machine
from rstar2.gpu_check.report import lines, summary, write


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
    text_file, json_file = write(out, reports)
    typer.echo(f"\n{summary(reports)}")
    typer.echo(f"report: {text_file} and {json_file}", err=True)
    raise typer.Exit(any(report.outcome is CheckOutcome.FAILED for report in reports))


async def examine(machine: Machine, *, cpu: bool) -> list[CheckReport]:
    """Run all checks on a machine and show each when it is done."""

    def show(report: CheckReport) -> None:
        for line in lines(report):
            typer.echo(line)

    def started(name: str) -> None:
        typer.echo(f"checking {name} ...", err=True)

    try:
        return await run_checks(all_checks(cpu=cpu), machine, started, show)
    finally:
        await machine.close()
