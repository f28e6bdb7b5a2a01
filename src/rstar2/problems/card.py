"""The data card: rows in, rows out, what each step dropped and why, with examples.

Every `rstar2 data` command writes it next to its output: `card.md` for people and `card.json` for
the next command, which extends it. This module also has the output directory, which appears
complete or not at all, and the file of dropped rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol, TypeVar

import msgspec

from rstar2.errors import DataError
from rstar2.files import replacing_directory
from rstar2.types import decode, encode

T_contra = TypeVar("T_contra", contravariant=True)

EXAMPLES = 3
MARKDOWN, JSON, DROPPED = "card.md", "card.json", "dropped.jsonl"


class DataFilter(Protocol[T_contra]):
    """One step of a pipeline. `name` is its line in the data card."""

    @property
    def name(self) -> str: ...

    def drop(self, item: T_contra, /) -> str | None:
        """Return why the item is dropped, or None to keep it."""
        ...


@dataclass(frozen=True, slots=True)
class Dropped:
    """One dropped row."""

    step: str
    reason: str
    where: str
    prompt: str
    answer: str = ""


@dataclass(slots=True)
class StepCount:
    """A line of the data card."""

    name: str
    entered: int = 0
    left: int = 0
    examples: list[Dropped] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    """Counts by kind of reason, for steps that name kinds."""

    def drop(self, dropped: Dropped) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(dropped)

    def count(self, kind: str) -> None:
        self.reasons[kind] = self.reasons.get(kind, 0) + 1


@dataclass(slots=True)
class Lengths:
    """Lengths of the conversations of one source."""

    unit: str
    count: int
    mean: float
    p50: int
    p90: int
    p99: int
    longest: int
    trained: float
    """Share of the length that enters the loss."""


@dataclass(slots=True)
class Card:
    """Rows in, rows out, and what each step dropped."""

    noun: str = "problems"
    sources: dict[str, int] = field(default_factory=dict)
    steps: list[StepCount] = field(default_factory=list)
    kept: int = 0
    kept_by_source: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, Lengths] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def keep(self, source: str) -> None:
        self.kept += 1
        self.kept_by_source[source] = self.kept_by_source.get(source, 0) + 1

    def markdown(self) -> str:
        lines = ["# Data card", "", "| source | rows | kept |", "|---|---:|---:|"]
        for name, rows in self.sources.items():
            lines.append(f"| {name} | {rows:,} | {self.kept_by_source.get(name, 0):,} |")
        lines += ["", "| step | in | dropped | out |", "|---|---:|---:|---:|"]
        for step in self.steps:
            dropped = step.entered - step.left
            lines.append(f"| {step.name} | {step.entered:,} | {dropped:,} | {step.left:,} |")
        lines += ["", f"**{self.kept:,} {self.noun}.**"]
        lines += self._lengths()
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        lines += ["", "## Dropped rows"]
        for step in self.steps:
            if step.examples or step.reasons:
                lines += ["", f"### {step.name}", ""]
                for kind, count in sorted(step.reasons.items(), key=lambda item: -item[1]):
                    lines.append(f"- {count:,} x {kind}")
                for example in step.examples:
                    text = " ".join(example.prompt.split())[:160].replace("`", "'")
                    lines.append(f"- {example.where}: {example.reason}: `{text}`")
        return "\n".join(lines) + "\n"

    def _lengths(self) -> list[str]:
        if not self.lengths:
            return []
        unit = next(iter(self.lengths.values())).unit
        head = f"| {unit} | count | mean | p50 | p90 | p99 | longest | in the loss |"
        lines = ["", head, "|---|---:|---:|---:|---:|---:|---:|---:|"]
        for name, row in self.lengths.items():
            lines.append(
                f"| {name} | {row.count:,} | {row.mean:,.0f} | {row.p50:,} | {row.p90:,} "
                f"| {row.p99:,} | {row.longest:,} | {row.trained:.0%} |"
            )
        return lines

    def write(self, directory: Path) -> None:
        (directory / MARKDOWN).write_text(self.markdown(), encoding="utf-8")
        (directory / JSON).write_bytes(encode(self))


def read_card(directory: Path) -> Card | None:
    """Read the card of an earlier command; None if there is none."""
    path = directory / JSON
    if not path.is_file():
        return None
    try:
        return decode(path.read_bytes(), Card)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}: not a data card: {error}") from error


class DroppedRows:
    """The file of dropped rows, each with its reason."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def drop(self, count: StepCount, dropped: Dropped) -> None:
        count.drop(dropped)
        self._file.write(encode(dropped) + b"\n")


def check_names(names: Sequence[str]) -> None:
    """Refuse two sources with the same name."""
    if len(set(names)) != len(names):
        raise DataError(f"source names repeat: {list(names)}; write NAME=FILE")


def check_new(out: Path) -> None:
    """Refuse an output directory that is there already."""
    if out.exists():
        raise DataError(f"output {str(out)!r} exists; name a new directory or remove it")


@contextmanager
def output_directory(out: Path) -> Iterator[Path]:
    """A temporary directory that gets the name `out` at the end; an error leaves nothing."""
    check_new(out)
    with ExitStack() as stack:
        try:
            temporary = stack.enter_context(replacing_directory(out))
        except OSError as error:
            raise DataError(f"output {str(out)!r} cannot be written: {error.strerror}") from error
        yield temporary
