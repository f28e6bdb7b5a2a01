"""What is recorded of one stage, as columns: small enough to hold for 100,000 rollouts, quick to
filter. Filled from index/<stage>.jsonl where a run has one and from the lines themselves where it
has none (or where it has gaps); brought up to date in slices, so that nobody waits for it.

Bytes `[0, covered)` of trajectories/<stage>.jsonl are in the columns, in the file's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rstar2.record.index import GroupEntry, entry_of_line
from rstar2.types import Outcome, StopReason
from rstar2.viewer.tails import Tail, read_at

STOPS = tuple(stop.value for stop in StopReason)
OUTCOMES = tuple(outcome.value for outcome in Outcome)
FAILED = frozenset(o.value for o in Outcome if o.failed)
NOT_COUNTED = Outcome.INFRASTRUCTURE.value
UNKNOWN = 255

ROLLOUT = np.dtype(
    [
        ("group", "i4"),
        ("member", "i4"),
        ("reward", "f4"),  # nan: none
        ("stop", "u1"),
        ("kept", "i1"),  # -1: its group was not used
        ("outcomes", "u2"),  # one bit each
        ("tokens", "i4"),
        ("sampled", "i4"),
        ("turns", "i4"),
        ("calls", "i4"),
        ("failed", "i4"),
        ("entropy", "f4"),  # nan: not reported
        ("wall", "f4"),
        ("step", "i4"),
        ("kind", "i2"),
    ]
)
Rows = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


class Table:
    """A structured array that grows."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._rows: Rows = np.zeros(1024, dtype)
        self.count = 0

    def extend(self, rows: Sequence[tuple[Any, ...]]) -> None:
        need = self.count + len(rows)
        if need > len(self._rows):
            grown = np.zeros(max(need, 2 * len(self._rows)), self._rows.dtype)
            grown[: self.count] = self._rows[: self.count]
            self._rows = grown
        if rows:
            self._rows[self.count : need] = rows
        self.count = need

    def cut(self, count: int) -> None:
        self.count = count

    @property
    def rows(self) -> Rows:
        return self._rows[: self.count]


