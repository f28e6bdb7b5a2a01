"""Tools of MCP servers, in the extra `mcp`.

    mcp_tools("stdio:python my_server.py")       a command that speaks MCP on stdin and stdout
    mcp_tools("http://localhost:8000/mcp")       a server that runs already

The names, descriptions and schemas are read when the tools are made: the server is started (or
asked) once for that. The connection that serves the calls is opened at the first call and shared by
all episodes; a server that we started ends with it, and with this process. Tools that are made for
an episode have a connection of their own, which ends with the last episode that uses it.

| what the server does                       | becomes                                          |
|--------------------------------------------|--------------------------------------------------|
| returns content                            | OK or NO_OUTPUT                                  |
| returns a result with `isError`            | EXCEPTION, with the text                         |
| refuses the arguments, or the tool's name  | BAD_ARGUMENTS, UNKNOWN_TOOL                      |
| answers with another JSON-RPC error        | EXCEPTION, with the message                      |
| does not answer within the deadline        | TIMEOUT                                          |
| ends, or cannot be reached                 | ToolServerError: the rollout is retried          |
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import signal
import tempfile
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeVar

from rstar2.child import TAIL_LINES, with_parent_death_signal
from rstar2.environments.base import SandboxClient, ToolSpec
from rstar2.errors import DeadlineError, InfrastructureError, UserError
from rstar2.types import Outcome, ToolCall, ToolResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mcp import Client, MCPError
    from mcp.types import CallToolResult
    from mcp.types import Tool as ListedTool

log = logging.getLogger(__name__)
T = TypeVar("T")

STDIO = "stdio:"
START_DEADLINE_S = 60.0
CLOSE_DEADLINE_S = 15.0
OUTPUT_CHARS = 20_000
"""Longer results are cut in the middle, before the agent's own limit in tokens."""
HTTP_STATUS = "Server returned an error response"
"""The message of MCP's client for an HTTP status that says nothing about the call."""


class ToolServerError(InfrastructureError):
    """An MCP server could not be started or reached, or ended during a call."""


def mcp_tools(server: str, *, timeout_s: float = 30.0) -> tuple[McpTool, ...]:
    """The tools of an MCP server: `stdio:command ...` or a URL.

    `timeout_s` is the deadline of one call, if the agent's own deadline is not shorter.
    """
    connection = McpConnection(server.removeprefix("mcp:"))
    listed = _in_own_loop(connection.probe())
    if not listed:
        raise UserError(f"tools: the MCP server {connection.target!r} offers no tool")
    return tuple(McpTool(connection, _spec(tool), timeout_s) for tool in listed)


def _spec(tool: ListedTool) -> ToolSpec:
    return ToolSpec(tool.name, (tool.description or "").strip(), dict(tool.input_schema))


