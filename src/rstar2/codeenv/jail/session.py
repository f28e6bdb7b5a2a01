"""Sessions inside a worker: one process per session holds the interpreter's state.

For each call the session process clones itself. The clone runs the program. On success the clone
becomes the session process and the old one is killed; on failure the clone ends and the old process
still holds the state from before the call. A branch is a clone that runs nothing.

    worker --code, pipes, new socket--> session process --clone(CLONE_PARENT)--> clone

Session processes hold untrusted state, so the worker trusts nothing they send: the kernel provides
the clone's pid (credentials on its socket), and wait4 its end, because CLONE_PARENT makes every
clone a child of the worker. After each call every other process in the worker is killed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import socket
import struct
import time
from typing import Any, NoReturn

from rstar2.codeenv.jail import confine, frames, runner, seccomp, syscalls
from rstar2.codeenv.jail.frames import WorkerReply, WorkerRequest
from rstar2.codeenv.jail.running_call import RESULT_FD, RunningCall, cpu_time, spool
from rstar2.codeenv.jail.worker import JailWorker

_SESSION_FD = 4
_CREDENTIALS = struct.Struct("iii")
_ORDER = struct.Struct("<cI")
_DONE = struct.Struct("<cq")
_WINDOW = 20_000
"""Range of pids to kill when a program uses up every process that the worker may have."""


class SessionProcess:
    """The process that holds a session's state, as the worker sees it."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock


class SessionWorker(JailWorker):
    """A worker that serves the sessions of one family (a session and its branches)."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.processes: dict[bytes, SessionProcess] = {}
        """By session name."""
        self.filter = None if self.spec.forks else seccomp.CallFilter(self.spec.level, session=True)
        self.listing = _open_listing(self.spec)
        self.lost = False
        """A program could not be killed completely; the server must replace this worker."""

    def answer(self, request: WorkerRequest) -> None:
        name = bytes(self.body.view[: request.name])
        if request.kind == frames.SESSION_OPEN:
            self._open(request, name)
        elif request.kind == frames.SESSION_RUN:
            self._call(request, name, b"R")
        elif request.kind == frames.SESSION_BRANCH:
            self._call(request, name, b"B")
        else:
            process = self.processes.pop(name, None)
            if process is not None:
                process.sock.close()
            self._kill_all_but_sessions()
            self._short_reply(request, frames.EXITED)

    def _short_reply(self, request: WorkerRequest, cause: int) -> None:
        self.send(WorkerReply(request.seq, 0, cause, 0, 0, 0, 0, 0.0, 0.0, 0.0))

    # ------------------------------------------------------------------ worker side

    def _open(self, request: WorkerRequest, name: bytes) -> None:
        ours, theirs = _pair()
        pid = confine.fork()
        if pid == 0:
            self._become_session_process(request, theirs)
        theirs.close()
        self.processes[name] = SessionProcess(pid, ours)
        self._short_reply(request, frames.EXITED)

    def _call(self, request: WorkerRequest, name: bytes, order: bytes) -> None:
        """Let the session process clone itself, watch the clone, and keep one of the two."""
        process = self.processes.get(name)
        if process is None:
            self._short_reply(request, frames.NO_SESSION)
            return
        call = RunningCall(request)
        ours, theirs = _pair()
        if not self._hand_over(call, process, theirs, order):
            ours.close()
            call.close()
            self.processes.pop(name)
            self._kill_all_but_sessions()
            self._short_reply(request, frames.NO_SESSION)
            return
        peak_kb = self._follow(call, ours, is_branch=order == b"B")
        status, usage = 0, None
        if peak_kb is None:
            ours.close()
            status, usage = self._collect(call)
        elif order == b"B":
            start = request.name
            self.processes[bytes(self.body.view[start : start + request.code])] = SessionProcess(
                call.pid, ours
            )
        else:
            self.processes[name] = SessionProcess(call.pid, ours)
            process.sock.close()
        spent = cpu_time(call.pid) if usage is None else usage.ru_utime + usage.ru_stime
        peak = (peak_kb or 0) if usage is None else usage.ru_maxrss
        self._kill_all_but_sessions()
        self._drain(call)
        call.close()
        out, err, record = self.streams
        self.send(
            WorkerReply(
                request.seq,
                status,
                frames.PROCESSES if self.lost else call.cause,
                int(self.lost),
                out.used,
                err.used,
                record.used,
                time.monotonic() - call.started,
                spent,
                max(0, peak - self.base_rss_kb) / 1024,
            )
        )

    def _hand_over(
        self, call: RunningCall, process: SessionProcess, theirs: socket.socket, order: bytes
    ) -> bool:
        """Send the session process its order and the clone's descriptors; False if it has ended."""
        request = call.request
        view = self.body.view
        start = request.name + request.code
        spools = [spool(bytes(view[request.name : start]))]
        spools.append(spool(bytes(view[start : start + request.stdin])))
        writers = call.writers
        message = _ORDER.pack(order, request.output_chars)
        try:
            socket.send_fds(process.sock, [message], [*spools, *writers, theirs.fileno()])
        except OSError:
            return False
        finally:
            for descriptor in (*spools, *writers):
                os.close(descriptor)
            theirs.close()
        for reader in call.readers:
            os.set_blocking(reader, False)
        return True

    def _follow(self, call: RunningCall, ours: socket.socket, is_branch: bool) -> int | None:
        """Wait until the clone reports success; returns its peak memory, or None if it failed."""
        while self.watch(call, ours.fileno()):
            try:
                data, ancillary, _, _ = ours.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                return None
            if not data:
                return None
            if call.pid == 0:
                call.adopt(_sender(ancillary))
                if is_branch:
                    return 0
            elif len(data) == _DONE.size and data[:1] == b"D":
                return int(_DONE.unpack(data)[1])
            else:
                return None
        return None

    def _check_limits(self, call: RunningCall) -> float | None:
        """Also kill a program that clones itself where no pids control group limits it."""
        left = super()._check_limits(call)
        if left is None or self.spec.forks or self.spec.level == "strict":
            return left
        if len(self._listed()) > len(self.processes) + 1:
            call.kill(frames.PROCESSES)
            return None
        return left

    def _collect(self, call: RunningCall) -> tuple[int, resource.struct_rusage | None]:
        """Kill a clone that failed; returns its wait status and usage."""
        if call.pid == 0:
            return int(signal.SIGKILL), None
        call.kill_quietly()
        try:
            _, status, usage = os.wait4(call.pid, 0)
        except ChildProcessError:
            return int(signal.SIGKILL), None
        return status, usage

    def _kill_all_but_sessions(self) -> None:
        """Kill and reap everything in this worker except the session processes."""
        keep = {process.pid for process in self.processes.values()}
        if self.listing < 0:
            self.lost = not self._sweep_by_number(keep)
            return
        confine.kill_children(self._listed, keep)
        self._reap()

    def _listed(self) -> set[int]:
        return {int(pid) for pid in os.pread(self.listing, 1 << 20, 0).split()}

    def _sweep_by_number(self, keep: set[int]) -> bool:
        """Kill every pid of the namespace until no process has appeared between two passes.

        False if a program used up all processes or pids: its session is then lost.
        """
        newest, full = 1, 0
        while full < 3:
            latest = _newest_pid()
            if latest is None:  # fork fails: a program still holds all processes
                full += 1
                bound = newest + _WINDOW
            elif latest < newest:
                return False
            else:
                bound = latest
            for pid in range(2, bound):
                if pid not in keep:
                    _kill(pid)
            self._reap()
            if latest == newest + 1:
                return True
            newest = latest or newest
        return False

    def _reap(self) -> None:
        sessions = {process.pid: name for name, process in self.processes.items()}
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in sessions:
                self.processes.pop(sessions[pid]).sock.close()

    # ------------------------------------------------------------------ session side (untrusted)

    def _become_session_process(self, request: WorkerRequest, sock: socket.socket) -> NoReturn:
        try:
            os.dup2(sock.fileno(), _SESSION_FD)
            os.closerange(_SESSION_FD + 1, 256)
            self.body.drop()
            self.confine(request)  # clones inherit these limits and cannot raise them
            gc.enable()
            runner.reseed()
            session_loop(socket.socket(fileno=_SESSION_FD), self.spec.level)
        finally:
            os._exit(121)


