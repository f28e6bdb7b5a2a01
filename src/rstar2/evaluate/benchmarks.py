"""Benchmarks by name, each pinned to a revision of its publisher's data set.

    aime24                  from the hub, as listed in PUBLISHED
    aime24=FILE             the same set from a file with the publisher's fields
    FILE, NAME=FILE         any file of rstar2 problems, or of rows that a reader recognises
    arithmetic              the held-out problems of the embedded task

A benchmark is read completely or not at all. A row that cannot be read, a reference answer that its
grader cannot check, or a wrong number of rows is an error, because it would change the score.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar2.errors import DataError, UserError
from rstar2.problems.load import ARITHMETIC, load_problems, read_jsonl
from rstar2.problems.rows import BadRow, DataRow, read_rows
from rstar2.problems.sources import READERS, MalformedRow, recognise, to_problem
from rstar2.reward.grade import check_gold
from rstar2.seeds import derive_seed
from rstar2.types import Problem, encode

ARITHMETIC_COUNT = 240
"""Default number of held-out problems of the embedded task, as in its recipe."""
OWN_FIELDS = {field.name for field in dataclasses.fields(Problem)}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Published:
    """Where a benchmark is published, and which reader its rows need."""

    hub: str
    """NAME[#CONFIG][@REVISION][:SPLIT], as `rstar2 data` takes it after `hub:`."""
    reader: str
    rows: int


PUBLISHED = {
    "aime24": Published(
        "HuggingFaceH4/aime_2024@2fe88a2f1091d5048c0f36abc874fb997b3dd99a:train", "math", 30
    ),
    "aime25": Published(
        "math-ai/aime25@563bb8404243c5f09de6ec262f2db674fe5bce9b:test", "euler", 30
    ),
    "hmmt25": Published("MathArena/hmmt_feb_2025:train", "euler", 30),
    "math500": Published(
        "HuggingFaceH4/MATH-500@6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be:test", "math", 500
    ),
    "gsm8k": Published(
        "openai/gsm8k#main@e53f048856ff4f594e959d75785d2c2d37b678ee:test", "gsm8k", 1319
    ),
    "gpqa": Published(
        "Idavidrein/gpqa#gpqa_diamond@633f5ee89ab8ad4522a9f850766b73f62147ffdd:train", "gpqa", 198
    ),
}
"""HMMT is not pinned: its publisher corrects the set in place. GPQA is gated: the hub requires an
account that has accepted its terms."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A named set of problems."""

    name: str
    source: str
    problems: tuple[Problem, ...]

    @property
    def digest(self) -> str:
        """Identifies a version of the set: ids, prompts, answers and graders, in order."""
        digest = hashlib.sha256()
        for problem in self.problems:
            digest.update(encode([problem.id, problem.prompt, problem.answer, problem.grader]))
        return digest.hexdigest()[:16]


def load_benchmark(text: str, count: int | None = None) -> Benchmark:
    """Read a benchmark as named on the command line, or its first `count` problems."""
    name, equals, source = text.partition("=")
    if not equals:
        known = text in PUBLISHED or text == ARITHMETIC
        name, source = (text, "") if known else (Path(text).name.split(".")[0], text)
    if not _NAME.fullmatch(name):
        raise UserError(f"--on {text!r}: {name!r} cannot name a benchmark; write it as NAME=FILE")
    if name == ARITHMETIC and not source:
        return Benchmark(
            name, name, load_problems(name, "heldout", count=count or ARITHMETIC_COUNT)
        )
    published = PUBLISHED.get(name)
    if not source and published is None:
        raise UserError(f"--on {text!r}: not one of {', '.join([*PUBLISHED, ARITHMETIC])}")
    place = source or f"hub:{published.hub}"  # type: ignore[union-attr]
    problems = tuple(_read(name, place, published))
    if published is not None and len(problems) != published.rows:
        raise DataError(f"{name} has {published.rows} problems, {place} has {len(problems)}")
    for problem in problems:
        check_gold(problem, place)
    return Benchmark(name, place, problems if count is None else problems[:count])


def _read(name: str, place: str, published: Published | None) -> Iterator[Problem]:
    rows = list(_whole(place))
    if not rows:
        raise DataError(f"{place}: contains no problem")
    if published is None and rows[0].fields.keys() <= OWN_FIELDS:
        yield from read_jsonl(Path(place))
        return
    reader = _reader(rows[0].fields, published)
    for row in rows:
        try:
            if reader == "gpqa":
                yield gpqa_problem(row, name)
            else:
                yield to_problem(row, READERS[reader], name)
        except MalformedRow as error:
            raise DataError(f"{row.where}: {error}") from error


def _whole(place: str) -> Iterator[DataRow]:
    for row in read_rows(place):
        if isinstance(row, BadRow):
            raise DataError(f"{row.where}: {row.reason}")
        yield row


def _reader(fields: Mapping[str, Any], published: Published | None) -> str:
    """The publisher's reader, unless the file has the fields of another port of the set."""
    if "Correct Answer" in fields:
        return "gpqa"
    recognised = recognise(fields)
    if published is None or recognised in ("svamp", "mawps", "dapo", "rstar2"):
        return recognised
    return published.reader if published.reader != "gpqa" else recognised


# --------------------------------------------------------------------------- multiple choice

_WRONG = tuple(f"Incorrect Answer {number}" for number in (1, 2, 3))


def gpqa_problem(row: DataRow, source: str) -> Problem:
    """A question with four lettered options, shuffled by a seed from the question alone."""
    texts = {}
    for name in ("Question", "Correct Answer", *_WRONG):
        value = row.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise MalformedRow(f"field {name!r} is missing or not text")
        texts[name] = value.strip()
    options = [texts["Correct Answer"], *(texts[name] for name in _WRONG)]
    order = list(range(4))
    random.Random(derive_seed("gpqa", texts["Question"])).shuffle(order)
    listed = "\n".join(
        f"({letter}) {options[index]}" for letter, index in zip("ABCD", order, strict=True)
    )
    return Problem(
        id=f"{source}-{row.number}",
        prompt=f"{texts['Question']}\n\n{listed}\n\nAnswer with the letter of the right option.",
        answer="ABCD"[order.index(0)],
        grader="choice",
        kind=str(row.fields.get("High-level domain") or ""),
        source=source,
        meta={"origin": str(row.fields.get("Record ID") or "")},
    )
