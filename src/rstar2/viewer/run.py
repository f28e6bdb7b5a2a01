"""One run directory as the viewer knows it: figures in memory, rollouts by offset.

`refresh` is called again and again by one thread and takes a bounded slice of work each time;
readers hold the same lock while they look. `version` grows whenever something changed.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from rstar2.agent.pieces import Pieces, find_tokenizer
from rstar2.errors import UserError
from rstar2.record import SCHEMA, read_environment, read_recipe
from rstar2.record.read import GroupLine
from rstar2.types import TokenValues
from rstar2.viewer.catalog import Catalog, GroupRef
from rstar2.viewer.tails import Records, Tail, read_at

HELD_LINES = 8
"""Decoded groups kept for the next request: a reader goes back and forth within one."""
HEAD_BYTES = 200
YIELD_S = 0.001
"""Pause between two slices: locks are not fair, and a reader must get its turn."""


class NotRecordedError(UserError):
    """Something was asked for that this run has not recorded."""


class _Step(msgspec.Struct):
    stage: str
    step: int
    values: tuple[TokenValues, ...]


class Run:
    """One run directory, followed."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.lock = threading.RLock()
        self.version = 0
        self.trouble = ""
        """Why this run cannot be shown; empty if it can."""
        self.recipe: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self._read_head()
        self.metrics = Records(path / "metrics.jsonl")
        self.evaluations = Records(path / "evaluations.jsonl")
        self.events = Records(path / "events.jsonl")
        self.catalogs: dict[str, Catalog] = {}
        self._status = ""
        self._token_lines: dict[str, tuple[Tail, dict[int, tuple[int, int]]]] = {}
        self._held: OrderedDict[tuple[str, int, int], GroupLine] = OrderedDict()
        self._pieces: Pieces | None = None

    def _read_head(self) -> None:
        self.environment = read_environment(self.path)
        self.recipe = read_recipe(self.path)
        schema = self.environment.get("schema")
        if schema != SCHEMA:
            newer = isinstance(schema, int) and schema > SCHEMA
            self.trouble = (
                f"This run was written in format {schema}; this version of rstar2 reads format "
                f"{SCHEMA}. Open it with the rstar2 that wrote it "
                f"({self.environment.get('rstar2', 'version not recorded')})"
                + (", or upgrade." if newer else ".")
            )

    # ----------------------------------------------------------------- following

    def refresh(self) -> bool:
        """Take in one slice of what is new; false when there is nothing left to take."""
        if self.trouble:
            return False
        with self.lock:
            changed = False
            for records in (self.metrics, self.evaluations, self.events):
                changed |= records.refresh()
            for file in sorted((self.path / "trajectories").glob("*.jsonl")):
                if file.stem not in self.catalogs:
                    self.catalogs[file.stem] = Catalog(self.path, file.stem)
            before, self._status = self._status, self.status
            changed |= before != self._status
        for catalog in list(self.catalogs.values()):
            with self.lock:
                changed |= catalog.refresh()
            time.sleep(YIELD_S)
        if changed:
            self.version += 1
        return changed

    @property
    def progress(self) -> float:
        """Share of the recorded rollouts' bytes that can be listed."""
        total = sum(c.covered / c.progress for c in self.catalogs.values() if c.progress)
        covered = sum(c.covered for c in self.catalogs.values())
        return covered / total if total else 1.0

    @property
    def unreadable(self) -> int:
        """Lines that are whole and cannot be read."""
        small = (self.metrics, self.evaluations, self.events)
        return sum(r.unreadable for r in small) + sum(c.unreadable for c in self.catalogs.values())

    # ----------------------------------------------------------------- state

    @property
    def status(self) -> str:
        """`running`, `finished`, `collapsed`, or `stopped` (nobody writes and it has no end)."""
        names = [event.get("event") for event in self.events.values]
        if "finished" in names:
            return "finished"
        if self._is_written():
            return "running"
        return "collapsed" if "collapsed" in names else "stopped"

    def _is_written(self) -> bool:
        """Whether a process holds the run's lock. Only looks: trying the lock, even for a moment,
        could refuse a run that is just being resumed."""
        try:
            held = (self.path / ".lock").stat()
            locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        device = f"{os.major(held.st_dev):02x}:{os.minor(held.st_dev):02x}:{held.st_ino}"
        return any(device in line.split() for line in locks.splitlines())

    @property
    def stage_names(self) -> list[str]:
        """RL stages of the recipe, in order."""
        return [str(s.get("name")) for s in (self.recipe.get("rl") or {}).get("stages") or []]

    # ----------------------------------------------------------------- groups

    def find_group(self, group_id: str) -> tuple[Catalog, GroupRef]:
        """The stage and place of a group."""
        for catalog in self.catalogs.values():
            number = catalog.numbers.get(group_id)
            if number is not None:
                return catalog, catalog.groups[number]
        raise NotRecordedError(f"{self.name} has no group {group_id!r} on record")

    def read_group(self, catalog: Catalog, group: GroupRef) -> GroupLine:
        """A group, decoded whole."""
        key = (catalog.stage, group.at, group.size)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        try:
            line = msgspec.json.decode(catalog.line(group), type=GroupLine)
        except msgspec.MsgspecError as error:
            raise NotRecordedError(f"the line of {group.id} cannot be read: {error}") from error
        if line.group.id != group.id:
            raise NotRecordedError(f"{group.id} has just been rewound: look again")
        self._held[key] = line
        while len(self._held) > HELD_LINES:
            self._held.popitem(last=False)
        return line

    # ----------------------------------------------------------------- tokens

    def token_values(self, stage: str, step: int) -> dict[str, TokenValues]:
        """What the learner made of the tokens of a step, by trajectory; empty if not recorded."""
        path = self.path / "tokens" / f"{stage}.jsonl"
        tail, places = self._token_lines.setdefault(stage, (Tail(path), {}))
        if tail.restarted():
            places.clear()
        while lines := tail.read():
            for line in lines:
                found = _step_of(line.data)
                if found is not None:
                    places[found] = (line.at, len(line.data))
        if step not in places:
            return {}
        try:
            read = msgspec.json.decode(read_at(path, *places[step]), type=_Step)
        except msgspec.MsgspecError:
            self._token_lines.pop(stage)
            return {}
        return {values.trajectory_id: values for values in read.values}

    @property
    def pieces(self) -> Pieces:
        """The run's tokenizer, to show tokens as text."""
        if self._pieces is None:
            self._pieces = Pieces(find_tokenizer(self.path, self.recipe))
        return self._pieces


def _step_of(line: bytes) -> int | None:
    """The step of a line of token values, from its head: the rest is long."""
    head = line[:HEAD_BYTES].partition(b'"step":')[2]
    digits = head[: len(head) - len(head.lstrip(b"0123456789"))]
    return int(digits) if digits else None


def open_runs(paths: list[Path]) -> dict[str, Run]:
    """The runs by name; equal directory names get a number."""
    runs: dict[str, Run] = {}
    for path in paths:
        path = path.resolve()
        name, number = path.name or "run", 2
        while name in runs:
            name, number = f"{path.name}-{number}", number + 1
        runs[name] = Run(path, name)
    return runs
