"""The pool: executes calls on warm, jailed workers. Implements protocol.Executor.

    run/verify -> (known id?) -> queue, bounded -> permit (one of `slots`) -> worker -> result

A permit is the right to occupy a core; a worker is a jailed process. Workers are kept by key
(flavour and the limits their jail was built with) and made on demand, so a call with unusual limits
gets a jail of its own and the usual ones never wait for it.

Invariants
- A call is answered exactly once; the same id again gets the same answer (bounded memory of ids).
- A worker runs one call at a time; an endless loop occupies its own permit and no other.
- A lost worker or zygote is replaced. The call in flight is tried once more, then it is reported
  as infrastructure, never as the program's failure. Killed for memory is the program's failure.
- Nothing here blocks the event loop, and every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rstar2.codeenv import cgroups, frames, kernel, outcome, verify
from rstar2.codeenv.frames import Record, Reply, Request
from rstar2.codeenv.jail import JailSpec
from rstar2.codeenv.links import Lost, WorkerLink, ZygoteLink
from rstar2.codeenv.protocol import (
    PoolStats,
    RunRequest,
    SessionInfo,
    VerifyRequest,
    VerifyResult,
)
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, DeadlineError, IsolationError, QueueFullError, UserError
from rstar2.types import Limits, Outcome, ToolResult

_GRACE_S = 3.0
"""How long after a call's wall limit its worker may take to answer."""
_REMEMBER = 4096
_REMEMBER_BYTES = 64 << 20
_OVERHEAD_MB = 192
"""Memory of the worker itself in its control group."""
_UID_BASE = 60_100

Key = tuple[str, int, int, int]


