"""One server as the client sees it: its connections, its load, and whether it is up.

`monitor` runs for as long as the client does. It asks a server that is up for its health, and
revives one that is down: an owned process is started again, a remote server is asked until it
answers.

The HTTP/1.1 client below exists because results arrive one by one: reading a streamed line through
httpx costs 0.33 ms of CPU here, through asyncio's streams 0.12 ms, and the whole call 2-3 ms. It
implements what this project's server uses (Content-Length and chunked bodies) and nothing more.
Every operation is bounded by the deadline of its request; any breach of the protocol is a
TransportError.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from rstar2.child import describe_exit
from rstar2.codeenv import deadlines, wire
from rstar2.errors import CodeEnvError, InfrastructureError, QueueFullError, UserError

log = logging.getLogger(__name__)

HEALTH_FAILURES = 2
"""A busy machine may miss one health check; the second in a row means that the server hangs."""
STREAM_LIMIT = 1 << 20
MAX_LINE_BYTES = 256 << 20

S = TypeVar("S")


class OwnedServer(Protocol):
    """A server that its endpoint starts and revives: a local process, or one on another node."""

    token: str

    @property
    def running(self) -> bool: ...

    async def start(self) -> wire.ServerReady: ...

    async def wait(self) -> int: ...

    async def stop(self) -> None: ...


class ServerEndpoint:
    """State of one server; used only from the client's event loop."""

    def __init__(self, url: str, token: str | None, batch: int, owned: OwnedServer | None) -> None:
        self.owned = owned
        self.batch = batch
        self.outstanding = 0
        self.window = 4 * batch
        """Calls in flight at most: keeps the server busy and both sides' memory bounded."""
        self.healthy = False
        self.retry_at = 0.0
        """Back-pressure: nothing is sent before this loop time."""
        self.health = wire.Health("shutting_down")
        """`health.server` is a new id after each start: sessions of an earlier start are lost."""
        self.error = "it was not asked yet"
        self.pinned: deque[Any] = deque()
        """Calls that only this server can execute (its sessions)."""
        self._set_url(url, token)
        self._down = asyncio.Event()

    def _set_url(self, url: str, token: str | None) -> None:
        self.url = url
        self.connections = Connections(Address.parse(url, token))

    @property
    def enough(self) -> int:
        """With more calls than this in flight, all slots are busy and the next ones wait there."""
        return 2 * self.health.slots + 2

    def available(self, now: float) -> bool:
        return self.healthy and now >= self.retry_at and self.outstanding < self.window

    def mark_down(self, reason: str, *, cut: bool = False) -> None:
        """Send nothing to this server until the monitor finds it up again.

        `cut` also closes its busy connections, for a server that hangs instead of exiting.
        """
        if self.healthy:
            log.warning("code environment %s is down: %s", self.url, reason)
        self.healthy = False
        self.error = reason
        self.connections.close(busy=cut)
        self._down.set()

    async def check(self) -> None:
        """Ask for its health; raises when it does not answer well."""
        health = await self.json("GET", "/health", None, wire.Health, deadlines.HEALTH_REPLY_S)
        if health.status != "ok":
            raise CodeEnvError(f"{self.url} is shutting down")
        if not health.slots:
            raise UserError(
                f"codeenv.token: {self.url} requires a token and did not accept this one; "
                "set codeenv.token (or RSTAR2_CODEENV_TOKEN) to the server's token"
            )
        self.health = health
        self.window = max(4 * self.batch, 4 * health.slots)
        self.healthy = True
        self._down.clear()

    async def monitor(self, on_change: Callable[[], None]) -> None:
        """Keep `healthy` up to date until cancelled."""
        failures = 0
        while True:
            if not self.healthy:
                await self._revive()
                failures = 0
                on_change()
                continue
            await self._until_down()
            if not self.healthy:
                continue
            try:
                await self.check()
                failures = 0
            except (InfrastructureError, UserError) as error:
                failures += 1
                if failures >= HEALTH_FAILURES:
                    self.mark_down(str(error), cut=True)
                    on_change()

    async def _until_down(self) -> None:
        """Wait for the next health check, or until the server is reported down."""
        waits: set[asyncio.Task[Any]] = {asyncio.create_task(self._down.wait())}
        if self.owned is not None:
            waits.add(asyncio.create_task(self._process_end(self.owned)))
        try:
            await asyncio.wait(
                waits, timeout=deadlines.HEALTH_EVERY_S, return_when=asyncio.FIRST_COMPLETED
            )  # fmt: skip
        finally:
            for wait in waits:
                wait.cancel()

    async def _process_end(self, owned: OwnedServer) -> None:
        self.mark_down(f"its process {describe_exit(await owned.wait())}")

    async def _revive(self) -> None:
        """Try until the server answers; pause longer after each failure.

        An owned process is started again when it is dead, or alive without answering.
        """
        pause_s, failures = deadlines.REVIVE_FIRST_S, 0
        while not self.healthy:
            try:
                if self.owned is not None and not self.owned.running:
                    await self.owned.stop()
                    ready = await self.owned.start()
                    self._set_url(ready.url, self.owned.token)
                await self.check()
            except (InfrastructureError, UserError) as error:
                self.error = str(error)
                failures += 1
                if self.owned is not None and failures >= HEALTH_FAILURES:
                    await self.owned.stop()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, deadlines.REVIVE_MOST_S)

    async def json(self, method: str, path: str, value: Any, kind: type[S], deadline_s: float) -> S:
        """One small request; raises the exception that an error body names."""
        body = b"" if value is None else wire.encode(value)
        try:
            async with asyncio.timeout(deadline_s), self.connections.lease() as connection:
                response = await connection.request(method, path, body)
                answer = await response.body()
        except TimeoutError as error:
            raise TransportError(f"{self.url} did not answer within {deadline_s:g} s") from error
        if response.status >= 400:
            raise to_exception(read_error(answer, self.url, response.status))
        return wire.read(answer, kind)


