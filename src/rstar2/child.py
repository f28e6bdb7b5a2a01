"""A supervised child process, which never outlives its parent. Linux only.

    Child(...) -> ready(until it serves) -> wait() or stop() -> post_mortem()

Guarantees:
- The child leads its own session and process group: Ctrl-C at a terminal reaches only its parent,
  which then stops it gracefully.
- The child ends with its parent, even if the parent is killed with -9, in one of two ways. The
  kernel sends it `parent_death_signal` (PR_SET_PDEATHSIG, set before the command runs; the kernel
  watches the *thread* that started the child). Or the child watches its stdin or another inherited
  descriptor itself: the kernel closes the other end when the parent dies, and the child can then
  clean up.
- `stop` sends SIGTERM, waits for the grace period, then kills the whole group.
- Nothing blocks the event loop, and every wait has a deadline except `wait`.

Processes that `multiprocessing` forks (the ranks of a learner) are not children of this kind: they
use `describe_exit` and `call_when_closed` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rstar2.errors import DeadlineError

TAIL_LINES, LINE_CHARS = 20, 240
PR_SET_PDEATHSIG = 1
_LAUNCHER = f"""\
import ctypes, os, sys
number, parent, *command = sys.argv[1:]
if ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, int(number), 0, 0, 0) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() == int(parent):  # otherwise the parent died before the call to prctl
    os.execvp(command[0], command)
"""
"""Replaces itself with the command. `preexec_fn` could deadlock in a process with threads."""

T = TypeVar("T")


class Child:
    """One child process, started by the constructor."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        parent_death_signal: signal.Signals | None,
        grace_s: float,
        environment: Mapping[str, str] | None = None,
        directory: str | Path | None = None,
        descriptors: Sequence[int] = (),
        stdin: bytes | None = None,
        reads_line: bool = False,
        log: Path | None = None,
        quiet: bool = False,
        kills_group: bool = True,
    ) -> None:
        """Start a command.

        `parent_death_signal` is None if the child watches a descriptor instead. `stdin` is
        written to the child's stdin, which then stays open until `stop`; None gives /dev/null.
        Stdout is a pipe for `read_line` if `reads_line`, else /dev/null. Stderr is inherited, or
        /dev/null if `quiet`. Both are appended to `log` if it is given. `kills_group=False` leaves
        the other processes of the group to the caller when the child has ended.
        """
        self.name, self.log, self.grace_s = name, log, grace_s
        self._kills_group = kills_group
        if parent_death_signal is not None:
            command = with_parent_death_signal(command, parent_death_signal)
        with log.open("ab") if log is not None else contextlib.nullcontext() as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stdout=subprocess.PIPE if reads_line else output or subprocess.DEVNULL,
                stderr=output or (subprocess.DEVNULL if quiet else None),
                env=environment,
                cwd=directory,
                pass_fds=descriptors,
                start_new_session=True,
            )
        self._lines: asyncio.StreamReader | None = None
        self._lines_transport: asyncio.ReadTransport | None = None
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended at once; `ready` reports that
                self._process.stdin.write(stdin or b"")
                self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of its group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None and not self._ended()

    @property
    def returncode(self) -> int | None:
        """Its exit code, the negative number of the signal that killed it, or None."""
        if self._process.returncode is None and self._ended():
            self._collect()
        return self._process.returncode

    async def ready(self, answer: Awaitable[T], within_s: float) -> T:
        """Await the child's first answer; if there is none within the deadline, stop the child.

        `answer` itself must fail when the child ends, as a read from its pipe or socket does.
        """
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError as error:
            await self.stop()
            raise DeadlineError(f"{self.name}: not ready within {within_s:g} s") from error
        except BaseException:
            await self.stop()
            raise

    async def read_line(self) -> bytes:
        """The next line of its stdout; empty once it has ended."""
        if self._lines is None:
            assert self._process.stdout is not None, "start the child with reads_line=True"
            reader = self._lines = asyncio.StreamReader()
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
            )
            self._lines_transport = transport
        return await self._lines.readline()

    async def wait(self) -> int:
        """Wait until it has ended; returns its exit code, see `returncode`."""
        if self.running:
            loop = asyncio.get_running_loop()
            ended = asyncio.Event()
            descriptor = os.pidfd_open(self.pid)
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        return self._collect()

    async def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL of its group after the grace period. Idempotent."""
        try:
            self._close_stdin()
            if self.running:
                os.kill(self.pid, signal.SIGTERM)
            async with asyncio.timeout(self.grace_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
        finally:  # also when this wait is cancelled
            self.kill()
            self._collect()
            if self._lines_transport is not None:
                self._lines_transport.close()

    def kill(self) -> None:
        """Kill it, and the other processes of its group unless `kills_group` is off."""
        if self._process.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            if self._kills_group:
                os.killpg(self.pid, signal.SIGKILL)

    def describe_end(self) -> str:
        """How it ended, in words."""
        code = self.returncode
        state = "is still running" if code is None else describe_exit(code)
        return f"process {self.pid} {state}"

    def post_mortem(self) -> str:
        """How it ended, and the last lines of its log if it has one."""
        lines = tail(self.log) if self.log is not None and self.log.exists() else ""
        return f"{self.describe_end()}; its last output:\n{lines}" if lines else self.describe_end()

    def _ended(self) -> bool:
        """Whether it has ended. It stays a zombie, so that its process id is not reused."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def _collect(self) -> int:
        """Reap the ended process and what is left of its group. Unread lines stay readable."""
        if self._process.returncode is None:
            if self._kills_group:
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._close_stdin()
            if self._process.stdout is not None and self._lines is None:
                self._process.stdout.close()
        return self._process.returncode

    def _close_stdin(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended before it had read everything
                self._process.stdin.close()


def with_parent_death_signal(command: Sequence[str], number: signal.Signals) -> list[str]:
    """The command line, started so that the kernel sends it a signal when this process ends."""
    words = [str(int(number)), str(os.getpid()), *command]
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, *words]


def describe_exit(code: int) -> str:
    """An exit code as subprocess gives it, in words."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a text file, each cut to a readable length."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return "\n".join(deque((line.rstrip()[:LINE_CHARS] for line in file), maxlen=lines))


# --------------------------------------------------------------------------- in the child


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(0)  # the parent died before the call to prctl


def call_when_closed(descriptor: int, action: Callable[[], object]) -> None:
    """Call `action` from a thread once the other end of a pipe, which sends nothing, is closed."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(descriptor, 1)
        action()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
