"""Processes that programs of a session left running, found without /proc by their numbers.

The kernel numbers the processes of a PID namespace upwards, so those of a call have higher numbers
than everything before it. Numbers of threads are skipped: a signal to one ends its whole process.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from rstar2.codeenv.jail import confine

_WINDOW = 20_000
"""Range of pids to kill when a program uses up every process that the worker may have."""
_MOST_PASSES = 50
_MOST_SEARCHED = 1 << 17
"""The most pids that are searched after the kernel has started again from the lowest one."""


class StrayProcesses:
    """Kills them after each call. Construct it before the jail hides /proc."""

    def __init__(self) -> None:
        self._swept = 1
        """Every process with a higher pid is new since the last call."""
        self._most_pids = int(Path("/proc/sys/kernel/pid_max").read_text())

    def kill(self, keep: set[int], reap: Callable[[], None]) -> bool:
        """Kill every new process but `keep`, which must be stopped; False if that fails."""
        for _ in range(_MOST_PASSES):
            newest = _newest_pid()
            pids = self._new_pids(newest)
            if pids is None:
                return False
            killed = [pid for pid in pids if pid not in keep and _kill(pid)]
            reap()
            if newest is not None:
                self._swept = newest
                if not killed:
                    return True
        return False

    def _new_pids(self, newest: int | None) -> Iterable[int] | None:
        """The numbers of processes that were created since the last call; None if unknown."""
        if newest is None:  # fork fails: a program holds all processes
            return range(self._swept, self._swept + _WINDOW)
        if newest >= self._swept:
            return range(self._swept, newest)
        if self._most_pids - self._swept + newest > _MOST_SEARCHED:
            return None
        return itertools.chain(range(self._swept, self._most_pids + 1), range(2, newest))


def _newest_pid() -> int | None:
    """The newest pid of this namespace; None if no process can be created."""
    try:
        pid = confine.fork()
    except OSError:
        return None
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def _kill(pid: int) -> bool:
    """Kill a process; False if there is none with this number (it may be that of a thread)."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True
