"""Processes that programs of a session left running, found in the list of their control group.

The group contains the worker, the processes of its members, and everything that programs start.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable

from rstar2.codeenv import deadlines
from rstar2.codeenv.jail import confine

_MOST_PASSES = 50
_LONGEST_LIST = 1 << 20


class StrayProcesses:
    """Kills them after each call. Construct it before the jail hides the control groups."""

    def __init__(self, directory: str) -> None:
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        os.dup2(opened, confine.GROUP_FD, inheritable=False)
        os.close(opened)

    def kill(self, keep: set[int], reap: Callable[[], None]) -> bool:
        """End every process but this one and `keep`, which must be stopped; False if new ones
        appear as fast as they are killed.

        A process that the kernel has not ended after TEARDOWN_S runs no program any more.
        """
        spared = {os.getpid(), *keep}
        give_up = time.monotonic() + deadlines.TEARDOWN_S
        for _ in range(_MOST_PASSES):
            strays = _listed() - spared
            for descriptor in [opened for pid in strays if (opened := _kill(pid)) is not None]:
                _wait(descriptor, give_up)
                os.close(descriptor)
            reap()
            if not strays:
                return True
            spared |= strays
        return False


def _kill(pid: int) -> int | None:
    """Kill a process; returns its descriptor, or None if it has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        os.close(descriptor)
        return None
    return descriptor


def _wait(descriptor: int, give_up: float) -> None:
    """Wait for the end of a process."""
    patience = select.poll()
    patience.register(descriptor, select.POLLIN)
    patience.poll(max(0.0, give_up - time.monotonic()) * 1000)


def _listed() -> set[int]:
    """The processes of the group. Opened anew each time: version 1 keeps the list of an open file
    for a second."""
    opened = os.open("cgroup.procs", os.O_RDONLY | os.O_CLOEXEC, dir_fd=confine.GROUP_FD)
    try:
        text = b""
        while part := os.read(opened, _LONGEST_LIST):
            text += part
    finally:
        os.close(opened)
    return {int(pid) for pid in text.split()}
