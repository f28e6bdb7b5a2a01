"""Processes that programs of a session left running, found in the list of their control group.

The group contains the worker, the processes of its members, and everything that programs start. A
process that was killed runs no program any more and cannot fork, so nothing waits for its end.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

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
        """Kill every process but this one and `keep`, which must be stopped; False if new ones
        appear as fast as they are killed."""
        spared = {os.getpid(), *keep}
        for _ in range(_MOST_PASSES):
            strays = _listed() - spared
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            reap()
            if not strays:
                return True
            spared |= strays
        return False


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
