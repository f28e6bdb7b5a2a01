"""The viewer's web server: its routes, and its lifecycle from bind to shutdown.

    /api/...     JSON, answered in a thread, so that one request does not wait for another's disk
    /static/...  the files of the page
    all others   the page itself: its script reads the path, so every address can be shared

What keeps it local: it listens on loopback only, refuses requests whose Host is not a loopback name
(a page on another site cannot reach it through another name), allows no other origins, and never
writes.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rstar2.errors import UserError
from rstar2.http_server import SignalFreeServer, bind, foreign_site
from rstar2.viewer import STATIC, detail, overview, query
from rstar2.viewer.run import NotRecordedError, ViewedRun

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The page may load its own files and talk to its own server; text can never become a script."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
REQUEST_S = 60.0
POLL_S = 0.5
"""Interval between two looks at the run directories when nothing has changed."""
STOP_S = 5.0

RunEndpoint = Callable[[ViewedRun, QueryParams], Any]


# --------------------------------------------------------------------------- routes


def viewer_app(runs: Mapping[str, ViewedRun]) -> Starlette:
    """The web application for a fixed set of runs."""

    def versions(request: Request) -> Response:
        return _json({name: run.version for name, run in runs.items()})

    def summaries(request: Request) -> Response:
        return _json([_locked(run, overview.head) for run in runs.values()])

    def find_run(request: Request) -> ViewedRun:
        return _run_named(request.path_params["name"], runs)

    def summary(request: Request) -> Response:
        return _json(_locked(find_run(request), overview.overview))

    def json_of(endpoint: RunEndpoint) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            run = _readable(find_run(request))
            return _json(_locked(run, lambda r: endpoint(r, request.query_params)))

        return answer

    def download_of(
        make: Callable[[ViewedRun, str, int], bytes], media_type: str, suffix: str
    ) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            run, asked = _readable(find_run(request)), request.query_params
            stage, step = asked.get("stage", ""), _number(asked, "step")
            body = _locked(run, lambda r: make(r, stage, step))
            disposition = f'attachment; filename="{_file_name(run.name, stage, step)}{suffix}"'
            return Response(body, 200, {"content-disposition": disposition}, media_type)

        return answer

    def no_route(request: Request) -> Response:
        raise HTTPException(404, f"there is no /api/{request.path_params['path']}")

    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    def run_route(name: str, answer: Callable[[Request], Response]) -> Route:
        return Route(f"/{name}/{{name:path}}", _in_thread(answer))

    trace = download_of(detail.timeline_trace, "application/json", ".trace.json")
    picture = download_of(detail.timeline_svg, "image/svg+xml", ".svg")
    api = [
        Route("/pulse", _in_thread(versions)),
        Route("/runs", _in_thread(summaries)),
        Route("/compare", _in_thread(lambda request: _comparison(request, runs))),
        run_route("run", summary),
        *(run_route(name, json_of(endpoint)) for name, endpoint in ENDPOINTS.items()),
        run_route("trace", trace),
        run_route("picture", picture),
        Route("/{path:path}", _in_thread(no_route)),
    ]
    return Starlette(
        routes=[
            Mount("/api", routes=api),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/{path:path}", page),
        ],
        middleware=[Middleware(LocalOnly)],
        exception_handlers={
            HTTPException: _http_error,
            NotRecordedError: lambda _, error: _error(404, str(error)),
            UserError: lambda _, error: _error(400, str(error)),
            OSError: lambda _, error: _error(500, f"the run directory cannot be read: {error}"),
            TimeoutError: lambda *_: _error(504, f"no answer within {REQUEST_S:g} s"),
        },
    )


def _run_named(name: str, runs: Mapping[str, ViewedRun]) -> ViewedRun:
    if name not in runs:
        raise NotRecordedError(f"no run {name!r} was opened; there are: {', '.join(runs)}")
    return runs[name]


def _readable(run: ViewedRun) -> ViewedRun:
    if run.trouble:
        raise HTTPException(409, run.trouble)
    return run


def _comparison(request: Request, runs: Mapping[str, ViewedRun]) -> Response:
    """Two evaluations, of the runs `a` and `b` after their stages `sa` and `sb`."""
    from rstar2.viewer.compare import compare_runs  # imports evaluate, which opening does not need

    asked = request.query_params
    first, second = (_readable(_run_named(asked.get(side, ""), runs)) for side in ("a", "b"))
    stages = (asked.get("sa", ""), asked.get("sb", ""))
    return _json(compare_runs(first, second, stages, asked.get("mode", "")))


ENDPOINTS: dict[str, RunEndpoint] = {
    "curves": lambda run, _: overview.curves(run),
    "facets": lambda run, _: query.facets(run),
    "rollouts": lambda run, asked: query.rollouts(run, query.Filter.parse(asked)),
    "step": lambda run, asked: detail.step(
        run, asked.get("stage", ""), _number(asked, "step"), _number(asked, "start")
    ),
    "group": lambda run, asked: detail.group(run, asked.get("id", "")),
    "rollout": lambda run, asked: detail.rollout(run, asked.get("id", "")),
    "tokens": lambda run, asked: detail.tokens(run, asked.get("id", "")),
    "timeline": lambda run, asked: detail.timeline(
        run, asked.get("stage", ""), _number(asked, "step")
    ),
}
"""What /api/<key>/<run> answers, for runs that can be read."""


class LocalOnly:
    """Rejects requests that another site's page could make; adds HEADERS to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if foreign_site(scope["headers"]) is None:
            await self._app(scope, receive, send_with_headers)
        else:
            refusal = _error(403, "the viewer only answers requests from this machine")
            await refusal(scope, receive, send_with_headers)


