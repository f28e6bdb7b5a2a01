"""A worker: the warm, jailed process that forks a child per call and supervises it from outside.

In strict it is PID 1 of its namespace, so calls cannot signal it; in portable seccomp blocks their
signals. It never parses what a child sends. Code, input and output are held in private buffers that
are dropped after each call: the next child is a copy of this process and must not find the data of
earlier calls.

    server --WorkerRequest--> worker --fork--> child (stdin, stdout, stderr, record on 0 to 3)
    server <--WorkerReply---- worker <--pipes, wait status-- child

Invariants: one call at a time; no process of a call runs after it (strict: all processes of the PID
namespace are killed); one reply per request; end of file from the server ends the worker. If the
kernel needs long to end a call's processes, the reply does not wait for it: it asks the server to
replace the worker, which ends with everything in it.
"""

from __future__ import annotations

import math
import mmap
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import NoReturn

from rstar2.codeenv import deadlines
from rstar2.codeenv.jail import (
    cgroups,
    confine,
    files,
    frames,
    handover,
    runner,
    seccomp,
    syscalls,
)
from rstar2.codeenv.jail.frames import WorkerReply, WorkerRequest
from rstar2.codeenv.jail.running_call import RESULT_FD, RunningCall, cpu_time, provide_stdin
from rstar2.codeenv.jail.scratch import Scratch

