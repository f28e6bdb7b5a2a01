"""`rstar2 data fetch`: download the paper's data sets, verify and convert them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rstar2.cli.data_shared import bar, progress, show_card
from rstar2.errors import UserError

if TYPE_CHECKING:
    from rstar2.problems.card import Card, DataFilter
    from rstar2.problems.hub_files import HubSet
    from rstar2.problems.sft.converters import ParsedConversation
    from rstar2.types import Problem


def fetch(
    name: Annotated[
        str | None, typer.Argument(help="A data set of --list, such as dapo-math-17k.")
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the data sets with hub ids and licences.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory to create. The default is data/NAME.")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(help="Download these files of the repository (a pattern). Can be repeated."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Revision of the repository. The default is its newest.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the data card as JSON.")] = False,
) -> None:
    """Download a public data set, verify it and convert it to the files that recipes read.

    The publisher's files stay in OUT-raw, with their hashes in fetched.json. Without a network, put
    them there by hand: the command says which.
    """
    from dataclasses import replace

    from rstar2.problems.card import check_new
    from rstar2.problems.hub_files import fetch_files, with_files

    sets = known_sets()
    if list_:
        _list(sets)
        return
    if name not in sets:
        raise UserError(f"data set {name!r}: choose one of {', '.join(sets)} (--list shows them)")
    wanted = with_files(sets[name], file or [])
    if revision is not None:
        wanted = replace(wanted, revision=revision)
    out = out or Path("data") / name
    check_new(out)
    files = fetch_files(
        name, wanted, out.with_name(f"{out.name}-raw"), lambda text: progress.print(text)
    )
    card, data = _convert(name, wanted, files, out)
    show_card(card, data, as_json=json)


def known_sets() -> dict[str, HubSet]:
    """The training sets, and the benchmarks of `rstar2 eval`."""
    from rstar2.evaluate.benchmarks import PUBLISHED
    from rstar2.problems.hub_files import EVALUATION_SET, HUB_SETS, HubSet

    benchmarks = {}
    for name in ("aime24", "aime25", "hmmt25", "math500"):
        hub, _, split = PUBLISHED[name].hub.rpartition(":")
        repository, _, revision = hub.partition("@")
        patterns = (f"{split}.jsonl", f"data/{split}-*.parquet")
        reader = PUBLISHED[name].reader
        benchmarks[name] = HubSet(
            repository, patterns, reader, EVALUATION_SET, "see its page", revision or "main"
        )
    return {**HUB_SETS, **benchmarks}


def _list(sets: dict[str, HubSet]) -> None:
    for content in dict.fromkeys(one.content for one in sets.values()):
        typer.echo(f"{content}:")
        for name, one in sets.items():
            if one.content == content:
                typer.echo(f"{name:17} {one.licence:12} {one.repository}")
    typer.echo(
        "\nLicences are as the publishers stated them; fetch prints what the hub says now.",
        err=True,
    )


def _convert(name: str, wanted: HubSet, files: list[Path], out: Path) -> tuple[Card, Path]:
    """Convert the files as `rstar2 data problems` and `rstar2 data sft` do."""
    from rstar2.problems.hub_files import SFT_SET

    names = [name] if len(files) == 1 else [f"{name}-{n}" for n in range(1, len(files) + 1)]
    if wanted.content == SFT_SET:
        return _conversations(wanted, list(zip(names, files, strict=True)), out)
    return _problems(wanted, list(zip(names, files, strict=True)), out)


def _problems(wanted: HubSet, files: list[tuple[str, Path]], out: Path) -> tuple[Card, Path]:
    from rstar2.problems import clean
    from rstar2.problems.hub_files import EVALUATION_SET
    from rstar2.problems.prepare import PROBLEMS, ProblemSource, prepare
    from rstar2.problems.sources import READERS

    sources = [ProblemSource(str(path), name, READERS[wanted.reader]) for name, path in files]
    steps: list[DataFilter[Problem]] = [clean.GoldsReadable(), clean.UniqueProblems()]
    if wanted.content != EVALUATION_SET:  # a benchmark is used whole
        steps = [clean.VerifiableProblems(), clean.IntegerAnswers(), clean.NotGiant(12), *steps]
    with bar("problems") as show:
        card = asyncio.run(prepare(sources, steps, out, progress=show))
    return card, out / PROBLEMS


def _conversations(wanted: HubSet, files: list[tuple[str, Path]], out: Path) -> tuple[Card, Path]:
    from rstar2.problems.sft import checks
    from rstar2.problems.sft.converters import CONVERTERS
    from rstar2.problems.sft.prepare import (
        CONVERSATIONS,
        Mixture,
        SftSource,
        characters,
        prepare_sft,
    )

    sources = [SftSource(str(path), name, CONVERTERS[wanted.reader]) for name, path in files]
    filters: list[DataFilter[ParsedConversation]] = [
        *(checks.OrderedTurns(), checks.NoMathReasoning(), checks.UniqueConversations())
    ]
    with bar("conversations") as show:
        card = prepare_sft(
            sources,
            filters,
            out,
            mixture=Mixture(None, None, 0, None),
            measure=characters,
            unit="characters",
            progress=show,
        )
    return card, out / CONVERSATIONS
