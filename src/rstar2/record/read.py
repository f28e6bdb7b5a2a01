"""Reads a run directory, also while its run is writing: what reports and the viewer use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import yaml

from rstar2.errors import UserError
from rstar2.record.packed import RecordedId, plain_line
from rstar2.types import Evaluation, Group, Selection, TokenValues

T = TypeVar("T")

CHUNK = 1 << 21
"""Bytes that a FileTail reads at a time."""
BUFFER = 1 << 19
"""Longer than most lines: readline copies a line once per buffer that it spans."""


class GroupLine(msgspec.Struct, frozen=True):
    """One line of trajectories/<stage>.jsonl."""

    stage: str
    step: int
    time: float
    group: Group
    selection: Selection | None = None


_GROUP_DECODER = msgspec.json.Decoder(GroupLine)


class TokenValuesLine(msgspec.Struct, frozen=True):
    """One line of tokens/<stage>.jsonl."""

    stage: str
    step: int
    values: tuple[TokenValues, ...]


def decode_group(line: bytes) -> GroupLine:
    """A line of trajectories/<stage>.jsonl; raises msgspec.MsgspecError if it is damaged."""
    return _GROUP_DECODER.decode(plain_line(line))


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """The complete lines of a JSONL file, decoded; an incomplete last line is left out."""
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decoder.decode(line)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All recorded steps, in order."""
    return list(read_lines(run / "metrics.jsonl", dict[str, Any]))


class RecordedGroup(msgspec.Struct, frozen=True):
    """The id of a group and its step, in a line of trajectories/<stage>.jsonl."""

    step: int
    group: RecordedId


def problem_number(group: str) -> int:
    """The index of the problem in the id of a group of an evaluation, STAGE/STEP/INDEX; 0 for an
    id of another form, so that such groups stay in the order of recording."""
    index = group.rpartition("/")[2]
    return int(index) if index.isdecimal() else 0


def read_groups(run: Path, stage: str) -> Iterator[GroupLine]:
    """The recorded groups of a stage, one at a time; those of an evaluation by problem.

    An evaluation records its groups as they end, in an order that differs between runs.
    """
    path = run / "trajectories" / f"{stage}.jsonl"
    return _by_problem(path) if stage.startswith("eval-") else _in_order(path)


def _in_order(path: Path) -> Iterator[GroupLine]:
    if path.exists():
        with path.open("rb") as file:
            yield from (decode_group(line) for line in file if line.endswith(b"\n"))


def _by_problem(path: Path) -> Iterator[GroupLine]:
    """The lines of a file in the order of steps and problems; only one is in memory at a time."""
    if not path.exists():
        return
    places: list[tuple[int, int, int]] = []
    heads = msgspec.json.Decoder(RecordedGroup)
    with path.open("rb") as file:
        at = 0
        for line in file:
            if line.endswith(b"\n"):
                head = heads.decode(line)
                places.append((head.step, problem_number(head.group.id), at))
            at += len(line)
        for _, _, at in sorted(places):
            file.seek(at)
            yield decode_group(file.readline())


def read_evaluations(run: Path) -> list[Evaluation]:
    """The recorded evaluations in order, the last one for each stage and mode."""
    evaluations = read_lines(run / "evaluations.jsonl", Evaluation)
    return list({(e.stage, e.mode): e for e in evaluations}.values())


def read_events(run: Path) -> list[dict[str, Any]]:
    """All events, in order."""
    return list(read_lines(run / "events.jsonl", dict[str, Any]))


def read_recipe(run: Path) -> dict[str, Any]:
    """The resolved recipe as plain values; another version of rstar2 may have written it."""
    try:
        recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{run} is not a run directory: {error}") from error
    if not isinstance(recipe, dict):
        raise UserError(f"{run / 'recipe.yaml'} does not hold a recipe")
    return recipe


def rl_stage_names(recipe: Mapping[str, Any]) -> list[str]:
    """The RL stages of a recipe that `read_recipe` returned, in order."""
    return [str(stage.get("name")) for stage in (recipe.get("rl") or {}).get("stages") or []]


