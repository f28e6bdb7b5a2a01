"""Files of a call: written into its working directory in advance, collected after its end.

The worker does both, in its own scratch directory, while no process of the call runs. File contents
stay in the worker's private buffers and are never copied to its heap. Nothing follows a symbolic
link: every directory is opened by descriptor with O_NOFOLLOW, and only regular files are read. The
walk is bounded in entries and depth, the result in files and bytes.

On the wire between server and worker, files are packed one after another: lengths of name and
content, name in UTF-8, content.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import struct
from collections.abc import Collection, Iterator, Mapping

from rstar2.codeenv.sizes import MAX_FILES, MAX_FILES_BYTES, MAX_PATH_BYTES, MAX_PATH_PARTS
from rstar2.errors import UserError

_MAX_ENTRIES = 4096
"""Directory entries that are looked at; a program can create more than can be listed in time."""

_HEADER = struct.Struct("<HI")
MAX_PACKED = MAX_FILES_BYTES + MAX_FILES * (_HEADER.size + MAX_PATH_BYTES)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def pack(files: Mapping[str, bytes], scratch_mb: int) -> bytes:
    """Files as the worker reads them; UserError if they do not fit into the call's scratch."""
    parts: list[bytes] = []
    for name, content in files.items():
        encoded = name.encode()
        parts += (_HEADER.pack(len(encoded), len(content)), encoded, content)
    packed = b"".join(parts)
    if len(packed) > scratch_mb << 20:
        raise UserError(
            f"files: {len(packed)} bytes do not fit into the call's scratch_mb of {scratch_mb}; "
            "raise that limit"
        )
    return packed


def left_out_message(count: int) -> str:
    """A sentence about files that were not collected."""
    most = f"above {MAX_FILES} files or {MAX_FILES_BYTES >> 20} MB"
    return f"{count} files were not returned: {most}, or unreadable."


def unpack(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Name and content of each packed file, without copying the content."""
    at = 0
    while at < len(data):
        length, size = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        yield bytes(data[at : at + length]), data[at + length : at + length + size]
        at += length + size


def read(packed: bytes) -> dict[str, bytes]:
    """Packed files by path."""
    return {name.decode(): bytes(content) for name, content in unpack(memoryview(packed))}


def place(packed: memoryview) -> int:
    """Write files below the current directory; 0, or the error number if one cannot be written."""
    try:
        for name, content in unpack(packed):
            *directories, last = name.split(b"/")
            parent = os.open(b".", _DIRECTORY)
            try:
                for part in directories:
                    parent = _enter(parent, part)
                descriptor = os.open(
                    last, _FILE | os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=parent
                )
                try:
                    while content:
                        content = content[os.write(descriptor, content) :]
                finally:
                    os.close(descriptor)
            finally:
                os.close(parent)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _enter(parent: int, part: bytes) -> int:
    """Open a directory below another, made if it is missing; closes the other after a success."""
    try:
        child = os.open(part, _DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        os.mkdir(part, 0o755, dir_fd=parent)
        child = os.open(part, _DIRECTORY, dir_fd=parent)
    os.close(parent)
    return child


def collect(
    given: memoryview, out: memoryview, skip: Collection[str], since_ns: int = 0
) -> tuple[int, int]:
    """Pack the files below the current directory into `out`.

    Left out: those in `skip` (names in the current directory), those that did not change since
    `since_ns` (time of the inode), and those that equal the file that was `given`. Returns the
    bytes used, and how many files did not fit or could not be read.
    """
    inputs = dict(unpack(given))
    used = count = left_out = 0
    for path, descriptor, size in _walk(skip, since_ns):
        if descriptor < 0:
            left_out += 1
            continue
        try:
            start = used + _HEADER.size + len(path)
            if count == MAX_FILES or size > MAX_FILES_BYTES or start + size > len(out):
                left_out += 1
                continue
            done = _read(descriptor, out[start : start + size])
        finally:
            os.close(descriptor)
        content = out[start : start + done]
        if path in inputs and inputs[path] == content:
            continue
        _HEADER.pack_into(out, used, len(path), done)
        out[used + _HEADER.size : start] = path
        used = start + done
        count += 1
    return used, left_out


def _read(descriptor: int, view: memoryview) -> int:
    done = 0
    while done < len(view) and (count := os.readv(descriptor, [view[done:]])):
        done += count
    return done


def _walk(skip: Collection[str], since_ns: int) -> Iterator[tuple[bytes, int, int]]:
    """Path, open descriptor and size of each regular file; descriptor -1 if it cannot be read."""
    left = _MAX_ENTRIES
    directories = [b""]
    while directories:
        path = directories.pop(0)
        try:
            parent = _open_path(path)
        except OSError:
            yield path, -1, 0
            continue
        try:
            with os.scandir(parent) as listing:
                entries = list(itertools.islice(listing, left + 1))
            left -= len(entries)
            if left < 0:
                yield path, -1, 0
            for entry in sorted(entries, key=lambda entry: entry.name):
                if not path and entry.name in skip:
                    continue
                name = os.fsencode(entry.name)
                inside = path + b"/" + name if path else name
                if entry.is_dir(follow_symlinks=False):
                    if inside.count(b"/") < MAX_PATH_PARTS:
                        directories.append(inside)
                    else:  # deeper files are never returned
                        yield inside, -1, 0
                elif entry.is_file(follow_symlinks=False):
                    yield from _open_file(parent, name, inside, since_ns)
        finally:
            os.close(parent)
        if left < 0:
            return


def _open_path(path: bytes) -> int:
    parent = os.open(b".", _DIRECTORY)
    for part in path.split(b"/") if path else ():
        try:
            child = os.open(part, _DIRECTORY, dir_fd=parent)
        finally:
            os.close(parent)
        parent = child
    return parent


def _open_file(
    parent: int, name: bytes, path: bytes, since_ns: int
) -> Iterator[tuple[bytes, int, int]]:
    try:
        path.decode()
        descriptor = os.open(name, _FILE | os.O_RDONLY, dir_fd=parent)
    except (OSError, UnicodeDecodeError):
        yield path, -1, 0
        return
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_ctime_ns < since_ns:
        os.close(descriptor)
        return
    if len(path) > MAX_PATH_BYTES or path.count(b"/") >= MAX_PATH_PARTS:
        os.close(descriptor)
        descriptor = -1
    yield path, descriptor, info.st_size
