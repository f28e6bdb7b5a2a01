"""Warm workers: the socket to each (`WorkerLink`), and the pool that starts and keeps them.

The pool keeps zygotes by flavour and workers by the limits their jails were built with. It knows no
calls and no queue. The executor takes a worker, uses it for one call, and gives it back or drops
it. Idle workers of unusual kinds make room for others. Event loop only: nothing blocks, and every
wait has a deadline.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import re
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar2.codeenv import deadlines
from rstar2.codeenv.jail import cgroups, frames, warmup
from rstar2.codeenv.jail.confine import JailSpec
from rstar2.codeenv.jail.frames import WorkerReply, WorkerRequest
from rstar2.codeenv.server import probe
from rstar2.codeenv.server.packages import InterpreterSetup
from rstar2.codeenv.server.zygotes import WorkerLostError, ZygoteLink, ZygotePool
from rstar2.config.codeenv import WarmUp
from rstar2.errors import DeadlineError, IsolationError
from rstar2.tasks import cancel_all
from rstar2.types import Limits

OVERHEAD_MB = 192
"""Memory of the worker itself in its control group, in addition to what its calls may use."""
_UID_FIRST, _UIDS = 50_000, 10_000
"""Uids for workers when the server is root; servers start at different ones."""
_PER_SLOT = 5
"""Workers kept per slot, of all kinds together: one of each flavour."""

_64 = rb"[A-Za-z0-9+/]"
_ENCODED = re.compile(rb"[\"']((?:%b{4}){4,}(?:%b{2}==|%b{3}=)?)[\"']" % (_64, _64, _64))
"""Base64 of at least 12 bytes as a literal."""

WorkerKey = tuple[str, int, int, int]


def lightest_flavour(code: bytes, packages: Sequence[str] = ()) -> str:
    """The lightest flavour with the modules that a program mentions; all of them can execute it.

    Base64 text that the program decodes counts too: the release's client sends programs so.
    """
    if b"b64decode" in code:
        code = b"\n".join([code, *map(base64.b64decode, _ENCODED.findall(code))])
    if any(name.encode() in code for name in packages):
        return warmup.PACKAGES
    if b"scipy" in code or (b"random" in code and (b"numpy" in code or b"np." in code)):
        return "scipy"
    if b"sympy" in code or b"mpmath" in code:
        return "base"
    return "numpy" if b"numpy" in code else "plain"


class WorkerLink(asyncio.Protocol):
    """The socket to one worker: one request, then its reply, in turn."""

    def __init__(self, spec: JailSpec, flavour: str) -> None:
        self.spec = spec
        self.flavour = flavour
        self.pid = 0
        self._pidfd = -1
        self.calls = 0
        self.oom_seen = 0
        self.alive = True
        self.used_at = time.monotonic()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._header: WorkerReply | None = None
        self._waiting: asyncio.Future[tuple[WorkerReply, bytes]] | None = None
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.exited: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Set when the zygote has reaped the worker: did the kernel kill it for memory?"""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def busy(self) -> bool:
        """True while a call runs in it."""
        return self._waiting is not None

    def on_spawned(self, pid: int) -> None:
        """Open a handle on the process: unlike its pid, it is never reused."""
        self.pid = pid
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def on_exited(self, oom: bool) -> None:
        """The zygote has reaped the process."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if not self.exited.done():
            self.exited.set_result(oom)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._hello.done():
            self._greet()
            return
        if self._header is None:
            size = frames.REPLY.size
            if len(self._buffer) < size:
                return
            self._header = WorkerReply(*frames.REPLY.unpack_from(self._buffer))
            del self._buffer[:size]
        if len(self._buffer) < self._header.body:
            return
        body, header = bytes(self._buffer[: self._header.body]), self._header
        del self._buffer[: header.body]
        self._header = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result((header, body))

    def _greet(self) -> None:
        if b"\n" not in self._buffer:
            return
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        if line + b"\n" == frames.HELLO:
            self._hello.set_result(None)
        else:
            self._hello.set_exception(IsolationError(line.decode("utf-8", "replace")))

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        lost = WorkerLostError(f"worker {self.name} ended without an answer")
        if not self._hello.done():
            self._hello.set_exception(lost)
            self._hello.exception()  # retrieved here: after a failed spawn nothing awaits it
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(lost)

    async def greeted(self) -> None:
        """Wait until the worker serves; IsolationError says why its jail could not be built."""
        try:
            async with asyncio.timeout(deadlines.SPAWN_S):
                await self._hello
        except TimeoutError:
            self.kill()
            raise DeadlineError(
                f"worker {self.name} was not ready in {deadlines.SPAWN_S:g} s"
            ) from None

    async def ask(
        self,
        request: WorkerRequest,
        parts: tuple[bytes, ...],
        grace_s: float = deadlines.WORKER_GRACE_S,
    ) -> tuple[WorkerReply, bytes]:
        """One call. A worker that is silent `grace_s` after the wall limit is killed."""
        if self._transport is None or not self.alive:
            raise WorkerLostError(f"worker {self.name} has ended")
        self._waiting = asyncio.get_running_loop().create_future()
        # Not writelines: from Python 3.12 on, an empty part at the end keeps asyncio busy.
        self._transport.write(b"".join((request.pack(), *parts)))
        self.calls += 1
        self.used_at = time.monotonic()
        try:
            async with asyncio.timeout(request.wall_s + grace_s):
                header, body = await self._waiting
        except TimeoutError:
            self.kill()
            raise WorkerLostError(f"worker {self.name} hung and was killed") from None
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            self._waiting = None
        if header.seq != request.seq:
            self.kill()
            raise WorkerLostError(
                f"worker {self.name} answered {header.seq} instead of {request.seq}"
            )
        return header, body

    def abort(self) -> None:
        """End the running call of a session worker; its reply still comes."""
        if self._transport is not None and self.alive:
            order = WorkerRequest(0, frames.SESSION_ABORT, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)
            self._transport.write(order.pack())

    async def killed_for_memory(self) -> bool:
        """Wait for the zygote's report on a lost worker: did the kernel kill it for memory?"""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadlines.EXIT_REPORT_S):
                return await asyncio.shield(self.exited)
        return False

    def kill(self) -> None:
        """End the worker now, and everything in its namespace."""
        self.alive = False
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self._transport is not None:
            self._transport.abort()


