"""`rstar2 data`: convert public data sets to the problems and conversations that rstar2 trains on.

`fetch` downloads (`data_fetch`), `problems` cleans (this module), `agree` and `difficulty` filter
with a model (`data_filter`), `sft` converts conversations (`data_sft`). Each command writes a data
card next to its output.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rstar2.cli.data_fetch import fetch
from rstar2.cli.data_filter import agree, difficulty
from rstar2.cli.data_sft import sft
from rstar2.cli.data_shared import SOURCES_HELP, bar, evaluation_sets, named_source, show_card
from rstar2.errors import UserError

if TYPE_CHECKING:
    from rstar2.problems.card import Card, DataFilter
    from rstar2.problems.clean import OfKinds
    from rstar2.problems.prepare import ProblemSource
    from rstar2.types import Problem

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Prepare training data from public data sets.",
)


@app.callback()
def root() -> None:
    """Prepare training data from public data sets."""


@app.command()
def problems(
    sources: Annotated[list[str], typer.Argument(help=SOURCES_HELP)],
    out: Annotated[Path, typer.Option(help="Directory to create.")],
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Drop problems that share 8 words in a row with this evaluation set. Can be "
            "repeated."
        ),
    ] = None,
    integers: Annotated[
        bool, typer.Option(help="Keep only integer answers, as in the paper.")
    ] = True,
    kind: Annotated[
        list[str] | None, typer.Option(help="Keep only problems of this kind. Can be repeated.")
    ] = None,
    grader: Annotated[
        str | None,
        typer.Option(
            help="How all answers are checked: integer, number, math or choice. The default is "
            "integer for integers and math for others."
        ),
    ] = None,
    digits: Annotated[
        int, typer.Option(min=1, help="Maximum number of digits of an integer answer.")
    ] = 12,
    verify: Annotated[
        bool,
        typer.Option(
            help="Grade every reference answer against itself in the code environment, and drop "
            "the problems whose answer the grader rejects."
        ),
    ] = True,
    prompt_field: Annotated[
        str | None, typer.Option(help="Prompt field of a data set that no reader knows.")
    ] = None,
    answer_field: Annotated[str | None, typer.Option(help="Answer field of that data set.")] = None,
    kind_field: Annotated[
        str | None, typer.Option(help="Field with the kind of problem, if there is one.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the data card as JSON.")] = False,
) -> None:
    """Clean data sets into RL problems and write a data card.

    \b
    rstar2 data problems gsm8k/train.jsonl dapo:hub:BytedTsinghua-SIA/DAPO-Math-17k \\
        --out problems --against aime24.jsonl --against math500.jsonl
    """
    from rstar2.problems.clean import OfKinds
    from rstar2.problems.prepare import PROBLEMS

    named = {"prompt": prompt_field, "answer": answer_field, "kind": kind_field}
    fields = {name: field for name, field in named.items() if field}
    listed = _sources(sources, fields, _known_grader(grader))
    of_kinds = OfKinds(frozenset(kind or ()))
    steps = _steps(of_kinds, integers, digits, against or [])
    card = asyncio.run(_prepare(listed, steps, out, verify))
    show_card(card, out / PROBLEMS, as_json=json)
    if unknown := sorted(of_kinds.kinds - of_kinds.met):
        met = ", ".join(sorted(of_kinds.met)) or "none"
        raise UserError(
            f"--kind {unknown[0]}: no problem is of this kind; kinds are {met}. {out} has the "
            "problems of the other kinds: delete it before you run this again"
        )


def _known_grader(name: str | None) -> str | None:
    from rstar2.reward.grade import GRADERS

    if name is not None and name not in GRADERS:
        raise UserError(f"--grader {name} is unknown: the graders are {', '.join(sorted(GRADERS))}")
    return name


def _sources(
    texts: list[str], fields: dict[str, str], grader: str | None = None
) -> list[ProblemSource]:
    """The field map applies to the sources that name no reader."""
    from rstar2.problems.prepare import ProblemSource
    from rstar2.problems.sources import READERS, mapped

    if fields and not {"prompt", "answer"} <= fields.keys():
        raise UserError("--prompt-field and --answer-field go together")
    map_reader = mapped(fields) if fields else None
    listed = []
    for text in texts:
        name, where, reader = named_source(text, READERS)
        listed.append(ProblemSource(where, name, reader or map_reader, grader))
    return listed


def _steps(
    of_kinds: OfKinds, integers: bool, digits: int, against: list[str]
) -> list[DataFilter[Problem]]:
    from rstar2.problems import clean

    steps: list[DataFilter[Problem]] = [of_kinds] if of_kinds.kinds else []
    steps.append(clean.VerifiableProblems())
    if integers:
        steps.append(clean.IntegerAnswers())
    steps += [clean.NotGiant(digits), clean.GoldsReadable(), clean.UniqueProblems()]
    if against:
        steps.append(clean.decontaminated(evaluation_sets(against)))
    return steps


async def _prepare(
    sources: list[ProblemSource], steps: list[DataFilter[Problem]], out: Path, verify: bool
) -> Card:
    from rstar2.codeenv.client.client import CodeEnvClient
    from rstar2.config import CodeEnvConfig
    from rstar2.problems.card import check_new
    from rstar2.problems.prepare import prepare

    check_new(out)
    with bar("problems") as show:
        if not verify:
            return await prepare(sources, steps, out, progress=show)
        grading = CodeEnvConfig(warm_up="never")  # it runs no programs
        async with await CodeEnvClient.start(grading) as client:
            return await prepare(sources, steps, out, verifier=client, progress=show)


app.command()(fetch)
app.command()(agree)
app.command()(difficulty)
app.command()(sft)
