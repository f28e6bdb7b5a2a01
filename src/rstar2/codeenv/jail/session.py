"""Sessions inside a worker: a head process per session holds the interpreter's state.

Per call the head clones itself. The clone runs the program; if that goes well it becomes the new
head and the old one is killed; if not, the clone is gone and the old head still holds the state
from before the call. A branch is a clone that runs nothing.

    worker --code, pipes, new socket--> head --clone(CLONE_PARENT)--> clone: runs, then is the head

Heads hold untrusted state, so the worker believes nothing they say: the clone's pid comes from the
kernel (credentials on its socket), its end from wait4, because CLONE_PARENT makes every clone a
child of the worker. After each call everything in the worker but the heads is killed.
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
from rstar2.codeenv.jail.worker import RESULT_FD, JailWorker, RunningCall, cpu_time, spool

_CLONE_PARENT = seccomp.CLONE_PARENT
_HEAD_FD = 4
_CREDENTIALS = struct.Struct("iii")
_ORDER = struct.Struct("<cI")
_DONE = struct.Struct("<cq")
_WINDOW = 20_000
"""Numbers to kill blindly when a program holds every process that the worker may have."""


class SessionProcess:
    """The process that holds a session's state, as the worker knows it."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock


class SessionWorker(JailWorker):
    """A worker that serves the sessions of one family (a session and its branches)."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.heads: dict[bytes, SessionProcess] = {}
        self.filter = None if self.spec.forks else seccomp.CallFilter(self.spec.level, session=True)
        self.listing = _open_listing(self.spec)
        self.lost = False

    def answer(self, request: WorkerRequest) -> None:
        name = bytes(self.body.view[: request.name])
        if request.kind == frames.SESSION_OPEN:
            self._open(request, name)
        elif request.kind == frames.SESSION_RUN:
            self._call(request, name, b"R")
        elif request.kind == frames.SESSION_BRANCH:
            self._call(request, name, b"B")
        else:
            head = self.heads.pop(name, None)
            if head is not None:
                head.sock.close()
            self._sweep_all_but_heads()
            self._short_reply(request, frames.EXITED)

    def _short_reply(self, request: WorkerRequest, cause: int) -> None:
        self.send(WorkerReply(request.seq, 0, cause, 0, 0, 0, 0, 0.0, 0.0, 0.0))

    # ------------------------------------------------------------------ worker side

    def _open(self, request: WorkerRequest, name: bytes) -> None:
        ours, theirs = _pair()
        pid = confine.fork()
        if pid == 0:
            self._become_head(request, theirs)
        theirs.close()
        self.heads[name] = SessionProcess(pid, ours)
        self._short_reply(request, frames.EXITED)

    def _call(self, request: WorkerRequest, name: bytes, order: bytes) -> None:
        """Have the head clone itself, watch the clone, keep it or the old head."""
        head = self.heads.get(name)
        if head is None:
            self._short_reply(request, frames.NO_SESSION)
            return
        call = RunningCall(request)
        ours, theirs = _pair()
        if not self._hand_over(call, head, theirs, order):
            ours.close()
            call.close()
            self.heads.pop(name)
            self._sweep_all_but_heads()
            self._short_reply(request, frames.NO_SESSION)
            return
        peak_kb = self._follow(call, ours, commit_on_hello=order == b"B")
        status, usage = 0, None
        if peak_kb is None:
            ours.close()
            status, usage = self._collect(call)
        elif order == b"B":
            start = request.name
            self.heads[bytes(self.body.view[start : start + request.code])] = SessionProcess(
                call.pid, ours
            )
        else:
            self.heads[name] = SessionProcess(call.pid, ours)
            head.sock.close()
        spent = cpu_time(call.pid) if usage is None else usage.ru_utime + usage.ru_stime
        peak = (peak_kb or 0) if usage is None else usage.ru_maxrss
        self._sweep_all_but_heads()
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
        self, call: RunningCall, head: SessionProcess, theirs: socket.socket, order: bytes
    ) -> bool:
        """Send the head its order and the clone's descriptors; False if the head is gone."""
        request = call.request
        view = self.body.view
        start = request.name + request.code
        spools = [spool(bytes(view[request.name : start]))]
        spools.append(spool(bytes(view[start : start + request.stdin])))
        writers = call.writers
        message = _ORDER.pack(order, request.output_chars)
        try:
            socket.send_fds(head.sock, [message], [*spools, *writers, theirs.fileno()])
        except OSError:
            return False
        finally:
            for descriptor in (*spools, *writers):
                os.close(descriptor)
            theirs.close()
        for reader in call.readers:
            os.set_blocking(reader, False)
        return True

    def _follow(self, call: RunningCall, ours: socket.socket, commit_on_hello: bool) -> int | None:
        """Wait for the clone to say that it is done: its peak memory, or None if it failed."""
        while self.watch(call, ours.fileno()):
            try:
                data, ancillary, _, _ = ours.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                return None
            if not data:
                return None
            if call.pid == 0:
                call.adopt(_sender(ancillary))
                if commit_on_hello:
                    return 0
            elif len(data) == _DONE.size and data[:1] == b"D":
                return int(_DONE.unpack(data)[1])
            else:
                return None
        return None

    def _next_look(self, call: RunningCall) -> float | None:
        """Also see to it that a program without a pids cgroup does not clone itself."""
        left = super()._next_look(call)
        if left is None or self.spec.forks or self.spec.level == "strict":
            return left
        if len(self._listed()) > len(self.heads) + 1:
            call.kill(frames.PROCESSES)
            return None
        return left

    def _collect(self, call: RunningCall) -> tuple[int, resource.struct_rusage | None]:
        """The wait status of a clone that failed; it is killed first."""
        if call.pid == 0:
            return int(signal.SIGKILL), None
        call.kill_quietly()
        try:
            _, status, usage = os.wait4(call.pid, 0)
        except ChildProcessError:
            return int(signal.SIGKILL), None
        return status, usage

    def _sweep_all_but_heads(self) -> None:
        """Kill and reap everything in this worker except the heads."""
        keep = {head.pid for head in self.heads.values()}
        if self.listing < 0:
            self.lost = not self._sweep_by_number(keep)
            return
        while others := self._listed() - keep:
            for pid in others:
                _kill(pid)
            self._reap()
            time.sleep(0.0005)

    def _listed(self) -> set[int]:
        return {int(pid) for pid in os.pread(self.listing, 1 << 20, 0).split()}

    def _sweep_by_number(self, keep: set[int]) -> bool:
        """Kill every number of the namespace until no new process has appeared between two looks.

        False if a program used up all processes or numbers: that costs it its session.
        """
        newest, full = 1, 0
        while full < 3:
            latest = _newest_pid()
            if latest is None:  # no process can be made: something still makes them
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
        heads = {head.pid: name for name, head in self.heads.items()}
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in heads:
                self.heads.pop(heads[pid]).sock.close()

    # ------------------------------------------------------------------ head side (untrusted)

    def _become_head(self, request: WorkerRequest, sock: socket.socket) -> NoReturn:
        try:
            os.dup2(sock.fileno(), _HEAD_FD)
            os.closerange(_HEAD_FD + 1, 256)
            self.body.drop()
            self.confine(request)  # for good: clones inherit these limits and cannot raise them
            gc.enable()
            runner.reseed()
            head_loop(socket.socket(fileno=_HEAD_FD), self.spec.level)
        finally:
            os._exit(121)


