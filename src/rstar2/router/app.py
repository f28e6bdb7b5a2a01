"""The router's HTTP interface, and its lifecycle from bind to shutdown.

    POST /v1/completions, /v1/chat/completions, /inference/v1/generate   scheduled
    GET  /v1/models, POST /tokenize, /detokenize                         any server answers
    GET  /health, /metrics                                               the router's own
    DELETE /sessions/{name}                                              a rollout has ended

Bodies and answers pass through unchanged, streams event by event. A client that disconnects cancels
its request on the server. Errors of the router have OpenAI's format; `code` is the error's name:

| what happened                                            | status | code                      |
|----------------------------------------------------------|--------|---------------------------|
| a body or path that the router cannot read               | 400    | user                      |
| a wrong key                                              | 401    | unauthorized              |
| no server took the request within --wait-s               | 504    | deadline                  |
| a server was silent for --answer-s                       | 504    | deadline                  |
| servers failed with the request, or none serves          | 502    | engine                    |
| the router's machine is out of descriptors or ports      | 503    | local_resource            |

After its beginning, a stream that fails ends with such an error as its last event.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import signal
import socket
from collections.abc import Callable
from urllib.parse import unquote

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from rstar2.errors import DeadlineError, EngineError, InfrastructureError, RstarError, UserError
from rstar2.http_server import AsgiApp, SignalFreeServer
from rstar2.router.router import EVENT_STREAM, Router
from rstar2.router.turns import TURN_PATHS, read_turn

BODY_S = 60.0
"""Maximum time for a client to send the body of a request."""
MAX_BODY_BYTES = 64 << 20
STOP_S = 10.0
KEEP_ALIVE_S = 600
SESSIONS = "/sessions/"
ANY_SERVER = frozenset((("GET", "/v1/models"), ("POST", "/tokenize"), ("POST", "/detokenize")))
FORWARDED_HEADERS = ("authorization", "x-request-id")


class _ClientAnswer:
    """Writes one answer to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = self.streams = False

    async def start(self, status: int, content_type: str) -> None:
        self.started, self.streams = True, content_type.startswith(EVENT_STREAM)
        headers = [(b"content-type", content_type.encode("latin-1"))]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def part(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class RouterApp:
    """The ASGI application of a router."""

    def __init__(self, router: Router, *, session_header: str, key: str | None = None) -> None:
        self.router, self.session_header, self.key = router, session_header, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(f"{scope['type']} connections are not served")
        request = Request(scope, receive)
        if not self._allowed(request):
            await error_response(401, "wrong key", "unauthorized")(scope, receive, send)
        elif request.method == "POST" and request.url.path in TURN_PATHS:
            await self._turn(request, send)
        else:
            await (await self._other(request))(scope, receive, send)

    def _allowed(self, request: Request) -> bool:
        given = request.headers.get("authorization", "")
        open_path = request.url.path == "/health"
        return self.key is None or open_path or hmac.compare_digest(given, f"Bearer {self.key}")

    def _forwarded(self, request: Request) -> dict[str, str]:
        """Headers that the server gets too; a key of the router's own is not one of them."""
        names = FORWARDED_HEADERS[1:] if self.key is not None else FORWARDED_HEADERS
        return {name: request.headers[name] for name in names if name in request.headers}

    async def _other(self, request: Request) -> Response:
        router, method, path = self.router, request.method, request.url.path
        match method, path:
            case "GET", "/health":
                return self._health()
            case "GET", "/metrics":
                return Response(metrics_text(router), media_type="text/plain; version=0.0.4")
        if method == "DELETE" and path.startswith(SESSIONS):
            name = unquote(path.removeprefix(SESSIONS))
            if router.end_session(name):
                return JSONResponse({"ended": name})
            return error_response(404, f"there is no session {name!r}", "not_found")
        if (method, path) not in ANY_SERVER:
            return error_response(
                404, f"{method} {path} is not routed; docs/router.md has the paths", "not_found"
            )
        try:
            body = await read_body(request)
            status, kind, answer = await router.ask_any(
                method, path, body, self._forwarded(request)
            )
            return Response(answer, status, media_type=kind)
        except RstarError as error:
            return failure_response(error)
        except ClientDisconnect:
            return Response(status_code=499)

    def _health(self) -> Response:
        router = self.router
        servers = {name: backend.trouble or "serves" for name, backend in router.backends.items()}
        return JSONResponse({"servers": servers}, 200 if router.serving else 503)

    async def _turn(self, request: Request, send: Send) -> None:
        """One scheduled request, until it is answered or its client has disconnected."""
        answer = _ClientAnswer(send)
        try:
            body = await read_body(request)
            turn = read_turn(request.url.path, body, self.router.scale)
            session = request.headers.get(self.session_header)
            work = asyncio.ensure_future(
                self.router.route(turn, session, self._forwarded(request), answer)
            )
            await _unless_disconnected(work, request)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # it has outlasted STOP_S
            await self._fail(EngineError("the router is stopping"), answer, request, send)
        except RstarError as error:
            await self._fail(error, answer, request, send)

    async def _fail(
        self, error: RstarError, answer: _ClientAnswer, request: Request, send: Send
    ) -> None:
        """Tell the client; an answer that has begun and is no stream can only break off."""
        if not answer.started:
            await failure_response(error)(request.scope, request.receive, send)
        elif answer.streams:
            event = f"data: {json.dumps(error_body(str(error), error.name))}\n\n"
            await answer.part(event.encode(), more=False)
        else:
            raise error


async def _unless_disconnected(work: asyncio.Task[None], request: Request) -> None:
    """Wait for the work; raises ClientDisconnect, and cancels it, if the client leaves first."""
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        work.result()
    finally:
        work.cancel()
        leaving.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def read_body(request: Request) -> bytes:
    """The body of a request, bounded in size and time."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise UserError(f"the body is above {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise UserError(f"the body was not complete after {BODY_S:g} s") from None
    return b"".join(parts)


def error_body(message: str, code: str) -> dict[str, dict[str, str | None]]:
    """An error in OpenAI's format."""
    kind = "invalid_request_error" if code in ("user", "unauthorized") else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_response(status: int, message: str, code: str) -> Response:
    return JSONResponse(error_body(message, code), status)


def failure_response(error: RstarError) -> Response:
    """The answer to a request that failed before its answer began."""
    if isinstance(error, UserError):
        return error_response(400, str(error), "user")
    statuses = ((EngineError, 502), (DeadlineError, 504), (InfrastructureError, 503))
    status = next((status for kind, status in statuses if isinstance(error, kind)), 500)
    return error_response(status, str(error), error.name)


def metrics_text(router: Router) -> str:
    """The router's figures in Prometheus' format."""
    counters, scheduler = router.counters, router.scheduler
    values: dict[str, float] = {
        "waiting": scheduler.waiting,
        "sessions": router.sessions,
        "servers": len(router.backends),
        "servers_serving": len(router.serving),
        "servers_lost_total": counters.lost,
        "retried_total": counters.retried,
        "moved_total": counters.moved,
        "sampled_tokens_total": counters.new_tokens,
        "wait_seconds_total": counters.wait_s,
    }
    lines = [f"rstar2_router_{name} {value:g}" for name, value in values.items()]
    for name in router.backends:
        label = f'{{server="{name}"}}'
        lines.append(f"rstar2_router_turns_total{label} {counters.turns[name]}")
        if scheduler.knows(name):
            budget = scheduler.budget(name)
            lines.append(f"rstar2_router_running{label} {scheduler.running(name)}")
            lines.append(
                f"rstar2_router_kv_reserved_ratio{label} {budget.reserved / budget.total:g}"
            )
    return "\n".join([*lines, ""])


# --------------------------------------------------------------------------- lifecycle


async def serve(
    router: Router, app: AsgiApp, sock: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Route until SIGINT or SIGTERM; running requests then have STOP_S to end."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    server = SignalFreeServer(
        uvicorn.Config(
            app, log_config=None, log_level="error", access_log=False, lifespan="off", ws="none",
            server_header=False, timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(STOP_S),
        )
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await router.start()
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    waiting = asyncio.create_task(stopped.wait())
    try:
        on_ready()
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        router.refuse_waiting()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=2 * STOP_S)
        await router.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    if serving.done():
        serving.result()
