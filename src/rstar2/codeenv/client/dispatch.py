"""The dispatcher of the client: batches to the least busy server, results to calls, retries.

    submit -> pending -> pump -> batch -> endpoint -> line -> future
                ^                                       |
                +-------- retry: same id, elsewhere ----+

Every submitted call is in exactly one place: pending, in one batch's `open`, in the pause before a
retry, or resolved. A line resolves the call that it names. A line for a call that its batch does
not wait for means that nothing from this stream can be trusted (InvariantError).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rstar2.codeenv import deadlines, wire
from rstar2.codeenv.client.endpoint import (
    ServerEndpoint,
    TransportError,
    read_error,
    to_exception,
)
from rstar2.codeenv.protocol import (
    CallRequest,
    CallResult,
    RunRequest,
    VerifyResult,
    infrastructure_result,
    is_infrastructure,
)
from rstar2.config import CodeEnvConfig
from rstar2.errors import InvariantError, UserError
from rstar2.http_client import LocalResourceError
from rstar2.tasks import cancel_all
from rstar2.types import Outcome, ToolResult

log = logging.getLogger(__name__)

ATTEMPTS = 5
"""Executions of one call before its infrastructure failure is final."""
BATCH_BYTES = 8 << 20
LOCAL_PAUSE_S = 0.2
"""Pause after this machine could not open a connection."""
SESSION_LOST = "the session was lost with its server"


class Retry(StrEnum):
    """Why a call is sent again."""

    LOST = "lost"
    """The connection or the server broke while the call was there."""
    STALE_CONNECTION = "stale connection"
    """The server had closed an idle connection: the call never arrived."""
    INFRASTRUCTURE = "infrastructure"
    QUEUE_FULL = "queue_full"
    SHUTTING_DOWN = "shutting_down"
    LOCAL = "local"
    """This machine could not open a connection."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """A submitted request, its retries, and the number of callers that wait for it."""

    request: CallRequest
    deadline: float
    """Loop time."""
    future: asyncio.Future[CallResult]
    waiters: int = 1
    attempts: int = 0
    avoid: ServerEndpoint | None = None
    pinned: tuple[ServerEndpoint, str] | None = None
    """The server that holds the call's session, and the id of that start of the server."""
    batch: SentBatch | None = None
    why: str = "no server was free"


@dataclass(slots=True, eq=False)
class SentBatch:
    """Calls sent together; `open` shrinks as their lines arrive."""

    endpoint: ServerEndpoint
    open: dict[str, PendingCall]
    task: asyncio.Task[None] | None = None
    sent: bool = False
    """From here on the server may have executed its calls."""


@dataclass(slots=True)
class ClientStats:
    """Counters of the client, for records and benchmarks."""

    calls: int = 0
    batches: int = 0
    retries: Counter[Retry] = field(default_factory=Counter)
    """Calls sent again, by reason."""


