"""Frames on the socket between the server and one worker: fixed headers followed by raw bytes.

The server sends a `WorkerRequest` and its body (session name, code, standard input, files). The
worker answers with a `WorkerReply`, standard output, standard error, the record and files. The
record is what the program's process reports about its own end (value, traceback). It is untrusted:
`Record.parse` accepts any bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

MAX_BODY = 32 << 20
HELLO = b"rstar2 worker\n"

RUN, VERIFY, SESSION_OPEN, SESSION_RUN, SESSION_BRANCH, SESSION_CLOSE, RUN_HERE = range(7)
SESSION_ABORT = 7
"""SESSION_ABORT ends the running call of a session, which is then rolled back; it has no reply.
RUN_HERE is a RUN that is not handed over to a warmer interpreter; see `handover`."""
EXITED, WALL, CPU, OUTPUT, SCRATCH, NO_SESSION, FILES, NO_COPY, ABORTED, NOT_STOPPED = range(10)
NO_ROOM, BROKEN = 10, 11
"""Why a call ended. EXITED means that the program ended by itself; see the wait status. NO_COPY: a
session could not be copied, and nothing has changed; the status is an error number. FILES: a file
of the call could not be written; the status is an error number. NOT_STOPPED: a session's program
ended, but one of its threads could not be stopped, so the call was rolled back. NO_ROOM: a program
was not run because threads, memory or files that its session holds use up its own limits; the
status is an error number. BROKEN: it was not run because an earlier program had broken the process
of the session, which is lost; the status is that of the process."""


REQUEST = struct.Struct("<QIIIIIIIIddII")
REPLY = struct.Struct("<QiIIIIIdddII")


class WorkerRequest(NamedTuple):
    """Header of a call. `name` (of a session), `code`, `stdin` and `files` are lengths in bytes."""

    seq: int
    kind: int
    name: int
    code: int
    stdin: int
    memory_mb: int
    processes: int
    file_mb: int
    output_chars: int
    wall_s: float
    cpu_s: float
    files: int = 0
    collect: int = 0
    """1 to answer with the files that the program leaves in its working directory."""

    def pack(self) -> bytes:
        return REQUEST.pack(*self)


class WorkerReply(NamedTuple):
    """Header of an answer. `status` is a wait status, unless the cause says that it is an error
    number; `retire` asks the server for a new worker."""

    seq: int
    status: int
    cause: int
    retire: int
    stdout: int
    stderr: int
    record: int
    wall_s: float
    cpu_s: float
    peak_mb: float
    files: int = 0
    left_out: int = 0
    """Files that were not collected: too many, too large or unreadable."""

    def pack(self) -> bytes:
        return REPLY.pack(*self)

    @property
    def body(self) -> int:
        return self.stdout + self.stderr + self.record + self.files

    def record_in(self, body: bytes) -> bytes:
        """The record's bytes in the body of the answer."""
        start = self.stdout + self.stderr
        return body[start : start + self.record]


def output_cap(output_chars: int) -> int:
    """Bytes of one stream after which a call is killed; far more than the result shows."""
    return max(1 << 20, 16 * output_chars)


VALUE, NOTHING, EXCEPTION, SYNTAX, EXIT, MEMORY, JSON, REFUSED, HANDOVER = KINDS = b"VNESXMJRH"


@dataclass(frozen=True, slots=True)
class Record:
    """What a program's process reported at its end. `cut` counts characters left out of `text`."""

    kind: int
    message: str = ""
    text: str = ""
    cut: int = 0

    _layout: ClassVar[struct.Struct] = struct.Struct("<BIQ")

    def pack(self) -> bytes:
        message = self.message.encode("utf-8", "backslashreplace")
        text = self.text.encode("utf-8", "backslashreplace")
        return self._layout.pack(self.kind, len(message), self.cut) + message + text

    @classmethod
    def parse(cls, data: bytes) -> Record | None:
        """Read a record; None if the bytes are not a record."""
        if len(data) < cls._layout.size:
            return None
        kind, length, cut = cls._layout.unpack_from(data)
        rest = data[cls._layout.size :]
        if kind not in KINDS or length > len(rest):
            return None
        message = rest[:length].decode("utf-8", "replace")
        return cls(kind, message, rest[length:].decode("utf-8", "replace"), cut)
