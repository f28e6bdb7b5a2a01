"""Following a JSONL file that somebody else is writing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

CHUNK = 1 << 21


@dataclass(frozen=True, slots=True)
class Line:
    """One whole line and where it begins."""

    at: int
    data: bytes


class Tail:
    """The whole lines of a file from where the last reading ended.

    `restarted` becomes true when the file was replaced or cut (a run was rewound): whoever follows
    forgets what it knew and reads from the beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self._inode = 0
        self.size = 0

    def restarted(self) -> bool:
        """Look at the file; true if what was read of it is no longer there."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            gone, self.position, self._inode, self.size = self.position > 0, 0, 0, 0
            return gone
        again = self._inode not in (0, found.st_ino) or found.st_size < self.position
        self._inode, self.size = found.st_ino, found.st_size
        if again:
            self.position = 0
        return again

    @property
    def behind(self) -> int:
        """Bytes that are there and not read yet (a torn last line included)."""
        return max(0, self.size - self.position)

    def read(self, limit: int = CHUNK) -> list[Line]:
        """New whole lines, about `limit` bytes of them; a line of any length is read whole."""
        if not self.behind:
            return []
        with self.path.open("rb") as file:
            file.seek(self.position)
            data = file.read(limit)
            end = data.rfind(b"\n")
            while end < 0 and (more := file.read(limit)):
                data += more
                end = data.rfind(b"\n")
        if end < 0:
            return []
        lines, at = [], self.position
        for part in data[: end + 1].splitlines(keepends=True):
            lines.append(Line(at, part))
            at += len(part)
        self.position = at
        return lines


class Records:
    """All values of a small JSONL file (metrics, events), kept up to date."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.values: list[dict[str, Any]] = []
        self.unreadable = 0

    def refresh(self) -> bool:
        """Read what is new; true if anything changed."""
        changed = self._tail.restarted()
        if changed:
            self.values, self.unreadable = [], 0
        while lines := self._tail.read():
            changed = True
            for line in lines:
                try:
                    value = msgspec.json.decode(line.data)
                except msgspec.DecodeError:
                    self.unreadable += 1
                    continue
                if isinstance(value, dict):
                    self.values.append(value)
                else:
                    self.unreadable += 1
        return changed


def read_at(path: Path, at: int, size: int) -> bytes:
    """The bytes of one line; shorter if the file was cut meanwhile."""
    with path.open("rb", buffering=0) as file:
        file.seek(at, os.SEEK_SET)
        parts = []
        while size > 0 and (part := file.read(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
