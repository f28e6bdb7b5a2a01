"""HTTP to one engine: a request with a deadline, and the errors that it may raise.

- The server closed the connection, refused it or broke the protocol: EngineError, the engine is
  lost.
- No answer in time, or no connection within CONNECT_S: DeadlineError.
- This machine cannot open a connection: LocalResourceError. It is not the engine's failure.

A request that is `patient` tries again if there was no connection in time or no room for one, until
its deadline. An engine that hangs is found by the watchdog.

A server closes a connection that has been idle for its keep-alive time (uvicorn, and so vLLM: 5 s).
A request sent at that moment gets no response, and the engine would look dead. So the client
closes idle connections earlier than the server, and a request that gets no response on a connection
that was used before is sent again on another one.
"""

from __future__ import annotations

import asyncio
import logging
import time

from rstar2.errors import DeadlineError, EngineError, InfrastructureError
from rstar2.http_client import Address, Connections, LocalResourceError

log = logging.getLogger(__name__)

IDLE_S = 2.0
CONNECT_S = 10.0
PAUSE_S = 0.05
"""Before the second attempt to connect; doubled each time, up to a second."""


class EngineHttp:
    """The connections to one engine."""

    def __init__(self, name: str, address: Address) -> None:
        self.name = name
        self._connections = Connections(address, EngineError, idle_s=IDLE_S, connect_s=CONNECT_S)

    async def close(self) -> None:
        """Close all connections; pending requests fail with EngineError."""
        await self._connections.aclose()

    async def ask(
        self, method: str, path: str, body: bytes, deadline_s: float, *, patient: bool = False
    ) -> tuple[int, bytes]:
        """Send one request; returns the status and the body of the response."""
        ends = time.monotonic() + deadline_s
        pause_s = PAUSE_S
        try:
            async with asyncio.timeout(max(0.0, deadline_s)):
                while True:
                    try:
                        return await self._exchange(method, path, body)
                    except (LocalResourceError, EngineError) as error:
                        again = patient and _not_connected(error)
                        if not again or time.monotonic() + pause_s >= ends:
                            raise
                        log.info("%s: %s is tried again: %s", self.name, path, error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, 1.0)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self.name}: {path} was not answered within {deadline_s:g} s"
            ) from error
        except EngineError as error:
            kind = DeadlineError if _not_connected(error) else EngineError
            raise kind(f"{self.name}: {path}: {error}") from error

    async def _exchange(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        while True:
            async with self._connections.lease() as connection:
                try:
                    response = await connection.request(method, path, body)
                except EngineError:
                    if connection.used == 1 or connection.closed:
                        raise  # a first request, or `close` has broken the connection
                    continue  # the server had closed an idle connection: ask on another one
                return response.status, await response.body()


def _not_connected(error: InfrastructureError) -> bool:
    """Whether there was no connection, and no sign that the server is gone."""
    return isinstance(error, LocalResourceError) or isinstance(error.__cause__, TimeoutError)