_EAGER_MS = 5
"""Most calls are shorter than this. Until then only the end of the child wakes the worker, because
small outputs fit into the pipe."""
_SHARED_COUNT = 1024
"""Slack where RLIMIT_NPROC also counts other processes of the same uid; a pids cgroup is exact.
Sessions have twice as much: they copy themselves also while a call holds all threads it can get."""
_SCRATCH_CHECK_S = 0.03
"""Maximum interval between two checks of the limits in portable, where scratch is checked."""
_GATHER_MS = 2
"""Pause between two reads of a program that writes little at a time."""
_CPU_FD = 202
_CALL_FILES = 256
"""Descriptors of a call. The worker may have more: the kernel also compares this limit with the
descriptors that all processes of the user have in flight, and the worker must be able to send."""


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
        self.call_threads = 0
        """Threads of a call if the kernel counts them together with those of other workers."""
        self.namespace = runner.fresh_main()
        self.poller = select.poll()
        self.poller.register(control, 0)
        self.end_fd = -1
        """The descriptor in the poller that tells the end of a call."""
        self.served = 0
        self.base_as = 0
        self.base_rss_kb = 0
        self.scratch: Scratch
        """Opened inside the jail."""
        self.cores = min(len(os.sched_getaffinity(0)), spec.processes or 1)
        """Cores that one call can use at the same time."""
        self.cpu_file = _open_cpu_usage(spec)

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
        if request.files and (error := files.place(self.given_files(request))):
            retire = int(not self.scratch.restore())
            reply = WorkerReply(request.seq, error, frames.FILES, retire, 0, 0, 0, 0.0, 0.0, 0.0)
            self.send(reply)
            return
        call = self._start(request)
        self.watch(call)
        status, cpu_s, peak_kb, ended = self._end(call)
        self._drain(call)
        call.close()
        wall_s = time.monotonic() - call.started
        left_out = 0
        if request.collect and ended:
            given = self.given_files(request)
            self.files.used, left_out = files.collect(given, self.files.view, self.scratch.keep)
        clean = ended and self.scratch.restore()
        out, err, record = self.streams
        peak = (peak_kb - self.base_rss_kb) / 1024
        self.send(
            WorkerReply(
                request.seq, status, call.cause, 0 if clean else 1,
                out.used, err.used, record.used, wall_s, cpu_s, peak if peak > 0 else 0.0,
                self.files.used, left_out,
            )
        )  # fmt: skip

    def given_files(self, request: WorkerRequest) -> memoryview:
        """The packed files of a request, in the buffer of its body."""
        start = request.name + request.code + request.stdin
        return self.body.view[start : start + request.files]

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

    def _start(self, request: WorkerRequest) -> RunningCall:
        call = RunningCall(request)
        pid = confine.fork()
        if pid == 0:
            self._child(call)
        call.adopt(pid)
        return call

    def _end(self, call: RunningCall) -> tuple[int, float, int, bool]:
        """Reap a call and all its processes: wait status, CPU seconds, peak memory in KB.

        False as the last value: some of them have not ended TEARDOWN_S after they were killed.
        """
        give_up = time.monotonic() + deadlines.TEARDOWN_S
        if call.cause != frames.EXITED:
            if self.spec.forks:
                syscalls.libc.kill(-1, 9)
            if not readable(call.pidfd, deadlines.TEARDOWN_S):
                return int(signal.SIGKILL), self.cpu_used(call), 0, False
        _, status, usage = os.wait4(call.pid, 0)
        call.pid = 0  # the kernel may give the number to another process
        swept_s = self.sweep(give_up)
        cpu_s = usage.ru_utime + usage.ru_stime + (swept_s or 0.0)
        if call.cpu_before is not None:
            cpu_s = max(cpu_s, self.cpu_used(call))
        return status, cpu_s, usage.ru_maxrss, swept_s is not None

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
            provide_stdin(stdin)
            self.confine(request)
            limit_files()
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
        strict = self.spec.level == "strict"
        counted_here = strict and not self.spec.group.pids and not self.spec.session
        shared = 2 * _SHARED_COUNT if self.spec.session else _SHARED_COUNT
        threads = self.spec.processes + (1 if counted_here else shared)
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        if hard != resource.RLIM_INFINITY:
            threads = min(threads, hard)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        if not strict and not self.spec.group.pids:
            self.call_threads = threads  # set per call: the worker itself can always fork
        else:
            resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))

    def confine(self, request: WorkerRequest) -> None:
        """Set the limits of a call and, without a PID namespace or control groups, its filter."""
        cpu = math.ceil(request.cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        size = request.file_mb << 20
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        if self.call_threads:
            resource.setrlimit(resource.RLIMIT_NPROC, (self.call_threads, self.call_threads))
        if self.filter is not None:
            if self.spec.level != "strict":
                confine.die_with_parent()
            self.filter.install(os.getpid())

    def watch(self, call: RunningCall) -> None:
        """Wait until the call ends, or exceeds a limit and is killed.

        Nothing else comes before the first wait: while the child runs, the kernel copies every
        page that the worker writes to. So the poller keeps the number that the child's handle
        usually has.
        """
        if call.pidfd != self.end_fd:
            if self.end_fd >= 0:
                self.poller.unregister(self.end_fd)
            self.poller.register(call.pidfd, select.POLLIN)
            self.end_fd = call.pidfd
        events = self.poller.poll(min(_EAGER_MS, call.request.wall_s * 1000))
        call.parent_side()
        if not events:
            self._watch_streams(call, call.pidfd)
        elif events[0][0] != call.pidfd:
            os._exit(0)  # the server has closed the socket

    def _watch_streams(self, call: RunningCall, end: int) -> bool:
        """Watch a longer call: read its output and check its limits."""
        poller = self.poller
        cap = frames.output_cap(call.request.output_chars)
        streams = dict(zip(call.readers, self.streams, strict=True))
        ends = select.poll()
        ends.register(end, select.POLLIN)
        ends.register(self.control, 0)
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
                ends.poll(_GATHER_MS)
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
            if self.scratch.exceeds(self.spec.scratch_mb << 20):
                call.kill(frames.SCRATCH)
                return None
        if request.cpu_s < request.wall_s * self.cores:
            spare = request.cpu_s - self.cpu_used(call)
            if spare <= 0:
                call.kill(frames.CPU)
                return None
            left = min(left, max(spare / self.cores, 0.005))
        return left

    def cpu_used(self, call: RunningCall) -> float:
        """CPU seconds of a call: with all its processes where a control group counts them.

        The group is read for the first time when a call has run for _EAGER_MS, so that short calls
        cost nothing; what other processes of the call used before then is not counted.
        """
        own = cpu_time(call.pid) if call.pid else 0.0
        if self.cpu_file < 0:
            return own
        everything = cgroups.cpu_usage(self.cpu_file) - time.process_time()
        if call.cpu_before is None:
            call.cpu_before = everything - own
        return max(own, everything - call.cpu_before)

    def sweep(self, give_up: float) -> float | None:
        """Kill and reap every process that the call left running in this PID namespace.

        Returns their CPU seconds; None if some have not ended at the time `give_up`.
        """
        cpu_s = 0.0
        if not self.spec.forks:
            return cpu_s
        while syscalls.libc.kill(-1, 9) == 0:  # through libc: no exception in the usual case
            try:
                pid, _, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0  # only descendants whose parents have not ended yet
            if pid:
                cpu_s += usage.ru_utime + usage.ru_stime
            elif time.monotonic() > give_up:
                return None
            else:
                time.sleep(0.0005)
        return cpu_s

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
        self._open_scratch()

    def _open_scratch(self) -> None:
        strict = self.spec.level == "strict"
        places = (confine.SCRATCH_INSIDE, "/dev/shm") if strict else (".",)
        self.scratch = Scratch(places, on_tmpfs=strict)


def limit_files() -> None:
    """Set the limit of a call's descriptors, after everything that sends some: see _CALL_FILES."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (_CALL_FILES, _CALL_FILES))


def _open_cpu_usage(spec: confine.JailSpec) -> int:
    """The file with the CPU time of the worker's control group; -1 without one.

    It must be opened before the jail is entered.
    """
    path = spec.group.cpu_usage_file
    if path is None:
        return -1
    opened = os.open(path, os.O_RDONLY)
    kept = os.dup2(opened, _CPU_FD, inheritable=False)
    os.close(opened)
    return kept


def readable(descriptor: int, wait_s: float = 0.0) -> bool:
    """Whether something can be read from a descriptor; waits up to `wait_s` for that."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(wait_s * 1000))
