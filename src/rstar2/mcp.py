"""The code environment as an MCP server: the tools `python` and `python_session`.

    MCP client -> stdio, or HTTP at /mcp -> PythonTools -> CodeEnvClient -> the code environment

`python` keeps nothing. `python_session` keeps variables, imports and files. A conversation has one
session, which is opened by its first call:

- Over stdio the process serves one conversation; its session is closed when stdin ends.
- Over HTTP with protocols up to 2025-11-25 the conversation is the Mcp-Session-Id. Its session is
  closed when the client ends the MCP session, or after `session_ttl_s` without a call.
- Over HTTP with protocol 2026-07-28 requests belong to no conversation. The first call opens a
  session and returns its id, which later calls pass as `session`.

A program that fails is a result with `isError` and the text that a model needs to correct it. A
call that could not be executed is a JSON-RPC error instead, so that no model is blamed for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http import MCP_SESSION_ID_HEADER
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)
from starlette.requests import Request

from rstar2 import __version__
from rstar2.codeenv import deadlines
from rstar2.codeenv.client import CodeEnvClient, CodeSession
from rstar2.codeenv.protocol import RunRequest
from rstar2.codeenv.server.app import authorized, send_unauthorized
from rstar2.codeenv.server.connections import HttpServer, connection_bound
from rstar2.codeenv.server.serve import StopSignal, check_exposure, http_config, url_of
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, RstarError, UserError
from rstar2.http_server import Receive, Scope, Send, bind
from rstar2.tool_text import tool_text
from rstar2.types import Limits, Outcome, ToolResult

PATH = "/mcp"
STDIO = "stdio"
"""The conversation of a server that talks over stdin and stdout."""

_CODE = {"type": "string", "description": "The Python program to execute."}
_STDIN = {"type": "string", "description": "Text that the program reads from standard input."}
_SESSION = {
    "type": "string",
    "description": "The session to continue, as named by an earlier result; omit it to use the "
    "session of this conversation, or to start one.",
}
_TEXTS = ("outcome", "stdout", "stderr", "traceback", "message", "isolation")
_OUTPUT = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in _TEXTS},
        "value": {"type": ["string", "null"]},
        "wall_s": {"type": "number"},
        "session": {"type": "string"},
    },
    "required": [*_TEXTS, "value", "wall_s"],
}

TOOLS = [
    Tool(
        name="python",
        description=(
            "Execute a Python program in a sandbox and return what it prints, or the value of its "
            "last expression if it prints nothing. NumPy, SciPy and SymPy are available; there is "
            "no network. Every call starts afresh: variables and files are not kept."
        ),
        input_schema={
            "type": "object",
            "properties": {"code": _CODE, "stdin": _STDIN},
            "required": ["code"],
            "additionalProperties": False,
        },
        output_schema=_OUTPUT,
    ),
    Tool(
        name="python_session",
        description=(
            "Execute Python code in a sandboxed interpreter that keeps variables, imports and "
            "files between calls, like the cells of a notebook. A cell that fails leaves the "
            "variables as they were before it. NumPy, SciPy and SymPy are available; there is no "
            "network."
        ),
        input_schema={
            "type": "object",
            "properties": {"code": _CODE, "stdin": _STDIN, "session": _SESSION},
            "required": ["code"],
            "additionalProperties": False,
        },
        output_schema=_OUTPUT,
    ),
]


@dataclass(slots=True, eq=False)
class OpenedSession:
    """A session, when it was last used, and how many calls run in it."""

    session: CodeSession
    used_s: float
    """Loop time."""
    running: int = 0


@dataclass(slots=True)
class ConversationSession:
    """The session of one conversation; the lock lets concurrent first calls open only one."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    callers: int = 0
    """Calls that wait for the session to be opened."""
    opened: OpenedSession | None = None


