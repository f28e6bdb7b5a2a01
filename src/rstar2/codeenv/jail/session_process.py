"""A process that holds the state of a session, and the call in it, as their worker sees them."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import time
from dataclasses import dataclass

from rstar2.codeenv import deadlines
from rstar2.codeenv.jail import frames
from rstar2.codeenv.jail.running_call import RunningCall


class SessionProcess:
    """The process that holds a member's state, as the worker sees it."""

    def __init__(self, pid: int, sock: socket.socket, number: int) -> None:
        self.pid = pid
        self.sock = sock
        self.number = number
        """Of the member's files."""
        self._pidfd = os.pidfd_open(pid)
        try:
            os.setpgid(pid, pid)
        except PermissionError:  # copy of a process that called setsid: the guard protects it there
            return
        except OSError:
            os.close(self._pidfd)
            raise

    def send(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    def stop(self) -> bool:
        """Stop all threads and wait until they have stopped.

        False if the process has ended, or if a thread has not stopped after SESSION_STOP_S: one
        that waits in vfork stops when its child has ended. A change of state sends SIGCHLD, which
        is blocked meanwhile, so that none is missed.
        """
        deadline = time.monotonic() + deadlines.SESSION_STOP_S
        options = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        try:
            self.send(signal.SIGSTOP)
            while (state := os.waitid(os.P_PIDFD, self._pidfd, options)) is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                signal.sigtimedwait({signal.SIGCHLD}, left_s)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return state.si_code == os.CLD_STOPPED

    def discard_messages(self) -> None:
        """Drop what a program of an earlier call has sent; the process must be stopped."""
        with contextlib.suppress(OSError):  # nothing more, or it has ended
            while self.sock.recv(64):
                pass

    def has_ended(self, wait_s: float = 0.0) -> bool:
        """Whether all threads have ended; waits up to `wait_s` for that."""
        patience = select.poll()
        patience.register(self._pidfd, select.POLLIN)
        return bool(patience.poll(wait_s * 1000))

    def cpu_limit(self) -> int:
        """Seconds of CPU time after which the kernel kills the process, which must not be reaped.

        Programs can lower it.
        """
        return resource.prlimit(self.pid, resource.RLIMIT_CPU)[1]

    def end(self) -> tuple[int, resource.struct_rusage] | None:
        """Kill and reap; None if the kernel has not ended the process after TEARDOWN_S."""
        self.send(signal.SIGKILL)
        ended = self.has_ended(deadlines.TEARDOWN_S)
        self.release()
        if not ended:
            return None
        _, status, usage = os.wait4(self.pid, 0)
        return status, usage

    def release(self) -> None:
        """Close the descriptors; the process must be known to have ended, or be given up."""
        self.sock.close()
        os.close(self._pidfd)


class PipeFeeder:
    """Writes data into a pipe as fast as its reader takes it."""

    def __init__(self, data: memoryview) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self._rest = data
        self.feed()

    def feed(self) -> None:
        """Write what fits; close the pipe after the last byte or if nobody reads."""
        try:
            while self._rest:
                self._rest = self._rest[os.write(self.writer, self._rest) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._rest = self._rest[:0]
        self.close()

    @property
    def open(self) -> bool:
        return self.writer >= 0

    def close(self) -> None:
        if self.open:
            os.close(self.writer)
            self.writer = -1


@dataclass(slots=True)
class SessionCall:
    """What the worker knows about the call that runs in a member."""

    call: RunningCall
    process: SessionProcess
    copy_socket: socket.socket
    feeders: list[PipeFeeder]
    copy: SessionProcess | None = None
    """Holds the state from before the call."""
    aborted: bool = False
    """The caller has left."""
    error: int = 0
    """Why the process could not be copied: an error number."""
    done: bool = False
    """The process has carried out the order and waits for the next one."""
    ended: bool = False
    """The process was ended, or had ended by itself."""
    cpu_limited: bool = False
    """Programs had lowered its limit of CPU time."""
    lied: bool = False
    """The process has sent what makes no sense."""
    peak_kb: int = 0

    def is_own_fault(self, status: int) -> bool:
        """Whether the session's own programs made its process end, by its wait status.

        A process that was killed by the kernel, or on a machine that is too busy, may be innocent.
        Programs have changed one that ended in another way, limited its CPU time, sent what makes
        no sense, has not copied itself although its worker got its own time on the CPU, or cannot
        be stopped.
        """
        if self.call.cause != frames.EXITED:
            return self.call.cause in (frames.BROKEN, frames.NOT_STOPPED)
        return self.lied or self.cpu_limited or status != signal.SIGKILL


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair whose first end, the worker's, never blocks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def receive_listener(sock: socket.socket) -> int | None:
    """The descriptor on which notifications arrive, from a process that has just started."""
    patience = select.poll()
    patience.register(sock, select.POLLIN)
    if not patience.poll(deadlines.SESSION_ORDER_S * 1000):
        return None
    _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    return descriptors[0] if descriptors else None
