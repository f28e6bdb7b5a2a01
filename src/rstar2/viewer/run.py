"""One run directory as the viewer holds it: figures in memory, rollouts on disk by offset.

One thread calls `refresh` repeatedly; each call reads a bounded slice of new data. Requests hold
the same lock while they read. `version` increases with every change.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from rstar2.agent.detokenizer import Detokenizer, find_tokenizer
from rstar2.errors import UserError
from rstar2.record import SCHEMA, read_environment, read_recipe
from rstar2.record.packed import plain_line
from rstar2.record.read import (
    FileTail,
    FollowedRecords,
    GroupLine,
    TokenValuesLine,
    decode_group,
    has_finished,
    read_at,
    rl_stage_names,
)
from rstar2.types import TokenValues
from rstar2.viewer.catalog import Catalog, GroupRef

HELD_LINES = 8
"""Decoded groups kept in memory: the requests of one page are mostly about the same group."""
HEAD_BYTES = 200
YIELD_S = 0.001
"""Pause between two slices: locks are not fair, and requests must get their turn."""


class NotRecordedError(UserError):
    """A request for something that is not recorded in this run."""


class ViewedRun:
    """One run directory, kept up to date."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.lock = threading.RLock()
        self.version = 0
        self.trouble = ""
        """Why this run cannot be shown; empty if it can be."""
        self.recipe: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self._read_head()
        self.metrics = FollowedRecords(path / "metrics.jsonl")
        self.evaluations = FollowedRecords(path / "evaluations.jsonl")
        self.events = FollowedRecords(path / "events.jsonl")
        self.catalog = Catalog(path, self.stage_names)
        self._status = ""
        self._token_lines: dict[str, tuple[FileTail, dict[int, tuple[int, int]]]] = {}
        self._held: OrderedDict[tuple[int, int, int], GroupLine] = OrderedDict()
        self._pieces: Detokenizer | None = None

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
        """Read one slice of new data; false when there is none left to read."""
        if self.trouble:
            return False
        with self.lock:
            changed = False
            for records in (self.metrics, self.evaluations, self.events):
                changed |= records.refresh()
            self.catalog.open_stages()
            before, self._status = self._status, self.status
            changed |= before != self._status
        for reader in list(self.catalog.readers.values()):
            with self.lock:
                changed |= reader.refresh()
            time.sleep(YIELD_S)
        if changed:
            self.version += 1
        return changed

    @property
    def progress(self) -> float:
        """Share of the bytes of recorded groups that have been read; 0 before the first refresh."""
        if not self.version:
            return 0.0
        readers = self.catalog.readers.values()
        whole = sum(reader.whole for reader in readers)
        return sum(reader.covered for reader in readers) / whole if whole > 0 else 1.0

    @property
    def unreadable(self) -> int:
        """The number of complete lines that cannot be decoded."""
        files = (self.metrics, self.evaluations, self.events)
        stages = self.catalog.readers.values()
        return sum(file.unreadable for file in files) + sum(s.unreadable for s in stages)

    # ----------------------------------------------------------------- state

    @property
    def status(self) -> str:
        """`running`, `finished`, `collapsed`, or `stopped` (no writer, and not finished)."""
        names = [event.get("event") for event in self.events.values]
        if has_finished(self.events.values):
            return "finished"
        if self._is_written():
            return "running"
        return "collapsed" if "collapsed" in names else "stopped"

    def _is_written(self) -> bool:
        """Whether a process holds the run's lock. Reads /proc/locks: taking the lock to find out,
        even for a moment, could make a run that is just resuming fail."""
        try:
            held = (self.path / ".lock").stat()
            locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        device = f"{os.major(held.st_dev):02x}:{os.minor(held.st_dev):02x}:{held.st_ino}"
        return any(device in line.split() for line in locks.splitlines())

    @property
    def stage_names(self) -> list[str]:
        """The RL stages of the recipe, in order."""
        return rl_stage_names(self.recipe)

    # ----------------------------------------------------------------- groups

    def find_group(self, group_id: str) -> GroupRef:
        """A group by its id."""
        group = self.catalog.find_group(group_id)
        if group is None:
            raise NotRecordedError(f"{self.name} has no group {group_id!r} on record")
        return group

    def read_group(self, group: GroupRef) -> GroupLine:
        """A group, decoded whole."""
        key = (group.stage, group.at, group.size)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        try:
            line = decode_group(self.catalog.line(group))
        except msgspec.MsgspecError as error:
            raise NotRecordedError(f"the line of {group.id} cannot be read: {error}") from error
        if line.group.id != group.id:
            raise NotRecordedError(f"{group.id} has just been rewound: reload the page")
        self._held[key] = line
        while len(self._held) > HELD_LINES:
            self._held.popitem(last=False)
        return line

    # ----------------------------------------------------------------- tokens

    def token_values(self, stage: str, step: int) -> dict[str, TokenValues]:
        """The learner's logprobs of a step by trajectory; empty if they are not recorded."""
        path = self.path / "tokens" / f"{stage}.jsonl"
        tail, places = self._token_lines.setdefault(stage, (FileTail(path), {}))
        if tail.restarted():
            places.clear()
        while lines := tail.read():
            for line in lines:
                line_step = _step_of(line.data)
                if line_step is not None:
                    places[line_step] = (line.at, len(line.data))
        if step not in places:
            return {}
        try:
            text = plain_line(read_at(path, *places[step]))
            recorded = msgspec.json.decode(text, type=TokenValuesLine)
        except msgspec.MsgspecError:
            self._token_lines.pop(stage)
            return {}
        return {values.trajectory_id: values for values in recorded.values}

    @property
    def pieces(self) -> Detokenizer:
        """Decodes token ids to text with the run's tokenizer."""
        if self._pieces is None:
            self._pieces = Detokenizer(find_tokenizer(self.path, self.recipe))
        return self._pieces


def _step_of(line: bytes) -> int | None:
    """The step of a line of token values, from its first bytes: the rest is long."""
    head = line[:HEAD_BYTES].partition(b'"step":')[2]
    digits = head[: len(head) - len(head.lstrip(b"0123456789"))]
    return int(digits) if digits else None


def open_runs(paths: list[Path]) -> dict[str, ViewedRun]:
    """The runs by directory name; a number is appended to equal names."""
    runs: dict[str, ViewedRun] = {}
    for path in paths:
        path = path.resolve()
        name, number = path.name or "run", 2
        while name in runs:
            name, number = f"{path.name}-{number}", number + 1
        runs[name] = ViewedRun(path, name)
    return runs