class PythonTools:
    """Executes the calls of both tools and keeps the sessions of conversations."""

    def __init__(
        self,
        client: CodeEnvClient,
        limits: Limits = Limits(),
        session_ttl_s: float = 300.0,
        conversation: str | None = None,
    ) -> None:
        self._client = client
        self._limits = limits
        self._ttl_s = session_ttl_s
        self._conversation = conversation
        self._conversations: dict[str, ConversationSession] = {}
        """Only those that have a session, or are opening one."""
        self._sessions: dict[str, OpenedSession] = {}

    def server(self) -> Server[dict[str, Any]]:
        """An MCP server with both tools; one serves any number of conversations."""
        return Server(
            "rstar2", version=__version__, title="rstar2 code environment",
            on_list_tools=self._list, on_call_tool=self._call,
        )  # fmt: skip

    async def _list(
        self, context: ServerRequestContext[Any, Any], params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(tools=TOOLS)

    async def _call(
        self, context: ServerRequestContext[Any, Any], params: CallToolRequestParams
    ) -> CallToolResult:
        tool = next((tool for tool in TOOLS if tool.name == params.name), None)
        if tool is None:
            names = ", ".join(tool.name for tool in TOOLS)
            raise MCPError(INVALID_PARAMS, f"no tool is called {params.name!r}; there are {names}")
        arguments = params.arguments or {}
        problem = _check(tool, arguments)
        if problem is not None:
            return _failure(problem)
        try:
            if tool.name == "python":
                return await self._python(**arguments)
            return await self._python_session(self._conversation_of(context), **arguments)
        except UserError as error:
            return _failure(str(error))
        except RstarError as error:
            raise MCPError(INTERNAL_ERROR, f"{error.name}: {error}") from error

    async def _python(self, code: str, stdin: str = "") -> CallToolResult:
        request = RunRequest(f"mcp-{uuid.uuid4().hex}", code, stdin, self._limits)
        return _answer(await self._client.run(request))

    async def _python_session(
        self, conversation: str | None, code: str, stdin: str = "", session: str | None = None
    ) -> CallToolResult:
        opened = await self._session(conversation, session)
        opened.running += 1
        try:
            result = await opened.session.run(code, stdin, self._limits)
        finally:
            opened.running -= 1
            opened.used_s = asyncio.get_running_loop().time()
        if result.outcome is Outcome.INFRASTRUCTURE:
            await self._forget(opened)
        return _answer(result, opened.session.id, named=conversation is None and session is None)

    # ----------------------------------------------------------------- sessions

    def _conversation_of(self, context: ServerRequestContext[Any, Any]) -> str | None:
        if self._conversation is not None or not isinstance(context.request, Request):
            return self._conversation
        return context.request.headers.get(MCP_SESSION_ID_HEADER)

    async def _session(self, conversation: str | None, asked: str | None) -> OpenedSession:
        """The session that was asked for, or the conversation's own, or a new one."""
        if asked is not None:
            known = self._sessions.get(asked)
            if known is None:
                raise UserError(
                    f"session: {asked!r} does not exist or has ended; omit it to start a new one"
                )
            return known
        if conversation is None:
            return await self._open()
        own = self._conversations.setdefault(conversation, ConversationSession())
        own.callers += 1
        try:
            async with own.lock:
                if own.opened is None:
                    own.opened = await self._open()
                return own.opened
        finally:
            own.callers -= 1
            self._drop_empty(conversation, own)

    async def _open(self) -> OpenedSession:
        await self._close_expired()
        try:
            session = await self._client.open(ttl_s=self._ttl_s)
        except UserError as error:  # a setting of this server, which no model can correct
            raise CodeEnvError(f"cannot open a session: {error}") from error
        opened = OpenedSession(session, asyncio.get_running_loop().time())
        self._sessions[session.id] = opened
        return opened

    async def _close_expired(self) -> None:
        """Close sessions that no call has used for their TTL; the server has ended them by now."""
        oldest_s = asyncio.get_running_loop().time() - self._ttl_s
        for opened in list(self._sessions.values()):
            if opened.used_s < oldest_s and not opened.running:
                await self._forget(opened)

    async def _forget(self, opened: OpenedSession) -> None:
        """A session that lost a call may have lost its state: the next call opens another."""
        self._sessions.pop(opened.session.id, None)
        for conversation, own in list(self._conversations.items()):
            if own.opened is opened:
                own.opened = None
                self._drop_empty(conversation, own)
        await opened.session.close()

    def _drop_empty(self, conversation: str, own: ConversationSession) -> None:
        """Forget a conversation that has no session and opens none."""
        if own.opened is None and not own.callers:
            self._conversations.pop(conversation, None)

    async def end(self, conversation: str) -> None:
        """Close the session of a conversation that has ended, also one that is being opened."""
        own = self._conversations.get(conversation)
        if own is not None:
            async with own.lock:
                if own.opened is not None:
                    await self._forget(own.opened)


def _check(tool: Tool, arguments: dict[str, Any]) -> str | None:
    """Why the arguments do not fit the tool's schema; None if they do."""
    known = tool.input_schema["properties"]
    for name, value in arguments.items():
        if name not in known:
            return f"{name}: {tool.name} has no such argument; it takes {', '.join(known)}"
        if not isinstance(value, str):
            return f"{name}: must be a string, is {type(value).__name__}"
    return None if "code" in arguments else "code: is missing; send the program as a string"


def _failure(text: str) -> CallToolResult:
    """A call that the model can correct."""
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)


