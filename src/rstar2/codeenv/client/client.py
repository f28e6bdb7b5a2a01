"""The client of the code environment: one `run` per call, batches on the wire, many servers.

Invariants:
- Every call gets its own result exactly once, also if servers or connections fail (both ends check
  ids; a retry keeps its id, and servers execute an id once).
- `run` and `verify` never raise for infrastructure: when no server could execute a call within its
  deadline and attempts, the outcome is INFRASTRUCTURE. A failure of the program is an outcome as
  well. Only bad input (UserError) and bugs (InvariantError) are raised.
- The number of calls in flight to one server is bounded by its window, so any number of calls may
  be submitted at once. After a 429 a server gets no new batches for as long as it asked.

`dispatch` sends calls and routes their results; `endpoint` connects to servers and monitors them.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from typing import cast

from rstar2.codeenv import deadlines, wire
from rstar2.codeenv.client.dispatch import ClientStats, Dispatcher, PendingCall
from rstar2.codeenv.client.endpoint import OwnedServer, ServerEndpoint, TransportError
from rstar2.codeenv.client.owned import LocalServer
from rstar2.codeenv.client.session import CodeSession
from rstar2.codeenv.protocol import (
    CallRequest,
    CallResult,
    RunRequest,
    SessionInfo,
    VerifyRequest,
    VerifyResult,
    infrastructure_result,
)
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, RstarError, UserError
from rstar2.types import ToolResult

NOWHERE = "http://127.0.0.1:9"
"""URL of an owned server that has not started yet."""


async def _start_all(config: CodeEnvConfig, servers: Sequence[OwnedServer]) -> list[ServerEndpoint]:
    """Start all servers at once; if one fails, stop the others and raise its error."""
    results = await asyncio.gather(*(s.start() for s in servers), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            await asyncio.gather(*(s.stop() for s in servers), return_exceptions=True)
            raise result
    return [
        ServerEndpoint(cast(wire.ServerReady, ready).url, server.token, config.batch, server)
        for server, ready in zip(servers, results, strict=True)
    ]


class CodeEnvClient:
    """Executes calls on one or many servers; make one with `await CodeEnvClient.start(config)`."""

    def __init__(self, config: CodeEnvConfig, endpoints: Sequence[ServerEndpoint]) -> None:
        self.config = config
        self.endpoints = list(endpoints)
        self._dispatcher = Dispatcher(config, self.endpoints)
        self._calls: dict[str, PendingCall] = {}
        self._sessions: dict[str, tuple[ServerEndpoint, str]] = {}
        self._closed = False

    @classmethod
    async def start(
        cls, config: CodeEnvConfig, servers: Sequence[OwnedServer] | None = None
    ) -> CodeEnvClient:
        """Connect to config.urls, or start and own servers: those given, else a local one."""
        if config.urls:
            endpoints = [
                ServerEndpoint(url, config.token, config.batch, None) for url in config.urls
            ]
        else:
            endpoints = await _start_all(config, servers or [LocalServer(config)])
        client = cls(config, endpoints)
        try:
            await client._connect()
        except BaseException:
            await client.close()
            raise
        for endpoint in endpoints:
            client._dispatcher.spawn(endpoint.monitor(client._dispatcher.wake))
        client._dispatcher.spawn(client._dispatcher.pump())
        return client

    async def _connect(self) -> None:
        """Wait until one server answers; raises the errors of all of them if none does."""
        loop = asyncio.get_running_loop()
        within_s = deadlines.CONNECT_S if self.config.urls else deadlines.OWNED_CONNECT_S
        deadline = loop.time() + within_s
        while True:
            answers = await asyncio.gather(
                *(endpoint.check() for endpoint in self.endpoints), return_exceptions=True
            )
            for endpoint, answer in zip(self.endpoints, answers, strict=True):
                if isinstance(answer, UserError) or not isinstance(answer, RstarError | None):
                    raise answer
                endpoint.error = str(answer or "")
            if any(endpoint.healthy for endpoint in self.endpoints):
                return
            if loop.time() > deadline:
                reasons = "; ".join(endpoint.error for endpoint in self.endpoints)
                raise CodeEnvError(f"no code environment answered within {within_s:g} s: {reasons}")
            await asyncio.sleep(0.2)

    def add(self, server: OwnedServer) -> None:
        """Own one more server; it is started, and restarted, in the background."""
        endpoint = ServerEndpoint(NOWHERE, server.token, self.config.batch, server)
        self.endpoints.append(endpoint)
        self._dispatcher.spawn(endpoint.monitor(self._dispatcher.wake))

    async def __aenter__(self) -> CodeEnvClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Answer the open calls and stop the owned servers."""
        self._closed = True
        await self._dispatcher.close()
        for call in list(self._calls.values()):
            self._dispatcher.resolve(
                call, infrastructure_result(call.request, "the client was closed", "")
            )
        for endpoint in self.endpoints:
            endpoint.connections.close()
            if endpoint.owned is not None:
                await endpoint.owned.stop()

    @property
    def isolation(self) -> str:
        """The weakest isolation level of the servers that are up."""
        levels = {endpoint.health.isolation for endpoint in self.endpoints if endpoint.healthy}
        return "portable" if "portable" in levels else next(iter(levels), "")

    @property
    def stats(self) -> ClientStats:
        return self._dispatcher.stats

    # ----------------------------------------------------------------- calls

    async def run(self, request: RunRequest) -> ToolResult:
        """Execute code; infrastructure failure is an outcome, not an exception."""
        return cast(ToolResult, await self._call(request))

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Call a trusted function by name; infrastructure failure is marked in the result."""
        return cast(VerifyResult, await self._call(request))

    async def _call(self, request: CallRequest) -> CallResult:
        call = self._register(request)
        budget_s = request.deadline_s or deadlines.DEFAULT_DEADLINE_S
        try:
            async with asyncio.timeout(budget_s):
                return await asyncio.shield(call.future)
        except TimeoutError:
            message = f"no result within the deadline of {budget_s:g} s: {call.why}"
            return infrastructure_result(request, message, "", max(1, call.attempts))
        finally:
            self._leave(call)

    def _register(self, request: CallRequest) -> PendingCall:
        """Submit a call, or join the one in flight with the same id."""
        if self._closed:
            raise UserError("this client is closed; start another")
        known = self._calls.get(request.id)
        if known is not None:
            if known.request != request:
                raise UserError(f"id: {request.id!r} is in flight for another request")
            known.waiters += 1
            return known
        pinned = None
        if isinstance(request, RunRequest) and request.session is not None:
            pinned = self._session(request.session)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (request.deadline_s or deadlines.DEFAULT_DEADLINE_S)
        call = PendingCall(request, deadline, loop.create_future(), pinned=pinned)
        self._calls[request.id] = call
        self._dispatcher.submit(call)
        return call

    def _leave(self, call: PendingCall) -> None:
        """One caller stopped waiting; a call without callers is forgotten."""
        call.waiters -= 1
        if call.waiters > 0:
            return
        if self._calls.get(call.request.id) is call:
            del self._calls[call.request.id]
        if not call.future.done():
            self._dispatcher.abandon(call)

    # ----------------------------------------------------------------- sessions

    async def open(self, session: str | None = None, ttl_s: float | None = None) -> CodeSession:
        """Open a session on the least busy server; see CodeSession for what it promises."""
        return CodeSession(self, await self.open_session(session, ttl_s))

    async def open_session(
        self, session: str | None = None, ttl_s: float | None = None
    ) -> SessionInfo:
        """Open a session on the least busy server; its calls all go there."""
        if session is not None:
            wire.check_session_id(session)
        healthy = [endpoint for endpoint in self.endpoints if endpoint.healthy]
        if not healthy:
            raise CodeEnvError("no code environment is up: " + self.endpoints[0].error)
        endpoint = min(healthy, key=lambda e: e.outstanding)
        body = wire.SessionIn(session or f"s-{uuid.uuid4().hex}", ttl_s)
        info = await endpoint.json(
            "POST", "/v1/sessions", body, SessionInfo, deadlines.SESSION_REQUEST_S
        )
        self._sessions[info.id] = (endpoint, endpoint.health.server)
        return info

    async def branch_session(self, session: str, branch: str | None = None) -> SessionInfo:
        """A new session with a copy of this one's state, on the same server."""
        endpoint, server_id = self._session(session)
        if branch is not None:
            wire.check_session_id(branch)
        if endpoint.health.server != server_id:
            raise CodeEnvError(f"session {session!r} was lost with its server")
        body = wire.BranchIn(branch or f"s-{uuid.uuid4().hex}")
        path = f"/v1/sessions/{session}/branch"
        info = await endpoint.json("POST", path, body, SessionInfo, deadlines.SESSION_REQUEST_S)
        self._sessions[info.id] = (endpoint, server_id)
        return info

    async def close_session(self, session: str) -> None:
        """Close a session; one that expired or was lost with its server is already closed.

        If the server cannot be reached it has ended, or it ends the session when its time is over.
        """
        endpoint, server_id = self._session(session)
        del self._sessions[session]
        if endpoint.healthy and endpoint.health.server == server_id:
            path = f"/v1/sessions/{session}"
            with contextlib.suppress(UserError, TransportError):
                await endpoint.json("DELETE", path, None, dict, deadlines.SESSION_REQUEST_S)

    def _session(self, session: str) -> tuple[ServerEndpoint, str]:
        known = self._sessions.get(session)
        if known is None:
            raise UserError(f"session: {session!r} was not opened by this client")
        return known