def _in_thread(answer: Callable[[Request], Response]) -> Callable[[Request], Any]:
    """Answer in a thread, within REQUEST_S."""

    async def endpoint(request: Request) -> Response:
        async with asyncio.timeout(REQUEST_S):
            return await asyncio.to_thread(answer, request)

    return endpoint


def _locked(run: ViewedRun, work: Callable[[ViewedRun], Any]) -> Any:
    with run.lock:
        return work(run)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _error(status: int, message: str) -> Response:
    body = msgspec.json.encode({"error": message})
    return Response(body, status, media_type="application/json")


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "the viewer is read-only" if error.status_code == 405 else error.detail
    return _error(error.status_code, message)


def _number(asked: QueryParams, name: str) -> int:
    return query.whole_number(name, asked.get(name, "")) or 0


def _file_name(run: str, stage: str, step: int) -> str:
    name = f"{run}-{stage}-{step}"
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in name)


# --------------------------------------------------------------------------- lifecycle


class RunFollower:
    """One thread that keeps all runs up to date; ends within STOP_S of `stop`."""

    def __init__(self, runs: Mapping[str, ViewedRun]) -> None:
        self._runs = list(runs.values())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="viewer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(STOP_S)

    def _follow(self) -> None:
        while not self._stop.is_set():
            changed = False
            for run in self._runs:
                try:
                    changed |= run.refresh()
                except OSError as error:
                    log.warning("%s cannot be read: %s", run.path, error)
                if self._stop.is_set():
                    return
            if not changed:
                self._stop.wait(POLL_S)


async def serve(runs: Mapping[str, ViewedRun], port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM."""
    follower = RunFollower(runs)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    with bind(HOST, port) as sock:
        server = SignalFreeServer(
            uvicorn.Config(
                viewer_app(runs), log_config=None, access_log=False, lifespan="off", ws="none",
                server_header=False, timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        waiting = asyncio.create_task(stopped.wait())
        follower.start()
        try:
            on_ready(f"http://{HOST}:{sock.getsockname()[1]}/")
            await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            server.should_exit = True
            await asyncio.wait({serving}, timeout=STOP_S)
            follower.stop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
    if serving.done():
        serving.result()