def _in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a thread of its own, whether or not a loop is running here."""
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 - raised again below
            outcome.append(error)

    thread = threading.Thread(target=run, name="mcp-probe")
    thread.start()
    thread.join()
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    return result


@dataclass(frozen=True, slots=True)
class McpTool:
    """One tool of a server."""

    connection: McpConnection
    spec: ToolSpec
    timeout_s: float

    @property
    def needs_sandbox(self) -> bool:
        return False

    def open(self, sandbox: SandboxClient | None) -> McpTool:
        """Episodes share the server, so that the open tool is the tool itself."""
        return self

    async def call(self, call: ToolCall, deadline_s: float) -> ToolResult:
        """Call the tool; its own failures are outcomes, those of the server ToolServerError."""
        started = time.perf_counter()
        deadline_s = min(deadline_s, self.timeout_s)
        outcome, text = await self.connection.call(self.spec.name, call.arguments, deadline_s)
        wall_s = time.perf_counter() - started
        if outcome in (Outcome.OK, Outcome.NO_OUTPUT):
            return ToolResult(call.id, outcome, stdout=text, wall_s=wall_s)
        return ToolResult(call.id, outcome, message=text, wall_s=wall_s)

    async def close(self) -> None:
        """Nothing is held for one episode."""

    async def shutdown(self) -> None:
        """End the connection that all episodes share."""
        await self.connection.close()


class McpConnection:
    """One connection to one server, opened when it is needed. Used by one event loop at a time.

    The connection lives in a task of its own: MCP's client must be closed by the task that opened
    it.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._command: list[str] | None = None
        if target.startswith(STDIO):
            self._command = shlex.split(target.removeprefix(STDIO))
        elif not target.startswith(("http://", "https://")):
            raise UserError(
                f"tools: {target!r} names no MCP server; write stdio:COMMAND or http(s)://..."
            )
        if self._command == []:
            raise UserError("tools: stdio: needs the command that starts the MCP server")
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Client] | None = None
        self._stop: asyncio.Event | None = None
        self._episodes = 0

    async def probe(self) -> Sequence[ListedTool]:
        """List the tools of the server over a connection that is closed afterwards."""
        try:
            async with asyncio.timeout(START_DEADLINE_S), self._open() as client:
                tools: list[ListedTool] = []
                cursor: str | None = None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if not cursor:
                        return tools
        except ToolServerError as error:
            raise UserError(f"tools: {error}") from error
        except TimeoutError:
            late = DeadlineError(
                f"the MCP server {self.target!r} did not list its tools within "
                f"{START_DEADLINE_S:g} s"
            )
            raise UserError(f"tools: {late}") from late

    async def call(
        self, name: str, arguments: Mapping[str, Any], deadline_s: float
    ) -> tuple[Outcome, str]:
        """The outcome and the text of one call."""
        from mcp import MCPError

        client = await self._connected()
        try:
            async with asyncio.timeout(deadline_s):
                result = await client.call_tool(name, dict(arguments))
        except TimeoutError:
            return Outcome.TIMEOUT, f"The tool did not answer within {deadline_s:g} s."
        except MCPError as error:
            outcome = _outcome(error)
            if outcome is not None:
                return outcome, _cut(error.error.message) or "The tool failed without a message."
            await self.close()
            raise ToolServerError(f"{self.target}: {error}") from error
        except Exception as error:
            await self.close()
            raise ToolServerError(f"{self.target}: {type(error).__name__}: {error}") from error
        text = _cut(_text(result))
        if result.is_error:
            return Outcome.EXCEPTION, text or "The tool failed without a message."
        return (Outcome.OK, text) if text.strip() else (Outcome.NO_OUTPUT, "")

    def join(self) -> None:
        """Count an episode whose tools were made for it."""
        self._episodes += 1

    async def leave(self) -> None:
        """Such an episode has ended; the last one ends the connection."""
        self._episodes -= 1
        if self._episodes == 0:
            await self.close()

    async def close(self) -> None:
        """End the connection, and the server if we started it; a later call opens a new one."""
        task, stop, self._task = self._task, self._stop, None
        if task is None or stop is None:
            return
        stop.set()
        _, pending = await asyncio.wait({task}, timeout=CLOSE_DEADLINE_S)
        if pending:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _connected(self) -> Client:
        if self._task is None or self._task.done():
            self._ready = asyncio.get_running_loop().create_future()
            self._stop = asyncio.Event()
            self._task = asyncio.ensure_future(self._live(self._ready, self._stop))
        assert self._ready is not None
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                return await asyncio.shield(self._ready)
        except TimeoutError as error:
            await self.close()
            raise ToolServerError(
                f"{self.target}: no connection within {START_DEADLINE_S:g} s"
            ) from error

    async def _live(self, ready: asyncio.Future[Client], stop: asyncio.Event) -> None:
        """Hold the connection open until `stop`; how the start failed is the result of `ready`."""
        try:
            async with self._open() as client:
                ready.set_result(client)
                await stop.wait()
        except Exception as error:  # noqa: BLE001 - the result of `ready`, or logged
            if ready.done():
                log.warning("MCP server %s: %r", self.target, error)
            else:
                ready.set_exception(error)
                ready.exception()  # whoever awaits it raises it; nobody may await it

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Client]:
        from mcp import Client, StdioServerParameters, stdio_client

        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            server: Any = self.target
            if self._command is not None:
                command = with_parent_death_signal(self._command, signal.SIGKILL)
                server = stdio_client(
                    StdioServerParameters(
                        command=command[0], args=command[1:], env=dict(os.environ)
                    ),
                    errlog=errors,
                )
            opened = False
            try:
                async with Client(server) as client:
                    opened = True
                    yield client
            except Exception as error:
                if opened:
                    raise
                verb = "started" if self._command is not None else "reached"
                raise ToolServerError(
                    f"the MCP server {self.target!r} cannot be {verb}: {_reason(error)}"
                    f"{_tail(errors)}"
                ) from error


def _outcome(error: MCPError) -> Outcome | None:
    """What an error means for the call; None if it is the connection that failed."""
    from mcp.types import (
        CONNECTION_CLOSED,
        INVALID_PARAMS,
        INVALID_REQUEST,
        METHOD_NOT_FOUND,
        PARSE_ERROR,
        REQUEST_TIMEOUT,
    )

    code = error.error.code
    if code == INVALID_PARAMS:
        return Outcome.BAD_ARGUMENTS
    if code == METHOD_NOT_FOUND:
        return Outcome.UNKNOWN_TOOL
    lost = (CONNECTION_CLOSED, REQUEST_TIMEOUT, INVALID_REQUEST, PARSE_ERROR)
    return None if code in lost or error.error.message == HTTP_STATUS else Outcome.EXCEPTION


def _reason(error: Exception) -> str:
    """The errors that a group of errors consists of, in words."""
    if isinstance(error, ExceptionGroup):
        return "; ".join(_reason(part) for part in error.exceptions)
    return str(error) or type(error).__name__


def _text(result: CallToolResult) -> str:
    """The content of a result as text; other media are named, not shown."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        else:
            parts.append(f"[{block.type}]")
    if not parts and result.structured_content not in (None, {"result": None}):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _cut(text: str) -> str:
    if len(text) <= OUTPUT_CHARS:
        return text
    half = OUTPUT_CHARS // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}"


def _tail(errors: IO[str]) -> str:
    errors.seek(0)
    lines = errors.read().splitlines()[-TAIL_LINES:]
    return "; its last output:\n" + "\n".join(lines) if lines else ""
