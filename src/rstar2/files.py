"""Atomic writes: a file or a directory is on disk in full under its name, or not at all.

The content is written to a temporary sibling, synced to disk, then renamed. After a crash at any
moment a reader sees the old content or the new content, never a part. A path has one writer at a
time; the next writer removes what a killed writer left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


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
    except BaseException:
        temporary.unlink(missing_ok=True)
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
    temporary.mkdir()
    try:
        yield temporary
        for part in sorted(temporary.rglob("*")):
            sync(part)
        sync(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # the first error is the one to report
        raise
    if path.exists():
        path.rename(replaced)
    temporary.rename(path)
    sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)  # the next writer removes what is left


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