def _open_listing(spec: confine.JailSpec) -> int:
    """Without a PID namespace: the worker's children, listed anew at each read; else -1.

    Opened before the jail shuts. Every process there is a child of the worker (CLONE_PARENT).
    """
    if spec.level == "strict":
        return -1
    opened = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)
    kept = os.dup2(opened, 201, inheritable=False)
    os.close(opened)
    return kept


def _newest_pid() -> int | None:
    """The highest number given out in this namespace so far; None if no process can be made."""
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


def head_loop(sock: socket.socket, level: str) -> NoReturn:
    """Clone per order; in the clone run the program and go on as the head if it went well."""
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
        sock = socket.socket(fileno=os.dup2(descriptors[5], _HEAD_FD, inheritable=False))
        sock.send(b"H")
        if order == b"R":
            _run_in_clone(descriptors, namespace, limit, sock)
        else:
            os.closerange(_HEAD_FD + 1, 256)


def _run_in_clone(
    descriptors: list[int], namespace: dict[str, Any], limit: int, sock: socket.socket
) -> None:
    """Run one program of a session; returns only if it succeeded."""
    with open(descriptors[0], "rb", closefd=False) as file:
        source = file.read().decode("utf-8", "replace")
    for target, descriptor in enumerate(descriptors[1:5]):
        os.dup2(descriptor, target)
    for descriptor in descriptors:
        os.close(descriptor)
    runner.CountingRaw.wrote = False
    runner.prepare_streams()
    record = runner.execute(source, namespace, limit)
    if record.kind not in (frames.VALUE, frames.NOTHING):
        runner.finish(record, RESULT_FD)
        os._exit(1)
    runner.flush()
    runner.hand_in(record, RESULT_FD)
    null = os.open("/dev/null", os.O_RDWR)
    for target in range(4):
        os.dup2(null, target)
    os.close(null)
    sock.send(_DONE.pack(b"D", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def _clone() -> int:
    """Fork a child of our parent, with Python's own hooks around it: state is arbitrary here."""
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    number = syscalls.numbers()["clone"]
    pid: int = syscalls.libc.syscall(
        ctypes.c_long(number), ctypes.c_ulong(_CLONE_PARENT | int(signal.SIGCHLD)), 0, 0, 0, 0
    )
    if pid == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid
