"""Convert public data sets to RL problems: read, filter, write, and count every step.

Every input row becomes a line of `problems.jsonl`, or a line of `dropped.jsonl` with the step that
dropped it and the reason. The output directory appears complete or not at all (written to a
temporary directory, then renamed). Rows stream in chunks; filters keep hash tables.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rstar2.problems.card import (
    DROPPED,
    Card,
    DataFilter,
    Dropped,
    DroppedRows,
    StepCount,
    check_names,
    output_directory,
)
from rstar2.problems.rows import BadRow, known_rows, shown
from rstar2.problems.sources import READERS, MalformedRow, Reader, recognise, to_problem
from rstar2.reward.grade import Verifier, rejected_golds
from rstar2.types import Problem, encode

__all__ = ["Card", "Dropped", "ProblemSource", "prepare", "read_problems"]

CHUNK = 512
PROBLEMS = "problems.jsonl"
READ = "read"
ACCEPTED = "golds accepted by their grader"
VERIFY_DEADLINE_S = 30.0

Progress = Callable[[int, int], None]
"""Called with (rows read, problems kept) after every chunk."""


@dataclass(frozen=True, slots=True)
class ProblemSource:
    """One data set: its path, its name and its reader (None: recognised by its fields)."""

    path: str
    name: str
    reader: Reader | None = None
    grader: str | None = None
    """How all answers are checked; None: `integer` for integers, `math` for others."""


def read_problems(source: ProblemSource) -> Iterator[tuple[str, Problem | Dropped]]:
    """Stream a source as problems; unreadable rows come as `Dropped` in the step `read`."""
    for recognised in known_rows(source.path, source.reader, lambda row: READERS[recognise(row)]):
        if isinstance(recognised, BadRow):
            bad = recognised
            yield bad.where, Dropped(READ, bad.reason, bad.where, bad.text)
            continue
        row, reader = recognised
        try:
            problem = to_problem(row, reader, source.name)
        except MalformedRow as error:
            yield row.where, Dropped(READ, str(error), row.where, shown(row))
            continue
        yield (
            row.where,
            problem if source.grader is None else replace(problem, grader=source.grader),
        )


async def prepare(
    sources: Sequence[ProblemSource],
    steps: Sequence[DataFilter[Problem]],
    out: Path,
    *,
    verifier: Verifier | None = None,
    progress: Progress | None = None,
) -> Card:
    """Run every source through every filter into the directory `out`; returns the data card."""
    check_names([source.name for source in sources])
    names = [READ, *(step.name for step in steps), *([ACCEPTED] if verifier else [])]
    card = Card(steps=[StepCount(name) for name in names])
    with output_directory(out) as temporary:
        with (temporary / PROBLEMS).open("wb") as kept, (temporary / DROPPED).open("wb") as dropped:
            cleaning = _Cleaning(steps, card, DroppedRows(dropped), verifier)
            for source in sources:
                async for problem in cleaning.run(source, progress):
                    kept.write(encode(problem) + b"\n")
                    card.keep(problem.source)
        card.write(temporary)
    return card


@dataclass(frozen=True, slots=True)
class _Cleaning:
    """All filters with their counts. One for all sources, because duplicates span sources."""

    steps: Sequence[DataFilter[Problem]]
    card: Card
    dropped_rows: DroppedRows
    verifier: Verifier | None

    async def run(self, source: ProblemSource, progress: Progress | None) -> AsyncIterator[Problem]:
        """The problems of a source that pass every filter."""
        through = self._through(source)
        while chunk := list(itertools.islice(through, CHUNK)):
            if self.verifier is not None:
                chunk = await self._accepted(chunk, self.verifier)
            for _, problem in chunk:
                yield problem
            if progress is not None:
                progress(self.card.steps[0].entered, self.card.kept)

    def _through(self, source: ProblemSource) -> Iterator[tuple[str, Problem]]:
        reading, *counts = self.card.steps
        stages = list(zip(self.steps, counts, strict=False))  # the last count is the verifier's
        rows = self.card.sources
        rows[source.name] = 0
        for where, problem in read_problems(source):
            reading.entered += 1
            rows[source.name] += 1
            if isinstance(problem, Dropped):
                self.dropped_rows.drop(reading, problem)
                continue
            reading.left += 1
            if self._passes(where, problem, stages):
                yield where, problem

    def _passes(
        self, where: str, problem: Problem, stages: Sequence[tuple[DataFilter[Problem], StepCount]]
    ) -> bool:
        for step, count in stages:
            count.entered += 1
            reason = step.drop(problem)
            if reason is not None:
                self.dropped_rows.drop(count, _dropped(step.name, reason, where, problem))
                return False
            count.left += 1
        return True

    async def _accepted(
        self, chunk: list[tuple[str, Problem]], verifier: Verifier
    ) -> list[tuple[str, Problem]]:
        """The problems of a chunk whose reference answer the grader accepts."""
        count = self.card.steps[-1]
        refused = await rejected_golds([p for _, p in chunk], verifier, VERIFY_DEADLINE_S)
        why = {problem.id: reason for problem, reason in refused}
        count.entered += len(chunk)
        count.left += len(chunk) - len(why)
        for where, problem in chunk:
            if problem.id in why:
                self.dropped_rows.drop(count, _dropped(ACCEPTED, why[problem.id], where, problem))
        return [(where, problem) for where, problem in chunk if problem.id not in why]


def _dropped(step: str, reason: str, where: str, problem: Problem) -> Dropped:
    return Dropped(step, reason, where, problem.prompt, problem.answer)