def _answer(result: ToolResult, session: str = "", *, named: bool = False) -> CallToolResult:
    """What the model reads, and the parts of the result for programs."""
    if result.outcome is Outcome.INFRASTRUCTURE:
        raise MCPError(
            INTERNAL_ERROR, f"the code environment could not execute the program: {result.message}"
        )
    parts = {name: str(getattr(result, name)) for name in _TEXTS}
    structured = {**parts, "value": result.value, "wall_s": result.wall_s}
    text = tool_text(result)
    if session:
        structured["session"] = session
    if named:
        text += f'\n\n(Pass session="{session}" to continue with this state.)'
    return CallToolResult(
        content=[TextContent(type="text", text=text)],
        structured_content=structured,
        is_error=not result.outcome.succeeded,
    )


# --------------------------------------------------------------------------- transports


async def serve_stdio(tools: PythonTools) -> None:
    """Serve one conversation over stdin and stdout until stdin ends."""
    server = tools.server()
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())
    await tools.end(STDIO)


class McpApp:
    """ASGI: checks the token and passes /mcp to the session manager."""

    def __init__(
        self, tools: PythonTools, manager: StreamableHTTPSessionManager, token: str | None
    ) -> None:
        self._tools = tools
        self._manager = manager
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not authorized(scope, self._token):
            return await send_unauthorized(send)
        if scope["path"].rstrip("/") != PATH:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            return await send({"type": "http.response.body", "body": b"MCP is served at /mcp\n"})
        await self._manager.handle_request(scope, receive, send)
        if scope["method"] == "DELETE":
            name = MCP_SESSION_ID_HEADER.encode()
            for header, value in scope["headers"]:
                if header == name:
                    await self._tools.end(value.decode("latin-1"))
        return None


async def serve_http(
    tools: PythonTools,
    config: CodeEnvConfig,
    session_ttl_s: float,
    on_ready: Callable[[str], None],
) -> None:
    """Serve at config.host:config.port until SIGTERM or Ctrl-C."""
    check_exposure(config)
    manager = StreamableHTTPSessionManager(tools.server(), session_idle_timeout=session_ttl_s)
    stop = StopSignal()
    with bind(config.host, config.port) as sock, stop.on_signals():
        server = HttpServer(
            http_config(McpApp(tools, manager, config.token), config.token),
            connection_bound(config.connections),
        )
        async with manager.run():
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            on_ready(url_of(config, sock) + PATH)
            await stop.unless(serving)
            server.should_exit = True
            await asyncio.wait({serving}, timeout=deadlines.HTTP_STOP_S)
            server.force_exit = True
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
