"""Problems by name: `arithmetic` (the embedded task) or a JSONL file with one problem per line.

    {"id": "7", "prompt": "What is 6 * 7?", "answer": "42", "kind": "product"}

`id` defaults to the line number, and `answer` may be a number. Every other field of types.Problem
is optional. An invalid line is a DataError that names file, line and field; so is a problem that no
answer can satisfy (an unknown grader, or a truth that its grader cannot read).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rstar2.errors import DataError
from rstar2.reward.grade import check_gold
from rstar2.seeds import derive_seed
from rstar2.types import Problem, Split

ARITHMETIC = "arithmetic"
TRAIN_COUNT = 4096
"""Default number of training problems of the embedded task."""


class _ProblemLine(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    answer: str | int | float
    id: str | int = ""
    grader: str = "math"
    kind: str = ""
    source: str = ""
    meta: dict[str, Any] = {}


def load_problems(
    name: str,
    split: Split,
    *,
    count: int | None = None,
    seed: int = 0,
    graded: bool = True,
    level: int = 1,
) -> tuple[Problem, ...]:
    """The problems of a recipe, at most `count`; deterministic in its arguments.

    `graded` is false if their environment does not use the graders of `reward/`; `level` is that of
    the embedded task.
    """
    if name == ARITHMETIC:
        from rstar2.problems.arithmetic import make_problems
        from rstar2.problems.chains import make_chains

        size = count if count is not None else TRAIN_COUNT
        make = make_chains if level == 2 else make_problems
        return tuple(make(split, size, derive_seed("problems", split, seed)))
    problems = tuple(read_jsonl(Path(name), graded=graded))
    return problems if count is None else problems[:count]


def read_jsonl(path: Path, *, graded: bool = True) -> Iterator[Problem]:
    """Stream a JSONL file of problems; ids must be unique, and `graded` answers readable."""
    from rstar2.problems.overlap import HashTable, text_hash  # NumPy: only files need it

    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(
            f"problems {str(path)!r} cannot be read: {error.strerror} "
            f"(give {ARITHMETIC!r} or the path of a JSONL file)"
        ) from error
    seen = HashTable()
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            problem = _parse(line, f"{path}:{number}", number)
            if graded:
                check_gold(problem, f"{path}:{number}")
            if (first := seen.first(text_hash(problem.id), number)) != number:
                raise DataError(f"{path}:{number}: id {problem.id!r} is already on line {first}")
            yield problem
    if not len(seen):
        raise DataError(f"{path}: contains no problem")


def _parse(line: bytes, where: str, number: int) -> Problem:
    try:
        fields = msgspec.json.decode(line, type=_ProblemLine)
    except msgspec.MsgspecError as error:
        known = sorted(_ProblemLine.__struct_fields__)
        raise DataError(f"{where}: {error}; a problem has the fields {known}") from error
    answer = fields.answer
    if isinstance(answer, float):
        if not math.isfinite(answer):
            raise DataError(f"{where}: answer {answer} is not a finite number")
        answer = int(answer) if answer.is_integer() else answer
    if not fields.prompt.strip():
        raise DataError(f"{where}: prompt is empty")
    if not str(answer).strip():
        raise DataError(f"{where}: answer is empty")
    return Problem(
        id=str(fields.id) or str(number),
        prompt=fields.prompt,
        answer=str(answer),
        grader=fields.grader,
        kind=fields.kind,
        source=fields.source,
        meta=fields.meta,
    )
