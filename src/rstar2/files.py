"""Atomic writes: a file or a directory is on disk in full under its name, or not at all.

The content is written to a temporary sibling, synced to disk, then renamed. After a crash at any
moment a reader sees the old content or the new content, never a part. A path has one writer at a
time; the next writer removes what a killed writer left. A full disk is a DiskFullError that names
the path, whatever the library that wrote the file has raised.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rstar2.errors import DiskFullError

NO_SPACE = "No space left on device"
NEARLY_FULL = 1 << 20
"""A failed write with less free space than this is blamed on the disk."""


def write_file(path: Path, content: bytes | str) -> None:
    """Replace a file atomically; text is encoded as UTF-8."""
    with replacing_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that replaces `path` at the end; an exception leaves `path` as is."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        full = disk_full(error, path, temporary.stat().st_size if temporary.exists() else 0)
        temporary.unlink(missing_ok=True)
        if full is not None:
            raise full from error
        raise
    temporary.replace(path)
    sync(path.parent)


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Make a directory that replaces `path` at the end; an exception leaves `path` as is.

    Directories cannot be exchanged in one step: an old one is moved aside first, so a crash
    between the two renames leaves no directory at `path`.
    """
    temporary = path.with_name(f".{path.name}.writing")
    replaced = path.with_name(f".{path.name}.replaced")
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in (temporary, replaced):
        if leftover.exists():
            shutil.rmtree(leftover)
    try:
        temporary.mkdir()
        yield temporary
        for part in sorted(temporary.rglob("*")):
            sync(part)
        sync(temporary)
    except BaseException as error:
        full = disk_full(error, path, size_of(temporary))
        shutil.rmtree(temporary, ignore_errors=True)  # the first error is the one to report
        if full is not None:
            raise full from error
        raise
    if path.exists():
        path.rename(replaced)
    temporary.rename(path)
    sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)  # the next writer removes what is left


def disk_full(error: BaseException, path: Path, written: int) -> DiskFullError | None:
    """The error as DiskFullError if the disk of `path` is full; None if it has another cause.

    Libraries hide the system's error in texts of their own, so a write that failed on a disk
    without free space counts too.
    """
    if not isinstance(error, Exception) or isinstance(error, DiskFullError):
        return None
    parent = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if not (_says_full(error) or free < NEARLY_FULL):
        return None
    return DiskFullError(
        f"no space is left on the disk of {path}: {written:,} bytes were written, {free:,} bytes "
        "are free. Free some space; the same command then resumes a run"
    )


def _says_full(error: BaseException) -> bool:
    """Whether an error, or one that caused it, is that of a full disk or quota."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if NO_SPACE in str(chain):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def size_of(directory: Path) -> int:
    """Bytes of all files in a directory."""
    return sum(part.stat().st_size for part in directory.rglob("*") if part.is_file())


def remove_unfinished(parent: Path) -> None:
    """Remove the temporary directories that killed writers left in `parent`."""
    for leftover in (*parent.glob(".*.writing"), *parent.glob(".*.replaced")):
        shutil.rmtree(leftover)


def sync(path: Path) -> None:
    """Wait until a file or the entries of a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
