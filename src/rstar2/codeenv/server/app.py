"""The HTTP interface of the code environment: a small ASGI application over the call table.

Routes are in `CodeEnvApp._routes`. Written on ASGI directly because the batch endpoint needs what
frameworks hide: a line is sent as soon as its call finishes (one slow call never delays the others
of its batch), results that finish together share one write, and a caller that disconnects cancels
its calls.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from rstar2.codeenv import deadlines, wire
from rstar2.codeenv.protocol import CallRequest, CallResult
from rstar2.codeenv.server import metrics
from rstar2.codeenv.server.calls import SHUTTING_DOWN, CallTable
from rstar2.codeenv.wire import BatchLine, Refusal
from rstar2.errors import CodeEnvError, InfrastructureError, QueueFullError, UserError
from rstar2.http_server import Receive, Scope, Send
from rstar2.types import ToolResult

log = logging.getLogger(__name__)

Body = bytes
Handler = Callable[[Body], Awaitable[Any]]

FLUSH_S = 0.008
"""Lines of one batch that finish closer together than this share a write."""

MAX_BODIES_BYTES = 8 * wire.MAX_BODY_BYTES
"""Most memory for the bodies of requests that are being read."""

JSON = b"application/json"


class CodeEnvApp:
    """Dispatches requests to the call table; every error is answered as {"error": ...}."""

    def __init__(self, table: CallTable, token: str | None) -> None:
        from rstar2.codeenv.server.compat import Compat

        self.table = table
        self.token = token
        compat = Compat(table)
        self._routes: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/run"): self._run,
            ("POST", "/v1/verify"): self._verify,
            ("POST", "/v1/sessions"): self._open_session,
            ("GET", "/health"): self._health,
            **compat.routes(),
        }
        self._methods = [*self._routes, ("POST", "/v1/batch"), ("GET", "/metrics")]
        self._body_bytes = 0
        """Bytes of all request bodies that are being read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(f"{scope['type']} connections are not served")
        try:
            await self._dispatch(scope, receive, send)
        except Refusal as refusal:
            self.table.metrics.refused[refusal.wire.code] += 1
            await _send_error(send, refusal.wire)
        except QueueFullError as error:
            refusal_ = wire.WireError(
                "queue_full", str(error), retry_after_s=error.retry_after_s or 0.1
            )
            self.table.metrics.refused["queue_full"] += 1
            await _send_error(send, refusal_)
        except (CodeEnvError, InfrastructureError) as error:
            await _send_error(send, wire.WireError("infrastructure", f"{error.name}: {error}"))
        except UserError as error:
            named = scope["path"].startswith("/v1/sessions/")
            code: wire.ErrorCode = "not_found" if named else "invalid"
            await _send_error(send, wire.WireError(code, str(error), "session" if named else None))

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        # HEAD is GET without the body of the answer, which uvicorn leaves out.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        path = scope["path"]
        allowed = authorized(scope, self.token)
        if path == "/health" and method == "GET" and not allowed:
            return await _send_json(send, {"status": self.table.health().status})
        if not allowed:
            self.table.metrics.refused["unauthorized"] += 1
            return await send_unauthorized(send)
        if (method, path) == ("GET", "/metrics"):
            text = metrics.render(self.table)
            return await _send(send, 200, text.encode(), b"text/plain; version=0.0.4")
        if (method, path) == ("POST", "/v1/batch"):
            return await self._batch(await self._read_body(scope, receive), receive, send)
        handler = self._routes.get((method, path)) or self._session_route(method, path)
        if handler is None:
            taken_here = [known for known, taken in self._methods if taken == path]
            if taken_here:
                methods = ", ".join(taken_here)
                error = wire.WireError(
                    "method", f"{path} does not take {method}; it takes {methods}"
                )
                self.table.metrics.refused["method"] += 1
                return await _send_error(send, error, (b"allow", methods.encode()))
            known = sorted({taken for _, taken in self._methods})
            raise Refusal("not_found", f"no such path: {path}; there are {', '.join(known)}")
        body = await self._read_body(scope, receive)
        answer = await _until_disconnect(handler(body), receive)
        return await _send_json(send, answer)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """The request body, bounded in size and time; so is the sum of those being read."""
        headers = dict(scope["headers"])
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding != "identity":
            raise Refusal(
                "bad_json", f"content-encoding: {encoding} is not supported; send plain JSON"
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > wire.MAX_BODY_BYTES:
            raise _too_large()
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(deadlines.BODY_READ_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(
                            "bad_json", "the caller disconnected before the body was complete"
                        )
                    parts.append(message.get("body", b""))
                    self._body_bytes += len(parts[-1])
                    self._check_body(parts)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            raise Refusal(
                "bad_json", f"the body was not complete after {deadlines.BODY_READ_S:g} s"
            ) from error
        finally:
            self._body_bytes -= sum(map(len, parts))

    def _check_body(self, parts: list[bytes]) -> None:
        if sum(map(len, parts)) > wire.MAX_BODY_BYTES:
            raise _too_large()
        if self._body_bytes > MAX_BODIES_BYTES:
            raise Refusal(
                "queue_full",
                f"the bodies of all requests being read are above {MAX_BODIES_BYTES} bytes; "
                "try again later, or send smaller batches",
                retry_after_s=1.0,
            )

    # ----------------------------------------------------------------- single calls

    async def _run(self, body: Body) -> CallResult:
        request = wire.to_run(wire.read(body, wire.RunIn), self.table.config.cap)
        return await self.table.call(request)

    async def _verify(self, body: Body) -> CallResult:
        return await self.table.call(wire.to_verify(wire.read(body, wire.VerifyIn)))

    async def _health(self, body: Body) -> wire.Health:
        return self.table.health()

    # ----------------------------------------------------------------- sessions

    def _session_route(self, method: str, path: str) -> Handler | None:
        """`/v1/sessions/{id}` and `/v1/sessions/{id}/branch`."""
        prefix, _, rest = path.partition("/v1/sessions/")
        if prefix or not rest:
            return None
        session, _, action = rest.partition("/")
        if method == "DELETE" and not action:
            return lambda body: self._close_session(session)
        if method == "POST" and action == "branch":
            return lambda body: self._branch_session(session, body)
        return None

    async def _open_session(self, body: Body) -> Any:
        asked = wire.read(body or b"{}", wire.SessionIn)
        if asked.id is not None:
            wire.check_session_id(asked.id)
        if asked.ttl_s is not None and not 0 < asked.ttl_s <= self.table.config.session_ttl_s:
            most = self.table.config.session_ttl_s
            raise Refusal(
                "invalid", f"ttl_s: {asked.ttl_s} must be above 0 and at most {most}", "ttl_s"
            )
        return await self.table.executor.open_session(asked.id, asked.ttl_s)

    async def _branch_session(self, session: str, body: Body) -> Any:
        asked = wire.read(body or b"{}", wire.BranchIn)
        if asked.id is not None:
            wire.check_session_id(asked.id)
        return await self.table.executor.branch_session(session, asked.id)

    async def _close_session(self, session: str) -> dict[str, str]:
        await self.table.executor.close_session(session)
        return {"closed": session}

    # ----------------------------------------------------------------- batches

    async def _batch(self, body: Body, receive: Receive, send: Send) -> None:
        calls = wire.read(body, wire.BatchIn).calls
        if not 0 < len(calls) <= wire.MAX_BATCH:
            raise Refusal(
                "invalid", f"calls: {len(calls)} calls; send 1 to {wire.MAX_BATCH}", "calls"
            )
        if len({call.id for call in calls}) < len(calls):
            raise Refusal("invalid", "calls: two calls have the same id; ids are unique", "calls")
        del body
        stream = BatchStream(self.table, len(calls))
        for call in calls:
            stream.add(call)
        refused = stream.all_refused()
        if refused is not None:
            raise refused
        await stream.answer(receive, send)


class BatchStream:
    """Answers the calls of one batch, line by line, as they finish."""

    def __init__(self, table: CallTable, count: int) -> None:
        self.table = table
        self.count = count
        self._open: dict[str, CallRequest] = {}
        self._ready: list[bytes] = []
        self._refusals: list[Refusal] = []
        self._wake = asyncio.Event()
        self._disconnected = False
        self._longest_s = 0.0

    def add(self, call: wire.RunIn | wire.VerifyIn) -> None:
        """Submit one call; a refusal becomes its line."""
        try:
            request: CallRequest
            if isinstance(call, wire.RunIn):
                request = wire.to_run(call, self.table.config.cap)
            else:
                request = wire.to_verify(call)
            task = self.table.submit(request)
        except Refusal as refusal:
            self._refusals.append(refusal)
            self._refuse(call.id, refusal.wire)
            return
        self._open[call.id] = request
        self._longest_s = max(self._longest_s, request.deadline_s or deadlines.DEFAULT_DEADLINE_S)
        task.add_done_callback(lambda done: self._finish(request, done))

    def all_refused(self) -> Refusal | None:
        """The reason, if back-pressure or shutdown refused every call of the batch."""
        codes = {refusal.wire.code for refusal in self._refusals}
        if len(self._refusals) == self.count and codes in ({"queue_full"}, {"shutting_down"}):
            return self._refusals[0]
        return None

    def _refuse(self, call_id: str, error: wire.WireError) -> None:
        self.table.metrics.refused[error.code] += 1
        self._line(BatchLine(call_id, error=error))

    def _finish(self, request: CallRequest, task: asyncio.Future[CallResult]) -> None:
        if self._open.pop(request.id, None) is None:
            return None
        if task.cancelled():
            error = wire.WireError("shutting_down", SHUTTING_DOWN)
            return self._refuse(request.id, error)
        failed = task.exception()
        if isinstance(failed, Refusal):
            return self._refuse(request.id, failed.wire)
        if failed is not None:
            error = wire.WireError("infrastructure", f"{type(failed).__name__}: {failed}")
            return self._refuse(request.id, error)
        result = task.result()
        if isinstance(result, ToolResult):
            return self._line(BatchLine(request.id, run=result))
        return self._line(BatchLine(request.id, verify=result))

    def _line(self, reply: BatchLine) -> None:
        self._ready.append(wire.encode(reply) + b"\n")
        self._wake.set()

    async def answer(self, receive: Receive, send: Send) -> None:
        """Write lines until all calls are answered or the caller has disconnected."""
        await _start(send, 200, b"application/x-ndjson")
        watcher = asyncio.create_task(_disconnect(receive))
        watcher.add_done_callback(self._on_disconnect)
        try:
            async with asyncio.timeout(self._longest_s + deadlines.SERVER_WRITE_GRACE_S):
                await self._write_lines(send)
        except TimeoutError:
            log.warning("a caller did not read its answer; its connection is closed")
        finally:
            watcher.cancel()
            for request in self._open.values():
                self.table.leave(request)
            self._open.clear()

    def _on_disconnect(self, watcher: asyncio.Task[None]) -> None:
        self._disconnected = not watcher.cancelled()
        self._wake.set()

    async def _write_lines(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        left, flushed_s = self.count, -math.inf
        while left:
            await self._wake.wait()
            wait_s = flushed_s + FLUSH_S - loop.time()
            if wait_s > 0 and len(self._ready) < left:
                await asyncio.sleep(wait_s)
            self._wake.clear()
            if self._disconnected:
                return
            chunk = b"".join(self._ready)
            left -= len(self._ready)
            self._ready.clear()
            await send({"type": "http.response.body", "body": chunk, "more_body": left > 0})
            flushed_s = loop.time()


# --------------------------------------------------------------------------- ASGI helpers


def authorized(scope: Scope, token: str | None) -> bool:
    """True if no token is needed, or the request carries it (Bearer, or Basic from a URL)."""
    if token is None:
        return True
    given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
    scheme, _, secret = given.partition(b" ")
    if scheme.lower() == b"basic":
        try:
            secret = base64.b64decode(secret, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    elif scheme.lower() != b"bearer":
        return False
    return hmac.compare_digest(secret.strip(), token.encode())


async def send_unauthorized(send: Send) -> None:
    message = (
        "this server needs its token: send `Authorization: Bearer TOKEN`, or put it into the URL "
        "as http://token:TOKEN@host:port"
    )
    await _send_error(send, wire.WireError("unauthorized", message))


def _too_large() -> Refusal:
    message = f"the body is above {wire.MAX_BODY_BYTES} bytes; send smaller batches"
    return Refusal("too_large", message)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _until_disconnect(answer: Awaitable[Any], receive: Receive) -> Any:
    """Await an answer; cancel it if the caller disconnects first."""
    task = asyncio.ensure_future(answer)
    watcher = asyncio.create_task(_disconnect(receive))
    watcher.add_done_callback(lambda done: None if done.cancelled() else task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        task.cancel()
        if watcher.done() and not watcher.cancelled():
            raise Refusal("bad_json", "the caller disconnected before the answer") from None
        raise
    finally:
        watcher.cancel()


async def _start(send: Send, status: int, kind: bytes, *headers: tuple[bytes, bytes]) -> None:
    all_headers = [(b"content-type", kind), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})


async def _send(
    send: Send, status: int, body: bytes, kind: bytes, *headers: tuple[bytes, bytes]
) -> None:
    await _start(send, status, kind, (b"content-length", str(len(body)).encode()), *headers)
    await send({"type": "http.response.body", "body": body})


async def _send_json(send: Send, value: Any) -> None:
    await _send(send, 200, wire.encode(value), JSON)


async def _send_error(send: Send, error: wire.WireError, *more: tuple[bytes, bytes]) -> None:
    headers = list(more)
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
    if error.code == "unauthorized":
        headers.append((b"www-authenticate", b"Bearer"))
    body = wire.encode(wire.ErrorBody(error))
    await _send(send, wire.STATUS[error.code], body, JSON, *headers)
