"""The viewer's HTTP side: a plain ASGI application, GET only.

    /api/...    JSON (answered in a thread, so that no reader waits for another's disk)
    /static/... the page's own files
    any other   the page itself: its script reads the path, so every address can be shared

What keeps it local: requests whose Host is not a loopback name are refused (a web page elsewhere
cannot reach it by another name), nothing allows other origins, and nothing here writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec

from rstar2.errors import UserError
from rstar2.viewer import detail, overview, query, timeline
from rstar2.viewer.run import NotRecordedError, Run

log = logging.getLogger(__name__)

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The page may load its own files and talk to its own server; text can never become script."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
REQUEST_S = 60.0

Scope = Mapping[str, Any]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back to the browser."""

    body: bytes
    kind: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class App:
    """Answers for a fixed set of runs."""

    def __init__(self, runs: Mapping[str, Run]) -> None:
        self.runs = runs
        self._files = _static_files()

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = await self._answer(scope)
        headers = {
            "content-type": answer.kind,
            "content-length": str(len(answer.body)),
            "content-security-policy": POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-store",
            **answer.headers,
        }
        await send(
            {
                "type": "http.response.start",
                "status": answer.status,
                "headers": [(k.encode(), v.encode("latin-1")) for k, v in headers.items()],
            }
        )
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope) -> Answer:
        if scope["method"] not in ("GET", "HEAD"):
            return _error(405, "the viewer only reads")
        if not _is_local(scope):
            return _error(403, "the viewer answers on this machine only")
        path = scope["path"]
        if path.startswith("/static/"):
            return self._file(path.removeprefix("/static/"))
        if not path.startswith("/api/"):
            return self._file("index.html")
        asked = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        work = asyncio.to_thread(self._api, path.removeprefix("/api/"), asked)
        try:
            async with asyncio.timeout(REQUEST_S):
                return await work
        except TimeoutError:
            return _error(504, f"no answer within {REQUEST_S:g} s")

    def _file(self, name: str) -> Answer:
        if name not in self._files:
            return _error(404, f"there is no file {name!r}")
        body, kind = self._files[name]
        return Answer(body, kind)

    # ----------------------------------------------------------------- JSON

    def _api(self, path: str, asked: Query) -> Answer:
        try:
            if path == "pulse":
                return _json({name: run.version for name, run in self.runs.items()})
            if path == "runs":
                return _json(
                    [_locked(run, lambda r: overview.head(r)) for run in self.runs.values()]
                )
            what, _, name = path.partition("/")
            return self._of_run(what, unquote(name), asked)
        except NotRecordedError as error:
            return _error(404, str(error))
        except UserError as error:
            return _error(400, str(error))
        except OSError as error:
            return _error(500, f"the run directory cannot be read: {error}")

    def _of_run(self, what: str, name: str, asked: Query) -> Answer:
        if what not in ROUTES and what not in FILES:
            return _error(404, f"there is no /api/{what}")
        run = self.runs.get(name)
        if run is None:
            return _error(404, f"no run {name!r} was opened; there are: {', '.join(self.runs)}")
        if run.trouble and what != "run":
            return _error(409, run.trouble)
        if what in FILES:
            return _file_of(run, what, asked.get("stage", ""), _number(asked, "step"))
        return _json(_locked(run, lambda r: ROUTES[what](r, asked)))


ROUTES: dict[str, Callable[[Run, Query], Any]] = {
    "run": lambda run, _: overview.overview(run),
    "curves": lambda run, _: overview.curves(run),
    "facets": lambda run, _: query.facets(run),
    "rollouts": lambda run, asked: query.rollouts(run, query.Filter.parse(asked)),
    "step": lambda run, asked: detail.step(
        run, asked.get("stage", ""), _number(asked, "step"), _number(asked, "start")
    ),
    "group": lambda run, asked: detail.group(run, asked.get("id", "")),
    "rollout": lambda run, asked: detail.rollout(run, asked.get("id", "")),
    "tokens": lambda run, asked: detail.tokens(run, asked.get("id", "")),
    "timeline": lambda run, asked: timeline.drawing(
        run, asked.get("stage", ""), _number(asked, "step")
    ),
}
FILES = {
    "trace": (timeline.trace, "application/json", ".trace.json"),
    "picture": (timeline.picture, TYPES[".svg"], ".svg"),
}
"""What is handed out as a file."""


def _file_of(run: Run, what: str, stage: str, step: int) -> Answer:
    """A download of one step's timeline."""
    make, kind, suffix = FILES[what]
    body = _locked(run, lambda r: make(r, stage, step))
    name = f"{run.name}-{stage}-{step}"
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in name)
    return Answer(
        body, kind, headers={"content-disposition": f'attachment; filename="{safe}{suffix}"'}
    )


def _locked(run: Run, work: Callable[[Run], Any]) -> Any:
    with run.lock:
        return work(run)


def _json(value: Any) -> Answer:
    return Answer(msgspec.json.encode(value))


def _error(status: int, message: str) -> Answer:
    return Answer(msgspec.json.encode({"error": message}), status=status)


def _number(asked: Query, name: str) -> int:
    text = asked.get(name, "") or "0"
    if not text.isdecimal() or len(text) > 12:
        raise UserError(f"{name}={text!r}: must be a whole number")
    return int(text)


def _is_local(scope: Scope) -> bool:
    """Whether the request names this machine by a loopback name."""
    host = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"host"), "")
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return name.strip("[]") in LOOPBACK


def _static_files() -> dict[str, tuple[bytes, str]]:
    """The page's files by name, read once."""
    found = {}
    for file in resources.files("rstar2.viewer").joinpath("static").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in TYPES:
            found[file.name] = (file.read_bytes(), TYPES[suffix])
    return found
