"""A worker: the warm, jailed process that forks a child per call and supervises it from outside.

In strict it is PID 1 of its namespace, so calls cannot signal it; in portable seccomp blocks their
signals. It never parses what a child sends. Code, input and output are held in private buffers that
are dropped after each call: the next child is a copy of this process and must not find the data of
earlier calls.

    server --WorkerRequest--> worker --fork--> child (stdin, stdout, stderr, record on 0 to 3)
    server <--WorkerReply---- worker <--pipes, wait status-- child

Invariants: one call at a time; no process of a call runs after it (strict: all processes of the PID
namespace are killed); one reply per request; end of file from the server ends the worker.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import resource
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable
from typing import NoReturn

from rstar2.codeenv.jail import confine, files, frames, handover, runner, seccomp, syscalls
from rstar2.codeenv.jail.frames import WorkerReply, WorkerRequest

RESULT_FD = 3
_FIRST_FD = 4
_EAGER_MS = 5
"""Most calls are shorter than this. Until then only the end of the child wakes the worker, because
small outputs fit into the pipe."""
_SHARED_COUNT = 1024
"""Slack where RLIMIT_NPROC also counts other processes of the same uid; a pids cgroup is exact."""
_SCRATCH_CHECK_S = 0.03
"""Longest interval between two checks of the limits in portable, where scratch is checked."""


class Buffer:
    """Private memory outside the heap; `drop` returns the pages, so that no data remains."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self._map)
        self.used = 0

    def drop(self) -> None:
        if self.used:
            self._map.madvise(mmap.MADV_DONTNEED)
            self.used = 0

    def fill(self, descriptor: int, cap: int) -> bool:
        """Read the available data, up to `cap` bytes in total; False at end of file."""
        try:
            count = os.readv(descriptor, [self.view[self.used : cap + 1]])
        except BlockingIOError:
            return True
        self.used += count
        return count > 0


class RunningCall:
    """The child of one call and the pipes to it, as the worker sees them."""

    __slots__ = ("cause", "deadline", "pid", "pidfd", "readers", "request", "started", "writers")

    def __init__(self, request: WorkerRequest) -> None:
        self.request = request
        self.cause = frames.EXITED
        self.pid = 0
        self.pidfd = -1
        out, err, record = os.pipe(), os.pipe(), os.pipe()
        self.readers = (out[0], err[0], record[0])
        self.writers = (out[1], err[1], record[1])
        self.started = time.monotonic()
        self.deadline = self.started + request.wall_s

    def adopt(self, pid: int) -> None:
        """Remember the child by its pid and a pidfd."""
        self.pid = pid
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError:
            self.pidfd = -1  # it has ended already: its wait status is the result

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
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, 9)

    def close(self) -> None:
        for reader in self.readers:
            os.close(reader)
        if self.pidfd >= 0:
            os.close(self.pidfd)


