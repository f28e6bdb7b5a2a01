"""A light HTTP/1.1 client on asyncio, for engines and code environments.

A driver sends tens of thousands of requests a step. Through httpx each costs several milliseconds
of CPU, more with every open connection, and here a fraction of one (`benchmarks/scaling.py --http`
has the figures). The client implements what those servers use (Content-Length and chunked bodies,
TCP, TLS and Unix sockets) and nothing more.

    connections = Connections(Address.parse("http://host:8000"), EngineError)
    async with connections.lease() as connection:
        response = await connection.request("GET", "/health")
        body = await response.body()

Invariants
- Leaving a lease before its response was read whole closes the connection, which cancels the
  request on the server.
- What the server does wrong raises the error class that the caller gave. What this machine cannot
  do (no descriptor, memory, port or name service) raises LocalResourceError: it says nothing about
  the server.
- Callers set the deadline of a request with `asyncio.timeout`; only connecting has its own.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import ipaddress
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import ClassVar, TypeVar
from urllib.parse import unquote, urlsplit

from rstar2.descriptors import RESERVED_DESCRIPTORS, descriptor_limit
from rstar2.errors import InfrastructureError, UserError

STREAM_LIMIT = 1 << 20
"""With so much unread data a connection reads no more until someone needs it."""
MAX_HEAD_BYTES = 1 << 20
MAX_LINE_BYTES = 256 << 20
CONNECTING = 8
"""Connections that are opened to one server at a time: a thousand at once would time out in this
process, not in the server."""

LOCAL_ERRNOS = frozenset(
    (
        *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM),
        *(errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.ENETDOWN),
    )
)

LOCAL_S = 60.0
"""How long a control call is repeated that this machine had no room for."""

T = TypeVar("T")


class LocalResourceError(InfrastructureError):
    """This machine cannot open another connection or start a process; the server may be well."""


async def despite_local_errors(call: Callable[[], Awaitable[T]]) -> T:
    """Make a call; one that this machine had no room for is repeated for LOCAL_S."""
    ends, pause_s = monotonic() + LOCAL_S, 0.05
    while True:
        try:
            return await call()
        except LocalResourceError:
            if monotonic() + pause_s > ends:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and its authorization header."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    authorization: str | None = None
    socket: str | None = None
    """Path of a Unix socket, instead of host and port."""

    @property
    def name(self) -> str:
        """host:port as headers and messages have it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, url: str, token: str | None = None, setting: str = "url") -> Address:
        """From a URL; `http://token:SECRET@host:port` carries its own token."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{setting}: {url!r} is not a URL like http://host:8000")
        secret = unquote(parts.password) if parts.password else token
        authorization = f"Bearer {secret}" if secret else None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(
            parts.hostname, port, parts.scheme == "https", parts.path.rstrip("/"), authorization
        )


@dataclass(slots=True)
class HttpResponse:
    """Status and headers; the body is read through the connection it came from."""

    status: int
    headers: Mapping[str, str]
    _connection: Connection

    async def body(self) -> bytes:
        """The whole body; the connection can be used again afterwards."""
        return await self._connection.whole(self.headers)

    def parts(self) -> AsyncIterator[bytes]:
        """The body as it arrives; one with a Content-Length comes whole."""
        return self._connection.parts(self.headers)

    async def lines(self) -> AsyncIterator[bytes]:
        """Lines of the body as they arrive, without their newline."""
        rest = b""
        error = self._connection.pool.error
        async for part in self._connection.parts(self.headers):
            *lines, rest = (rest + part).split(b"\n") if rest else part.split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise error(f"a line of the response is above {MAX_LINE_BYTES} bytes")
            for line in lines:
                yield line
        if rest:
            raise error("the response ended inside a line")


class Connection(asyncio.Protocol):
    """One connection; not shared between concurrent requests.

    A protocol of its own, because asyncio's streams cost as much CPU as all the rest. The task that
    reads is woken only when as much has arrived as it needs.
    """

    def __init__(self, pool: Connections) -> None:
        self.pool = pool
        self.reusable, self.used, self.closed = True, 0, False
        self.idle_since = 0.0
        """Loop time."""
        self._buffer = bytearray()
        self._needed = 1
        self._reading: asyncio.Future[None] | None = None
        self._ended = False
        self._error: Exception | None = None
        self._transport: asyncio.Transport | None = None

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= self._needed:
            self._wake()
            if len(self._buffer) > STREAM_LIMIT and self._transport is not None:
                self._transport.pause_reading()

    def eof_received(self) -> None:
        self._ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended, self._error = True, exc
        self._wake()

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    # ------------------------------------------------------------------ reading

    async def _more(self, needed: int) -> None:
        """Wait until this many bytes have arrived; EOFError if the server closed before."""
        if self._ended:
            raise self._error or EOFError("end of stream")
        assert self._transport is not None
        self._needed = needed
        self._reading = asyncio.get_running_loop().create_future()
        if not self._transport.is_closing():
            self._transport.resume_reading()
        try:
            await self._reading
        finally:
            self._reading = None

    async def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            await self._more(count)
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    async def _until(self, end: bytes) -> bytes:
        searched = 0
        while (found := self._buffer.find(end, searched)) < 0:
            searched = max(0, len(self._buffer) - len(end) + 1)
            if searched > MAX_HEAD_BYTES:
                raise ValueError("a line of the head is too long")
            await self._more(len(self._buffer) + 1)
        return await self._exactly(found + len(end))

    # ------------------------------------------------------------------ requests

    @property
    def stale(self) -> bool:
        """True if the server has closed it, or may be about to."""
        idle_s = asyncio.get_running_loop().time() - self.idle_since
        return self._ended or self.closed or idle_s > self.pool.idle_s

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """Send a request and read the head of its response; `headers` are sent in addition."""
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"{method} {self.pool.prefix}{path}{self.pool.head}{len(body)}\r\n{more}\r\n"
        self.reusable = False
        self.used += 1
        assert self._transport is not None
        try:
            self._transport.write(head.encode() + body)
            raw = await self._until(b"\r\n\r\n")
        except (OSError, EOFError, ValueError) as error:
            raise self._broken(error) from error
        return self._head(raw)

    def _head(self, raw: bytes) -> HttpResponse:
        status_line, *rest = raw.decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in rest if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        words = status_line.split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise self.pool.error(f"not an HTTP response: {status_line[:80]!r}")
        return HttpResponse(int(words[1]), headers, self)

    async def whole(self, headers: Mapping[str, str]) -> bytes:
        """The whole body."""
        return b"".join([part async for part in self.parts(headers)])

    async def parts(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """The body, part by part as it arrives."""
        try:
            if headers.get("transfer-encoding", "").lower() == "chunked":
                while size := int(await self._until(b"\r\n"), 16):
                    yield (await self._exactly(size + 2))[:-2]
                await self._until(b"\r\n")
            elif length := int(headers.get("content-length", "0")):
                yield await self._exactly(length)
        except (OSError, EOFError, ValueError) as error:
            raise self._broken(error) from error
        self.reusable = headers.get("connection", "").lower() != "close"

    def _broken(self, error: Exception) -> InfrastructureError:
        name = self.pool.address.name
        return self.pool.error(f"{name} broke the connection: {_reason(error)}")

    def close(self) -> None:
        """Close the connection at once; what was not sent is dropped. Idempotent."""
        if not self.closed and self._transport is not None:
            self.closed = True
            Connections.count -= 1
            self._transport.abort()


def _reason(error: Exception) -> str:
    """The system's text of an error, or the name of its type."""
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


