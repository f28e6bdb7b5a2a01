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
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from rstar2.codeenv.jail import cgroups, frames, verify, warmup
from rstar2.codeenv.jail.frames import Record, WorkerReply, WorkerRequest
from rstar2.codeenv.protocol import (
    PoolStats,
    RunRequest,
    SessionInfo,
    VerifyRequest,
    VerifyResult,
)
from rstar2.codeenv.server import outcome, selfcheck
from rstar2.codeenv.server.links import Lost
from rstar2.codeenv.server.permits import Permits
from rstar2.codeenv.server.sessions import Sessions
from rstar2.codeenv.server.workers import Stock
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, DeadlineError, IsolationError, UserError
from rstar2.types import Limits, Outcome, ToolResult

_log = logging.getLogger(__name__)
_GRACE_S = 3.0
"""How long after a call's wall limit its worker may take to answer."""
_REMEMBER = 4096
_REMEMBER_BYTES = 64 << 20

Answer = tuple[WorkerReply, bytes, bool]
"""What a worker saw, the streams, and whether the kernel killed for memory."""


Attempt = Callable[[WorkerRequest, float | None], Awaitable[Answer]]
"""One try at a call before a deadline (monotonic)."""


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
        self.functions = dict(verify.FUNCTIONS if functions is None else functions)
        slots = config.slots or (os.cpu_count() or 1) + 1
        self._permits = Permits(slots, config.queue)
        self.fallback = ""
        """Why the level is weaker than the one that was chosen; empty if it is not."""
        self._build(isolation)
        self._numbers = itertools.count(1)
        self._inflight: dict[str, asyncio.Task[Any]] = {}
        self._leaving: set[asyncio.Task[Any]] = set()
        self._askers: Counter[str] = Counter()
        self._done: OrderedDict[str, tuple[int, Any]] = OrderedDict()
        self._done_bytes = 0
        self._completed: Counter[str] = Counter()
        self._lost = 0
        self._closing = False

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Warm up, build a first jail and check that every limit holds in it.

        If strict was chosen by `auto` and does not hold, portable is taken instead, with a warning
        and the reason in `fallback`; if it was asked for, IsolationError says what does not hold.
        """
        try:
            try:
                await self._warm_up()
            except IsolationError as error:
                if self.isolation != "strict" or self.config.isolation != "auto":
                    raise
                self.fallback = str(error)
                _log.warning("isolation falls from strict to portable: %s", error)
                await self.stock.close()
                self._build("portable")
                await self._warm_up()
        except BaseException:
            await self.close(0)
            raise
        self._completed.clear()
        self._done.clear()
        self.stock.start_others()

    def _build(self, isolation: str) -> None:
        self.isolation = isolation
        self.stock = Stock(isolation, self._permits.slots, self.functions)
        self._sessions = Sessions(self.config, self.stock)

    async def _warm_up(self) -> None:
        await self.stock.start()
        await selfcheck.check(self)

    async def close(self, grace_s: float) -> None:
        """Finish what runs within the grace, kill the rest, leave no process, mount or file."""
        self._closing = True
        pending = list(self._inflight.values())
        if pending and grace_s > 0:
            await asyncio.wait(pending, timeout=grace_s)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, *self._leaving, return_exceptions=True)
        self._sessions.drop_all()
        await self.stock.close()

    def stats(self) -> PoolStats:
        return PoolStats(
            isolation=self.isolation,
            slots=self._permits.slots,
            busy=self._permits.busy,
            queued=max(0, len(self._inflight) - self._permits.busy),
            sessions=len(self._sessions),
            restarts=self._lost + self.stock.restarts,
            completed=dict(self._completed),
            warm=tuple(flavour for flavour in warmup.FLAVOURS if self.stock.warm(flavour)),
        )

    # ------------------------------------------------------------------ calls

    async def run(self, request: RunRequest) -> ToolResult:
        """Execute a program; the same id again returns the first result."""
        limits = outcome.effective(request.limits, self.config.default, self.config.cap)
        result: ToolResult = await self._once(request.id, lambda: self._run(request, limits))
        return result

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Call a trusted function by name."""
        identity = f"verify:{request.id}"
        result: VerifyResult = await self._once(identity, lambda: self._verify(request))
        return result

    async def open_session(self, session: str | None, ttl_s: float | None) -> SessionInfo:
        """A fresh interpreter that keeps its state across calls."""
        return await self._sessions.open(session, ttl_s)

    async def branch_session(self, session: str, branch: str | None) -> SessionInfo:
        """A copy of a session's state under another id."""
        return await self._sessions.branch(session, branch)

    async def close_session(self, session: str) -> None:
        """End a session now."""
        await self._sessions.close(session)

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
            self._permits.check(len(self._inflight))
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
                self._leave(identity, task)

    def _leave(self, identity: str, task: asyncio.Task[Any]) -> None:
        """Nobody waits any more: end the call, and let a later asker start afresh."""
        if not task.done():
            task.cancel()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            del self._inflight[identity]

    def _remember(self, identity: str, task: asyncio.Task[Any]) -> None:
        if self._inflight.get(identity) is task:
            del self._inflight[identity]
        if task.cancelled() or task.exception() is not None:
            return
        result = task.result()
        size = 512
        if isinstance(result, ToolResult):
            self._completed[result.outcome.value] += 1
            if result.outcome is Outcome.INFRASTRUCTURE:
                return  # worth another try under the same id
            size += len(result.stdout) + len(result.stderr) + len(result.traceback)
        elif result.infrastructure:
            return
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
        header = self._header(frames.RUN, limits, len(code), len(stdin))
        arrived = time.monotonic()
        if request.session is None:
            wanted = warmup.flavour_for(code)
            flavour = wanted if self.stock.warm(wanted) else "base"
            attempt, tries = self._on_stock(flavour, limits, (code, stdin)), 2
        else:
            limits = replace(limits, memory_mb=self.config.session_memory_mb)
            attempt, tries = self._in_session(request.session, (code, stdin)), 1
        try:
            queue_s, attempts, (reply, body, oom) = await self._execute(
                attempt, tries, header, arrived, request.deadline_s
            )
        except (Lost, DeadlineError, IsolationError) as error:
            return ToolResult(
                call_id=request.id,
                outcome=Outcome.INFRASTRUCTURE,
                message=str(error),
                queue_s=time.monotonic() - arrived,
                isolation=self.isolation,
            )
        result = outcome.build(request.id, reply, body, limits, self.isolation, oom)
        result = replace(result, queue_s=queue_s, attempts=attempts)
        return _blame(result, reply, limits, request.deadline_s)

    async def _verify(self, request: VerifyRequest) -> VerifyResult:
        if request.function not in self.functions:
            known = ", ".join(sorted(self.functions))
            text = f"no function {request.function!r}; there are: {known}"
            return VerifyResult(request.id, error="unknown_function", message=text)
        limits = outcome.effective(
            Limits(wall_s=request.deadline_s, cpu_s=request.deadline_s),
            self.config.default,
            self.config.cap,
        )
        order = {"function": request.function, "arguments": dict(request.arguments)}
        code = json.dumps(order).encode()
        header = self._header(frames.VERIFY, limits, len(code), 0)
        standard = outcome.effective(Limits(), self.config.default, self.config.cap)
        try:
            _, attempts, (reply, body, oom) = await self._execute(
                self._on_stock("verify", standard, (code,)),
                2,
                header,
                time.monotonic(),
                request.deadline_s,
            )
        except (Lost, DeadlineError, IsolationError) as error:
            return VerifyResult(
                request.id, error=error.name, message=str(error), infrastructure=True
            )
        return _verified(request.id, reply, body, limits, oom, attempts)

    def _header(self, kind: int, limits: Limits, code: int, stdin: int) -> WorkerRequest:
        return WorkerRequest(
            seq=next(self._numbers),
            kind=kind,
            name=0,
            code=code,
            stdin=stdin,
            memory_mb=limits.memory_mb or 0,
            processes=limits.processes or 0,
            file_mb=limits.file_mb or 0,
            output_chars=limits.output_chars or 0,
            wall_s=limits.wall_s or 0.0,
            cpu_s=limits.cpu_s or 0.0,
        )

    async def _execute(
        self,
        attempt: Attempt,
        tries: int,
        header: WorkerRequest,
        arrived: float,
        deadline_s: float | None,
    ) -> tuple[float, int, Answer]:
        """Wait for a permit, then try; once more if the worker was lost."""
        deadline = None if deadline_s is None else arrived + deadline_s
        await self._permits.acquire(deadline)
        began = time.monotonic()
        try:
            for number in itertools.count(1):
                try:
                    return began - arrived, number, await attempt(header, deadline)
                except Lost:
                    self._lost += 1
                    if number == tries:
                        raise
            raise AssertionError("unreachable")
        finally:
            self._permits.release(time.monotonic() - began)

    def _on_stock(self, flavour: str, limits: Limits, parts: tuple[bytes, ...]) -> Attempt:
        """How a plain call is made: on any worker whose jail fits."""

        async def attempt(header: WorkerRequest, deadline: float | None) -> Answer:
            if deadline is None:
                link = await self.stock.take(flavour, limits)
            else:
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        link = await self.stock.take(flavour, limits)
                except TimeoutError:
                    raise DeadlineError("the deadline passed before a worker was ready") from None
            try:
                reply, body = await link.ask(_within(header, deadline), parts, _GRACE_S)
            except Lost:
                self.stock.drop(link)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        if await link.exited:
                            return _memory_kill(header), b"", True
                raise
            except BaseException:
                self.stock.drop(link)
                raise
            killed = os.WIFSIGNALED(reply.status) and reply.cause == frames.EXITED
            oom = killed and cgroups.oom_kills(link.spec.group) > link.oom_seen
            if oom:
                link.oom_seen = cgroups.oom_kills(link.spec.group)
            if reply.retire:
                self.stock.drop(link)
            else:
                self.stock.give_back(link)
            return reply, body, oom

        return attempt

    def _in_session(self, session: str, parts: tuple[bytes, bytes]) -> Attempt:
        """How a session's call is made: in its own worker, never twice."""

        async def attempt(header: WorkerRequest, deadline: float | None) -> Answer:
            reply, body = await self._sessions.run(session, _within(header, deadline), parts)
            return reply, body, False

        return attempt


def _within(header: WorkerRequest, deadline: float | None) -> WorkerRequest:
    """The wall limit of a call, cut to what its caller's deadline leaves of it."""
    if deadline is None:
        return header
    return header._replace(wall_s=max(0.001, min(header.wall_s, deadline - time.monotonic())))


def _memory_kill(header: WorkerRequest) -> WorkerReply:
    """The reply of a worker that the kernel killed, with its call, for memory."""
    return WorkerReply(header.seq, 9, frames.EXITED, 1, 0, 0, 0, 0.0, 0.0, float(header.memory_mb))


def _blame(
    result: ToolResult, reply: WorkerReply, limits: Limits, deadline_s: float | None
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
    identity: str, reply: WorkerReply, body: bytes, limits: Limits, oom: bool, attempts: int
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
