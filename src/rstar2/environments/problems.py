"""The problems of an own environment: a JSONL file, a list, or a function of (split, seed).

A problem is a types.Problem or a dict with `prompt`; `answer`, `id` and `kind` are optional, and
every other key becomes `meta`. Of a file or list one problem in eight, chosen by a hash of its
text, is held out for evaluation (with fewer than eight problems, all are used for both).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar2.errors import DataError, UserError
from rstar2.types import Problem, Split

HELDOUT_EVERY = 8

ProblemLike = Problem | Mapping[str, Any]
ProblemSource = str | Path | Sequence[ProblemLike] | Callable[[Split, int], Iterable[ProblemLike]]


class ProblemList:
    """The problems of one environment; files are read once."""

    def __init__(self, source: ProblemSource, name: str) -> None:
        self._name = name
        self._make: Callable[[Split, int], Iterable[ProblemLike]] | None = None
        self._all: tuple[Problem, ...] = ()
        if isinstance(source, str | Path):
            self._all = checked(_lines(Path(source)), str(source))
        elif callable(source):
            self._make = source
        else:
            self._all = checked(
                ((f"problem {n}", one) for n, one in enumerate(source)), f"environment {name}"
            )

    def take(self, split: Split, count: int | None, seed: int) -> tuple[Problem, ...]:
        """At most `count` problems of a split."""
        if self._make is not None:
            made = self._make(split, seed)
            problems = checked(
                ((f"problem {n}", one) for n, one in enumerate(made)), f"environment {self._name}"
            )
        elif len(self._all) < HELDOUT_EVERY:
            problems = self._all
        else:
            held = self._held_out()
            problems = tuple(p for p in self._all if (p.id in held) == (split == "heldout"))
        return problems if count is None else problems[:count]

    def _held_out(self) -> set[str]:
        """The ids of one problem in eight; they do not depend on the order of the problems."""

        def rank(problem: Problem) -> bytes:
            return hashlib.sha256(f"{problem.id}\n{problem.prompt}".encode()).digest()

        ranked = sorted(self._all, key=rank)
        return {problem.id for problem in ranked[: len(ranked) // HELDOUT_EVERY]}


def checked(given: Iterable[tuple[str, ProblemLike]], source: str) -> tuple[Problem, ...]:
    """Problems from (place, problem or dict); every fault names the place."""
    problems: list[Problem] = []
    places: dict[str, str] = {}
    for place, one in given:
        problem = _problem(one, len(problems), f"{source}: {place}")
        if problem.id in places:
            raise DataError(
                f"{source}: {place}: id {problem.id!r} is already that of {places[problem.id]}"
            )
        places[problem.id] = place
        problems.append(problem)
    if not problems:
        raise DataError(f"{source} has no problems")
    return tuple(problems)


def _problem(one: ProblemLike, number: int, where: str) -> Problem:
    if isinstance(one, Problem):
        problem = one
    elif isinstance(one, Mapping):
        fields = dict(one)
        prompt = fields.pop("prompt", None)
        if not isinstance(prompt, str):
            raise DataError(f"{where}: prompt = {prompt!r} must be text (it has {sorted(one)})")
        problem = Problem(
            id=str(fields.pop("id", number)),
            prompt=prompt,
            answer=str(fields.pop("answer", "")),
            grader=str(fields.pop("grader", "")),
            kind=str(fields.pop("kind", "")),
            source=str(fields.pop("source", "")),
            meta=dict(fields.pop("meta", {})) | fields,
        )
    else:
        raise DataError(f"{where}: expected a problem or a dict with prompt, got {one!r}")
    if not problem.prompt.strip():
        raise DataError(f"{where}: prompt is empty")
    return problem


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"problems {str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{number}: not valid JSON: {error}") from error