def stage_label(recipe: Mapping[str, Any], stage: str) -> str:
    """The name of an evaluated stage for people. Without SFT, RL starts from the base model: its
    evaluation is recorded as `sft` and shown as `base`."""
    return "base" if stage == "sft" and recipe.get("sft", {}) is None else stage


def busy_seconds(
    steps: Iterable[Mapping[str, Any]], evaluations: Iterable[tuple[str, float | None]]
) -> float:
    """Seconds that a run worked: its recorded steps and the evaluations after its stages.

    Pauses between two starts do not count. An evaluation is given by stage and seconds; the modes
    of a stage are evaluated at the same time, so the longest counts.
    """
    longest: dict[str, float] = {}
    for stage, seconds in evaluations:
        longest[stage] = max(longest.get(stage, 0.0), seconds or 0.0)
    worked = (step.get(name) for step in steps for name in ("time/step", "time/evaluate"))
    known = (s for s in worked if isinstance(s, int | float) and math.isfinite(s))
    return sum(known) + sum(longest.values())


def read_environment(run: Path) -> dict[str, Any]:
    """The contents of environment.json."""
    try:
        about = msgspec.json.decode((run / "environment.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{run} is not a run directory: {error}") from error
    return about


def is_finished(run: Path) -> bool:
    """Whether the run in this directory has finished, with all stages that were added to it."""
    return has_finished(read_events(run))


def has_finished(events: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a run with these events has finished; one that was extended may not have."""
    names = [event.get("event") for event in events]
    ends = [name for name in names if name in ("finished", "extended")]
    return bool(ends) and ends[-1] == "finished"


def extension(events: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The stage that `rstar2 extend` added and that is not finished; None if there is none."""
    ends = [event for event in events if event.get("event") in ("finished", "extended")]
    return dict(ends[-1]["stage"]) if ends and ends[-1]["event"] == "extended" else None


# --------------------------------------------------------------------------- following


class TailLine(NamedTuple):
    """One complete line and its byte offset."""

    at: int
    data: bytes


class FileTail:
    """Reads the complete lines that another process appends to a file.

    When `restarted` returns true, the file was replaced or shortened (its run was rewound): the
    caller discards what it has read, and reading starts again at the beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self._inode = 0
        self.size = 0

    def restarted(self) -> bool:
        """Look at the file; true if the part that was read is no longer there."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            removed, self.position, self._inode, self.size = self.position > 0, 0, 0, 0
            return removed
        replaced = self._inode not in (0, status.st_ino) or status.st_size < self.position
        self._inode, self.size = status.st_ino, status.st_size
        if replaced:
            self.position = 0
        return replaced

    @property
    def behind(self) -> int:
        """Bytes not read yet, an incomplete last line included."""
        return max(0, self.size - self.position)

    def read(self, limit: int = CHUNK) -> list[TailLine]:
        """The next complete lines, about `limit` bytes of them but at least one."""
        if not self.behind:
            return []
        lines, at = [], self.position
        with self.path.open("rb", BUFFER) as file:
            file.seek(at)
            while at < self.position + limit:
                line = file.readline()
                if not line.endswith(b"\n"):
                    break
                lines.append(TailLine(at, line))
                at += len(line)
        self.position = at
        return lines


class FollowedRecords:
    """All values of a short JSONL file (metrics, events), kept up to date."""

    def __init__(self, path: Path) -> None:
        self._tail = FileTail(path)
        self.values: list[dict[str, Any]] = []
        self.unreadable = 0

    def refresh(self) -> bool:
        """Read new lines; true if anything changed."""
        changed = self._tail.restarted()
        if changed:
            self.values, self.unreadable = [], 0
        while lines := self._tail.read():
            changed = True
            for line in lines:
                try:
                    self.values.append(msgspec.json.decode(line.data, type=dict[str, Any]))
                except msgspec.MsgspecError:
                    self.unreadable += 1
        return changed


def read_at(path: Path, at: int, size: int) -> bytes:
    """`size` bytes from offset `at`; fewer if the file has been shortened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while size > 0 and (part := os.pread(descriptor, size, at)):
            parts.append(part)
            at, size = at + len(part), size - len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)
