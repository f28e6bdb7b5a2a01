"""What runs inside a session process: it waits for orders, copies itself and runs programs.

Everything here shares its memory with untrusted programs, which can change it. The worker on the
other end of the socket trusts nothing that it reads (see `session`).

For each call the process first makes a copy of itself, which keeps the state from before the call.
Then the process runs the program, so that threads of earlier calls are still there. A copy contains
one thread only: executors whose threads are missing in it are reset, so that they start new ones.

Signals reach the process only while a program runs, and timers end with their call: a signal
between two calls would end the session. A process that a program forked does not use the socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import queue
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterable
from typing import Any, NoReturn

from rstar2.codeenv.jail import confine, frames, runner, seccomp, syscalls
from rstar2.codeenv.jail.running_call import RESULT_FD

SESSION_FD = 4
ORDER = struct.Struct("<cI")
"""Order and, for a run, the number of characters kept of each stream."""
RUN, COPY = b"R", b"B"
REPORT = struct.Struct("<cq")
"""COPIED and the pid of the copy, FAILED and an error number, or DONE and the peak memory in KB."""
COPIED, FAILED, DONE = b"C", b"X", b"D"
DESCRIPTORS = 1024
"""Above the highest descriptor of a session process."""
_SENT_WITH = {RUN: 6, COPY: 1}
"""Descriptors that come with an order. The kernel drops those for which a process has no room."""
_SPARE = max(_SENT_WITH.values())
"""Descriptors that must be free after a call."""
_SIGNALS = signal.valid_signals()
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_TIMER_SIGNALS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)


def serve(sock: socket.socket, level: str) -> NoReturn:
    """Obey orders until the worker closes the socket."""
    namespace = runner.fresh_main()
    is_copy = False
    directory = ""
    mask: Iterable[int] = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    while True:
        data, descriptors, flags, _ = socket.recv_fds(sock, 64, 8)
        if not data:
            os._exit(0)
        order, limit = ORDER.unpack(data)
        if len(descriptors) != _SENT_WITH[order] or flags & socket.MSG_CTRUNC:
            _close(descriptors)
            sock.send(REPORT.pack(FAILED, errno.EMFILE))
            continue
        if is_copy:
            _take_over(directory)
            is_copy, directory = False, ""
        here = _working_directory()
        try:
            pid = _copy()
        except OSError as error:
            sock.send(REPORT.pack(FAILED, error.errno or 0))
            _close(descriptors)
            continue
        if pid == 0:
            if level != "strict":
                confine.die_with_parent()
            sock.close()
            sock = socket.socket(fileno=os.dup2(descriptors[-1], SESSION_FD, inheritable=False))
            _close(descriptors)
            is_copy, directory = True, here if order == COPY else ""
            continue
        os.close(descriptors.pop())
        sock.send(REPORT.pack(COPIED, pid))
        if order == RUN:
            mask = _run(descriptors, namespace, limit, mask)
            peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            sock.send(REPORT.pack(DONE, peak_kb))


def _run(
    descriptors: list[int], namespace: dict[str, Any], limit: int, mask: Iterable[int]
) -> Iterable[int]:
    """Run one program; returns only on success. `descriptors`: code, then those of 0 to 3.

    `mask` is the program's own set of blocked signals, before the call and in the result after it.
    """
    with open(descriptors[0], "rb", closefd=False) as file:
        source = file.read().decode("utf-8", "replace")
    for target, descriptor in enumerate(descriptors[1:]):
        os.dup2(descriptor, target)
    _close(descriptors)
    runner.prepare_streams()
    pid = os.getpid()
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        record = runner.execute(source, namespace, limit)
        runner.flush()
        mask = _block_signals()
    except BaseException as error:  # noqa: BLE001 - a signal handler raised after the program's end
        record = runner.describe(error, source, limit)
    if os.getpid() != pid:
        runner.leave_child(record)
    spare: list[int] = []
    if record.kind in (frames.VALUE, frames.NOTHING):
        try:
            spare.append(os.open("/dev/null", os.O_RDWR))
            spare.extend(os.dup(spare[0]) for _ in range(_SPARE - 1))
        except OSError as error:
            record = _too_many_files(error)
    if record.kind != frames.NOTHING:
        runner.write_record(record, RESULT_FD)
    if record.kind not in (frames.VALUE, frames.NOTHING):
        # The worker discards this process: no exit hooks, no waiting for threads.
        os._exit(runner.exit_code(record))
    for target in range(RESULT_FD + 1):
        os.dup2(spare[0], target)
    _close(spare)
    return mask


def _block_signals() -> Iterable[int]:
    """Block all signals and stop the timers; returns the program's own mask.

    Handlers of signals that have arrived run first; they may raise.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    for timer in _TIMERS:
        signal.setitimer(timer, 0)
    while signal.sigtimedwait(_TIMER_SIGNALS, 0) is not None:
        pass
    return mask


def _too_many_files(error: OSError) -> frames.Record:
    """Why a call that leaves no room for the descriptors of the next one is rolled back."""
    text = (
        f"{runner.headline(error)}: the session keeps so many files open that no further call can "
        "run. This call was rolled back; close files that are not needed"
    )
    return frames.Record(frames.EXCEPTION, text, text)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _take_over(directory: str) -> None:
    """First order of a copy. In a branch the working directory is the one of its own files."""
    if directory:
        with contextlib.suppress(OSError):  # the program sees that its directory is missing
            os.chdir(directory)
    module = sys.modules.get("concurrent.futures.thread")
    if module is None:
        return
    for item in gc.get_objects():
        if issubclass(type(item), module.ThreadPoolExecutor):
            item._threads = set()
            item._idle_semaphore = threading.Semaphore(0)
            item._work_queue = queue.SimpleQueue()


def _copy() -> int:
    """Fork a sibling with Python's fork hooks: the program's state may depend on them."""
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    number = syscalls.numbers()["clone"]
    flags = ctypes.c_ulong(seccomp.COPY_FLAGS)
    pid: int = syscalls.libc.syscall(ctypes.c_long(number), flags, 0, 0, 0, 0)
    error = ctypes.get_errno()
    if pid == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, "clone")
    return pid