def _open_listing(spec: confine.JailSpec) -> int:
    """Without a PID namespace, a file that lists the worker's children at each read; else -1.

    It must be opened before the jail is entered. CLONE_PARENT makes every clone such a child.
    """
    if spec.level == "strict":
        return -1
    opened = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)
    kept = os.dup2(opened, 201, inheritable=False)
    os.close(opened)
    return kept


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


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.setblocking(False)
    return ours, theirs


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int:
    """The pid that the kernel attached to a message."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid: int = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]
            return pid
    return 0


def session_loop(sock: socket.socket, level: str) -> NoReturn:
    """Clone for each order. The clone runs the program and, on success, continues this loop."""
    namespace = runner.fresh_main()
    while True:
        data, descriptors, _, _ = socket.recv_fds(sock, 64, 8)
        if not data:
            os._exit(0)
        order, limit = _ORDER.unpack(data)
        if _clone() != 0:
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        if level != "strict":
            confine.die_with_parent()
        sock.close()
        sock = socket.socket(fileno=os.dup2(descriptors[5], _SESSION_FD, inheritable=False))
        sock.send(b"H")
        if order == b"R":
            _run_in_clone(descriptors, namespace, limit, sock)
        else:
            os.closerange(_SESSION_FD + 1, 256)


def _run_in_clone(
    descriptors: list[int], namespace: dict[str, Any], limit: int, sock: socket.socket
) -> None:
    """Run one program of a session; returns only on success."""
    with open(descriptors[0], "rb", closefd=False) as file:
        source = file.read().decode("utf-8", "replace")
    for target, descriptor in enumerate(descriptors[1:5]):
        os.dup2(descriptor, target)
    for descriptor in descriptors:
        os.close(descriptor)
    runner.prepare_streams()
    record = runner.execute(source, namespace, limit)
    if record.kind not in (frames.VALUE, frames.NOTHING):
        runner.finish(record, RESULT_FD)
        os._exit(1)
    runner.flush()
    runner.write_record(record, RESULT_FD)
    null = os.open("/dev/null", os.O_RDWR)
    for target in range(4):
        os.dup2(null, target)
    os.close(null)
    sock.send(_DONE.pack(b"D", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def _clone() -> int:
    """Fork a sibling with Python's fork hooks: the program's state may depend on them."""
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    number = syscalls.numbers()["clone"]
    pid: int = syscalls.libc.syscall(
        ctypes.c_long(number),
        ctypes.c_ulong(seccomp.CLONE_PARENT | int(signal.SIGCHLD)),
        0,
        0,
        0,
        0,
    )
    if pid == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid
