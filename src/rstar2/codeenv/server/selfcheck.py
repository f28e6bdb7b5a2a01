"""Checks at start-up that every limit of the jail holds, by running programs that exceed it.

A control group that was not joined or a filter that was not installed causes no error by itself.
Therefore nothing is served before these programs have failed in the expected way. IsolationError
names the limits that do not hold. A program that ran out of wall time or lost its worker says
nothing about the jail: it is repeated once, with no other check beside it, before it counts.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rstar2.codeenv import deadlines
from rstar2.codeenv.protocol import RunRequest
from rstar2.errors import IsolationError
from rstar2.types import Limits, Outcome, ToolResult

if TYPE_CHECKING:
    from rstar2.codeenv.server.executor import WorkerExecutor

SMALL = Limits(
    wall_s=deadlines.SELF_CHECK_WALL_S,
    cpu_s=10.0,
    memory_mb=64,
    processes=8,
    file_mb=1,
    scratch_mb=2,
    output_chars=4000,
)
QUICK = replace(SMALL, wall_s=0.3)
LITTLE_CPU = replace(SMALL, cpu_s=0.05)
INCONCLUSIVE = (Outcome.TIMEOUT, Outcome.INFRASTRUCTURE)
"""Outcomes that a slow machine can cause in an intact jail."""

_WALLS = """
import ctypes, errno, fcntl, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def refused(name, action, *errors):
    try:
        action()
    except OSError:
        return
    except errors:
        return
    print("NOT REFUSED:", name)
def syscall(name, *arguments):
    def call():
        if getattr(libc, name)(*arguments) == -1:
            raise OSError(ctypes.get_errno())
    refused(name, call)
refused("reading a file of the service", lambda: open({canary!r}).read())
refused("reading /proc", lambda: open("/proc/self/environ").read())
refused("writing beside the interpreter", lambda: open(os.__file__, "a"))
refused("creating a file in /", lambda: open("/planted", "w"))
refused("TCP", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
refused("UDP", lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
refused("netlink", lambda: socket.socket(16, socket.SOCK_RAW))
refused("becoming root", lambda: os.setuid(0))
refused("signals through fcntl", lambda: fcntl.fcntl(1, fcntl.F_SETOWN, os.getpid()))
refused("a lease", lambda: fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), 1024, 0))
syscall("unshare", 0x10000000)
syscall("mount", b"none", b"/tmp", b"tmpfs", 0, None)
syscall("chroot", b"/tmp")
syscall("ptrace", 16, 1, 0, 0)
syscall("shmget", 0, 4096, 0o1600)
refused("signalling the worker", lambda: os.kill(os.getppid(), 9) or {protected})
try:
    with open("big", "wb") as file:
        for _ in range(3):
            file.write(bytes(1 << 20))
            file.flush()
    print("NOT REFUSED: a file beyond the file limit")
except OSError:
    pass
print("checked")
"""

_SCRATCH = """
import os
try:
    for number in range({scratch_mb} * 4):
        with open(f"part{{number}}", "wb") as file:
            file.write(bytes(1 << 19))
    import time; time.sleep(20)  # portable: the worker looks at scratch from time to time
    print("NOT REFUSED: scratch beyond its limit")
except OSError:
    print("checked")
"""

_THREADS = """
import threading
try:
    for _ in range({processes} * 4):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    print("NOT REFUSED: threads beyond the limit")
except RuntimeError:
    print("checked")
"""

_FORKS = """
import os, time
made = 0
try:
    while made < {processes} * 4:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
    print("NOT REFUSED: processes beyond the limit")
except OSError:
    print("checked")
"""

_FAMILY = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        block = bytearray({memory_mb} * 9 // 10 << 20)
        for i in range(0, len(block), 4096):
            block[i] = 1
        time.sleep(60)
try:
    while True:
        pid, status = os.wait()
        if os.WIFSIGNALED(status):
            print("checked")
            break
except ChildProcessError:
    print("NOT REFUSED: memory of children")
"""


@dataclass(frozen=True, slots=True)
class JailCheck:
    """A program and the outcomes it must have."""

    name: str
    code: str
    outcomes: tuple[Outcome, ...]
    limits: Limits = SMALL


def checks(level: str, forks: bool, counted: bool, canary: str) -> list[JailCheck]:
    """The programs to run. `counted`: threads are limited exactly here."""
    values = {"memory_mb": 64, "processes": 8, "scratch_mb": 2}
    ok, scratch = (Outcome.OK,), (Outcome.OK, Outcome.KILLED)
    protected = "None" if level == "strict" else "print('NOT REFUSED: signalling the worker')"
    walls = _WALLS.replace("{canary!r}", repr(canary)).replace("{protected}", protected)
    if level == "strict":  # PID 1 of a namespace: the signal is accepted and has no effect
        walls = walls.replace('refused("signalling the worker", ', "(lambda *_: _[-1]())(")
    programs = [
        JailCheck("walls of the jail", walls, ok),
        JailCheck("wall time", "import time; time.sleep(60)", (Outcome.TIMEOUT,), QUICK),
        JailCheck("CPU time", "while True: pass", (Outcome.TIMEOUT,), LITTLE_CPU),
        JailCheck("memory", "bytearray(300 << 20)", (Outcome.MEMORY,)),
        JailCheck("output", "while True: print('x' * 9999)", (Outcome.OUTPUT_LIMIT,)),
        JailCheck("scratch space", _SCRATCH.format(**values), scratch),
    ]
    if counted:
        programs.append(JailCheck("threads", _THREADS.format(**values), ok))
    if forks:
        programs.append(JailCheck("processes", _FORKS.format(**values), ok))
        programs.append(
            JailCheck("memory of children", _FAMILY.format(**values), (Outcome.OK, Outcome.MEMORY))
        )
    return programs


def _plant(directory: str, secret: str) -> Path:
    """A file that every process outside the jail may read; removed with the directory."""
    canary = Path(directory, "canary")
    canary.write_text(secret)
    canary.chmod(0o644)
    return canary


async def check(executor: WorkerExecutor) -> None:
    """Run all checks; IsolationError names the limits that do not hold."""
    secret = secrets.token_hex(16)
    canary = await asyncio.to_thread(_plant, executor.workers.directory, secret)
    link = await executor.workers.take(executor.workers.first, SMALL)
    executor.workers.give_back(link)
    counted = executor.isolation == "strict" or bool(link.spec.group.pids)
    todo = checks(executor.isolation, link.spec.forks, counted, str(canary))
    slots = asyncio.Semaphore(executor.slots)
    deadline = asyncio.get_running_loop().time() + deadlines.SELF_CHECK_S

    async def run(item: JailCheck) -> ToolResult:
        async with slots:
            call_id = f"selfcheck-{secrets.token_hex(4)}"
            return await executor.run(RunRequest(call_id, item.code, limits=item.limits), deadline)

    results = await asyncio.gather(*(run(item) for item in todo))
    failed = []
    for item, result in zip(todo, results, strict=True):
        if result.outcome not in item.outcomes and result.outcome in INCONCLUSIVE:
            result = await run(item)
        text = result.stdout + result.stderr + result.message
        if result.outcome not in item.outcomes or "NOT REFUSED" in text or secret in text:
            shown = (result.stdout or result.message or result.traceback).strip()[-300:]
            failed.append(f"{item.name} ({result.outcome}: {shown})")
    if failed:
        raise IsolationError(
            f"the {executor.isolation} jail does not hold here: " + "; ".join(failed)
        )