class Dispatcher:
    """Owns pending calls and batches; `pump` runs as a task of its own."""

    def __init__(self, config: CodeEnvConfig, endpoints: Sequence[ServerEndpoint]) -> None:
        self.config = config
        self.endpoints = endpoints
        self.stats = ClientStats()
        self._pending: deque[PendingCall] = deque()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, call: PendingCall) -> None:
        """Send a call; its future is resolved exactly once unless it is abandoned."""
        self.stats.calls += 1
        self._enqueue(call)

    def abandon(self, call: PendingCall) -> None:
        """No caller waits any more: never send it; cancel a batch of abandoned calls."""
        call.future.cancel()
        batch = call.batch
        if batch is not None and all(c.future.done() for c in batch.open.values()):
            assert batch.task is not None
            batch.task.cancel()

    def wake(self) -> None:
        """A server may have room again: try to send what is pending."""
        self._wake.set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that ends with the dispatcher; its failure is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the client failed", exc_info=task.exception())

    async def close(self) -> None:
        """End all tasks, and with them everything in flight."""
        tasks = list(self._tasks)
        await cancel_all(tasks)

    def _enqueue(self, call: PendingCall, *, front: bool = False) -> None:
        queue = self._pending if call.pinned is None else call.pinned[0].pinned
        (queue.appendleft if front else queue.append)(call)
        self._wake.set()

    # ----------------------------------------------------------------- sending

    async def pump(self) -> None:
        """Form and send batches while there are calls and servers with room."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._gathering():
                await asyncio.sleep(self.config.linger_s)
            while (next_batch := self._next_batch(loop.time())) is not None:
                endpoint, calls = next_batch
                batch = SentBatch(endpoint, {call.request.id: call for call in calls})
                for call in calls:
                    call.batch = batch
                endpoint.outstanding += len(calls)
                batch.task = self.spawn(self._send(batch))

    def _gathering(self) -> bool:
        """True if waiting for more calls pays off: there are few, and every server is busy."""
        few = 0 < len(self._pending) < self.config.batch
        return few and self.config.linger_s > 0 and all(e.outstanding for e in self.endpoints)

    def _next_batch(self, now: float) -> tuple[ServerEndpoint, list[PendingCall]] | None:
        """The least busy server with enough room, and what to send to it."""
        for endpoint in sorted(self.endpoints, key=lambda e: e.outstanding):
            if endpoint.available(now) and (calls := self._take(endpoint)):
                return endpoint, calls
        return None

    def _waiting(self, endpoint: ServerEndpoint) -> int:
        return len(endpoint.pinned) + len(self._pending)

    def _take(self, endpoint: ServerEndpoint) -> list[PendingCall]:
        """Up to a batch of calls for this server; none while it has enough to do.

        A request per call would cost more than the call. So a partial batch is held back while the
        server's slots and the queue before them are full anyway, and a full one until half a
        batch of the window is free.
        """
        waiting = self._waiting(endpoint)
        room = min(self.config.batch, endpoint.window - endpoint.outstanding)
        if room < min(waiting, max(1, self.config.batch // 2)):
            return []
        if waiting < self.config.batch and endpoint.outstanding > endpoint.enough:
            return []
        others = any(e is not endpoint and e.healthy for e in self.endpoints)
        calls: list[PendingCall] = []
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

    def _session_lost(self, call: PendingCall, endpoint: ServerEndpoint) -> bool:
        if call.pinned is None or call.pinned[1] == endpoint.health.server:
            return False
        self.resolve(call, infrastructure_result(call.request, SESSION_LOST, ""))
        return True

    async def _send(self, batch: SentBatch) -> None:
        """Send one batch and handle its lines; calls that stay open are sent again."""
        endpoint = batch.endpoint
        loop = asyncio.get_running_loop()
        self.stats.batches += 1
        latest = max(call.deadline for call in batch.open.values()) + deadlines.CLIENT_READ_GRACE_S
        try:
            async with asyncio.timeout_at(latest):
                await self._exchange(batch, loop.time())
        except TransportError as error:
            endpoint.mark_down(str(error))
            self._retry_all(batch, Retry.LOST, str(error), counts=batch.sent)
        except LocalResourceError as error:
            log.warning("no connection to code environment %s: %s", endpoint.url, error)
            self._hold(endpoint, LOCAL_PAUSE_S)
            self._retry_all(batch, Retry.LOCAL, str(error), counts=False)
        except TimeoutError:
            log.debug("batch to %s passed the deadlines of all its calls", endpoint.url)
        except InvariantError as error:
            log.error("code environment %s: %s", endpoint.url, error)
            self._fail_all(batch, error)
        finally:
            endpoint.outstanding -= len(batch.open)
            self._wake.set()

    async def _exchange(self, batch: SentBatch, now: float) -> None:
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
                return self._retry_all(batch, Retry.STALE_CONNECTION, str(error), counts=False)
            if response.status != 200:
                body = await response.body()
                return self._refused(batch, read_error(body, endpoint.url, response.status))
            async for line in response.lines():
                self._answer(batch, line)
        if batch.open:
            self._retry_all(batch, Retry.LOST, "the server's answer ended early")
        return None

    def _encode(self, batch: SentBatch, now: float) -> bytes:
        """The body; calls that cannot be written as JSON are answered and leave the batch."""
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

    def _answer(self, batch: SentBatch, line: bytes) -> None:
        """Resolve the call that one line names."""
        try:
            reply = wire.read(line, wire.BatchLine)
        except wire.Refusal as error:
            raise TransportError(f"{batch.endpoint.url} sent an invalid line: {error}") from error
        call = batch.open.get(reply.id)
        if call is None:
            raise InvariantError(
                f"a line for call {reply.id!r}, which this batch does not wait for"
            )
        if reply.error is not None:
            return self._error(batch, call, reply.error)
        result: CallResult | None
        if isinstance(call.request, RunRequest):
            result, answered = reply.run, reply.run.call_id if reply.run else None
        else:
            result, answered = reply.verify, reply.verify.id if reply.verify else None
        if result is None or answered != reply.id:
            raise InvariantError(f"call {reply.id!r} was answered with the result of {answered!r}")
        call.attempts += 1
        if call.pinned is not None and isinstance(result, ToolResult):
            if result.server != call.pinned[1]:
                result = infrastructure_result(call.request, SESSION_LOST, "", call.attempts)
        elif is_infrastructure(result) and call.attempts < ATTEMPTS:
            return self._retry(batch, call, Retry.INFRASTRUCTURE, result.message, counts=False)
        if call.attempts > result.attempts:
            result = dataclasses.replace(result, attempts=call.attempts)
        return self._close(batch, call, result)

    def _error(self, batch: SentBatch, call: PendingCall, error: wire.WireError) -> None:
        """A call that the server did not execute."""
        if error.code == "queue_full":
            self._hold(batch.endpoint, error.retry_after_s or 0.1)
            return self._retry(batch, call, Retry.QUEUE_FULL, error.message, counts=False)
        if error.code == "shutting_down":
            batch.endpoint.mark_down(error.message)
            return self._retry(batch, call, Retry.SHUTTING_DOWN, error.message, counts=False)
        if error.code == "infrastructure":
            return self._retry(batch, call, Retry.INFRASTRUCTURE, error.message)
        if error.code == "not_found" and call.pinned is not None:
            return self._close(
                batch, call, infrastructure_result(call.request, error.message, "", call.attempts)
            )
        if error.code == "too_large":
            return self._close(batch, call, _bad_arguments(call.request, error.message))
        return self._close(batch, call, to_exception(error))

    def _refused(self, batch: SentBatch, error: wire.WireError) -> None:
        """A batch that the server refused as a whole."""
        for call in list(batch.open.values()):
            self._error(batch, call, error)

    def _hold(self, endpoint: ServerEndpoint, pause_s: float) -> None:
        """Send nothing to a server for a while, then try again."""
        loop = asyncio.get_running_loop()
        until = loop.time() + pause_s
        if loop.time() >= endpoint.retry_at:
            loop.call_at(until, self._wake.set)
            endpoint.retry_at = until

    def _retry_all(self, batch: SentBatch, reason: Retry, why: str, *, counts: bool = True) -> None:
        for call in reversed(list(batch.open.values())):
            self._retry(batch, call, reason, why, counts=counts)

    def _retry(
        self, batch: SentBatch, call: PendingCall, reason: Retry, why: str, *, counts: bool = True
    ) -> None:
        """Send a call again, elsewhere if possible; `counts` if it may have been executed."""
        self._forget(batch, call)
        call.why = why
        call.attempts += counts
        if call.future.done():
            return None
        if call.pinned is not None and (counts or reason is Retry.STALE_CONNECTION):
            message = f"{why}; a call of a session is never sent twice"
            return self.resolve(
                call, infrastructure_result(call.request, message, "", call.attempts)
            )
        if call.attempts >= ATTEMPTS:
            message = f"failed after {call.attempts} attempts: {why}"
            return self.resolve(
                call, infrastructure_result(call.request, message, "", call.attempts)
            )
        self.stats.retries[reason] += 1
        own = (Retry.STALE_CONNECTION, Retry.LOCAL)
        call.avoid = None if reason in own else batch.endpoint
        if reason is Retry.INFRASTRUCTURE:
            pause_s = min(2.0, 0.05 * 2**call.attempts)
            loop = asyncio.get_running_loop()
            loop.call_later(pause_s, self._enqueue, call)
            return None
        return self._enqueue(call, front=True)

    def _fail_all(self, batch: SentBatch, error: InvariantError) -> None:
        for call in list(batch.open.values()):
            self._close(batch, call, error)

    def _forget(self, batch: SentBatch, call: PendingCall) -> None:
        del batch.open[call.request.id]
        batch.endpoint.outstanding -= 1
        call.batch = None
        if self._waiting(batch.endpoint):
            self._wake.set()

    def _close(self, batch: SentBatch, call: PendingCall, result: CallResult | Exception) -> None:
        self._forget(batch, call)
        self.resolve(call, result)

    def resolve(self, call: PendingCall, result: CallResult | Exception) -> None:
        if call.future.done():
            return
        if isinstance(result, Exception):
            call.future.set_exception(result)
        else:
            call.future.set_result(result)


def _bad_arguments(request: CallRequest, message: str) -> CallResult:
    """The result of a call whose text cannot be sent: the model's fault, therefore an outcome."""
    if isinstance(request, RunRequest):
        return ToolResult(request.id, Outcome.BAD_ARGUMENTS, message=message)
    return VerifyResult(request.id, error="bad_arguments", message=message)


def _size(request: CallRequest) -> int:
    if isinstance(request, RunRequest):
        files = sum(4 * len(content) // 3 for content in request.files.values())
        return len(request.code) + len(request.stdin) + files
    return 1024