class Pool:
    """See the module docstring. `isolation` is a level that `kernel.resolve` found possible."""

    def __init__(
        self,
        config: CodeEnvConfig,
        isolation: str,
        functions: Mapping[str, str] | None = None,
    ) -> None:
        if isolation not in ("strict", "portable"):
            raise IsolationError(f"isolation {isolation!r}: the pool takes strict or portable")
        self.config = config
        self.isolation = isolation
        self.functions = dict(verify.FUNCTIONS if functions is None else functions)
        self.slots = config.slots or (os.cpu_count() or 1) + 1
        self._zygotes: dict[str, ZygoteLink] = {}
        self._starting: dict[str, asyncio.Task[ZygoteLink]] = {}
        self._idle: dict[Key, list[WorkerLink]] = {}
        self._links: set[WorkerLink] = set()
        self._free = self.slots
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._numbers = itertools.count(1)
        self._inflight: dict[str, asyncio.Task[Any]] = {}
        self._askers: Counter[str] = Counter()
        self._done: OrderedDict[str, tuple[int, Any]] = OrderedDict()
        self._done_bytes = 0
        self._completed: Counter[str] = Counter()
        self._restarts = 0
        self._mean_s = 0.05
        self._closing = False
        self._runtime = ""
        self._tree = cgroups.Tree([])
        self._background: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Warm up, build a first jail and check that every limit holds in it."""
        kernel.sweep_runtime()
        self._runtime = tempfile.mkdtemp(prefix=f"{cgroups.owner_name()}-")
        Path(self._runtime).chmod(0o711)
        self._tree = cgroups.Tree(cgroups.hierarchies())
        await self._zygote("base")
        for flavour in ("verify", "scipy"):
            self._in_background(self._zygote(flavour))

    def _in_background(self, work: Awaitable[Any]) -> None:
        async def guarded() -> None:
            with contextlib.suppress(CodeEnvError, DeadlineError):
                await work  # a flavour that cannot start is tried again when it is needed

        task = asyncio.create_task(guarded())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self, grace_s: float) -> None:
        """Finish what runs within the grace, kill the rest, leave no process, mount or file."""
        self._closing = True
        pending = list(self._inflight.values())
        if pending and grace_s > 0:
            await asyncio.wait(pending, timeout=grace_s)
        for task in [*self._inflight.values(), *self._background, *self._starting.values()]:
            task.cancel()
        await asyncio.gather(*self._inflight.values(), *self._background, return_exceptions=True)
        for link in list(self._links):
            link.kill()
        await asyncio.gather(*(z.close() for z in self._zygotes.values()))
        self._zygotes.clear()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._tree.close)
        if self._runtime:
            shutil.rmtree(self._runtime, ignore_errors=True)

    def stats(self) -> PoolStats:
        return PoolStats(
            isolation=self.isolation,
            slots=self.slots,
            busy=self.slots - self._free,
            queued=len(self._waiters),
            sessions=0,
            restarts=self._restarts,
            completed=dict(self._completed),
        )

    # ------------------------------------------------------------------ calls

    async def run(self, request: RunRequest) -> ToolResult:
        """Execute a program; the same id again returns the first result."""
        limits = outcome.effective(request.limits, self.config.default, self.config.cap)
        return await self._once(request.id, lambda: self._run(request, limits))

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Call a trusted function by name."""
        return await self._once(f"verify:{request.id}", lambda: self._verify(request))

    async def _once(self, identity: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Idempotence: at most one execution per id, whoever asks and however often."""
        known = self._done.get(identity)
        if known is not None:
            self._done.move_to_end(identity)
            return known[1]
        task = self._inflight.get(identity)
        if task is None:
            if self._closing:
                raise CodeEnvError("the pool is closing")
            if self._free == 0 and len(self._waiters) >= self.config.queue:
                raise self._full()
            task = asyncio.ensure_future(work())
            self._inflight[identity] = task
            task.add_done_callback(lambda done: self._remember(identity, done))
        self._askers[identity] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._askers[identity] -= 1
            if not self._askers[identity]:
                del self._askers[identity]
                task.cancel()  # nobody waits any more; does nothing to a call that has ended

    def _full(self) -> QueueFullError:
        after = max(0.1, min(30.0, len(self._waiters) * self._mean_s / self.slots))
        return QueueFullError(
            f"the queue is full ({self.config.queue} calls); try again in {after:.1f} s", after
        )

    def _remember(self, identity: str, task: asyncio.Task[Any]) -> None:
        del self._inflight[identity]
        if task.cancelled() or task.exception() is not None:
            return
        result = task.result()
        if isinstance(result, ToolResult):
            self._completed[result.outcome.value] += 1
            if result.outcome is Outcome.INFRASTRUCTURE:
                return  # worth another try under the same id
            size = len(result.stdout) + len(result.stderr) + len(result.traceback) + 512
        else:
            size = 512
        self._done[identity] = (size, result)
        self._done_bytes += size
        while len(self._done) > _REMEMBER or self._done_bytes > _REMEMBER_BYTES:
            _, (freed, _) = self._done.popitem(last=False)
            self._done_bytes -= freed

    async def _run(self, request: RunRequest, limits: Limits) -> ToolResult:
        code, stdin = (t.encode("utf-8", "surrogatepass") for t in (request.code, request.stdin))
        if len(code) + len(stdin) > frames.MAX_BODY:
            raise UserError(
                f"code and stdin take {len(code) + len(stdin)} bytes; at most {frames.MAX_BODY}"
            )
        flavour = "scipy" if b"scipy" in code and self._warm("scipy") else "base"
        arrived = time.monotonic()
        granted = limits
        header = self._header(frames.RUN, limits, code=len(code), stdin=len(stdin))
        try:
            queue_s, attempts, (reply, body, oom) = await self._execute(
                flavour, limits, header, (code, stdin), arrived, request.deadline_s
            )
        except (Lost, DeadlineError, IsolationError) as error:
            return ToolResult(
                call_id=request.id,
                outcome=Outcome.INFRASTRUCTURE,
                message=str(error),
                queue_s=time.monotonic() - arrived,
                isolation=self.isolation,
            )
        result = outcome.build(request.id, reply, body, granted, self.isolation, oom)
        result = replace(result, queue_s=queue_s, attempts=attempts)
        return _blame(result, reply, limits, request.deadline_s)

    async def _verify(self, request: VerifyRequest) -> VerifyResult:
        if request.function not in self.functions:
            known = ", ".join(sorted(self.functions))
            return VerifyResult(
                request.id,
                error="unknown_function",
                message=f"no function {request.function!r}; there are: {known}",
            )
        limits = outcome.effective(Limits(), self.config.default, self.config.cap)
        code = json.dumps(
            {"function": request.function, "arguments": dict(request.arguments)}
        ).encode()
        header = self._header(frames.VERIFY, limits, code=len(code))
        arrived = time.monotonic()
        try:
            _, attempts, (reply, body, oom) = await self._execute(
                "verify", limits, header, (code,), arrived, request.deadline_s
            )
        except (Lost, DeadlineError, IsolationError) as error:
            return VerifyResult(
                request.id, error=error.name, message=str(error), infrastructure=True
            )
        return _verified(request.id, reply, body, limits, oom, attempts)

    def _header(self, kind: int, limits: Limits, **sizes: int) -> Request:
        return Request(
            seq=next(self._numbers),
            kind=kind,
            name=sizes.get("name", 0),
            code=sizes.get("code", 0),
            stdin=sizes.get("stdin", 0),
            memory_mb=limits.memory_mb or 0,
            processes=limits.processes or 0,
            file_mb=limits.file_mb or 0,
            output_chars=limits.output_chars or 0,
            wall_s=limits.wall_s or 0.0,
            cpu_s=limits.cpu_s or 0.0,
        )

    async def _execute(
        self,
        flavour: str,
        limits: Limits,
        header: Request,
        parts: tuple[bytes, ...],
        arrived: float,
        deadline_s: float | None,
    ) -> tuple[float, int, tuple[Reply, bytes, bool]]:
        """Queue, take a worker, ask it; once more on another worker if it was lost."""
        deadline = None if deadline_s is None else arrived + deadline_s
        await self._acquire(deadline)
        try:
            began = time.monotonic()
            for attempt in (1, 2):
                if deadline is not None:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise DeadlineError(f"the deadline of {deadline_s:g} s passed")
                    header = header._replace(wall_s=min(header.wall_s, left))
                try:
                    answer = await self._attempt(flavour, limits, header, parts)
                except Lost:
                    self._restarts += 1
                    if attempt == 2:
                        raise
                    continue
                spent = time.monotonic() - began
                self._mean_s += 0.05 * (spent - self._mean_s)
                return began - arrived, attempt, answer
            raise AssertionError("unreachable")
        finally:
            self._release()

    async def _attempt(
        self, flavour: str, limits: Limits, header: Request, parts: tuple[bytes, ...]
    ) -> tuple[Reply, bytes, bool]:
        link = await self._take(flavour, limits)
        try:
            reply, body = await link.ask(header, parts, _GRACE_S)
        except Lost:
            self._links.discard(link)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    if await link.exited:
                        return _memory_kill(header), b"", True
            raise
        except BaseException:
            self._links.discard(link)
            raise
        if reply.retire:
            self._drop(link)
        else:
            self._idle.setdefault(_key(link), []).append(link)
        oom = os.WIFSIGNALED(reply.status) and reply.cause == frames.EXITED
        return reply, body, oom and cgroups.oom_kills(link.spec.group) > 0

    # ------------------------------------------------------------------ permits and workers

    async def _acquire(self, deadline: float | None) -> None:
        if self._free:
            self._free -= 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            if deadline is None:
                await waiter
            else:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                self._release()
            else:
                waiter.cancel()
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
            if isinstance(error, TimeoutError):
                raise DeadlineError("the deadline passed in the queue") from None
            raise

    def _release(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1

    def _warm(self, flavour: str) -> bool:
        zygote = self._zygotes.get(flavour)
        return zygote is not None and zygote.alive

    async def _zygote(self, flavour: str) -> ZygoteLink:
        """The live zygote of a flavour; started again if it died."""
        zygote = self._zygotes.get(flavour)
        if zygote is not None and zygote.alive:
            return zygote
        task = self._starting.get(flavour)
        if task is None:
            task = asyncio.create_task(self._start_zygote(flavour))
            self._starting[flavour] = task
            task.add_done_callback(lambda _: self._starting.pop(flavour, None))
        return await asyncio.shield(task)

    async def _start_zygote(self, flavour: str) -> ZygoteLink:
        old = self._zygotes.pop(flavour, None)
        if old is not None:
            self._restarts += 1
            await old.close()
        zygote = ZygoteLink(flavour, self.functions)
        await zygote.start()
        self._zygotes[flavour] = zygote
        return zygote

    async def _take(self, flavour: str, limits: Limits) -> WorkerLink:
        """An idle worker whose jail fits these limits, or a new one."""
        key = (flavour, limits.memory_mb or 0, limits.processes or 0, limits.scratch_mb or 0)
        idle = self._idle.get(key, [])
        while idle:
            link = idle.pop()
            if link.alive:
                return link
            self._links.discard(link)
        self._make_room()
        zygote = await self._zygote(flavour)
        number = next(self._numbers)
        name = f"w{number}"
        group = self._tree.make(
            name,
            (limits.memory_mb or 0) + (limits.scratch_mb or 0) + _OVERHEAD_MB,
            (limits.processes or 0) + 1,
        )
        spec = JailSpec(
            level=self.isolation,
            name=name,
            runtime=self._runtime,
            memory_mb=key[1],
            processes=key[2],
            scratch_mb=key[3],
            uid=kernel.worker_uid(self.isolation, _UID_BASE + number % 400),
            group=group,
        )
        try:
            link = await zygote.spawn(spec)
        except BaseException:
            self._tree.remove(group)
            raise
        self._links.add(link)
        return link

    def _make_room(self) -> None:
        """Keep idle workers of other keys from piling up: at most three a slot in all."""
        while len(self._links) >= 3 * self.slots:
            idle = [link for links in self._idle.values() for link in links]
            if not idle:
                return
            oldest = min(idle, key=lambda link: link.used_at)
            self._idle[_key(oldest)].remove(oldest)
            self._drop(oldest)

    def _drop(self, link: WorkerLink) -> None:
        self._links.discard(link)
        link.kill()

    # ------------------------------------------------------------------ sessions

    async def open_session(self, session: str | None, ttl_s: float | None) -> SessionInfo:
        raise CodeEnvError("sessions are not available yet")

    async def branch_session(self, session: str, branch: str | None) -> SessionInfo:
        raise CodeEnvError("sessions are not available yet")

    async def close_session(self, session: str) -> None:
        raise CodeEnvError("sessions are not available yet")


def _key(link: WorkerLink) -> Key:
    spec = link.spec
    return (link.flavour, spec.memory_mb, spec.processes, spec.scratch_mb)


def _memory_kill(header: Request) -> Reply:
    """The reply of a worker that the kernel killed, with its call, for memory."""
    return Reply(header.seq, 9, frames.EXITED, 1, 0, 0, 0, 0.0, 0.0, float(header.memory_mb))


def _blame(
    result: ToolResult, reply: Reply, limits: Limits, deadline_s: float | None
) -> ToolResult:
    """A program cut short by its caller's deadline, not by its own limit, is not to blame."""
    cut_short = reply.cause == frames.WALL and reply.wall_s < 0.99 * (limits.wall_s or 0.0)
    if not cut_short or deadline_s is None:
        return result
    return replace(
        result,
        outcome=Outcome.INFRASTRUCTURE,
        message=f"The deadline of {deadline_s:g} s passed after {reply.wall_s:.2f} s of running.",
    )


def _verified(
    identity: str, reply: Reply, body: bytes, limits: Limits, oom: bool, attempts: int
) -> VerifyResult:
    """What a verification came to."""
    record = Record.parse(body[reply.stdout + reply.stderr :])
    base = VerifyResult(identity, wall_s=reply.wall_s, attempts=attempts)
    if reply.cause in (frames.WALL, frames.CPU):
        return replace(base, error="timeout", message=f"no answer in {reply.wall_s:.2f} s")
    if record is not None and record.kind == frames.JSON:
        return replace(base, value=json.loads(record.text))
    if record is not None and record.kind == frames.REFUSED:
        return replace(base, error=record.text, message=record.message)
    _, message = outcome.status_of(reply, None, limits, oom)
    return replace(base, error="memory" if oom else "crashed", message=message)
