"""`rstar2 data`: public data sets to problems and conversations that rstar2 trains on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rstar2.errors import UserError

if TYPE_CHECKING:
    from rstar2.problems.clean import Step
    from rstar2.problems.prepare import Card, Source
    from rstar2.types import Problem

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Prepare training data.")


@app.callback()
def root() -> None:
    """Prepare training data from public data sets."""


@app.command()
def problems(
    sources: Annotated[
        list[str],
        typer.Argument(help="[NAME=]FILE or [NAME=]hub:ID[@REVISION][:SPLIT]; read by its fields"),
    ],
    out: Annotated[Path, typer.Option(help="directory to make")],
    against: Annotated[
        list[str] | None, typer.Option(help="evaluation set to decontaminate against (repeatable)")
    ] = None,
    integers: Annotated[bool, typer.Option(help="keep integer answers only, as the paper")] = True,
    verify: Annotated[
        bool, typer.Option(help="ask the grader, in the code environment, to accept every gold")
    ] = True,
    prompt_field: Annotated[str | None, typer.Option(help="map a data set no reader knows")] = None,
    answer_field: Annotated[str | None, typer.Option(help="its answer field")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the data card as JSON")] = False,
) -> None:
    """Clean data sets into RL problems and write a data card.

    \b
    rstar2 data problems gsm8k/train.jsonl math.jsonl --out problems \\
        --against aime24.jsonl --against math500.jsonl
    """
    from rstar2.problems.sources import mapped
    from rstar2.types import encode

    if (prompt_field is None) != (answer_field is None):
        raise UserError("--prompt-field and --answer-field go together")
    reader = None
    if prompt_field is not None and answer_field is not None:
        reader = mapped({"prompt": prompt_field, "answer": answer_field})
    listed = [_source(text, reader) for text in sources]
    steps = _steps(integers, [_source(text, None) for text in against or []])
    card = asyncio.run(_prepare(listed, steps, out, verify))
    if json:
        typer.echo(encode(card).decode())
    else:
        typer.echo(card.markdown())
    Console(stderr=True).print(f"[green]{card.kept}[/] problems in {out / 'problems.jsonl'}")


def _source(text: str, reader: object) -> Source:
    from rstar2.problems.prepare import Source

    name, mark, path = text.partition("=")
    if not mark:
        name, path = Path(text.split("@")[0]).name.split(".")[0], text
        if name in ("train", "test") and (parent := Path(text).parent.name):
            name = f"{parent}-{name}"
    return Source(path, name, reader)  # type: ignore[arg-type]


def _steps(integers: bool, against: list[Source]) -> list[Step]:
    from rstar2.problems import clean

    steps: list[Step] = [clean.WellFormed()]
    if integers:
        steps.append(clean.IntegerAnswers())
    steps += [clean.NotGiant(), clean.GoldsReadable(), clean.Unique()]
    if against:
        steps.append(clean.Decontaminated.against(_protected(against)))
    return steps


def _protected(sources: list[Source]) -> Iterator[Problem]:
    """Evaluation problems; a row that cannot be read would go unprotected, so it is an error."""
    from rstar2.problems.prepare import Dropped, read_problems

    for source in sources:
        for where, found in read_problems(source):
            if isinstance(found, Dropped):
                raise UserError(f"evaluation set {where}: {found.reason}")
            yield found


async def _prepare(sources: list[Source], steps: list[Step], out: Path, verify: bool) -> Card:
    from rstar2.codeenv.client import CodeEnvClient
    from rstar2.config import CodeEnvConfig
    from rstar2.problems.prepare import prepare

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading")

        def show(rows: int, kept: int) -> None:
            bar.update(task, description=f"{rows:,} rows read, {kept:,} problems kept")

        if not verify:
            return await prepare(sources, steps, out, progress=show)
        async with await CodeEnvClient.start(CodeEnvConfig()) as client:
            return await prepare(sources, steps, out, verifier=client, progress=show)
