"""The scratch space of a worker: how much of it a call uses, and how it is emptied afterwards.

A program decides what lies in its scratch space: names, depth, modes and times. So everything here
goes from descriptor to descriptor, one directory at a time: no paths that can become too long, no
recursion, no symbolic links that are followed.

Invariant: after `Scratch.restore` has returned True, the directories have the entries, mode, owner
and times that they had before the first call. Otherwise the worker must be replaced.
"""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Callable, Collection

from rstar2.codeenv import deadlines

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SMALLEST = 4096
"""Bytes that an entry counts at least: empty files and directories take space, too."""
_MOST_BLIND = 20
"""Incomplete counts in a row after which a program is taken to hide its files."""
_MOST_NESTED = 256
"""Landlock checks every directory on the way to the root, so that deep trees make it slow."""


class MovedError(OSError):
    """A directory was moved while it was being walked."""


class ScratchFullError(Exception):
    """A program's files take more space, or are nested more deeply, than allowed."""


def walk(
    top: int,
    visit: Callable[[int], list[str]],
    enter: Callable[[str, int], int],
    leave: Callable[[str, int], None],
) -> None:
    """Walk a directory tree depth first, with one directory open at a time.

    `visit` gets a directory and returns the names of the subdirectories to walk. `enter` opens one
    of them. `leave` is called in the parent after a subdirectory.
    """
    here = os.dup(top)
    path: list[tuple[str, tuple[int, int]]] = []
    """Name of each directory on the way, and identity of its parent."""
    try:
        todo = [visit(here)]
        while True:
            if todo[-1]:
                name = todo[-1].pop()
                path.append((name, _identity(here)))
                child = enter(name, here)
                os.close(here)
                here = child
                todo.append(visit(here))
            elif path:
                parent = os.open("..", _DIRECTORY, dir_fd=here)
                os.close(here)
                here = parent
                name, identity = path.pop()
                if _identity(here) != identity:
                    raise MovedError(f"directory {name!r} was moved")
                todo.pop()
                leave(name, here)
            else:
                return
    finally:
        os.close(here)


def _identity(descriptor: int) -> tuple[int, int]:
    info = os.fstat(descriptor)
    return info.st_dev, info.st_ino


def empty(top: int, keep: Collection[str] = (), give_up: float = math.inf) -> None:
    """Remove everything in a directory but the entries `keep`.

    OSError if that fails, TimeoutError (an OSError) at the monotonic time `give_up`.
    """
    spared = set(keep)

    def remove_files(here: int) -> list[str]:
        if time.monotonic() > give_up:
            raise TimeoutError("scratch could not be emptied in time")
        with os.scandir(here) as listing:
            entries = [entry for entry in listing if entry.name not in spared]
        spared.clear()  # the first directory is `top`
        directories = []
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=here)
        return directories

    def unlock(name: str, here: int) -> int:
        """Open a directory, whatever mode the program gave it."""
        mode = os.stat(name, dir_fd=here, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
            os.chmod(name, 0o700, dir_fd=here)
        return os.open(name, _DIRECTORY, dir_fd=here)

    walk(top, remove_files, unlock, lambda name, here: os.rmdir(name, dir_fd=here))


def remove_tree(path: str) -> None:
    """Remove a directory and everything in it; OSError if that fails.

    No process may use the tree any more: modes are changed by name.
    """
    top = os.open(path, _DIRECTORY)
    try:
        empty(top)
    finally:
        os.close(top)
    os.rmdir(path)


class ScratchDirectory:
    """One directory that a worker's calls may write to, and its state before the first call."""

    def __init__(self, path: str, on_tmpfs: bool) -> None:
        opened = os.open(path, _DIRECTORY)
        self._on_tmpfs = on_tmpfs
        self.descriptor = opened
        self.keep = frozenset(os.listdir(opened))
        """Paths to an interpreter that is installed below it."""
        self._kept = self._identities()
        self._entries = self._count()
        self._state = self._metadata()

    def _count(self) -> int:
        """A number that changes when a call leaves something in the directory."""
        if not self._on_tmpfs:
            return len(os.listdir(self.descriptor))
        info = os.statvfs(self.descriptor)
        return info.f_files - info.f_ffree

    def _metadata(self) -> tuple[int, int, int, int, int]:
        info = os.fstat(self.descriptor)
        return info.st_mode, info.st_uid, info.st_gid, info.st_atime_ns, info.st_mtime_ns

    def _identities(self) -> list[tuple[int, int, int, str]]:
        """What the entries `keep` are: a call could replace them. OSError if one is missing."""
        found = []
        for name in sorted(self.keep):
            info = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            link = os.readlink(name, dir_fd=self.descriptor) if stat.S_ISLNK(info.st_mode) else ""
            found.append((info.st_dev, info.st_ino, info.st_mode, link))
        return found

    def restore(self, give_up: float) -> bool:
        """Undo what a call did to the directory and in it; False if that is impossible."""
        try:
            if self._identities() != self._kept:
                return False
        except OSError:
            return False
        if self._metadata() == self._state and self._count() == self._entries:
            return True
        mode, _, _, accessed, modified = self._state
        try:
            os.fchmod(self.descriptor, stat.S_IMODE(mode))
            if self._count() != self._entries:
                empty(self.descriptor, self.keep, give_up)
            os.utime(self.descriptor, ns=(accessed, modified))
        except OSError:
            return False
        return self._metadata() == self._state and self._count() == self._entries


class Scratch:
    """All directories that the calls of a worker may write to."""

    def __init__(self, paths: Collection[str], on_tmpfs: bool) -> None:
        self._directories = [ScratchDirectory(path, on_tmpfs) for path in paths]
        self._blind = 0

    @property
    def keep(self) -> frozenset[str]:
        """Entries of the working directory that belong to no call."""
        return self._directories[0].keep

    def restore(self) -> bool:
        """Undo what a call did; False if the worker must be replaced."""
        give_up = time.monotonic() + deadlines.TEARDOWN_S
        return all(directory.restore(give_up) for directory in self._directories)

    def exceeds(self, limit: int) -> bool:
        """Whether a running program's files take more than `limit` bytes, or cannot be counted."""
        total = depth = 0

        def add(here: int) -> list[str]:
            nonlocal total, depth
            depth += 1
            directories = []
            with os.scandir(here) as listing:
                for entry in listing:
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    total += max(info.st_blocks * 512, _SMALLEST)
                    if total > limit:
                        raise ScratchFullError
                    if stat.S_ISDIR(info.st_mode):
                        directories.append(entry.name)
            return directories

        def enter(name: str, here: int) -> int:
            if depth > _MOST_NESTED:
                raise ScratchFullError
            return os.open(name, _DIRECTORY, dir_fd=here)

        def leave(name: str, here: int) -> None:
            nonlocal depth
            depth -= 1

        try:
            for directory in self._directories:
                walk(directory.descriptor, add, enter, leave)
        except (ScratchFullError, PermissionError):
            return True  # PermissionError: a directory that even its owner cannot read
        except OSError:  # it changed during the walk; usually the next check can count it
            self._blind += 1
            return self._blind > _MOST_BLIND
        self._blind = 0
        return False
