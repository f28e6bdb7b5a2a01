"""What the HTTP servers of rstar2 share.

- `bind` makes the listening socket.
- `SignalFreeServer` leaves signals to the program around it. It disconnects callers that stop
  reading, and refuses requests with two lengths. Requests that are sent before the last answer
  (pipelining) wait in the caller's own socket when `MAX_PIPELINED_BYTES` of them have been read.
- `LocalCallers` protects a server without a token from web pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from rstar2.errors import UserError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

BACKLOG = 1024


UNREAD_S = 600.0
"""A caller that has not read on for this long is disconnected."""
READ_ON_BYTES = 64 << 10
"""So much of a long answer counts as reading on."""
MAX_PIPELINED_BYTES = 256 << 10


class UnreadAnswer:
    """Since when a caller has not read on. uvicorn itself would keep the connection for ever.

    A caller reads on if it takes `READ_ON_BYTES`, or all that is left. An answer that grows also
    counts: the server adds to it only while little of it is unread.
    """

    def __init__(self) -> None:
        self._left = self._counted = 0
        self._since_s = 0.0
        self.unread_s = 0.0

    def look(self, left: int, now_s: float) -> None:
        """`left`: bytes that the server has written and the network has not taken."""
        if left == 0 or left > self._left or left <= self._counted - READ_ON_BYTES:
            self._counted, self._since_s = left, now_s
        self._left = left
        self.unread_s = now_s - self._since_s


class PipelineFlow(FlowControl):
    """Reads no further while enough requests wait for their turn.

    uvicorn reads on whenever a request asks for more of its body or ends, and so would take in
    more requests than it answers.
    """

    def __init__(self, transport: asyncio.Transport, waiting: h11.Connection) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if self.read_paused and len(self._waiting.trailing_data[0]) < MAX_PIPELINED_BYTES:
            super().resume_reading()


class PipelinedConnection(H11Protocol):
    """uvicorn's connection with a bound of requests that wait for their turn."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = PipelineFlow(transport, self.conn)


class SignalFreeServer(uvicorn.Server):
    """uvicorn without its signal handlers: the program around it decides when it stops.

    A caller that does not read on for `unread_s` is disconnected.
    """

    def __init__(self, config: uvicorn.Config, unread_s: float = UNREAD_S) -> None:
        config.app = OneLength(config.app)
        if config.http == "auto":
            config.http = PipelinedConnection
        super().__init__(config)
        self.unread_s = unread_s
        self.unread: dict[Any, UnreadAnswer] = {}
        """By connection."""

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if counter % 10 == 0:
            self._look_at_unread(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    def _look_at_unread(self, now_s: float) -> None:
        known, self.unread = self.unread, {}
        for connection in self.server_state.connections:
            unread = self.unread[connection] = known.get(connection) or UnreadAnswer()
            unread.look(connection.transport.get_write_buffer_size(), now_s)
            if unread.unread_s > self.unread_s:
                connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises UserError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's delay off only on sockets that name their protocol; with it every
    # small answer would wait 40 ms for the caller's acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise UserError(
            f"--port: cannot listen on {host}:{port} ({error.strerror or error}); choose another "
            "(0 takes a free one), or stop the process that uses it"
        ) from error
    sock.setblocking(False)
    return sock


# --------------------------------------------------------------------------- requests


class OneLength:
    """Refuses a request that has a Content-Length and is chunked, and closes its connection.

    A proxy may follow the other header. What the server took for the next request would then be
    one that the proxy has not seen.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if {b"content-length", b"transfer-encoding"} <= names:
            message = "content-length and transfer-encoding: send one of them, not both"
            await _refuse(send, 400, "bad_request", message)
        else:
            await self._app(scope, receive, send)


class LocalCallers:
    """Refuses requests that a web page could make: for servers on loopback without a token."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        foreign = foreign_site(scope["headers"])
        if foreign is not None:
            await _refuse(send, 403, "forbidden", foreign)
        else:
            await self._app(scope, receive, send)


def foreign_site(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Why a request may come from a web page of another site; None if it cannot.

    Browsers send the page's site as Origin with every POST. A page whose name was given a loopback
    address after it was loaded (DNS rebinding) has that name as Host. Programs send no Origin.
    """
    for name, value in headers:
        text = value.decode("latin-1")
        if name == b"host" and not _is_loopback(f"//{text}"):
            return (
                f"host: {text!r} is no loopback name, and without a token or key this server "
                "answers only requests to 127.0.0.1, localhost or [::1]; use one of them, or set "
                "a token"
            )
        if name == b"origin" and not _is_loopback(text):
            return (
                f"origin: pages of {text!r} may not use this server, which has no token or key; "
                "set one, or send no Origin"
            )
    return None


def _is_loopback(url: str) -> bool:
    try:
        name = urlsplit(url).hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _refuse(send: Send, status: int, code: str, message: str) -> None:
    """An error in the format of the code environment, which OpenAI's clients can read too."""
    body = json.dumps({"error": {"code": code, "message": message}}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
