"""One running call as its worker sees it: the process, the pipes to it, and its CPU clock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time

from rstar2.codeenv.jail import frames
from rstar2.codeenv.jail.frames import WorkerRequest

RESULT_FD = 3
_FIRST_FD = 4


class RunningCall:
    """The child of one call and the pipes to it, as the worker sees them."""

    __slots__ = (
        "cause", "cpu_before", "deadline", "pid", "pidfd", "readers", "request", "started",
        "writers",
    )  # fmt: skip

    def __init__(self, request: WorkerRequest) -> None:
        self.request = request
        self.cause = frames.EXITED
        self.pid = 0
        self.pidfd = -1
        self.cpu_before: float | None = None
        """CPU time of everything in the worker before the call, once it was measured."""
        out, err, record = os.pipe(), os.pipe(), os.pipe()
        self.readers = (out[0], err[0], record[0])
        self.writers = (out[1], err[1], record[1])
        self.started = time.monotonic()
        self.deadline = self.started + request.wall_s

    def adopt(self, pid: int) -> None:
        """Remember the child by its pid and a pidfd, which also exists for one that has ended.

        OSError if the worker may open no more files: it ends, and its call is tried elsewhere.
        """
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def parent_side(self) -> None:
        """Keep the reading ends only, non-blocking: other processes may hold a writing end."""
        for writer in self.writers:
            os.close(writer)
        for reader in self.readers:
            os.set_blocking(reader, False)

    def child_side(self) -> None:
        """Put standard output, error and record on 1 to 3 and close every other descriptor."""
        out, err, record = self.writers
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.dup2(record, RESULT_FD)
        os.closerange(_FIRST_FD, 256)

    def kill(self, cause: int) -> None:
        if self.cause == frames.EXITED:
            self.cause = cause
        self.kill_quietly()

    def kill_quietly(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, 9)

    def close(self) -> None:
        for descriptor in (*self.readers, self.pidfd):
            os.close(descriptor)


def cpu_time(pid: int) -> float:
    """CPU seconds of another process, from its CPU clock (see clock_getcpuclockid)."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def spool(data: bytes) -> int:
    """A descriptor to read `data` from: a pipe if the data fits, else an unlinked file.

    The kernel makes pipes smaller when the processes of a user have many of them.
    """
    if len(data) <= 1 << 16:
        reader, writer = os.pipe()
        fits = len(data) <= 4096 or len(data) <= fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
        if fits:
            os.write(writer, data)
        os.close(writer)
        if fits:
            return reader
        os.close(reader)
    reader = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(reader, rest) :]
    os.lseek(reader, 0, os.SEEK_SET)
    return reader


def provide_stdin(data: bytes) -> None:
    """Put `data` on descriptor 0.

    Without data it is opened anew, too: locks and flags of a file that the worker keeps open would
    survive the call.
    """
    reader = spool(data) if data else os.open("/dev/null", os.O_RDWR)
    os.dup2(reader, 0)
    os.close(reader)