class WorkerPool:
    """Starts, keeps and ends workers. On the host it leaves `directory` and control groups."""

    def __init__(
        self,
        isolation: str,
        slots: int,
        functions: Mapping[str, str],
        warm_up: WarmUp = "before",
        setup: InterpreterSetup | None = None,
    ) -> None:
        self.isolation = isolation
        self.warm_up = warm_up
        self.first = "base" if warm_up == "before" else "plain"
        """The flavour that the server starts with, and checks."""
        self._zygotes = ZygotePool(functions, setup, lightest_flavour)
        self.most = _PER_SLOT * slots
        self.directory = ""
        self.links: set[WorkerLink] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._idle: dict[WorkerKey, list[WorkerLink]] = {}
        self._numbers = itertools.count(1)
        self._tree = cgroups.ControlGroupTree([])

    async def start(self) -> None:
        """Remove what dead servers left on the host, then start the first flavour."""
        await asyncio.get_running_loop().run_in_executor(None, self._prepare_host)
        await self.zygote(self.first)

    def _prepare_host(self) -> None:
        probe.sweep_runtime()
        self.directory = tempfile.mkdtemp(prefix=f"{cgroups.owner_name()}-")
        Path(self.directory).chmod(0o711)
        self._tree = cgroups.ControlGroupTree(cgroups.hierarchies())

    def start_others(self) -> None:
        """Warm up the other flavours in the background, if that is wanted."""
        if self.warm_up == "never":
            return
        task = asyncio.create_task(self._zygotes.start_others())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """End every process and remove every directory and control group."""
        await cancel_all(self._background)
        for link in list(self.links):
            self.drop(link)
        await self._zygotes.close()
        await asyncio.get_running_loop().run_in_executor(None, self._tree.close)
        if self.directory:
            await asyncio.to_thread(probe.remove_runtime, self.directory)

    def warm(self, flavour: str) -> bool:
        """True if a zygote of this flavour is ready."""
        live = self._zygotes.live
        return flavour in live and live[flavour].alive

    def flavour_for(self, code: bytes) -> str:
        """The flavour that a program starts in; `base` if that is warm and the right one is not."""
        flavour = lightest_flavour(code, self._zygotes.setup.packages)
        return "base" if self.warm("base") and not self.warm(flavour) else flavour

    @property
    def zygotes(self) -> dict[str, ZygoteLink]:
        """The live zygotes by flavour."""
        return dict(self._zygotes.live)

    @property
    def restarts(self) -> int:
        """Zygotes that were started again."""
        return self._zygotes.restarts

    async def zygote(self, flavour: str) -> ZygoteLink:
        """The live zygote of a flavour; waits while it is being started."""
        return await self._zygotes.get(flavour)

    # ------------------------------------------------------------------ workers

    async def take(self, flavour: str, limits: Limits) -> WorkerLink:
        """An idle worker whose jail fits these limits, or a new one."""
        key = (flavour, limits.memory_mb or 0, limits.processes or 0, limits.scratch_mb or 0)
        idle = self._idle.get(key, [])
        while idle:
            link = idle.pop()
            if link.alive:
                return link
            self.links.discard(link)
        self._make_room()
        return await self.make(flavour, limits)

    async def make(self, flavour: str, limits: Limits, session: bool = False) -> WorkerLink:
        """A new worker in a new jail."""
        zygote = await self.zygote(flavour)
        number = next(self._numbers)
        memory_mb, scratch_mb = limits.memory_mb or 0, limits.scratch_mb or 0
        processes = limits.processes or 0
        share = (memory_mb + scratch_mb + OVERHEAD_MB, processes + 1)
        group = self._tree.make(f"w{number}", *(_session_share(limits, 1) if session else share))
        spec = JailSpec(
            level=self.isolation,
            name=f"w{number}",
            runtime=self.directory,
            memory_mb=memory_mb,
            processes=processes,
            scratch_mb=scratch_mb,
            uid=probe.worker_uid(self.isolation, _UID_FIRST + (os.getpid() * 37 + number) % _UIDS),
            group=group,
            session=session,
            landlock_abi=probe.newest_landlock_abi(),
        )
        link = WorkerLink(spec, flavour)
        try:
            await zygote.spawn(link)
        except BaseException:
            self._tree.remove(group)
            raise
        self.links.add(link)
        return link

    def make_room(self, link: WorkerLink, limits: Limits, members: int) -> None:
        """Give a session worker's control group room for this many members."""
        memory_mb, processes = _session_share(limits, members)
        cgroups.raise_limits(link.spec.group, memory_mb, processes)

    def give_back(self, link: WorkerLink) -> None:
        """The worker is idle again."""
        self._idle.setdefault(_key(link), []).append(link)

    def drop(self, link: WorkerLink) -> None:
        """End a worker that is not idle."""
        self.links.discard(link)
        link.kill()

    def _make_room(self) -> None:
        """End the longest idle workers when there are too many."""
        while len(self.links) >= self.most:
            idle = [link for links in self._idle.values() for link in links]
            if not idle:
                return
            oldest = min(idle, key=lambda link: link.used_at)
            self._idle[_key(oldest)].remove(oldest)
            self.drop(oldest)


def _session_share(limits: Limits, members: int) -> tuple[int, int]:
    """Memory in MB and processes of a session worker. One more member's share is for the copy that
    is kept during a call."""
    memory_mb, processes = limits.memory_mb or 0, limits.processes or 0
    return (
        (members + 1) * memory_mb + (limits.scratch_mb or 0) + OVERHEAD_MB,
        (members + 1) * (processes + 1) + 1,
    )


def _key(link: WorkerLink) -> WorkerKey:
    spec = link.spec
    return (link.flavour, spec.memory_mb, spec.processes, spec.scratch_mb)