def read_error(body: bytes, url: str, status: int) -> wire.WireError:
    """The error in a body, or one made from the status if the body is not of this protocol."""
    try:
        return wire.read(body, wire.ErrorBody).error
    except wire.Refusal:
        code: wire.ErrorCode = "not_found" if status == 404 else "infrastructure"
        return wire.WireError(code, f"{url} answered {status} and no error of this protocol")


def to_exception(error: wire.WireError) -> Exception:
    """Back-pressure and outages are infrastructure; other errors are the caller's."""
    if error.code == "queue_full":
        return QueueFullError(error.message, error.retry_after_s or 0.1)
    if error.code in ("shutting_down", "infrastructure"):
        return CodeEnvError(error.message)
    return UserError(error.message)


# --------------------------------------------------------------------------- HTTP


class TransportError(CodeEnvError):
    """A server could not be reached, closed the connection early, or does not speak HTTP."""


@dataclass(frozen=True, slots=True)
class Address:
    """Host, port and authorization header of a server."""

    host: str
    port: int
    tls: bool
    prefix: str
    authorization: str | None

    @property
    def name(self) -> str:
        """host:port as headers and messages have it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, url: str, token: str | None) -> Address:
        """From a URL; `http://token:SECRET@host:port` carries its own token."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"codeenv.urls: {url!r} is not a URL like http://host:8000")
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
        return b"".join([part async for part in self._connection.parts(self.headers)])

    async def lines(self) -> AsyncIterator[bytes]:
        """Lines of the body as they arrive, without their newline."""
        rest = b""
        async for part in self._connection.parts(self.headers):
            *lines, rest = (rest + part).split(b"\n") if rest else part.split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise TransportError(f"a line of the response is above {MAX_LINE_BYTES} bytes")
            for line in lines:
                yield line
        if rest:
            raise TransportError("the response ended inside a line")


