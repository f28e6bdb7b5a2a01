"""The files of a session and its branches: each member of a family has its own.

The worker keeps the files of all members in one directory that programs cannot reach, and moves
those of the member whose call is next into the scratch directory that programs see. Moving renames
entries, so that open files, and the paths that a program knows, stay valid. Calls of a family run
one after another, and the processes of the others are stopped meanwhile.

    files/ shm/           what the running program sees as its scratch directory and /dev/shm
    store/NUMBER/files/   the files of another member
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from rstar2.codeenv.jail import scratch

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_STORE = "store"
_DEEPEST = 64
"""Directories inside each other that a branch copies."""
_FILES_MODE = 0o1777
_COARSE_CLOCK = 5
"""CLOCK_REALTIME_COARSE: the clock of file times."""


class FilesBefore(NamedTuple):
    """Files before a call: the state of each inode, and the names with the inode of their parent.

    Numbers of inodes may be used again: a file is the same one only in the same state.
    """

    states: dict[int, tuple[int, int, int]]
    names: set[tuple[int, str]]


def _state(info: os.stat_result) -> tuple[int, int, int]:
    """What writing changes, but renaming and linking do not. Of a directory: only its type."""
    if stat.S_ISDIR(info.st_mode):
        return (stat.S_IFDIR, 0, 0)
    return (stat.S_IFMT(info.st_mode), info.st_mtime_ns, info.st_blocks)


class SessionFiles:
    """The files of one family. `holder` is a descriptor of the directory described above."""

    def __init__(self, holder: int, places: Collection[str]) -> None:
        self._holder = holder
        self._shown = 0
        """Number of the member whose files are in place; 0 for none."""
        self._keep: dict[str, set[str]] = {}
        """Entries that belong to no member: an interpreter that is installed below scratch."""
        for place in places:
            opened = self._open(place)
            self._keep[place] = set(os.listdir(opened))
            os.close(opened)
        os.mkdir(_STORE, 0o700, dir_fd=holder)

    def show(self, number: int) -> None:
        """Put the files of a member in place; OSError if that fails: the family is then lost."""
        if number == self._shown:
            return
        for place, keep in self._keep.items():
            if self._shown:
                self._move(place, self._stored(self._shown, place), keep)
            self._move(self._stored(number, place), place, ())
        self._shown = number

    def copy(self, number: int) -> None:
        """Copy the files that are in place for a new member; OSError if that is impossible."""
        try:
            for place, keep in self._keep.items():
                source, target = self._open(place), self._open(self._stored(number, place))
                try:
                    _copy_tree(source, target, keep)
                finally:
                    os.close(source)
                    os.close(target)
        except OSError:
            self.drop(number)
            raise

    def snapshot(self) -> FilesBefore:
        """The files in place, as `discard_changes` compares with them."""
        before = FilesBefore({}, set())

        def note(here: int) -> list[str]:
            directories = []
            parent = os.fstat(here).st_ino
            for name in os.listdir(here):
                info = os.stat(name, dir_fd=here, follow_symlinks=False)
                before.states[info.st_ino] = _state(info)
                before.names.add((parent, name))
                if stat.S_ISDIR(info.st_mode):
                    directories.append(name)
            return directories

        self._walk(note, lambda name, here: None)
        return before

    def discard_changes(self, before: FilesBefore) -> None:
        """Remove the files in place that were created or written since the snapshot.

        Files that were only renamed or linked stay, under one name. So do directories that are not
        empty then.
        """

        def remove_new(here: int) -> list[str]:
            directories = []
            parent = os.fstat(here).st_ino
            for name in os.listdir(here):
                info = os.stat(name, dir_fd=here, follow_symlinks=False)
                moved = (parent, name) not in before.names
                if stat.S_ISDIR(info.st_mode):
                    directories.append(name)
                elif before.states.get(info.st_ino) != _state(info) or (
                    moved and info.st_nlink > 1
                ):
                    os.unlink(name, dir_fd=here)
            return directories

        def remove_directory(name: str, here: int) -> None:
            if os.stat(name, dir_fd=here, follow_symlinks=False).st_ino in before.states:
                return
            try:
                os.rmdir(name, dir_fd=here)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise

        self._walk(remove_new, remove_directory)

    def _walk(self, visit: Callable[[int], list[str]], leave: Callable[[str, int], None]) -> None:
        """Walk the files in place, whatever modes a program gave them.

        Directories stay unlocked: one that cannot be read would end every later call in portable,
        where its files are counted.
        """

        def enter(name: str, here: int) -> int:
            mode = stat.S_IMODE(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode)
            if mode & 0o700 != 0o700:
                os.chmod(name, mode | 0o700, dir_fd=here)
            return os.open(name, _DIRECTORY, dir_fd=here)

        for place in self._keep:
            opened = self._open(place)
            try:
                scratch.walk(opened, visit, enter, leave)
            finally:
                os.close(opened)

    def drop(self, number: int) -> None:
        """Remove the files of a member."""
        if number == self._shown:
            for place, keep in self._keep.items():
                opened = self._open(place)
                try:
                    scratch.empty(opened, keep)
                finally:
                    os.close(opened)
            self._shown = 0
        store = os.open(_STORE, _DIRECTORY, dir_fd=self._holder)
        try:
            if str(number) in os.listdir(store):
                opened = os.open(str(number), _DIRECTORY, dir_fd=store)
                try:
                    scratch.empty(opened)
                finally:
                    os.close(opened)
                os.rmdir(str(number), dir_fd=store)
        finally:
            os.close(store)

    def _stored(self, number: int, place: str) -> str:
        """The path of a member's files while they are not in place; made if it is missing."""
        for path in (f"{_STORE}/{number}", f"{_STORE}/{number}/{place}"):
            try:
                os.mkdir(path, 0o700, dir_fd=self._holder)
            except FileExistsError:
                continue
        return f"{_STORE}/{number}/{place}"

    def _open(self, path: str) -> int:
        """Open a directory of the holder, whatever mode a program gave it."""
        mode = stat.S_IMODE(os.stat(path, dir_fd=self._holder, follow_symlinks=False).st_mode)
        if mode & 0o700 != 0o700:
            os.chmod(path, _FILES_MODE, dir_fd=self._holder)
        return os.open(path, _DIRECTORY, dir_fd=self._holder)

    def _move(self, source: str, target: str, keep: Collection[str]) -> None:
        """Move the entries of one directory to another."""
        here, there = self._open(source), self._open(target)
        try:
            for name in os.listdir(here):
                if name not in keep:
                    _rename(name, here, there)
        finally:
            os.close(here)
            os.close(there)


