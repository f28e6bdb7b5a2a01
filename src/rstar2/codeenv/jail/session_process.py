"""A process that holds the state of a session, and the call in it, as their worker sees them."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
from dataclasses import dataclass

from rstar2.codeenv import deadlines
from rstar2.codeenv.jail.running_call import RunningCall


class SessionProcess:
    """The process that holds a member's state, as the worker sees it."""

    def __init__(self, pid: int, sock: socket.socket, number: int) -> None:
        self.pid = pid
        self.sock = sock
        self.number = number
        """Of the member's files."""
        self._pidfd = os.pidfd_open(pid)
        os.setpgid(pid, pid)

    def send(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    def stop(self) -> bool:
        """Stop all threads and wait until they have stopped; False if the process has ended."""
        self.send(signal.SIGSTOP)
        state = os.waitid(os.P_PIDFD, self._pidfd, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return state is not None and state.si_code == os.CLD_STOPPED

    def end(self) -> tuple[int, resource.struct_rusage] | None:
        """Kill and reap; None if the kernel has not ended the process after TEARDOWN_S."""
        self.send(signal.SIGKILL)
        self.sock.close()
        patience = select.poll()
        patience.register(self._pidfd, select.POLLIN)
        ended = patience.poll(deadlines.TEARDOWN_S * 1000)
        os.close(self._pidfd)
        if not ended:
            return None
        _, status, usage = os.wait4(self.pid, 0)
        return status, usage


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
    peak_kb: int = 0


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair whose first end, the worker's, never blocks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs
