"""The client of the code environment: one `run` per call, batches on the wire, many servers.

    run / verify -> pending -> pump: batches to the least busy server -> lines back -> futures

Invariants:
- Every call gets its own result, exactly once: lines are matched to calls by id, a line for a call
  that this batch does not wait for is an InvariantError, and a retry keeps its id.
- `run` and `verify` never raise for infrastructure: when no server could execute a call within its
  deadline and attempts, its result says so (Outcome.INFRASTRUCTURE). What a program does wrong
  is an outcome, too. Only bad input (UserError) and broken promises (InvariantError) are raised.
- What is in flight to one server is bounded by its window, so any number of calls may be submitted
  at once; a server's 429 stops new batches to it for as long as it asks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import cast

from rstar2.codeenv import wire
from rstar2.codeenv.endpoint import Endpoint, read_error, to_exception
from rstar2.codeenv.local import LocalServer
from rstar2.codeenv.protocol import RunRequest, SessionInfo, VerifyRequest, VerifyResult
from rstar2.codeenv.service import failure, infrastructure
from rstar2.codeenv.transport import TransportError
from rstar2.codeenv.wire import Request, Result
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, InvariantError, RstarError, UserError
from rstar2.types import Outcome, ToolResult

log = logging.getLogger(__name__)

ATTEMPTS = 5
"""Executions of one call before its infrastructure failure is final."""
BATCH_BYTES = 8 << 20
CONNECT_DEADLINE_S = 15.0
SESSION_DEADLINE_S = 30.0
ANSWER_SLACK_S = 2.0
"""A server keeps deadlines itself; the client stops reading this much later."""


@dataclass(slots=True, eq=False)
class _Call:
    """A request on its way, and who waits for it."""

    request: Request
    deadline: float
    """Loop time."""
    future: asyncio.Future[Result]
    waiters: int = 1
    attempts: int = 0
    avoid: Endpoint | None = None
    pinned: tuple[Endpoint, str] | None = None
    """The server and its life that hold the call's session."""
    batch: _Batch | None = None
    why: str = "no server was free"


@dataclass(slots=True, eq=False)
class _Batch:
    """Calls sent together; `open` shrinks as their lines arrive."""

    endpoint: Endpoint
    open: dict[str, _Call]
    task: asyncio.Task[None] | None = None
    sent: bool = False
    """From here on the server may have executed its calls."""


@dataclass(slots=True)
class ClientStats:
    """What the client saw, for records and benchmarks."""

    calls: int = 0
    batches: int = 0
    retries: Counter[str] = field(default_factory=Counter)
    """Calls sent again, by reason: lost, infrastructure, queue_full, shutting_down."""


class CodeEnvClient:
    """Executes calls on one or many servers; make one with `await CodeEnvClient.start(config)`."""

    def __init__(self, config: CodeEnvConfig, endpoints: Sequence[Endpoint]) -> None:
        self.config = config
        self.endpoints = list(endpoints)
        self.stats = ClientStats()
        self._calls: dict[str, _Call] = {}
        self._pending: deque[_Call] = deque()
        self._sessions: dict[str, tuple[Endpoint, str]] = {}
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    async def start(cls, config: CodeEnvConfig) -> CodeEnvClient:
        """Connect to config.urls, or start and own a local server when there are none."""
        if config.urls:
            endpoints = [Endpoint(url, config.token, config.batch, None) for url in config.urls]
        else:
            owned = LocalServer(config)
            ready = await owned.start()
            endpoints = [Endpoint(ready.url, owned.token, config.batch, owned)]
        client = cls(config, endpoints)
        try:
            await client._connect()
        except BaseException:
            await client.close()
            raise
        for endpoint in endpoints:
            client._spawn(endpoint.monitor(client._wake.set))
        client._spawn(client._pump())
        return client

    async def _connect(self) -> None:
        """Wait until one server answers; raises what stands in the way of all of them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONNECT_DEADLINE_S
        while True:
            answers = await asyncio.gather(
                *(endpoint.check() for endpoint in self.endpoints), return_exceptions=True
            )
            for endpoint, answer in zip(self.endpoints, answers, strict=True):
                if isinstance(answer, UserError) or not isinstance(answer, RstarError | None):
                    raise answer
                endpoint.error = str(answer or "")
            if any(endpoint.healthy for endpoint in self.endpoints):
                return
            if loop.time() > deadline:
                reasons = "; ".join(endpoint.error for endpoint in self.endpoints)
                raise CodeEnvError(
                    f"no code environment answered within {CONNECT_DEADLINE_S:g} s: {reasons}"
                )
            await asyncio.sleep(0.2)

    async def __aenter__(self) -> CodeEnvClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def isolation(self) -> str:
        """The weakest isolation level among the living servers."""
        levels = {endpoint.health.isolation for endpoint in self.endpoints if endpoint.healthy}
        return "portable" if "portable" in levels else next(iter(levels), "")

    # ----------------------------------------------------------------- calls

    async def run(self, request: RunRequest) -> ToolResult:
        """Execute code; infrastructure failure is an outcome, not an exception."""
        return cast(ToolResult, await self._call(request))

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Call a trusted function by name; infrastructure failure is marked in the result."""
        return cast(VerifyResult, await self._call(request))

    async def _call(self, request: Request) -> Result:
        call = self._register(request)
        loop = asyncio.get_running_loop()
        budget_s = request.deadline_s or wire.DEFAULT_DEADLINE_S
        try:
            async with asyncio.timeout_at(loop.time() + budget_s):
                return await asyncio.shield(call.future)
        except TimeoutError:
            message = f"no result within the deadline of {budget_s:g} s: {call.why}"
            return failure(request, message, "", max(1, call.attempts))
        finally:
            self._leave(call)

    def _register(self, request: Request) -> _Call:
        """Queue a call, or join the one that is under way with the same id."""
        if self._closed:
            raise UserError("this client is closed; start another")
        known = self._calls.get(request.id)
        if known is not None:
            if known.request != request:
                raise UserError(f"id: {request.id!r} is under way for another request")
            known.waiters += 1
            return known
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (request.deadline_s or wire.DEFAULT_DEADLINE_S)
        call = _Call(request, deadline, loop.create_future())
        self.stats.calls += 1
        self._calls[request.id] = call
        if isinstance(request, RunRequest) and request.session is not None:
            call.pinned = self._sessions.get(request.session)
            if call.pinned is None:
                message = f"session {request.session!r} was not opened by this client"
                self._resolve(call, failure(request, message, ""))
                return call
        self._enqueue(call)
        return call

    def _leave(self, call: _Call) -> None:
        """One waiter is done; a call that nobody waits for is forgotten and not sent."""
        call.waiters -= 1
        if call.waiters > 0:
            return
        if self._calls.get(call.request.id) is call:
            del self._calls[call.request.id]
        if call.future.done():
            return
        call.future.cancel()
        batch = call.batch
        if batch is not None and all(c.future.done() for c in batch.open.values()):
            assert batch.task is not None
            batch.task.cancel()

    def _enqueue(self, call: _Call, *, front: bool = False) -> None:
        queue = self._pending if call.pinned is None else call.pinned[0].pinned
        (queue.appendleft if front else queue.append)(call)
        self._wake.set()

    # ----------------------------------------------------------------- sending

    async def _pump(self) -> None:
        """Form batches while there are calls and room for them."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._gathering():
                await asyncio.sleep(self.config.linger_s)
            while (found := self._next_batch(loop.time())) is not None:
                endpoint, calls = found
                batch = _Batch(endpoint, {call.request.id: call for call in calls})
                for call in calls:
                    call.batch = batch
                endpoint.outstanding += len(calls)
                batch.task = self._spawn(self._send(batch))

    def _gathering(self) -> bool:
        """True while it pays to wait for more calls: there are few, and every server is busy."""
        few = 0 < len(self._pending) < self.config.batch
        return few and self.config.linger_s > 0 and all(e.outstanding for e in self.endpoints)

    def _next_batch(self, now: float) -> tuple[Endpoint, list[_Call]] | None:
        """The least busy server with enough room, and what to send to it."""
        for endpoint in sorted(self.endpoints, key=lambda e: e.outstanding):
            if not endpoint.available(now):
                if endpoint.healthy and now < endpoint.retry_at and self._waiting(endpoint):
                    loop = asyncio.get_running_loop()
                    loop.call_at(endpoint.retry_at, self._wake.set)
                continue
            calls = self._take(endpoint)
            if calls:
                return endpoint, calls
        return None

    def _waiting(self, endpoint: Endpoint) -> int:
        return len(endpoint.pinned) + len(self._pending)

    def _take(self, endpoint: Endpoint) -> list[_Call]:
        """Up to a batch of calls for this server; none while only crumbs of its window are free.

        Waiting for half a batch of room keeps batches large when the server is saturated.
        """
        room = min(self.config.batch, endpoint.window - endpoint.outstanding)
        if room < min(self._waiting(endpoint), max(1, self.config.batch // 2)):
            return []
        others = any(e is not endpoint and e.healthy for e in self.endpoints)
        calls: list[_Call] = []
        size = 0
        for queue in (endpoint.pinned, self._pending):
            while queue and len(calls) < room and size < BATCH_BYTES:
                call = queue[0]
                if call.avoid is endpoint and others:
                    break
                queue.popleft()
                if call.future.done() or self._session_lost(call, endpoint):
                    continue
                calls.append(call)
                size += _size(call.request)
        return calls

    def _session_lost(self, call: _Call, endpoint: Endpoint) -> bool:
        if call.pinned is None or call.pinned[1] == endpoint.health.server:
            return False
        self._resolve(call, failure(call.request, "the session was lost with its server", ""))
        return True

    async def _send(self, batch: _Batch) -> None:
        """Send one batch and deal with its lines; what stays open afterwards is sent again."""
        endpoint = batch.endpoint
        loop = asyncio.get_running_loop()
        self.stats.batches += 1
        latest = max(call.deadline for call in batch.open.values()) + ANSWER_SLACK_S
        try:
            async with asyncio.timeout_at(latest):
                await self._exchange(batch, loop.time())
        except TransportError as error:
            endpoint.mark_down(str(error))
            self._retry_all(batch, "lost", str(error), counts=batch.sent)
        except TimeoutError:
            pass  # every call of the batch has told its own caller
        except InvariantError as error:
            log.error("code environment %s: %s", endpoint.url, error)
            self._fail_all(batch, error)
        finally:
            endpoint.outstanding -= len(batch.open)
            self._wake.set()

    async def _exchange(self, batch: _Batch, now: float) -> None:
        body = self._encode(batch, now)
        if not batch.open:
            return None
        endpoint = batch.endpoint
        async with endpoint.connections.lease() as connection:
            batch.sent = True
            try:
                response = await connection.request("POST", "/v1/batch", body)
            except TransportError as error:
                if connection.used == 1:
                    raise
                # The server had closed an idle connection: that says nothing about the server.
                return self._retry_all(batch, "stale connection", str(error), counts=False)
            if response.status != 200:
                body = await response.body()
                return self._refused(batch, read_error(body, endpoint.url, response.status))
            async for line in response.lines():
                self._answer(batch, line)
        if batch.open:
            self._retry_all(batch, "lost", "the server's answer ended early")
        return None

    def _encode(self, batch: _Batch, now: float) -> bytes:
        """The body; calls that cannot be written as JSON leave the batch with an answer."""
        parts = []
        for call in list(batch.open.values()):
            left_s = max(0.001, call.deadline - now)
            try:
                parts.append(wire.encode_call(call.request, left_s))
            except UnicodeEncodeError as error:
                message = f"the text of the call has no UTF-8 form: {error}"
                self._close(batch, call, _bad_arguments(call.request, message))
            except TypeError as error:
                self._close(batch, call, UserError(f"arguments: not JSON: {error}"))
        return wire.join_batch(parts)

    # ----------------------------------------------------------------- answers

    def _answer(self, batch: _Batch, line: bytes) -> None:
        """Give one line to the call that it names."""
        try:
            reply = wire.read(line, wire.Reply)
        except wire.Refusal as error:
            raise TransportError(f"{batch.endpoint.url} sent nonsense: {error}") from error
        call = batch.open.get(reply.id)
        if call is None:
            raise InvariantError(
                f"a line for call {reply.id!r}, which this batch does not wait for"
            )
        if reply.error is not None:
            return self._error(batch, call, reply.error)
        result: Result | None
        if isinstance(call.request, RunRequest):
            result, answered = reply.run, reply.run.call_id if reply.run else None
        else:
            result, answered = reply.verify, reply.verify.id if reply.verify else None
        if result is None or answered != reply.id:
            raise InvariantError(f"call {reply.id!r} was answered with the result of {answered!r}")
        call.attempts += 1
        if infrastructure(result) and call.attempts < ATTEMPTS and call.pinned is None:
            return self._retry(batch, call, "infrastructure", result.message, counts=False)
        if call.attempts > 1:
            result = dataclasses.replace(result, attempts=call.attempts)
        return self._close(batch, call, result)

    def _error(self, batch: _Batch, call: _Call, error: wire.WireError) -> None:
        """A call that the server did not execute."""
        if error.code == "queue_full":
            self._hold(batch.endpoint, error)
            return self._retry(batch, call, "queue_full", error.message, counts=False)
        if error.code == "shutting_down":
            batch.endpoint.mark_down(error.message)
            return self._retry(batch, call, "shutting_down", error.message, counts=False)
        if error.code == "infrastructure":
            return self._retry(batch, call, "infrastructure", error.message)
        if error.code == "too_large":
            return self._close(batch, call, _bad_arguments(call.request, error.message))
        return self._close(batch, call, to_exception(error))

    def _refused(self, batch: _Batch, error: wire.WireError) -> None:
        """A batch that the server refused whole."""
        for call in list(batch.open.values()):
            self._error(batch, call, error)

    def _hold(self, endpoint: Endpoint, error: wire.WireError) -> None:
        loop = asyncio.get_running_loop()
        endpoint.retry_at = max(endpoint.retry_at, loop.time() + (error.retry_after_s or 0.1))

    def _retry_all(self, batch: _Batch, reason: str, why: str, *, counts: bool = True) -> None:
        for call in reversed(list(batch.open.values())):
            self._retry(batch, call, reason, why, counts=counts)

    def _retry(
        self, batch: _Batch, call: _Call, reason: str, why: str, *, counts: bool = True
    ) -> None:
        """Send a call again, elsewhere if possible; `counts` if it may have been executed."""
        self._forget(batch, call)
        call.why = why
        call.attempts += counts
        if call.future.done():
            return None
        if call.attempts >= ATTEMPTS:
            message = f"given up after {call.attempts} attempts: {why}"
            return self._resolve(call, failure(call.request, message, "", call.attempts))
        self.stats.retries[reason] += 1
        call.avoid = None if reason == "stale connection" else batch.endpoint
        if reason == "infrastructure":
            pause_s = min(2.0, 0.05 * 2**call.attempts)
            loop = asyncio.get_running_loop()
            loop.call_later(pause_s, self._enqueue, call)
            return None
        return self._enqueue(call, front=True)

    def _fail_all(self, batch: _Batch, error: InvariantError) -> None:
        for call in list(batch.open.values()):
            self._close(batch, call, error)

    def _forget(self, batch: _Batch, call: _Call) -> None:
        del batch.open[call.request.id]
        batch.endpoint.outstanding -= 1
        call.batch = None
        if self._waiting(batch.endpoint):
            self._wake.set()

    def _close(self, batch: _Batch, call: _Call, result: Result | Exception) -> None:
        self._forget(batch, call)
        self._resolve(call, result)

    def _resolve(self, call: _Call, result: Result | Exception) -> None:
        if call.future.done():
            return
        if isinstance(result, Exception):
            call.future.set_exception(result)
        else:
            call.future.set_result(result)

    # ----------------------------------------------------------------- sessions

    async def open_session(
        self, session: str | None = None, ttl_s: float | None = None
    ) -> SessionInfo:
        """Open a session on the least busy server; its calls all go there."""
        living = [endpoint for endpoint in self.endpoints if endpoint.healthy]
        if not living:
            raise CodeEnvError("no code environment is up: " + self.endpoints[0].error)
        endpoint = min(living, key=lambda e: e.outstanding)
        body = wire.SessionIn(session or f"s-{uuid.uuid4().hex}", ttl_s)
        info = await endpoint.json("POST", "/v1/sessions", body, SessionInfo, SESSION_DEADLINE_S)
        self._sessions[info.id] = (endpoint, endpoint.health.server)
        return info

    async def branch_session(self, session: str, branch: str | None = None) -> SessionInfo:
        """A new session with a copy of this one's state, on the same server."""
        endpoint, life = self._session(session)
        body = wire.BranchIn(branch or f"s-{uuid.uuid4().hex}")
        path = f"/v1/sessions/{session}/branch"
        info = await endpoint.json("POST", path, body, SessionInfo, SESSION_DEADLINE_S)
        self._sessions[info.id] = (endpoint, life)
        return info

    async def close_session(self, session: str) -> None:
        """End a session; one that died with its server is closed already."""
        endpoint, life = self._session(session, closing=True)
        if endpoint.healthy and endpoint.health.server == life:
            path = f"/v1/sessions/{session}"
            await endpoint.json("DELETE", path, None, dict, SESSION_DEADLINE_S)

    def _session(self, session: str, *, closing: bool = False) -> tuple[Endpoint, str]:
        known = self._sessions.pop(session, None) if closing else self._sessions.get(session)
        if known is None:
            raise UserError(f"session: {session!r} was not opened by this client")
        if not closing and known[0].health.server != known[1]:
            raise CodeEnvError(f"session {session!r} was lost with its server")
        return known

    # ----------------------------------------------------------------- life

    def _spawn(self, work: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the client's own task failed", exc_info=task.exception())

    async def close(self) -> None:
        """Answer what is open, end the owned server, leave nothing."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for call in list(self._calls.values()):
            self._resolve(call, failure(call.request, "the client was closed", ""))
        for endpoint in self.endpoints:
            endpoint.connections.close()
            if endpoint.owned is not None:
                await endpoint.owned.stop()


def _bad_arguments(request: Request, message: str) -> Result:
    """The answer to a call whose own text cannot be sent: the model's doing, so an outcome."""
    if isinstance(request, RunRequest):
        return ToolResult(request.id, Outcome.BAD_ARGUMENTS, message=message)
    return VerifyResult(request.id, error="bad_arguments", message=message)


def _size(request: Request) -> int:
    if isinstance(request, RunRequest):
        return len(request.code) + len(request.stdin)
    return 1024