def _rename(name: str, here: int, there: int) -> None:
    """Move one entry; a directory must be writable for that."""
    info = os.stat(name, dir_fd=here, follow_symlinks=False)
    locked = stat.S_ISDIR(info.st_mode) and not info.st_mode & 0o200
    if locked:
        os.chmod(name, 0o700, dir_fd=here)
    os.rename(name, name, src_dir_fd=here, dst_dir_fd=there)
    if locked:
        os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=there)


def _copy_tree(source: int, target: int, keep: Collection[str] = (), depth: int = 0) -> None:
    """Copy directories, regular files and symbolic links; leave out sockets."""
    if depth > _DEEPEST:
        raise OSError(errno.ENAMETOOLONG, f"directories are nested deeper than {_DEEPEST}")
    for name in os.listdir(source):
        if name in keep:
            continue
        info = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISDIR(info.st_mode):
            os.mkdir(name, 0o700, dir_fd=target)
            _copy_directory(name, source, target, depth)
        elif stat.S_ISREG(info.st_mode):
            _copy_file(name, source, target)
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            continue
        else:
            continue
        os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=target)
        os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=target)


def _copy_directory(name: str, source: int, target: int, depth: int) -> None:
    here = _unlocked(name, source, _DIRECTORY, 0o700)
    there = os.open(name, _DIRECTORY, dir_fd=target)
    try:
        _copy_tree(here, there, depth=depth + 1)
    finally:
        os.close(here)
        os.close(there)


def _copy_file(name: str, source: int, target: int) -> None:
    here = _unlocked(name, source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    there = os.open(name, flags, 0o600, dir_fd=target)
    try:
        size = os.fstat(here).st_size
        for start, end in _parts_with_data(here, size):
            os.lseek(there, start, os.SEEK_SET)
            while start < end and (count := os.sendfile(there, here, start, end - start)):
                start += count
        os.ftruncate(there, size)
    finally:
        os.close(here)
        os.close(there)


def _parts_with_data(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and end of each part that is not a hole. A copy with the holes filled in could take
    far more space."""
    end = 0
    while end < size:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # the rest is a hole
            raise
        end = os.lseek(file, start, os.SEEK_HOLE)
        yield start, end


def _unlocked(name: str, parent: int, flags: int, needed: int) -> int:
    """Open an entry, whatever mode the program gave it."""
    mode = stat.S_IMODE(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    if mode & needed == needed:
        return os.open(name, flags, dir_fd=parent)
    os.chmod(name, mode | needed, dir_fd=parent)
    try:
        return os.open(name, flags, dir_fd=parent)
    finally:
        os.chmod(name, mode, dir_fd=parent)


def next_file_time() -> int:
    """A time of the clock of file times that no earlier change has."""
    before = time.clock_gettime_ns(_COARSE_CLOCK)
    while (now := time.clock_gettime_ns(_COARSE_CLOCK)) == before:
        time.sleep(0.0005)
    return now
