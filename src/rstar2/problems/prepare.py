"""Public data sets -> RL problems: read, clean step by step, write, and say what happened.

Nothing is lost: every row that goes in comes out as a line of `problems.jsonl` or of
`dropped.jsonl` with the step that dropped it and why. The output directory appears whole or not
at all (written aside, then renamed). Rows stream through in chunks; the steps hold hash tables.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rstar2.errors import DataError
from rstar2.problems.clean import Step
from rstar2.problems.rows import BadRow, read_rows
from rstar2.problems.sources import READERS, Malformed, Reader, recognise, to_problem
from rstar2.reward.grade import Verifier, rejected_golds
from rstar2.types import Problem, encode

CHUNK = 512
EXAMPLES = 3
READ = "read"
ACCEPTED = "golds accepted by their grader"
VERIFY_DEADLINE_S = 30.0

Progress = Callable[[int, int], None]
"""Called with (rows read, problems kept) after every chunk."""


@dataclass(frozen=True, slots=True)
class Source:
    """One data set: where it is, what it is called, and how to read it (None: by its fields)."""

    path: str
    name: str
    reader: Reader | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """One row that did not become a problem."""

    step: str
    reason: str
    where: str
    prompt: str
    answer: str


@dataclass(slots=True)
class StepCount:
    """A line of the data card."""

    name: str
    entered: int = 0
    left: int = 0
    examples: list[Dropped] = field(default_factory=list)

    def drop(self, dropped: Dropped) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(dropped)


@dataclass(slots=True)
class Card:
    """What went in, what came out, and what each step took."""

    sources: dict[str, int] = field(default_factory=dict)
    steps: list[StepCount] = field(default_factory=list)
    kept: int = 0
    kept_by_source: dict[str, int] = field(default_factory=dict)

    def markdown(self) -> str:
        lines = ["# Data card", "", "| source | rows | kept |", "|---|---:|---:|"]
        for name, rows in self.sources.items():
            lines.append(f"| {name} | {rows} | {self.kept_by_source.get(name, 0)} |")
        lines += ["", "| step | in | dropped | out |", "|---|---:|---:|---:|"]
        for step in self.steps:
            gone = step.entered - step.left
            lines.append(f"| {step.name} | {step.entered} | {gone} | {step.left} |")
        lines += ["", f"**{self.kept} problems.**", "", "## What was dropped"]
        for step in self.steps:
            if step.examples:
                lines += ["", f"### {step.name}", ""]
                for example in step.examples:
                    text = " ".join(example.prompt.split())[:160].replace("`", "'")
                    lines.append(f"- {example.where}: {example.reason}: `{text}`")
        return "\n".join(lines) + "\n"


def read_problems(source: Source) -> Iterator[tuple[str, Problem | Dropped]]:
    """Stream a source as problems; rows that are none come as `Dropped` of the step `read`."""
    reader = source.reader
    rows = 0
    for row in read_rows(source.path):
        rows += 1
        if isinstance(row, BadRow):
            yield row.where, Dropped(READ, row.reason, row.where, row.text, "")
            continue
        if reader is None:
            reader = READERS[recognise(row.fields)]
        try:
            yield row.where, to_problem(row, reader, source.name)
        except Malformed as error:
            shown = encode({str(k): v for k, v in row.fields.items()})[:500].decode()
            yield row.where, Dropped(READ, str(error), row.where, shown, "")
    if not rows:
        raise DataError(f"{source.path}: holds no row")


async def prepare(
    sources: Sequence[Source],
    steps: Sequence[Step],
    out: Path,
    *,
    verifier: Verifier | None = None,
    progress: Progress | None = None,
) -> Card:
    """Run every source through every step into the directory `out`; returns its data card."""
    if len({source.name for source in sources}) != len(sources):
        raise DataError(f"source names repeat: {[source.name for source in sources]}")
    aside = _make_aside(out)
    names = [READ, *(step.name for step in steps), *([ACCEPTED] if verifier else [])]
    card = Card(steps=[StepCount(name) for name in names])
    try:
        with (
            (aside / "problems.jsonl").open("wb") as kept,
            (aside / "dropped.jsonl").open("wb") as gone,
        ):
            async for problem in _clean(sources, steps, card, gone, verifier, progress):
                kept.write(encode(problem) + b"\n")
                card.kept += 1
                counts = card.kept_by_source
                counts[problem.source] = counts.get(problem.source, 0) + 1
        (aside / "card.md").write_text(card.markdown())
        (aside / "card.json").write_bytes(encode(card))
        aside.rename(out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return card


def _make_aside(out: Path) -> Path:
    """A fresh directory beside `out`, to be renamed to it when everything is written."""
    if out.exists():
        raise DataError(f"output {str(out)!r} exists; name a new directory or remove it")
    aside = out.with_name(out.name + ".partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"output {str(out)!r} cannot be written: {error.strerror}") from error
    return aside


async def _clean(
    sources: Sequence[Source],
    steps: Sequence[Step],
    card: Card,
    gone: IO[bytes],
    verifier: Verifier | None,
    progress: Progress | None,
) -> AsyncIterator[Problem]:
    def drop(count: StepCount, dropped: Dropped) -> None:
        count.drop(dropped)
        gone.write(encode(dropped) + b"\n")

    def through(source: Source) -> Iterator[tuple[str, Problem]]:
        reading = card.steps[0]
        for where, found in read_problems(source):
            reading.entered += 1
            card.sources[source.name] = card.sources.get(source.name, 0) + 1
            if isinstance(found, Dropped):
                drop(reading, found)
                continue
            reading.left += 1
            if _passes(where, found, steps, card.steps[1:], drop):
                yield where, found

    for source in sources:
        for chunk in _chunks(through(source), CHUNK):
            rejected: dict[str, str] = {}
            if verifier is not None:
                problems = [problem for _, problem in chunk]
                refused = await rejected_golds(problems, verifier, VERIFY_DEADLINE_S)
                rejected = {problem.id: why for problem, why in refused}
            for where, problem in chunk:
                if verifier is not None:
                    card.steps[-1].entered += 1
                    if problem.id in rejected:
                        drop(
                            card.steps[-1], _dropped(ACCEPTED, rejected[problem.id], where, problem)
                        )
                        continue
                    card.steps[-1].left += 1
                yield problem
            if progress is not None:
                progress(card.steps[0].entered, card.kept)


def _passes(
    where: str,
    problem: Problem,
    steps: Iterable[Step],
    counts: Sequence[StepCount],
    drop: Callable[[StepCount, Dropped], None],
) -> bool:
    for step, count in zip(steps, counts, strict=False):
        count.entered += 1
        reason = step.drop(problem)
        if reason is not None:
            drop(count, _dropped(step.name, reason, where, problem))
            return False
        count.left += 1
    return True


def _dropped(step: str, reason: str, where: str, problem: Problem) -> Dropped:
    return Dropped(step, reason, where, problem.prompt, problem.answer)


def _chunks(items: Iterator[tuple[str, Problem]], size: int) -> Iterator[list[tuple[str, Problem]]]:
    while chunk := list(itertools.islice(items, size)):
        yield chunk