class JailWorker:
    """Serves the requests of one socket until the server closes it."""

    def __init__(
        self,
        control: socket.socket,
        spec: confine.JailSpec,
        verify: Callable[[bytes, int], NoReturn],
        tidy: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.control = control
        self.verify = verify
        self.tidy = tidy
        self.body = Buffer(frames.MAX_BODY)
        cap = frames.output_cap(1 << 20) + (1 << 16)
        self.streams = [Buffer(cap) for _ in range(3)]
        self.files = Buffer(files.MAX_PACKED)
        self.filter = None if spec.forks else seccomp.CallFilter(spec.level)
        self.namespace = runner.fresh_main()
        self.poller = select.poll()
        self.poller.register(control, 0)
        self.served = 0
        self.base_as = 0
        self.base_rss_kb = 0
        self.clean_mark = 0
        self.fixtures: set[str] = set()
        """Permanent entries of scratch: paths to an interpreter that is installed below it."""

    # ------------------------------------------------------------------ the loop

    def serve(self) -> NoReturn:
        """Answer requests until the server closes the socket."""
        self._measure()
        self.limit_all()
        self.control.sendall(frames.HELLO)
        header = bytearray(frames.REQUEST.size)
        while self._receive(memoryview(header)):
            request = WorkerRequest(*frames.REQUEST.unpack(header))
            length = request.name + request.code + request.stdin + request.files
            if length and not self._receive(self.body.view[:length]):
                break
            self.body.used = length
            self.answer(request)
            self.served += 1
            if self.served % 256 == 0:
                self.tidy()
        os._exit(0)

    def answer(self, request: WorkerRequest) -> None:
        """Run one plain call or verification and reply."""
        if request.files and not files.place(self.given_files(request)):
            clean = self._clean_scratch()
            self.send(WorkerReply(request.seq, 0, frames.FILES, not clean, 0, 0, 0, 0.0, 0.0, 0.0))
            return
        self.reply(*self._run(request))

    def given_files(self, request: WorkerRequest) -> memoryview:
        """The packed files of a request, in the buffer of its body."""
        start = request.name + request.code + request.stdin
        return self.body.view[start : start + request.files]

    def reply(self, call: RunningCall, status: int, usage: resource.struct_rusage) -> None:
        """Clean scratch, then send the reply."""
        out, err, record = self.streams
        wall = time.monotonic() - call.started
        left_out = 0
        if call.request.collect:
            given = self.given_files(call.request)
            self.files.used, left_out = files.collect(given, self.files.view, self.fixtures)
        clean = self._clean_scratch()
        cpu = usage.ru_utime + usage.ru_stime
        peak = (usage.ru_maxrss - self.base_rss_kb) / 1024
        self.send(
            WorkerReply(
                call.request.seq, status, call.cause, 0 if clean else 1,
                out.used, err.used, record.used, wall, cpu, peak if peak > 0 else 0.0,
                self.files.used, left_out,
            )
        )  # fmt: skip

    def send(self, header: WorkerReply) -> None:
        """Send the header and the streams together, then empty the buffers."""
        parts: list[memoryview | bytes] = [header.pack()]
        total = frames.REPLY.size
        for stream in (*self.streams, self.files):
            if stream.used:
                parts.append(stream.view[: stream.used])
                total += stream.used
        try:
            sent = self.control.sendmsg(parts)
            if sent < total:
                self.control.sendall(b"".join(parts)[sent:])
        except OSError:
            os._exit(0)  # the server has closed the socket
        for stream in self.streams:
            stream.drop()
        self.files.drop()
        self.body.drop()

    def _receive(self, view: memoryview) -> bool:
        done = 0
        while done < len(view):
            count = self.control.recv_into(view[done:])
            if count == 0:
                return False
            done += count
        return True

    # ------------------------------------------------------------------ one call

    def _run(self, request: WorkerRequest) -> tuple[RunningCall, int, resource.struct_rusage]:
        call = RunningCall(request)
        pid = confine.fork()
        if pid == 0:
            self._child(call)
        call.adopt(pid)
        call.parent_side()
        self.watch(call, call.pidfd)
        _, status, usage = os.wait4(pid, 0)
        self.sweep()
        self._drain(call)
        call.close()
        return call, status, usage

    def _child(self, call: RunningCall) -> NoReturn:
        """In the forked child: set up streams, limits and filter, then run the program."""
        code = 120
        try:
            request = call.request
            source = bytes(self.body.view[request.name : request.name + request.code])
            start = request.name + request.code
            stdin = bytes(self.body.view[start : start + request.stdin])
            call.child_side()
            self.body.drop()
            if stdin:
                provide_stdin(stdin)
            self.confine(request)
            if request.kind == frames.VERIFY:
                self.verify(source, RESULT_FD)
            if request.kind == frames.RUN:
                handover.arm(RESULT_FD)
            text = source.decode("utf-8", "replace")
            code = runner.run_program(text, self.namespace, request.output_chars, RESULT_FD)
        finally:
            os._exit(code)

    def limit_all(self) -> None:
        """Set the limits that every call of this worker inherits and that bind the worker too."""
        memory = self.base_as + (self.spec.memory_mb << 20)
        counted_here = self.spec.level == "strict" and not self.spec.group.pids
        threads = self.spec.processes + (1 if counted_here else _SHARED_COUNT)
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        if hard != resource.RLIM_INFINITY:
            threads = min(threads, hard)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))

    def confine(self, request: WorkerRequest) -> None:
        """Set the limits of a call and, without a PID namespace or control groups, its filter."""
        cpu = math.ceil(request.cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        size = request.file_mb << 20
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        if self.filter is not None:
            if self.spec.level != "strict":
                confine.die_with_parent()
            self.filter.install(os.getpid())

    def watch(self, call: RunningCall, end: int) -> bool:
        """Wait until `end` is readable (True) or a limit is exceeded (False)."""
        poller = self.poller
        poller.register(end, select.POLLIN)
        try:
            events = poller.poll(min(_EAGER_MS, call.request.wall_s * 1000))
            if not events:
                return self._watch_streams(call, end)
            if events[0][0] != end:
                os._exit(0)  # the server has closed the socket
            return True
        finally:
            poller.unregister(end)

    def _watch_streams(self, call: RunningCall, end: int) -> bool:
        """Watch a longer call: read its output and check its limits."""
        poller = self.poller
        cap = frames.output_cap(call.request.output_chars)
        streams = dict(zip(call.readers, self.streams, strict=True))
        for descriptor in call.readers:
            poller.register(descriptor, select.POLLIN)
        try:
            while True:
                late = time.monotonic() >= call.deadline
                if late and any(descriptor == end for descriptor, _ in poller.poll(0)):
                    return True  # it ended in time, but the machine was too busy to notice
                wait = self._check_limits(call)
                if wait is None:
                    return False
                for descriptor, _ in poller.poll(wait * 1000):
                    if descriptor == end:
                        return True
                    if descriptor not in streams:
                        os._exit(0)  # the server has closed the socket
                    if not streams[descriptor].fill(descriptor, cap):
                        poller.unregister(descriptor)
                        del streams[descriptor]
                    elif streams[descriptor].used > cap:
                        call.kill(frames.OUTPUT)
                        return False
        finally:
            for descriptor in streams:
                poller.unregister(descriptor)

    def _check_limits(self, call: RunningCall) -> float | None:
        """Seconds until the next check; None if a limit was exceeded and the call was killed."""
        request = call.request
        left = call.deadline - time.monotonic()
        if left <= 0:
            call.kill(frames.WALL)
            return None
        if self.spec.level != "strict":
            left = min(left, _SCRATCH_CHECK_S)
            if self._scratch_used() > self.spec.scratch_mb << 20:
                call.kill(frames.SCRATCH)
                return None
        if request.cpu_s < request.wall_s:
            spare = request.cpu_s - cpu_time(call.pid)
            if spare <= 0:
                call.kill(frames.CPU)
                return None
            left = min(left, max(spare / 2, 0.005))
        return left

    def sweep(self) -> None:
        """Kill and reap every process that the call left running in this PID namespace."""
        if not self.spec.forks:
            return
        while syscalls.libc.kill(-1, 9) == 0:  # through libc: no exception in the usual case
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)

    def _drain(self, call: RunningCall) -> None:
        """Read what is left in the pipes of a call that has ended; one read empties a pipe."""
        cap = frames.output_cap(call.request.output_chars)
        for reader, stream in zip(call.readers, self.streams, strict=True):
            if stream.used <= cap:
                stream.fill(reader, cap)

    # ------------------------------------------------------------------ scratch and baselines

    def _measure(self) -> None:
        """Measure the baselines: memory and scratch of a call that does nothing."""
        pid = confine.fork()
        if pid == 0:
            os._exit(0)
        _, _, usage = os.wait4(pid, 0)
        self.base_rss_kb = usage.ru_maxrss
        self.clean_mark = self._scratch_mark()
        if self.spec.level == "strict":
            self.fixtures = set(os.listdir(confine.SCRATCH_INSIDE))

    def _scratch_mark(self) -> int:
        """A number that changes when a call leaves something in scratch."""
        if self.spec.level != "strict":
            return len(os.listdir("."))
        mark = 0
        for path in (confine.SCRATCH_INSIDE, "/dev/shm"):
            info = os.statvfs(path)
            mark += info.f_files - info.f_ffree
        return mark

    def _scratch_used(self) -> int:
        """Bytes in the scratch directory (portable); each entry counts at least 4 KB."""
        total = entries = 0
        stack = ["."]
        while stack and entries < 100_000:
            try:
                with os.scandir(stack.pop()) as listing:
                    for entry in listing:
                        entries += 1
                        info = entry.stat(follow_symlinks=False)
                        total += max(info.st_blocks * 512, 4096)
                        if entry.is_dir(follow_symlinks=False):
                            stack.append(entry.path)
            except OSError:
                continue  # it changed during the scan; the next check counts it
        return total

    def _clean_scratch(self) -> bool:
        """Empty scratch; False if that fails and the worker must be replaced."""
        if self._scratch_mark() == self.clean_mark:
            return True
        places = [confine.SCRATCH_INSIDE, "/dev/shm"] if self.spec.level == "strict" else ["."]
        try:
            for place in places:
                for name in set(os.listdir(place)) - self.fixtures:
                    path = os.path.join(place, name)
                    if os.path.isdir(path) and not os.path.islink(path):
                        shutil.rmtree(path)
                    else:
                        os.unlink(path)
        except (OSError, RecursionError):
            return False
        return self._scratch_mark() == self.clean_mark


def cpu_time(pid: int) -> float:
    """CPU seconds of another process, from its CPU clock (see clock_getcpuclockid)."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def spool(data: bytes) -> int:
    """A descriptor to read `data` from: a pipe if the data fits, else an unlinked file."""
    if len(data) <= 1 << 16:
        reader, writer = os.pipe()
        os.write(writer, data)
        os.close(writer)
        return reader
    reader = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(reader, rest) :]
    os.lseek(reader, 0, os.SEEK_SET)
    return reader


def provide_stdin(data: bytes) -> None:
    """Put `data` on descriptor 0."""
    reader = spool(data)
    os.dup2(reader, 0)
    os.close(reader)
