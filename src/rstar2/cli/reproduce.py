"""`rstar2 reproduce`: run the experiment of a claim, or repeat one of its cells."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rstar2.errors import InvariantError, UserError

if TYPE_CHECKING:
    from rstar2.evidence.claim import Claim
    from rstar2.evidence.page import Judged
    from rstar2.evidence.run import CellRunner, Places


def reproduce(
    claim: Annotated[
        str, typer.Argument(help="Name of a claim: a file in the folder of claims, without .yaml.")
    ] = "",
    list_: Annotated[bool, typer.Option("--list", help="List all claims and verdicts.")] = False,
    cell: Annotated[
        str,
        typer.Option(
            metavar="ARM/SEED",
            help="Run or resume this cell alone. If its result is recorded and the claim's "
            "arithmetic is avx2, run it again and compare every number.",
        ),
    ] = "",
    evaluation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Make only this evaluation of the claim. Can be repeated. The default is all.",
        ),
    ] = None,
    pages: Annotated[
        bool, typer.Option("--pages", help="Write all pages from recorded cells; run nothing.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of cells in parallel. The default is 2, which need a core each, or 1 if "
            "the claim's arithmetic is native: a cell then uses all cores.",
        ),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Folder of claims and their results.")] = Path(
        "experiments"
    ),
    docs: Annotated[Path, typer.Option(help="Folder of the pages.")] = Path("docs/evidence"),
    runs: Annotated[Path, typer.Option(help="Folder of the run directories.")] = Path(
        "runs/evidence"
    ),
) -> None:
    """Run the missing cells of a claim and write its page. Resumes after a stop."""
    from rstar2.evidence.claim import claim_names, read_claim
    from rstar2.evidence.run import CellRunner, Places, execute, run_rstar2

    places = Places(folder, runs)
    if not claim_names(folder):
        raise UserError(f"no claims in {folder}: run this in a checkout of rstar2, or set --folder")
    if claim and (list_ or pages):
        option = "--list" if list_ else "--pages"
        raise UserError(f"{option} is about all claims: leave out the name {claim!r}")
    if list_ or pages or not claim:
        _report(places, docs if pages else None)
        return
    chosen = read_claim(folder, claim)
    only = evaluation or []
    if unknown := [name for name in only if name not in chosen.evaluations]:
        known = ", ".join(chosen.evaluations) or "none"
        raise UserError(f"--evaluation {unknown[0]}: the evaluations of {claim} are: {known}")
    jobs = jobs or (1 if chosen.arithmetic == "native" else 2)
    runner = CellRunner(
        places, execute, run_rstar2, lambda text: typer.echo(text, err=True), jobs, only
    )
    try:
        asyncio.run(_supervised(runner, chosen, cell))
    except asyncio.CancelledError:
        typer.echo("stopped; the same command resumes", err=True)
        raise typer.Exit(130) from None
    if not cell:
        _report(places, docs)


async def _supervised(runner: CellRunner, claim: Claim, cell: str) -> None:
    task = asyncio.current_task()
    if task is None:
        raise InvariantError("not inside a task")
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    if cell:
        await _one_cell(runner, claim, cell)
    else:
        await runner.run_all(claim)


async def _one_cell(runner: CellRunner, claim: Claim, text: str) -> None:
    from rstar2.evidence.results import difference, result_path, write_repetition
    from rstar2.evidence.run import missing_evaluations, parse_cell, recorded, repeat

    cell = parse_cell(claim, text)
    before = recorded(runner.places, claim, cell)
    if before is None or claim.arithmetic == "native":
        await runner.complete(claim, cell)
        typer.echo(f"{cell} is recorded in {result_path(runner.places.results, cell)}")
        if left := missing_evaluations(claim, runner.places, cell):
            typer.echo(f"without its evaluations {', '.join(left)}")
        return
    result = await repeat(runner, claim, cell)
    where = difference(before.numbers, result.numbers)
    write_repetition(runner.places.results, result, equal=where is None)
    if where is None:
        typer.echo(f"{cell}: equal to the recorded result in every digit")
        return
    typer.echo(f"{cell}: differs from the recorded result: {where}")
    raise typer.Exit(1)


def _report(places: Places, docs: Path | None) -> None:
    """Print all verdicts; write the pages if `docs` is given."""
    from rstar2.evidence.claim import claim_names
    from rstar2.evidence.page import write_pages

    judged = {name: _judged(places, name) for name in claim_names(places.claims)}
    for name, entry in judged.items():
        cells, total = entry.verdict.cells, entry.verdict.total
        typer.echo(f"{name:<22} {cells:>3} of {total:<4} {entry.verdict.word}")
    if docs is not None:
        written = write_pages(docs, judged)
        typer.echo(f"wrote {len(written)} pages to {docs}", err=True)


def _judged(places: Places, name: str) -> Judged:
    from rstar2.evidence.claim import cell_of, read_claim
    from rstar2.evidence.page import Judged
    from rstar2.evidence.results import read_repetitions
    from rstar2.evidence.run import recorded
    from rstar2.evidence.verdict import judge

    claim = read_claim(places.claims, name)
    cells = {
        (arm, seed): result
        for arm in claim.arms
        for seed in claim.seeds_of(arm)
        if (result := recorded(places, claim, cell_of(claim, arm, seed))) is not None
    }
    return Judged(claim, cells, judge(claim, cells), read_repetitions(places.results, name))