@dataclass(slots=True)
class Connection:
    """One TCP connection; not shared between concurrent requests."""

    address: Address
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    reusable: bool = True
    used: int = 0
    idle_since: float = 0.0
    """Loop time."""

    @property
    def stale(self) -> bool:
        """True if the server has closed it, or may be about to."""
        idle_s = asyncio.get_running_loop().time() - self.idle_since
        closed = self.reader.at_eof() or self.writer.is_closing()
        return closed or idle_s > deadlines.IDLE_CONNECTION_S

    @classmethod
    async def open(cls, address: Address) -> Connection:
        """Connect within deadlines.HTTP_CONNECT_S."""
        context = ssl.create_default_context() if address.tls else None
        try:
            async with asyncio.timeout(deadlines.HTTP_CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=context, limit=STREAM_LIMIT
                )
        except (OSError, TimeoutError) as error:
            raise TransportError(f"cannot connect to {address.name}: {_reason(error)}") from error
        return cls(address, reader, writer)

    async def request(self, method: str, path: str, body: bytes) -> HttpResponse:
        """Send a request and read the head of its response."""
        address = self.address
        head = [
            f"{method} {address.prefix}{path} HTTP/1.1",
            f"host: {address.name}",
            f"content-length: {len(body)}",
            "content-type: application/json",
        ]
        if address.authorization:
            head.append(f"authorization: {address.authorization}")
        self.reusable = False
        self.used += 1
        try:
            self.writer.write("\r\n".join([*head, "", ""]).encode() + body)
            await self.writer.drain()
            raw = await self.reader.readuntil(b"\r\n\r\n")
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            raise self._broken(error) from error
        return self._head(raw)

    def _head(self, raw: bytes) -> HttpResponse:
        status_line, *rest = raw.decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in rest if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        words = status_line.split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise TransportError(f"not an HTTP response: {status_line[:80]!r}")
        return HttpResponse(int(words[1]), headers, self)

    async def parts(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """The body, part by part as it arrives."""
        try:
            if headers.get("transfer-encoding", "").lower() == "chunked":
                while size := int(await self.reader.readuntil(b"\r\n"), 16):
                    yield (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readuntil(b"\r\n")
            elif length := int(headers.get("content-length", "0")):
                yield await self.reader.readexactly(length)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise self._broken(error) from error
        self.reusable = headers.get("connection", "").lower() != "close"

    def _broken(self, error: Exception) -> TransportError:
        return TransportError(f"{self.address.name} broke the connection: {_reason(error)}")

    def close(self) -> None:
        self.writer.close()


def _reason(error: Exception) -> str:
    """The system's text of an error, or the name of its type."""
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


@dataclass(slots=True)
class Connections:
    """Idle keep-alive connections to one server."""

    address: Address
    idle: list[Connection] = field(default_factory=list)
    busy: list[Connection] = field(default_factory=list)

    def lease(self) -> Lease:
        """A connection for one request: `async with pool.lease() as connection`."""
        return Lease(self)

    def close(self, *, busy: bool = True) -> None:
        """Close the idle connections and, if asked, the busy ones."""
        for connection in self.idle + (self.busy if busy else []):
            connection.close()
        self.idle.clear()


@dataclass(slots=True)
class Lease:
    """Takes an idle connection or opens one; gives it back if its response was read whole."""

    pool: Connections
    connection: Connection | None = None

    async def __aenter__(self) -> Connection:
        while self.pool.idle and self.connection is None:
            connection = self.pool.idle.pop()
            if connection.stale:
                connection.close()
            else:
                self.connection = connection
        if self.connection is None:
            self.connection = await Connection.open(self.pool.address)
        self.pool.busy.append(self.connection)
        return self.connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self.connection is not None
        self.pool.busy.remove(self.connection)
        if error is None and self.connection.reusable:
            self.connection.idle_since = asyncio.get_running_loop().time()
            self.pool.idle.append(self.connection)
        else:
            self.connection.close()
