"""Helpers of all `rstar2 data` commands: source syntax, progress display, printing the card."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rstar2.errors import UserError

if TYPE_CHECKING:
    from rstar2.problems.card import Card
    from rstar2.types import Problem

R = TypeVar("R")

SOURCES_HELP = "Sources: [NAME=][READER:]FILE or [NAME=][READER:]hub:ID[#CONFIG][@REVISION][:SPLIT]"
progress = Console(stderr=True, highlight=False)


def named_source(text: str, readers: Mapping[str, R]) -> tuple[str, str, R | None]:
    """(name, where, reader) of [NAME=][READER:]WHERE; the name defaults to the file's."""
    name, mark, where = text.partition("=")
    if not mark or "/" in name or ":" in name:
        name, where = "", text
    prefix, mark, rest = where.partition(":")
    reader = readers.get(prefix) if mark else None
    if reader is not None:
        where = rest
    return name or _file_name(where), where, reader


def _file_name(where: str) -> str:
    plain = where.removeprefix("hub:").split("@")[0].split("#")[0].split(":")[0]
    name = Path(plain).name.split(".")[0]
    if name in ("train", "test") and (parent := Path(plain).parent.name):
        return f"{parent}-{name}"
    return name


def evaluation_sets(sources: Iterable[str]) -> Iterator[Problem]:
    """Read evaluation problems. An unreadable row is an error: it could not be protected."""
    from rstar2.problems.prepare import Dropped, ProblemSource, read_problems
    from rstar2.problems.sources import READERS

    for text in sources:
        name, where, reader = named_source(text, READERS)
        for place, problem in read_problems(ProblemSource(where, name, reader)):
            if isinstance(problem, Dropped):
                raise UserError(f"evaluation set {place}: {problem.reason}")
            yield problem


@contextmanager
def bar(noun: str) -> Iterator[Callable[[int, int], None]]:
    """A progress line on stderr; call the yielded function with (rows read, kept)."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=progress, transient=True) as shown:
        task = shown.add_task("starting")

        def show(rows: int, kept: int) -> None:
            shown.update(task, description=f"{rows:,} rows read, {kept:,} {noun} kept")

        yield show


def show_card(card: Card, path: Path, *, as_json: bool) -> None:
    """Print the card to stdout, and the path of the data to stderr."""
    from rstar2.types import encode

    typer.echo(encode(card).decode() if as_json else card.markdown())
    progress.print(f"[green]{card.kept:,}[/] {card.noun} in {path}")
