"""A hand-written executor and a real HTTP server around it, for tests of the service."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager

import pytest

from rstar2.codeenv import deadlines
from rstar2.codeenv.protocol import (
    ExecutorStats,
    RunRequest,
    SessionInfo,
    VerifyRequest,
    VerifyResult,
)
from rstar2.codeenv.server.app import CodeEnvApp
from rstar2.codeenv.server.calls import CallTable
from rstar2.codeenv.server.connections import HttpConnection, HttpServer
from rstar2.codeenv.server.serve import http_config
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, QueueFullError, UserError
from rstar2.http_server import UnreadAnswer
from rstar2.types import Outcome, ToolResult


class FakeExecutor:
    """Runs a toy language, one instruction per program, so that tests choose what happens.

    `echo TEXT`, `print N` (N characters), `sleep SECONDS`, `hang`, `flaky N` (infrastructure N
    times, then ok), `swap` (answers with another call's id), `full` (its queue is full), `crash`
    (a bug).
    """

    def __init__(self, slots: int = 4) -> None:
        self.slots = slots
        self.executed: Counter[str] = Counter()
        self.cancelled: list[str] = []
        self.running: set[str] = set()
        self.sessions: dict[str, SessionInfo] = {}
        self.release = asyncio.Event()

    async def start(self) -> None:
        return

    def turn(self, request: RunRequest) -> None:
        return None

    async def run(self, request: RunRequest, deadline: float) -> ToolResult:
        assert len(self.running) < self.slots, "the call table admits at most `slots` calls"
        try:
            self.executed[request.id] += 1
            self.running.add(request.id)
            return await self.obey(request)
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            raise
        finally:
            self.running.discard(request.id)

    async def obey(self, request: RunRequest) -> ToolResult:
        if request.session is not None and request.session not in self.sessions:
            raise UserError(f"no session {request.session!r}")
        word, _, rest = request.code.partition(" ")
        answered = request.id
        if word == "print":
            rest = int(rest) * "x"
        elif word == "sleep":
            await asyncio.sleep(float(rest))
        elif word == "hang":
            await self.release.wait()
        elif word == "flaky" and self.executed[request.id] <= int(rest):
            return ToolResult(request.id, Outcome.INFRASTRUCTURE, message="a worker died")
        elif word == "swap":
            answered = "another"
        elif word == "full":
            raise QueueFullError("the executor's queue is full", 0.05)
        elif word == "lost":
            raise CodeEnvError("no slot could be started")
        elif word == "crash":
            raise ZeroDivisionError("a bug in the executor")
        return ToolResult(answered, Outcome.OK, stdout=rest, wall_s=0.001, isolation="portable")

    async def verify(self, request: VerifyRequest, deadline: float) -> VerifyResult:
        self.executed[request.id] += 1
        return VerifyResult(request.id, value=request.arguments.get("x"))

    async def open_session(self, session: str | None, ttl_s: float | None) -> SessionInfo:
        info = SessionInfo(session or secrets.token_hex(4), ttl_s or 300.0)
        self.sessions[info.id] = info
        return info

    async def branch_session(self, session: str, branch: str | None) -> SessionInfo:
        if session not in self.sessions:
            raise UserError(f"no session {session!r}")
        info = SessionInfo(branch or secrets.token_hex(4), 300.0, parent=session)
        self.sessions[info.id] = info
        return info

    async def close_session(self, session: str) -> None:
        if self.sessions.pop(session, None) is None:
            raise UserError(f"no session {session!r}")

    def stats(self) -> ExecutorStats:
        return ExecutorStats("portable", len(self.sessions))

    async def close(self) -> None:
        self.release.set()


class Running:
    """A server in this event loop; `kill` breaks it off as a crash would."""

    def __init__(
        self,
        executor: FakeExecutor,
        config: CodeEnvConfig,
        port: int = 0,
        header_read_s: float = deadlines.HEADER_READ_S,
    ) -> None:
        self.executor = executor
        self.connections = config.connections
        self.header_read_s = header_read_s
        self.table = CallTable(executor, config, f"fake-{secrets.token_hex(3)}")
        self.app = CodeEnvApp(self.table, config.token)
        self.sock = socket.socket(proto=socket.IPPROTO_TCP)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.sock.bind(("127.0.0.1", port))
        self.port = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server: HttpServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._server = HttpServer(
            http_config(self.app, self.app.token),
            self.connections,
            header_read_s=self.header_read_s,
        )
        self.sock.listen(64)
        self._task = asyncio.create_task(self._server.serve(sockets=[self.sock]))
        while not self._server.started:  # noqa: ASYNC110 (uvicorn offers no event)
            await asyncio.sleep(0.01)

    @property
    def open_connections(self) -> list[HttpConnection]:
        assert self._server is not None
        return self._server._open()

    @property
    def unread(self) -> Mapping[HttpConnection, UnreadAnswer]:
        assert self._server is not None
        return self._server.unread

    async def kill(self) -> None:
        """Abort every connection and stop listening."""
        assert self._server is not None
        assert self._task is not None
        await self._server.stop_accepting()
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        self.table.abort()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.sock.close()


Serve = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def serve() -> Serve:
    """`async with serve(...) as running`: a real HTTP server around a FakeExecutor."""

    @contextlib.asynccontextmanager
    async def start(
        executor: FakeExecutor | None = None,
        port: int = 0,
        slots: int = 4,
        header_read_s: float = deadlines.HEADER_READ_S,
        **settings: object,
    ) -> AsyncIterator[Running]:
        config = CodeEnvConfig.model_validate(settings)
        running = Running(executor or FakeExecutor(slots), config, port, header_read_s)
        await running.start()
        try:
            yield running
        finally:
            with contextlib.suppress(OSError):
                await running.kill()

    return start
