"""The worker decides about signals and copies of its session processes.

A session and its branches share a PID namespace (portable: the host's), so that a program could end
the processes of other branches. The filter of session processes (`seccomp.session_filter`) suspends
such system calls until the worker has answered. The decision depends only on numbers in registers:
a program cannot change them afterwards.

Rules: a program may signal its own process. In strict it may also signal processes that it started,
but no process that holds the state of a session. Where programs cannot fork, a session process may
copy itself only when the worker has asked for a copy.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import struct
from collections.abc import Iterable

from rstar2.codeenv.jail import seccomp, syscalls

_NOTIFICATION = struct.Struct("<QIIiIQ6Q")
"""id, pid, flags; number, architecture, instruction pointer and arguments of the system call."""
_ANSWER = struct.Struct("<QqiI")
"""id, return value, negative error number, flags."""
_CONTINUE = 1


class SessionGuard:
    """Answers the notifications of one family of session processes."""

    def __init__(self, listener: int, strict: bool) -> None:
        self.listener = listener
        self._strict = strict
        numbers = syscalls.numbers()
        self._clone = numbers["clone"]
        to_thread = ("tgkill", "rt_tgsigqueueinfo")
        self._signal_at = {numbers[name]: 2 if name in to_thread else 1 for name in seccomp.SIGNALS}
        """Which argument of a system call is the signal."""
        self._running = 0
        self._protected: set[int] = set()
        self._copies = 0
        self.suicide = False
        """The running process has been killed by its own program, a thread or a child of it."""

    def expect(self, running: int, others: Iterable[int]) -> None:
        """A call starts in the process `running`, which makes one copy of itself first."""
        self._running = running
        self._protected = {1, *others}
        self._copies = 1
        self.suicide = False

    def protect(self, pid: int) -> None:
        """No program may signal this process."""
        self._protected.add(pid)

    def answer(self) -> None:
        """Receive one notification and answer it."""
        notification = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(self.listener, seccomp.NOTIFICATION_RECEIVE, notification)
            identity, sender, _, number, _, _, *arguments = _NOTIFICATION.unpack(notification)
            target = ctypes.c_int(arguments[0] & 0xFFFFFFFF).value
            error = self._decide(number, target, sender)
            sent = arguments[self._signal_at[number]] if number in self._signal_at else 0
            if not error and sent & 0xFFFFFFFF == signal.SIGKILL:
                self.suicide |= self._hits_running(target, sender)
            answer = bytearray(_ANSWER.pack(identity, 0, -error, 0 if error else _CONTINUE))
            fcntl.ioctl(self.listener, seccomp.NOTIFICATION_SEND, answer)
        except OSError as problem:
            if problem.errno not in (errno.ENOENT, errno.EINTR):  # the sender was killed meanwhile
                raise

    def _decide(self, number: int, target: int, sender: int) -> int:
        """0 to allow the system call, else the error number that it fails with."""
        if number == self._clone:
            self._copies -= 1
            return 0 if self._copies >= 0 else errno.EAGAIN
        if target == self._running:
            return 0
        if not self._strict or target == -1 or target in self._protected:
            return errno.EPERM
        try:
            if target > 0:
                os.close(os.pidfd_open(target))  # fails for a thread of another process
                return 0
            group = -target if target else os.getpgid(sender)
            return errno.EPERM if any(_in_group(pid, group) for pid in self._protected) else 0
        except OSError as problem:
            return errno.ESRCH if problem.errno == errno.ESRCH else errno.EPERM

    def _hits_running(self, target: int, sender: int) -> bool:
        """Whether a signal reaches the running process: by its pid or its process group."""
        if target > 0:
            return target == self._running
        try:
            return os.getpgid(self._running) == (-target if target else os.getpgid(sender))
        except ProcessLookupError:
            return False


def _in_group(pid: int, group: int) -> bool:
    """Whether a process belongs to a process group."""
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False