def _is_local(error: OSError) -> bool:
    return isinstance(error, socket.gaierror) or error.errno in LOCAL_ERRNOS


@functools.cache
def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


@dataclass(slots=True, eq=False)
class Connections:
    """Keep-alive connections to one server: as many as there are requests at once."""

    count: ClassVar[int] = 0
    """Open connections of this process, to all servers."""

    address: Address
    error: type[InfrastructureError]
    """What an unreachable or broken server raises."""
    idle_s: float = 2.0
    """An idle connection is not used after this time: the server may be about to close it."""
    connect_s: float = 10.0
    idle: deque[Connection] = field(default_factory=deque)
    """The one used last is at the end, and is used next."""
    busy: dict[Connection, None] = field(default_factory=dict)
    prefix: str = ""
    head: str = ""
    reached: str = ""
    """The IP address of the last connection."""
    connecting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONNECTING))

    def __post_init__(self) -> None:
        address = self.address
        self.prefix = address.prefix
        secret = address.authorization
        authorization = f"authorization: {secret}\r\n" if secret else ""
        self.head = (
            f" HTTP/1.1\r\nhost: {address.name}\r\ncontent-type: application/json\r\n"
            f"{authorization}content-length: "
        )

    def lease(self, spare: int = 0) -> Lease:
        """A connection for one request: `async with connections.lease() as connection`."""
        return Lease(self, spare)

    async def open(self, spare: int = 0) -> Connection:
        """Connect within `connect_s`; `spare` of the reserved descriptors may be used for it."""
        async with self.connecting:
            most = descriptor_limit() - RESERVED_DESCRIPTORS + spare
            if Connections.count >= most:
                raise LocalResourceError(
                    f"{Connections.count} connections are open, of {most} possible: raise the "
                    "limit of open files (`ulimit -Hn`), or lower engine.max_sequences"
                )
            Connections.count += 1  # before it connects: others must not take its place
            try:
                async with asyncio.timeout(self.connect_s):
                    return await self._connect()
            except BaseException as error:
                Connections.count -= 1
                if not isinstance(error, OSError):  # TimeoutError is one
                    raise
                kind = LocalResourceError if _is_local(error) else self.error
                name = self.address.name
                raise kind(f"cannot connect to {name}: {_reason(error)}") from error

    async def _connect(self) -> Connection:
        """Connect to one of the server's addresses; raises the error that tells most."""
        address, made = self.address, functools.partial(Connection, self)
        loop = asyncio.get_running_loop()
        if address.socket is not None:
            _, connection = await loop.create_unix_connection(made, address.socket)
            return connection
        hosts = [address.host]
        if not _is_ip(address.host):
            infos = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            hosts = sorted(dict.fromkeys(str(i[4][0]) for i in infos), key=self._unproven)
        tls = _tls() if address.tls else None
        errors: dict[str, OSError] = {}
        for host in hosts:
            try:
                _, connection = await loop.create_connection(
                    made, host, address.port, ssl=tls, server_hostname=address.host if tls else None
                )
            except OSError as error:
                errors[host] = error
            else:
                self.reached = host
                return connection
        # A machine without IPv6 always has a local error for one of two addresses.
        told = [error for error in errors.values() if not _is_local(error)]
        raise errors.get(self.reached) or [*told, *errors.values()][0]

    def _unproven(self, host: str) -> bool:
        return host != self.reached

    def close(self, *, busy: bool = True) -> None:
        """Close the idle connections and, if asked, the busy ones."""
        for connection in [*self.idle, *(self.busy if busy else ())]:
            connection.close()
        self.idle.clear()

    async def aclose(self) -> None:
        """Close all connections, and wait until they are closed."""
        self.close()
        await asyncio.sleep(0)  # asyncio closes an aborted transport in the next iteration


@dataclass(slots=True, eq=False)
class Lease:
    """Takes an idle connection or opens one; gives it back if its response was read whole."""

    pool: Connections
    spare: int
    connection: Connection | None = None

    async def __aenter__(self) -> Connection:
        return self.connection or await self.take()

    async def take(self) -> Connection:
        """Take or open the connection before the lease is entered."""
        while self.pool.idle and self.connection is None:
            connection = self.pool.idle.pop()
            if connection.stale:
                connection.close()
            else:
                self.connection = connection
        if self.connection is None:
            self.connection = await self.pool.open(self.spare)
        self.pool.busy[self.connection] = None
        return self.connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self.connection is not None
        del self.pool.busy[self.connection]
        if error is None and self.connection.reusable:
            while self.pool.idle and self.pool.idle[0].stale:
                self.pool.idle.popleft().close()
            self.connection.idle_since = asyncio.get_running_loop().time()
            self.pool.idle.append(self.connection)
        else:
            self.connection.close()
