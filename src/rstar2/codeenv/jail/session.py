"""A worker that serves a session and its branches: one process per member holds its state.

    worker --order, pipes, socket of the copy--> process --clone(CLONE_PARENT)--> copy
    worker <--copied, done---------------------- process

For each call the process of a member copies itself and then runs the program. On success the copy
is killed; the process, with its threads, holds the new state. On failure the process is killed, and
the copy, which holds the state from before the call, takes its place. A branch is a copy that
becomes a member. Between calls every process is stopped, so idle threads use no CPU time.

Session processes hold untrusted state, so the worker trusts nothing they send. CLONE_PARENT makes
every copy a child of the worker, which verifies that and reads its end from the kernel. After each
call every process in the worker except those of members is killed. `session_guard` keeps programs
from ending processes of other members, `session_files` keeps their files apart.

Calls of one family run one after another.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import select
import signal
import socket
import time
from typing import Any, NoReturn

from rstar2.codeenv import deadlines
from rstar2.codeenv.jail import cgroups, confine, files, frames, runner, seccomp, session_program
from rstar2.codeenv.jail.frames import WorkerReply, WorkerRequest
from rstar2.codeenv.jail.running_call import RunningCall, cpu_time
from rstar2.codeenv.jail.session_files import FilesBefore, SessionFiles, next_file_time
from rstar2.codeenv.jail.session_guard import SessionGuard
from rstar2.codeenv.jail.session_process import (
    PipeFeeder,
    SessionCall,
    SessionProcess,
    receive_listener,
    socket_pair,
)
from rstar2.codeenv.jail.strays import StrayProcesses
from rstar2.codeenv.jail.worker import JailWorker, limit_files, readable

_FIRST_CHECK_S = 0.005
_NO_LIMIT_S = 1e9
_COPY_ERRORS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE)
"""Why a process cannot copy itself: processes, memory, or no room for the descriptors it needs."""
_PUNCTUAL_S = 1.0
"""A worker that notices a deadline this much later is on a machine that is too busy."""
_SPARE_FILES = 64
"""Descriptors that a worker needs in addition to two for each member."""


class SessionWorker(JailWorker):
    """A worker that serves the members of one family (a session and its branches)."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tidy = lambda: None  # new huge pages would not be shared with the zygote
        self.members: dict[bytes, SessionProcess] = {}
        """By session name."""
        self._numbers = itertools.count(1)
        group = self.spec.group.pids
        self._strays = StrayProcesses(group) if self.spec.forks and group else None
        self._lost = False
        """The family cannot be used any more; the server must replace this worker."""

    def _measure(self) -> None:
        """Prepare the places of files. The baseline of memory is that of the worker itself."""
        holder, places = confine.HOLDER_FD, list(confine.SESSION_PLACES)
        if self.spec.level != "strict":
            holder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
            del places[1:]
            os.mkdir(places[0], 0o700)
            os.chdir(places[0])
        self.session_files = SessionFiles(holder, places)
        self.base_rss_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._open_scratch()

    def answer(self, request: WorkerRequest) -> None:
        """Carry out one order of the server."""
        name = bytes(self.body.view[: request.name])
        if request.kind == frames.SESSION_ABORT:
            self.body.drop()  # the call that it was meant for has ended
        elif request.kind == frames.SESSION_OPEN:
            self._open(request, name)
        elif name not in self.members:
            self._reply(request, frames.NO_SESSION)
        elif request.kind == frames.SESSION_RUN:
            self._run_call(request, name)
        elif request.kind == frames.SESSION_BRANCH:
            self._branch(request, name)
        else:
            self._close(name)
            self._reply(request, frames.EXITED)

    def _reply(self, request: WorkerRequest, cause: int, status: int = 0) -> None:
        """Reply to an order that ran no program."""
        lost = int(self._lost)
        self.send(WorkerReply(request.seq, status, cause, lost, 0, 0, 0, 0.0, 0.0, 0.0))

    # ------------------------------------------------------------------ members

    def _open(self, request: WorkerRequest, name: bytes) -> None:
        ours, theirs = socket_pair()
        pid = confine.fork()
        if pid == 0:
            self._become_session_process(request, theirs)
        theirs.close()
        process = SessionProcess(pid, ours, next(self._numbers))
        listener = receive_listener(ours)
        if listener is None or not process.stop():
            if listener is not None:
                os.close(listener)
            process.end()
            self._reply(request, frames.NO_SESSION)
            return
        self.guard = SessionGuard(listener, strict=self.spec.level == "strict")
        self.members[name] = process
        self.session_files.show(process.number)
        self._reply(request, frames.EXITED)

    def _become_session_process(self, request: WorkerRequest, sock: socket.socket) -> NoReturn:
        """In the first process of a family: enter its limits, then wait for orders."""
        try:
            os.dup2(sock.fileno(), session_program.SESSION_FD, inheritable=False)
            os.closerange(session_program.SESSION_FD + 1, session_program.DESCRIPTORS)
            sock.detach()
            self.body.drop()
            sock = socket.socket(fileno=session_program.SESSION_FD)
            self.limit_session(request)
            listener = seccomp.session_filter(
                self.spec.level, self.spec.forks
            ).install_with_listener()
            socket.send_fds(sock, [b"L"], [listener])
            os.close(listener)
            limit_files()
            runner.reseed()
            session_program.serve(sock, self.spec.level)
        finally:
            os._exit(121)

    def limit_session(self, request: WorkerRequest) -> None:
        """Set the limits of a family's processes; copies inherit them and cannot raise them."""
        self.filter = None  # a session has its own
        self.confine(request._replace(cpu_s=_NO_LIMIT_S))  # CPU time is limited per call
        if self.spec.level != "strict":
            confine.die_with_parent()
            confine.keep_to_working_directory(self.spec)

    def _close(self, name: bytes) -> None:
        if self.members[name].end() is None:
            self._lost = True
        self._remove_member(name)
        self._kill_strays()

    def _remove_member(self, name: bytes) -> None:
        """The process of a member has ended: remove its files, too."""
        self._drop_files(self.members.pop(name).number)

    def _drop_files(self, number: int) -> None:
        """Remove the files of a member; the family is lost if that fails."""
        try:
            self.session_files.drop(number)
        except OSError:
            self._lost = True

    def _branch(self, request: WorkerRequest, name: bytes) -> None:
        process = self.members[name]
        start = request.name
        branch = bytes(self.body.view[start : start + request.code])
        number = next(self._numbers)
        if 2 * len(self.members) + _SPARE_FILES > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            return self._reply(request, frames.NO_COPY, errno.EMFILE)
        if not self._show_files(process):
            return self._reply(request, frames.NO_SESSION)
        try:
            self.session_files.copy(number)
        except OSError as error:
            return self._reply(request, frames.NO_COPY, error.errno or errno.EIO)
        running = self._begin(request, process, session_program.COPY, [])
        self._watch(running)
        running.call.close()
        copy = running.copy
        if copy is None:
            running.copy_socket.close()
            self._drop_files(number)
        else:
            copy.number = number
            self.members[branch] = copy
        if not self._stopped(running):
            status = self._end_process(running)
            self._remove_member(name)
            self._kill_strays()
            return self._reply_not_run(request, running, status)
        if copy is None:
            return self._reply(request, frames.NO_COPY, running.error)
        return self._reply(request, frames.EXITED)

    def _show_files(self, process: SessionProcess) -> bool:
        try:
            self.session_files.show(process.number)
        except OSError:
            self._lost = True
        return not self._lost

    # ------------------------------------------------------------------ one call

    def _run_call(self, request: WorkerRequest, name: bytes) -> None:
        process = self.members[name]
        if not self._show_files(process):
            self._reply(request, frames.NO_SESSION)
            return
        portable = self.spec.level != "strict"
        before = self.session_files.snapshot() if portable else None
        if request.files and (error := files.place(self.given_files(request))):
            self._discard_changes(before)
            self._reply(request, frames.FILES, error)
            return
        since_ns = next_file_time() if request.collect else 0
        view, start = self.body.view, request.name + request.code
        feeders = [
            PipeFeeder(view[request.name : start]),
            PipeFeeder(view[start : start + request.stdin]),
        ]
        running = self._begin(request, process, session_program.RUN, feeders)
        call = running.call
        self._watch(running)
        cpu_s = self.cpu_used(call)
        status = self._keep_one(name, running)
        if running.copy is None:
            call.close()
            self._reply_not_run(request, running, status)
            return
        self._kill_strays()
        if call.cause == frames.SCRATCH:
            self._discard_changes(before)
        self._drain(call)
        call.close()
        out, err, record = self.streams
        left_out = 0
        if request.collect:
            given = self.given_files(request)
            self.files.used, left_out = files.collect(
                given, self.files.view, self.scratch.keep, since_ns
            )
        self.send(
            WorkerReply(
                request.seq, status, call.cause, int(self._lost), out.used, err.used, record.used,
                time.monotonic() - call.started, cpu_s,
                max(0, running.peak_kb - self.base_rss_kb) / 1024, self.files.used, left_out,
            )
        )  # fmt: skip

    def _reply_not_run(self, request: WorkerRequest, running: SessionCall, status: int) -> None:
        """Say why a session's process did not obey."""
        cause = running.call.cause or frames.NO_SESSION
        if running.error and not running.ended:
            group = self.spec.group  # without one, other sessions count, too
            own = {errno.EMFILE: True, errno.EAGAIN: group.pids, errno.ENOMEM: group.memory}
            cause = frames.NO_ROOM if own[running.error] else frames.NO_COPY
            status = running.error
        elif self.guard.suicide or running.is_own_fault(status):
            cause = frames.BROKEN
        self._reply(request, cause, status)

    def _discard_changes(self, before: FilesBefore | None) -> None:
        """Remove what a call wrote that used too much scratch: others could not run after it.

        In strict the size of the file system is the limit, and nothing is removed.
        """
        if before is None:
            return
        try:
            self.session_files.discard_changes(before)
        except OSError:
            self._lost = True

    def _begin(
        self,
        request: WorkerRequest,
        process: SessionProcess,
        order: bytes,
        feeders: list[PipeFeeder],
    ) -> SessionCall:
        """Wake a process and send it an order with the descriptors that it needs."""
        call = RunningCall(request)
        call.adopt(process.pid)
        call.cpu_before = self._cpu_total(call)
        ours, theirs = socket_pair()
        given = [feeder.reader for feeder in feeders]
        descriptors = [*given, *(call.writers if feeders else ()), theirs.fileno()]
        message = session_program.ORDER.pack(order, request.output_chars)
        self.guard.expect(
            process.pid, (other.pid for other in self.members.values() if other is not process)
        )
        process.discard_messages()
        with contextlib.suppress(OSError):  # it has ended: `_watch` notices
            socket.send_fds(process.sock, [message], descriptors)
        process.send(signal.SIGCONT)
        for descriptor in given:
            os.close(descriptor)
        call.parent_side()
        theirs.close()
        return SessionCall(call, process, ours, feeders)

    def _keep_one(self, name: bytes, running: SessionCall) -> int:
        """End the copy after a success, else the process; returns the wait status of the call.

        A process that ended by itself has its own status, also if its message came first.
        """
        process, copy = running.process, running.copy
        if copy is None:
            running.copy_socket.close()
        for feeder in running.feeders:
            feeder.close()
        if self._stopped(running):
            if copy is not None and copy.end() is None:
                self._lost = True
            return 0
        status = self._end_process(running)
        if copy is None:
            self._remove_member(name)  # the next order finds no session
        else:
            copy.number = process.number
            self.members[name] = copy
        return status

    def _stopped(self, running: SessionCall) -> bool:
        """Stop a process that has carried out its order; False if it must be ended."""
        if not running.done:
            return False
        if running.process.stop():
            return True
        if not running.process.has_ended():
            running.call.cause = frames.NOT_STOPPED
        return False

    def _end_process(self, running: SessionCall) -> int:
        """End the process of a call; returns its wait status."""
        running.ended = True
        running.cpu_limited = running.process.cpu_limit() < int(_NO_LIMIT_S)
        ended = running.process.end()
        if ended is None:
            self._lost = True
            return int(signal.SIGKILL)
        status, usage = ended
        running.peak_kb = usage.ru_maxrss
        return status

    # ------------------------------------------------------------------ watching

    def _watch(self, running: SessionCall) -> None:
        """Wait until the order is carried out, the process has ended or a limit is exceeded."""
        call, process = running.call, running.process
        poller = select.poll()
        streams = dict(zip(call.readers, self.streams, strict=True))
        feeders = {feeder.writer: feeder for feeder in running.feeders if feeder.open}
        for descriptor in (process.sock.fileno(), call.pidfd, self.guard.listener, *streams):
            poller.register(descriptor, select.POLLIN)
        for descriptor in feeders:
            poller.register(descriptor, select.POLLOUT)
        poller.register(self.control, select.POLLIN)
        wait_s: float | None = min(_FIRST_CHECK_S, call.request.wall_s)
        while wait_s is not None:
            ready = dict(poller.poll(wait_s * 1000))
            for descriptor, events in ready.items():
                if descriptor == self.guard.listener:
                    # A copy must be protected before its program may send a signal.
                    if events & select.POLLIN and not readable(process.sock.fileno()):
                        self.guard.answer()
                elif descriptor in feeders:
                    feeders[descriptor].feed()
                    if not feeders[descriptor].open:
                        poller.unregister(descriptor)
                        del feeders[descriptor]
                elif descriptor in streams:
                    if not self._read_stream(call, descriptor):
                        poller.unregister(descriptor)
                elif descriptor == self.control.fileno():
                    if events & (select.POLLHUP | select.POLLERR):
                        os._exit(0)  # the server has closed the socket
                    running.aborted = True
                    poller.modify(self.control, 0)
            if process.sock.fileno() in ready:
                ended = not self._read_report(running) or running.done
            else:
                ended = call.pidfd in ready
            if ended or call.cause != frames.EXITED:
                return
            wait_s = self._next_check(running)

    def _next_check(self, running: SessionCall) -> float | None:
        """Seconds until the next check; None if the process was killed.

        To kill a process that has not copied itself loses the session: limits count from then on.
        """
        call = running.call
        if running.copy is None:
            left_s = call.started + deadlines.SESSION_COPY_S - time.monotonic()
            if left_s > 0:
                return left_s
            call.kill(frames.BROKEN if left_s > -_PUNCTUAL_S else frames.NO_SESSION)
        elif running.aborted:
            call.kill(frames.ABORTED)
        return None if call.cause != frames.EXITED else self._check_limits(call)

    def _read_stream(self, call: RunningCall, descriptor: int) -> bool:
        """Read what a program wrote; False at the end of the stream."""
        cap = frames.output_cap(call.request.output_chars)
        stream = self.streams[call.readers.index(descriptor)]
        still_open = stream.fill(descriptor, cap)
        if stream.used > cap:
            call.kill(frames.OUTPUT)
        return still_open

    def _read_report(self, running: SessionCall) -> bool:
        """Read one message of the process; False if it has ended or sends what makes no sense."""
        try:
            data = running.process.sock.recv(64)
        except OSError:
            return False
        running.lied = len(data) not in (0, session_program.REPORT.size)
        if not data or running.lied:
            return False
        kind, value = session_program.REPORT.unpack(data)
        if kind == session_program.COPIED and running.copy is None:
            running.copy = self._adopt_copy(value, running.copy_socket)
            call = running.call
            running.done = call.request.kind == frames.SESSION_BRANCH
            call.started = time.monotonic()
            call.deadline = call.started + call.request.wall_s
            call.cpu_before = self._cpu_total(call)
            running.lied = running.copy is None
            return not running.lied
        if kind == session_program.FAILED and running.copy is None and value in _COPY_ERRORS:
            running.error = value
        elif kind == session_program.DONE and running.copy is not None:
            running.peak_kb = max(0, value)
        else:
            running.lied = True
            return False
        running.done = True
        return True

    def _adopt_copy(self, pid: int, sock: socket.socket) -> SessionProcess | None:
        """Accept a process as a copy if it is a child of this worker and not known yet."""
        known = {process.pid for process in self.members.values()}
        if pid in known or not 1 < pid < 1 << 22:
            return None
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            copy = SessionProcess(pid, sock, 0)
        except OSError:
            return None
        copy.send(signal.SIGSTOP)
        self.guard.protect(pid)
        return copy

    # ------------------------------------------------------------------ CPU time

    def _cpu_total(self, call: RunningCall) -> float:
        """CPU seconds of the member's process or, with a control group, of all processes here."""
        if self.cpu_file < 0:
            return cpu_time(call.pid)
        return cgroups.cpu_usage(self.cpu_file) - time.process_time()

    def cpu_used(self, call: RunningCall) -> float:
        """CPU seconds since the call started: its process existed before."""
        return max(0.0, self._cpu_total(call) - (call.cpu_before or 0.0))

    # ------------------------------------------------------------------ processes of programs

    def _kill_strays(self) -> None:
        """End every process that holds no member's state. Only programs that may fork leave any."""
        if self._strays is not None:
            keep = {process.pid for process in self.members.values()}
            if not self._strays.kill(keep, self._reap):
                self._lost = True

    def _reap(self) -> None:
        members = {process.pid: name for name, process in self.members.items()}
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in members:  # not by an order: the kernel killed it for memory, for example
                process = self.members.pop(members[pid])
                process.release()
                self._drop_files(process.number)
