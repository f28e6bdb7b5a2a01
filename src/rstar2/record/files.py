"""The parts of a run directory: append-only files of JSON lines, and the lock."""

from __future__ import annotations

import fcntl
import os
import platform
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar, overload

import msgspec

from rstar2.errors import UserError
from rstar2.files import disk_full, replacing_file
from rstar2.types import encode

T = TypeVar("T")


class StepHead(msgspec.Struct, frozen=True):
    """The fields of a line that name the step it belongs to."""

    stage: str
    step: int


class JsonLines:
    """An append-only file of JSON lines. Opening it cuts off an incomplete last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("ab", buffering=1 << 20)
        cut_torn_line(path)
        self._size = path.stat().st_size

    def append(self, value: Any) -> tuple[int, bytes]:
        """Add a line; returns its byte offset and the line."""
        return self.append_line(encode(value))

    def append_line(self, encoded: bytes) -> tuple[int, bytes]:
        """Add a line that is encoded already; returns its byte offset and the line."""
        line = encoded + b"\n"
        with self._naming_a_full_disk():
            self._file.write(line)
        at, self._size = self._size, self._size + len(line)
        return at, line

    def flush(self) -> None:
        with self._naming_a_full_disk():
            self._file.flush()

    def sync(self) -> None:
        with self._naming_a_full_disk():
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with self._naming_a_full_disk():
            self._file.close()

    @contextmanager
    def _naming_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = disk_full(error, self.path, self._size)
            if full is None:
                raise
            raise full from error

    @overload
    def drop(self, unwanted: Callable[[StepHead], bool]) -> int: ...

    @overload
    def drop(self, unwanted: Callable[[T], bool], kind: type[T]) -> int: ...

    def drop(self, unwanted: Callable[[Any], bool], kind: type[Any] = StepHead) -> int:
        """Remove the unwanted lines atomically; returns their number. Lines are read as `kind`."""
        self._file.close()

        def is_unwanted(line: bytes) -> bool:
            return unwanted(msgspec.json.decode(line, type=kind))

        with self.path.open("rb") as old:
            dropped = sum(map(is_unwanted, old))
            if dropped:
                old.seek(0)
                with replacing_file(self.path) as new:
                    new.writelines(line for line in old if not is_unwanted(line))
        self._file = self.path.open("ab", buffering=1 << 20)
        self._size = self.path.stat().st_size
        return dropped


def cut_torn_line(path: Path) -> int:
    """Cut off an incomplete last line; returns the number of bytes cut off."""
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - (1 << 16))
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)
    return size - end


_HELD: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """An exclusive lock on a run directory; the system releases it when its process dies."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise UserError(
                f"run directory {path.parent} is in use by {holder or 'another process'}: "
                "wait for it to end, stop it, or choose another run directory (--run)"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise UserError(
                f"run directory {path.parent} cannot be locked: its file system refuses flock "
                f"({error.strerror}); choose a run directory on another one (--run)"
            ) from error
        os.ftruncate(descriptor, 0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}, {started}".encode())
        self._descriptor: int | None = descriptor
        _HELD.add(self)

    def release(self) -> None:
        """Release the lock; idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _release_in_child() -> None:
    # A flock lasts as long as any copy of its descriptor: a forked child would still hold the lock
    # after the run died, and a resumed run would be refused.
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
