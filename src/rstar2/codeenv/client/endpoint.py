"""One server as the client sees it: its connections, its load, and whether it is up.

`monitor` runs for as long as the client does. It asks a server that is up for its health, and
revives one that is down: an owned process is started again, a remote server is asked until it
answers.

A connection that this machine cannot open (LocalResourceError) says nothing about the server: it
stays up, and its calls are sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from rstar2.child import describe_exit
from rstar2.codeenv import deadlines, wire
from rstar2.errors import CodeEnvError, InfrastructureError, QueueFullError, UserError
from rstar2.http_client import Address, Connections, LocalResourceError

log = logging.getLogger(__name__)

HEALTH_FAILURES = 2
"""A busy machine may miss one health check; the second in a row means that the server hangs."""

S = TypeVar("S")


class TransportError(CodeEnvError):
    """A server could not be reached, closed the connection early, or does not speak HTTP."""


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
        self.connections = Connections(
            Address.parse(url, token, "codeenv.urls"),
            TransportError,
            idle_s=deadlines.IDLE_CONNECTION_S,
            connect_s=deadlines.HTTP_CONNECT_S,
        )

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
            except LocalResourceError as error:
                log.warning("code environment %s could not be checked: %s", self.url, error)
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
                failures += not isinstance(error, LocalResourceError)
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
