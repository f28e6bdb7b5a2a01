"""The HTTP server: accepts connections up to a bound, and closes those whose caller is silent.

A connection costs a descriptor, and a process has a limited number of them (often 1,024). So:

- `raise_descriptor_limit` raises the soft limit to the hard one when the server starts.
- At most `connections` are open, and at most half of the descriptors: workers need the others.
- At that bound a new connection replaces the one that has waited longest for its caller: without a
  request, or with an answer that was not read on for `UNREAD_AT_BOUND_S`. If there is none, the new
  connection is answered with 503 and closed.
- A caller has `HEADER_READ_S` to send the head of a request, and a connection without a request
  stays open for `KEEP_ALIVE_S`. A caller that does not read on for `UNREAD_S` is disconnected.
- If accepting fails nevertheless, the server pauses and logs once a minute. asyncio's own accept
  loop would retry and log a thousand times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket

import uvicorn

from rstar2.codeenv import deadlines
from rstar2.descriptors import raise_descriptor_limit
from rstar2.http_server import PipelinedConnection, SignalFreeServer
from rstar2.tasks import cancel_all

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10

_BUSY_BODY = (
    b'{"error":{"code":"queue_full","message":"every connection of this server is serving a '
    b'request; try again later, or raise its number with --connections","retry_after_s":1.0}}'
)
BUSY_RESPONSE = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(_BUSY_BODY), _BUSY_BODY)
)


def connection_bound(wanted: int) -> int:
    """`wanted`, or half of this process's descriptors if that is less (with a warning)."""
    half = raise_descriptor_limit() // 2
    if wanted > half:
        log.warning(
            "connections: %d need more descriptors than this process may open; serving at most %d. "
            "Raise the hard limit (`ulimit -Hn`) for more", wanted, half,
        )  # fmt: skip
    return min(wanted, half)


class HttpConnection(PipelinedConnection):
    """uvicorn's connection, which can say how long it has waited for its caller.

    It is looked at about once a second, so that requests cost nothing for it.
    """

    waits_since_s = math.inf
    """When it was first seen in the state it is in."""
    _seen: tuple[object, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.look(self.loop.time())

    @property
    def busy(self) -> bool:
        """True while a request is being read or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def in_head(self) -> bool:
        """True if the caller has connected or begun a request, but not sent its whole head."""
        return self.cycle is None or bool(self.conn.trailing_data[0])

    def look(self, now_s: float) -> None:
        """Note the time if the state is another one than at the last look."""
        state = (self.cycle, self.busy, self.busy or self.in_head)
        if state != self._seen:
            self._seen, self.waits_since_s = state, now_s

    def overdue(self, now_s: float, header_read_s: float) -> bool:
        """True if the caller has been silent for too long, and has nothing to read."""
        self.look(now_s)
        waited_s = now_s - self.waits_since_s
        if self.busy or self.transport.get_write_buffer_size():
            return False
        return waited_s > (header_read_s if self.in_head else deadlines.KEEP_ALIVE_S)


class HttpServer(SignalFreeServer):
    """uvicorn with bounded connections."""

    def __init__(
        self,
        config: uvicorn.Config,
        connections: int,
        header_read_s: float = deadlines.HEADER_READ_S,
    ) -> None:
        super().__init__(config, deadlines.UNREAD_S)
        self.connections = connections
        self.header_read_s = header_read_s
        self._warned_s = -math.inf
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.servers = []
        self._tasks = [asyncio.create_task(self._accept(sock)) for sock in sockets or ()]
        self._tasks.append(asyncio.create_task(self._close_overdue()))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.stop_accepting()
        await super().shutdown(sockets)

    async def stop_accepting(self) -> None:
        """Accept no further connection; those that are open stay open."""
        await cancel_all(self._tasks)

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        while True:
            try:
                peer, _ = await loop.sock_accept(sock)
                await self._admit(peer)
            except ConnectionError:  # the caller left before it was accepted
                continue
            except OSError as error:
                self._warn(error)
                self._close_longest_waiting()
                await asyncio.sleep(deadlines.ACCEPT_RETRY_S)

    async def _admit(self, peer: socket.socket) -> None:
        full = len(self.server_state.connections) >= self.connections
        if full and not self._close_longest_waiting():
            with peer, contextlib.suppress(OSError):
                peer.send(BUSY_RESPONSE)
            return
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(self._connection, peer)

    def _connection(self) -> HttpConnection:
        return HttpConnection(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def _open(self) -> list[HttpConnection]:
        open_now = self.server_state.connections
        return [connection for connection in open_now if isinstance(connection, HttpConnection)]

    def _close_longest_waiting(self) -> bool:
        """Close the connection that has waited longest for its caller; False if none waits."""
        now_s = asyncio.get_running_loop().time()
        waited_s: dict[HttpConnection, float] = {}
        for connection in self._open():
            connection.look(now_s)
            unread = self.unread.get(connection)
            if unread is not None and unread.unread_s > deadlines.UNREAD_AT_BOUND_S:
                waited_s[connection] = unread.unread_s
            elif not connection.busy and not connection.transport.is_closing():
                waited_s[connection] = now_s - connection.waits_since_s
        if not waited_s:
            return False
        max(waited_s, key=lambda connection: waited_s[connection]).transport.abort()
        return True

    async def _close_overdue(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self.header_read_s))
            for connection in self._open():
                if connection.overdue(loop.time(), self.header_read_s):
                    connection.transport.abort()

    def _warn(self, error: OSError) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._warned_s < deadlines.ACCEPT_WARNING_S:
            return
        self._warned_s = now_s
        log.warning(
            "cannot accept connections (%s); retrying every %g s. If this persists, raise the "
            "limit of open files (`ulimit -n`)", error.strerror, deadlines.ACCEPT_RETRY_S,
        )  # fmt: skip
