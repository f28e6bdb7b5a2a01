"""HTTP to one engine: a request with a deadline, and the errors that it may raise.

- The server closed the connection, refused it or broke the protocol: EngineError, the engine is
  lost.
- No answer in time, or no connection within CONNECT_S: DeadlineError.
- This machine cannot open a connection: LocalResourceError. It is not the engine's failure.

A request that is `patient` (a turn) waits for a connection if there was none in time or no room for
one, until its deadline; requests wait in the order of their arrival, and `unsent` counts them. An
engine that hangs is found by the watchdog. The other requests (control) may use descriptors that
are reserved, so that they do not wait behind turns.

A server closes a connection that has been idle for its keep-alive time (uvicorn, and so vLLM: 5 s).
A request sent at that moment gets no response, and the engine would look dead. So the client
closes idle connections earlier than the server, and a request that gets no response on a connection
that was used before is sent again on another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from rstar2.errors import DeadlineError, EngineError, InfrastructureError
from rstar2.http_client import Address, Connections, Lease, LocalResourceError

log = logging.getLogger(__name__)

IDLE_S = 2.0
CONNECT_S = 10.0
PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.25
"""Before the second attempt to connect, doubled each time; and at most."""
CLOSED = "the client was closed"
CONTROL_CONNECTIONS = 64
"""Of the reserved descriptors, those that requests which are not patient may use."""


class EngineHttp:
    """The connections to one engine."""

    def __init__(self, name: str, address: Address) -> None:
        self.name = name
        self.unsent = 0
        """Patient requests that have no connection yet."""
        self._connections = Connections(address, EngineError, idle_s=IDLE_S, connect_s=CONNECT_S)
        self._line: deque[asyncio.Future[None]] = deque()
        """Patient requests that found no connection. The first one tries to get one."""
        self._closed = False

    async def close(self) -> None:
        """Close all connections; pending requests fail with EngineError, all at once."""
        self._closed = True
        for place in self._line:
            if not place.done():
                place.set_exception(EngineError(CLOSED))
        await self._connections.aclose()

    async def ask(
        self, method: str, path: str, body: bytes, deadline_s: float, *, patient: bool = False
    ) -> tuple[int, bytes]:
        """Send one request; returns the status and the body of the response."""
        try:
            async with asyncio.timeout(max(0.0, deadline_s)):
                return await self._exchange(method, path, body, patient)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self.name}: {path} was not answered within {deadline_s:g} s"
            ) from error
        except EngineError as error:
            kind = DeadlineError if _not_connected(error) else EngineError
            raise kind(f"{self.name}: {path}: {error}") from error

    async def _exchange(
        self, method: str, path: str, body: bytes, patient: bool
    ) -> tuple[int, bytes]:
        while True:
            lease = self._connections.lease(0 if patient else CONTROL_CONNECTIONS)
            if patient:
                await self._take_in_line(lease)
            async with lease as connection:
                try:
                    response = await connection.request(method, path, body)
                except EngineError:
                    if connection.used == 1 or connection.closed:
                        raise  # a first request, or `close` has broken the connection
                    continue  # the server had closed an idle connection: ask on another one
                return response.status, await response.body()

    async def _take_in_line(self, lease: Lease) -> None:
        """Take a connection; requests that find none get one in the order of their arrival."""
        self.unsent += 1
        try:
            if self._line or not await self._taken(lease):
                await self._wait_in_line(lease)
        finally:
            self.unsent -= 1

    async def _wait_in_line(self, lease: Lease) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(place)
        self._wake_first()
        pause_s = PAUSE_S
        try:
            await place
            while not await self._taken(lease):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._line.remove(place)
            self._wake_first()

    def _wake_first(self) -> None:
        if self._line and not self._line[0].done():
            self._line[0].set_result(None)

    async def _taken(self, lease: Lease) -> bool:
        """Whether there was a connection; raises if there will be none."""
        if self._closed:
            raise EngineError(CLOSED)
        try:
            await lease.take()
        except (LocalResourceError, EngineError) as error:
            if not _not_connected(error):
                raise
            log.info("%s: a turn waits for a connection: %s", self.name, error)
            return False
        return True


def _not_connected(error: InfrastructureError) -> bool:
    """Whether there was no connection, and no sign that the server is gone."""
    return isinstance(error, LocalResourceError) or isinstance(error.__cause__, TimeoutError)
