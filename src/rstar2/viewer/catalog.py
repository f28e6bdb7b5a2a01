"""The rollouts of one run as tables of an SQLite database in memory: small enough for 100,000
rollouts, filtered and sorted by SQL.

The database is in memory because a run directory is never written to: read-only directories open,
and viewers of the same run do not share state. Loading 100,000 rollouts takes about 0.6 s of CPU
time, 0.9 times what NumPy columns took; without an index 2.2 s, 0.85 times (benchmarks/viewer.py).

A StageReader fills the tables from index/<stage>.jsonl, and from the recorded lines where the index
is missing, has gaps or does not match. It reads in slices, and requests are served between them.
Bytes `[0, covered)` of trajectories/<stage>.jsonl are in the tables.

A group is identified by `stage` (the position of its stage in the run) and `at` (its byte offset),
so the order of both is the order in which the run recorded its groups.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from rstar2.record import stage_order
from rstar2.record.index import GroupEntry, index_entry
from rstar2.record.read import FileTail, problem_number, read_at
from rstar2.types import Outcome

OUTCOMES = tuple(outcome.value for outcome in Outcome)
FAILED = frozenset(o.value for o in Outcome if o.failed)

SCHEMA = """
CREATE TABLE groups (
    stage INTEGER, at INTEGER, size INTEGER, id TEXT, step INTEGER, problem TEXT, kind TEXT,
    prompt TEXT, used INTEGER, members INTEGER,
    index_at INTEGER,   -- offset and size of the group's line in the index file; NULL: not there
    index_size INTEGER,
    PRIMARY KEY (stage, at)
) WITHOUT ROWID;
CREATE INDEX groups_by_id ON groups (id);
CREATE INDEX groups_by_step ON groups (stage, step);
CREATE TABLE rollouts ( -- in the order of lists, newest first: every list ends with this order
    stage INTEGER, at INTEGER, member INTEGER,
    kept INTEGER,       -- NULL: the group was not used for training
    reward REAL,        -- NULL: not graded
    tokens INTEGER, sampled INTEGER, turns INTEGER, calls INTEGER, failed INTEGER,
    entropy REAL,       -- NULL: not reported
    wall REAL, step INTEGER, kind TEXT, stop TEXT,
    outcomes TEXT,      -- those that occurred, each between spaces
    name TEXT,
    PRIMARY KEY (stage DESC, at DESC, member)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class GroupRef:
    """The position of a recorded group, and what lists show of it."""

    stage: int
    at: int
    size: int
    id: str
    step: int
    problem: str
    kind: str
    prompt: str
    used: bool
    members: int
    index_at: int | None
    index_size: int | None


class Catalog:
    """The recorded groups and rollouts of one run."""

    def __init__(self, run: Path, rl_stages: Sequence[str]) -> None:
        self.run = run
        self.db = sqlite3.connect(":memory:", check_same_thread=False)
        self.db.row_factory = sqlite3.Row
        self.db.executescript(SCHEMA)
        self._order = stage_order(rl_stages)
        self.readers: dict[int, StageReader] = {}
        """By position of the stage; stages that the recipe does not name come first."""

    def open_stages(self) -> None:
        """Start reading stages that have appeared since the last call."""
        known = {reader.stage for reader in self.readers.values()}
        for file in sorted((self.run / "trajectories").glob("*.jsonl")):
            stage = file.stem
            if stage not in known:
                number = self._order.index(stage) if stage in self._order else -1 - len(known)
                self.readers[number] = StageReader(self.run, stage, number, self.db)
                known.add(stage)

    # ----------------------------------------------------------------- reading

    def number_of(self, stage: str) -> int | None:
        """The position of a stage; None if nothing of it is recorded."""
        return next((n for n, reader in self.readers.items() if reader.stage == stage), None)

    def steps(self, stage: str) -> list[int]:
        """Steps that have a recorded group, in order."""
        query = "SELECT DISTINCT step FROM groups WHERE stage = ? ORDER BY step"
        return [step for (step,) in self.db.execute(query, [self.number_of(stage)])]

    def counts(self, stage: str) -> tuple[int, int]:
        """The numbers of groups and of rollouts of a stage."""
        query = "SELECT count(*), ifnull(sum(members), 0) FROM groups WHERE stage = ?"
        groups, rollouts = self.db.execute(query, [self.number_of(stage)]).fetchone()
        return groups, rollouts

    def rollout_count(self) -> int:
        """The number of rollouts of all stages."""
        (count,) = self.db.execute("SELECT count(*) FROM rollouts").fetchone()
        return int(count)

    def find_group(self, group_id: str) -> GroupRef | None:
        """A group by its id."""
        query = "SELECT * FROM groups WHERE id = ? ORDER BY stage, at DESC"
        row = self.db.execute(query, [group_id]).fetchone()
        return None if row is None else _group_ref(row)

    def line_at(self, stage: int, at: int) -> bytes:
        """The recorded line of the group with this key."""
        query = "SELECT size FROM groups WHERE stage = ? AND at = ?"
        (size,) = self.db.execute(query, [stage, at]).fetchone()
        return read_at(self.readers[stage].path, at, size)

    def groups_of_step(self, stage: str, step: int) -> list[GroupRef]:
        """The groups of a step as `read_groups` orders them: as recorded, or by problem."""
        query = "SELECT * FROM groups WHERE stage = ? AND step = ? ORDER BY at"
        rows = self.db.execute(query, [self.number_of(stage), step])
        groups = [_group_ref(row) for row in rows]
        if stage.startswith("eval-"):
            groups.sort(key=lambda group: problem_number(group.id))
        return groups

    def rollouts_of(self, group: GroupRef) -> list[dict[str, Any]]:
        """The rollouts of a group in order, as `rollout_cells`."""
        query = "SELECT * FROM rollouts WHERE stage = ? AND at = ? ORDER BY member"
        return [rollout_cells(row) for row in self.db.execute(query, [group.stage, group.at])]

    def stage_of(self, group: GroupRef) -> str:
        return self.readers[group.stage].stage

    def line(self, group: GroupRef) -> bytes:
        """The recorded line of a group."""
        return read_at(self.readers[group.stage].path, group.at, group.size)

    def entry(self, group: GroupRef) -> GroupEntry:
        """The index entry of a group, read from disk: it has the times of every turn."""
        if group.index_at is None or group.index_size is None:
            return index_entry(self.line(group), group.at)
        path = self.readers[group.stage].index_path
        line = read_at(path, group.index_at, group.index_size)
        return msgspec.json.decode(line, type=GroupEntry)


class StageReader:
    """Keeps the tables up to date with the recorded groups of one stage."""

    def __init__(self, run: Path, stage: str, number: int, db: sqlite3.Connection) -> None:
        self.stage, self.number = stage, number
        self.path = run / "trajectories" / f"{stage}.jsonl"
        self.index_path = run / "index" / f"{stage}.jsonl"
        self._db = db
        self._lines = FileTail(self.path)
        self._index = FileTail(self.index_path)
        self._decoder = msgspec.json.Decoder(GroupEntry)
        self._start_again()

    def _start_again(self) -> None:
        self._remove_from(0)
        self.covered = self._incomplete = 0
        """Bytes whose groups are in the tables, and bytes of an incomplete last line."""
        self.unreadable = 0
        self._lines.position = self._index.position = 0
        self._index_trusted = True

    def refresh(self) -> bool:
        """Read one slice of new data; false when no complete line is left to read."""
        changed = self._lines.restarted()
        self._index.restarted()
        if changed:
            self._start_again()
        before = self.covered
        until = self._read_index() if self._index.behind and self._index_trusted else None
        if self.covered == before and self._lines.size > self.covered:
            self._read_lines(until)
        return changed or self.covered != before

    @property
    def whole(self) -> int:
        """Bytes of the file's complete lines, as far as is known."""
        return self._lines.size - self._incomplete

    def _read_index(self) -> int | None:
        """Read entries that continue where the tables end; returns where the next one begins.

        Entries of lines that are not complete yet, and those after a gap, are left for later.
        A killed run may leave entries of lines that were never written; the entries that its
        resumed run writes for the same offsets replace them.
        """
        entries: list[tuple[GroupEntry, int, int]] = []
        for line in self._index.read():
            try:
                entry = self._decoder.decode(line.data)
            except msgspec.MsgspecError:
                self._index_trusted = False
                break
            while entries and entries[-1][0].end > entry.at:
                entries.pop()
            entries.append((entry, line.at, len(line.data)))
        if entries and entries[0][0].at < self.covered:
            self._remove_from(entries[0][0].at)
        end, fitting = self.covered, 0
        while fitting < len(entries):
            entry = entries[fitting][0]
            if entry.at != end or entry.end > self._lines.size:
                break
            end, fitting = entry.end, fitting + 1
        if fitting and not self._matches_file(entries[fitting - 1][0]):
            self._index_trusted = False
            return None
        self._insert(entries[:fitting])
        self.covered = end
        if fitting == len(entries):
            return None
        self._index.position = entries[fitting][1]
        return entries[fitting][0].at

    def _matches_file(self, entry: GroupEntry) -> bool:
        """Whether the group's line is where the entry says."""
        line = read_at(self.path, entry.at, entry.size)
        head = msgspec.json.encode({"id": entry.group})[1:-1]
        return line.endswith(b"\n") and line.count(b"\n") == 1 and head in line[:2000]

    def _read_lines(self, until: int | None) -> None:
        """Read complete lines from where the tables end, up to an offset if one is given."""
        self._lines.position = self.covered
        lines = self._lines.read()
        self._incomplete = 0 if lines else self._lines.size - self.covered
        entries: list[tuple[GroupEntry, int | None, int | None]] = []
        for line in lines:
            if until is not None and line.at >= until:
                break
            try:
                entries.append((index_entry(line.data, line.at), None, None))
            except msgspec.MsgspecError:
                self.unreadable += 1
            self.covered = line.at + len(line.data)
        self._insert(entries)

    def _remove_from(self, at: int) -> None:
        """Remove the groups from this offset on."""
        where = f"FROM groups WHERE stage = {self.number} AND at >= {at}"
        (first,) = self._db.execute(f"SELECT min(at) {where}").fetchone()
        if first is None:
            return
        with self._db:
            self._db.execute(f"DELETE {where}")
            self._db.execute(f"DELETE {where.replace('groups', 'rollouts')}")
        self.covered = first

    def _insert(self, entries: Sequence[tuple[GroupEntry, int | None, int | None]]) -> None:
        """Insert newest first, the order of the table: this is faster and fills its pages."""
        groups = (
            (
                self.number, entry.at, entry.size, entry.group, entry.step, entry.problem,
                entry.kind, entry.prompt, entry.used, len(entry.rollouts), index_at, index_size,
            )
            for entry, index_at, index_size in reversed(entries)
        )  # fmt: skip
        rollouts = (row for entry, _, _ in reversed(entries) for row in self._rollout_rows(entry))
        with self._db:
            self._db.executemany(f"INSERT INTO groups VALUES (?{',?' * 11})", groups)
            self._db.executemany(f"INSERT INTO rollouts VALUES (?{',?' * 16})", rollouts)

    def _rollout_rows(self, entry: GroupEntry) -> Iterator[tuple[Any, ...]]:
        for member, r in enumerate(entry.rollouts):
            kept = None if r.kept is None else int(r.kept)  # sqlite3 binds bool slowly
            outcomes, calls, failed = _call_columns(r.outcomes)
            yield (
                self.number, entry.at, member, kept, r.reward, r.tokens, r.sampled, len(r.turns),
                calls, failed, r.entropy, r.wall_s, entry.step, entry.kind, r.stop, outcomes,
                r.name,
            )  # fmt: skip


def rollout_cells(row: sqlite3.Row) -> dict[str, Any]:
    """The figures of one rollout as JSON values."""
    entropy = row["entropy"]
    return {
        **{name: row[name] for name in ("member", "step", "reward", "stop")},
        "kept": None if row["kept"] is None else bool(row["kept"]),
        "outcomes": row["outcomes"].split(),
        **{name: row[name] for name in ("tokens", "sampled", "turns", "calls", "failed")},
        "entropy": None if entropy is None else round(entropy, 4),
        "wall": round(row["wall"], 3),
    }


def _group_ref(row: sqlite3.Row) -> GroupRef:
    return GroupRef(**{**dict(row), "used": bool(row["used"])})


@lru_cache(maxsize=4096)
def _call_columns(outcomes: tuple[str, ...]) -> tuple[str, int, int]:
    """Columns `outcomes`, `calls` and `failed`; infrastructure failures do not count."""
    occurred = " ".join(name for name in OUTCOMES if name in outcomes)
    counted = [outcome for outcome in outcomes if outcome != Outcome.INFRASTRUCTURE]
    return f" {occurred} ", len(counted), sum(outcome in FAILED for outcome in counted)