class Codes:
    """Small numbers for strings that repeat."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._of: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        if name not in self._of:
            self._of[name] = len(self.names)
            self.names.append(name)
        return self._of[name]

    def find(self, name: str) -> int:
        return self._of.get(name, -1)


class GroupRef(msgspec.Struct, frozen=True):
    """Where one group is and what a list shows of it."""

    id: str
    step: int
    at: int
    size: int
    problem: str
    kind: str
    prompt: str
    used: bool
    first: int
    """Number of its first rollout in the table, and how many there are."""
    count: int
    index_at: int
    """Offset and size of its line in the index file; -1: it has none."""
    index_size: int


class Catalog:
    """The columns of one stage."""

    def __init__(self, run: Path, stage: str) -> None:
        self.stage = stage
        self.path = run / "trajectories" / f"{stage}.jsonl"
        self.index_path = run / "index" / f"{stage}.jsonl"
        self._lines = Tail(self.path)
        self._index = Tail(self.index_path)
        self._decoder = msgspec.json.Decoder(GroupEntry)
        self._reset()

    def _reset(self) -> None:
        self.groups: list[GroupRef] = []
        self.numbers: dict[str, int] = {}
        self.rollouts = Table(ROLLOUT)
        self.kinds = Codes()
        self.names: dict[int, str] = {}
        """Names of rollouts that are not just their number in the group."""
        self.covered = self._torn = 0
        """Bytes in the columns, and bytes at the end that are no whole line yet."""
        self.unreadable = 0
        self._lines.position = self._index.position = 0
        self._distrusted = False

    # ----------------------------------------------------------------- following

    def refresh(self) -> bool:
        """Take in one slice of what is new; false when there is nothing whole left to take."""
        changed = self._lines.restarted()
        self._index.restarted()
        if changed:
            self._reset()
        before = self.covered
        until = self._take_index() if self._index.behind and not self._distrusted else None
        if self.covered == before and self._lines.size > self.covered:
            self._take_lines(until)
        return changed or self.covered != before

    @property
    def progress(self) -> float:
        """Share of the file that is in the columns."""
        whole = self._lines.size - self._torn
        return self.covered / whole if whole > 0 else 1.0

    def _take_index(self) -> int | None:
        """Take entries that go on where the columns end; returns where the next one begins.

        Entries of lines that are not whole yet, and those behind a gap, are left for later.
        """
        taken: list[tuple[GroupEntry, int, int]] = []
        for line in self._index.read():
            try:
                entry = self._decoder.decode(line.data)
            except msgspec.MsgspecError:
                self._distrusted = True
                break
            while taken and taken[-1][0].end > entry.at:
                taken.pop()
            taken.append((entry, line.at, len(line.data)))
        if taken and taken[0][0].at < self.covered:
            self._cut_back(taken[0][0].at)
        end, fits = self.covered, 0
        while fits < len(taken):
            entry = taken[fits][0]
            if entry.at != end or entry.end > self._lines.size:
                break
            end, fits = entry.end, fits + 1
        if fits and not self._holds(taken[fits - 1][0]):
            self._distrusted = True
            return None
        for item in taken[:fits]:
            self._add(*item)
        if fits == len(taken):
            return None
        self._index.position = taken[fits][1]
        return taken[fits][0].at

    def _holds(self, entry: GroupEntry) -> bool:
        """Whether the group's line really is where the entry says."""
        line = read_at(self.path, entry.at, entry.size)
        head = msgspec.json.encode({"id": entry.group})[1:-1]
        return line.endswith(b"\n") and line.count(b"\n") == 1 and head in line[:2000]

    def _take_lines(self, until: int | None) -> None:
        """Read whole lines from where the columns end, up to an offset if one is given."""
        self._lines.position = self.covered
        lines = self._lines.read()
        self._torn = 0 if lines else self._lines.size - self.covered
        for line in lines:
            if until is not None and line.at >= until:
                break
            try:
                self._add(entry_of_line(line.data, line.at), -1, 0)
            except msgspec.MsgspecError:
                self.unreadable += 1
                self.covered = line.at + len(line.data)

    def _cut_back(self, at: int) -> None:
        """Forget groups from this offset on."""
        while self.groups and self.groups[-1].at >= at:
            gone = self.groups.pop()
            self.numbers.pop(gone.id, None)
            self.rollouts.cut(gone.first)
            self.covered = gone.at

    def _add(self, entry: GroupEntry, index_at: int, index_size: int) -> None:
        number, first = len(self.groups), self.rollouts.count
        kind = self.kinds(entry.kind)
        rows = []
        for member, rollout in enumerate(entry.rollouts):
            if rollout.name != str(member):
                self.names[first + member] = rollout.name
            rows.append(
                (
                    number,
                    member,
                    np.nan if rollout.reward is None else rollout.reward,
                    _code(STOPS, rollout.stop),
                    -1 if rollout.kept is None else int(rollout.kept),
                    _bits(rollout.outcomes),
                    rollout.tokens,
                    rollout.sampled,
                    len(rollout.turns),
                    sum(o != NOT_COUNTED for o in rollout.outcomes),
                    sum(o in FAILED for o in rollout.outcomes),
                    np.nan if rollout.entropy is None else rollout.entropy,
                    rollout.wall_s,
                    entry.step,
                    kind,
                )
            )
        self.rollouts.extend(rows)
        self.groups.append(
            GroupRef(
                entry.group, entry.step, entry.at, entry.size, entry.problem, entry.kind,
                entry.prompt, entry.used, first, len(rows), index_at, index_size,
            )
        )  # fmt: skip
        self.numbers[entry.group] = number
        self.covered = entry.end

    # ----------------------------------------------------------------- reading

    def steps(self) -> list[int]:
        """Steps that have a group, in order."""
        return sorted({group.step for group in self.groups})

    def of_step(self, step: int) -> list[GroupRef]:
        return [group for group in self.groups if group.step == step]

    def members(self, group: GroupRef) -> Rows:
        return self.rollouts.rows[group.first : group.first + group.count]

    def name_of(self, number: int) -> str:
        """Trajectory id of a rollout of the table."""
        row = self.rollouts.rows[number]
        group = self.groups[int(row["group"])]
        return f"{group.id}/{self.names.get(number, int(row['member']))}"

    def line(self, group: GroupRef) -> bytes:
        """The recorded line of a group."""
        return read_at(self.path, group.at, group.size)

    def entry(self, group: GroupRef) -> GroupEntry:
        """The index entry of a group, read again: it has the times of every turn."""
        if group.index_at >= 0:
            return self._decoder.decode(read_at(self.index_path, group.index_at, group.index_size))
        return entry_of_line(self.line(group), group.at)


def _code(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else UNKNOWN


def _bits(outcomes: Iterable[str]) -> int:
    bits = 0
    for outcome in outcomes:
        if outcome in OUTCOMES:
            bits |= 1 << OUTCOMES.index(outcome)
    return bits


def named_bits(bits: int) -> list[str]:
    """The outcomes of a bit set."""
    return [name for index, name in enumerate(OUTCOMES) if bits >> index & 1]
