"""The MCP server with the real client from PyPI, over stdio and over HTTP, in both protocols."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.types import CallToolResult, TextContent

from rstar2.cli import main
from rstar2.codeenv import deadlines
from rstar2.codeenv.client import CodeEnvClient
from rstar2.codeenv.protocol import SessionInfo
from rstar2.config import CodeEnvConfig
from rstar2.errors import QueueFullError
from rstar2.mcp import PythonTools
from tests.codeenv.conftest import FakeExecutor, Serve
from tests.commands import CODEENV, codeenv_command

START_S = 600


@pytest.fixture(scope="module")
def codeenv() -> Iterator[str]:
    """The URL of one code environment for this file."""
    with codeenv_command("serve", "--port", "0", "--slots", "2", "--max-wall-s", "300") as url:
        yield url


@pytest.fixture(scope="module")
def http_url(codeenv: str) -> Iterator[str]:
    """One MCP server: programs may wait for long, but not compute for long."""
    limits = ("--wall-s", "300", "--cpu-s", "3")
    with codeenv_command("mcp", "--http", "--port", "0", "--url", codeenv, *limits) as url:
        yield url


Connect = Callable[[], AbstractAsyncContextManager[Client]]


@pytest.fixture(params=["stdio-auto", "stdio-legacy", "http-auto", "http-legacy"])
def connect(request: pytest.FixtureRequest, codeenv: str, http_url: str) -> Connect:
    """Opens a client: over stdio it starts a server of its own, which uses the code environment."""
    transport, mode = request.param.split("-")

    def start() -> AbstractAsyncContextManager[Client]:
        if transport == "http":
            return Client(http_url, mode=mode, read_timeout_seconds=120)
        arguments = [*CODEENV[1:], "mcp", "--url", codeenv, "--wall-s", "20"]
        parameters = StdioServerParameters(command=CODEENV[0], args=arguments)
        return Client(stdio_client(parameters), mode=mode, read_timeout_seconds=120)

    return start


def text(result: CallToolResult) -> str:
    (block,) = result.content
    assert isinstance(block, TextContent)
    return block.text


def health(codeenv: str) -> Any:
    return httpx.get(codeenv + "/health", timeout=120).json()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 (of another process)
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_programs_sessions_and_mistakes(connect: Connect, codeenv: str) -> None:
    async with connect() as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"python", "python_session"}
        assert tools["python"].input_schema["required"] == ["code"]

        result = await client.call_tool("python", {"code": "print(int(input())*7)", "stdin": "6"})
        assert (text(result), result.is_error) == ("42", False)
        assert result.structured_content["outcome"] == "ok"
        failed = await client.call_tool("python", {"code": "x = 1\n1/0"})
        assert failed.is_error
        assert "ZeroDivisionError" in text(failed)
        assert "line 2" in text(failed)

        for arguments, part in (
            ({}, "code"), ({"code": 7}, "string"), ({"code": "1", "kode": "2"}, "kode"),
            ({"code": "x" * 2_000_000}, "code"),
        ):  # fmt: skip
            wrong = await client.call_tool("python", arguments)
            assert wrong.is_error
            assert part in text(wrong)
        with pytest.raises(MCPError, match="python_session"):
            await client.call_tool("bash", {"code": "ls"})

        hostile = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, 9)"
        await client.call_tool("python", {"code": hostile})
        spied = await client.call_tool("python", {"code": "open('/proc/1/environ').read()"})
        assert spied.is_error
        assert text(await client.call_tool("python", {"code": "1 + 1"})) == "2"

        first = await client.call_tool("python_session", {"code": "a = 20\nprint('set')"})
        more = {"session": first.structured_content["session"]}
        after = await client.call_tool("python_session", {"code": "a += 1; 1/0", **more})
        assert after.is_error
        kept = await client.call_tool("python_session", {"code": "a + 1", **more})
        assert text(kept) == "21"
        missing = await client.call_tool("python_session", {"code": "a", "session": "s-none"})
        assert missing.is_error
        assert "s-none" in text(missing)


def exists(codeenv: str, session: str) -> bool:
    """Ask the code environment itself whether a session is open."""
    call = {"id": f"exists-{uuid.uuid4().hex}", "code": "", "session": session}
    status = httpx.post(codeenv + "/v1/run", json=call, timeout=120).status_code
    assert status in (200, 404)
    return status == 200


async def in_session(client: Client, code: str) -> tuple[str, CallToolResult]:
    """Run code in the session of the conversation; returns the session's id and the result."""
    result = await client.call_tool("python_session", {"code": code})
    return result.structured_content["session"], result


@pytest.mark.slow
async def test_a_conversation_has_one_session_which_ends_with_it(
    codeenv: str, http_url: str
) -> None:
    async with Client(http_url, mode="legacy") as one, Client(http_url, mode="legacy") as two:
        opened = await asyncio.gather(*(in_session(one, "b = 1") for _ in range(3)))
        (mine,) = {session for session, _ in opened}
        assert text((await in_session(one, "b"))[1]) == "1"
        other, unknown = await in_session(two, "b")
        assert unknown.is_error
        assert other != mine
        assert exists(codeenv, mine)
        assert exists(codeenv, other)
    await until(lambda: not exists(codeenv, mine))
    await until(lambda: not exists(codeenv, other))

    arguments = [*CODEENV[1:], "mcp", "--url", codeenv]
    parameters = StdioServerParameters(command=CODEENV[0], args=arguments)
    async with Client(stdio_client(parameters)) as client:
        session, _ = await in_session(client, "b = 2")
        assert text((await in_session(client, "b"))[1]) == "2"
        assert exists(codeenv, session)
    await until(lambda: not exists(codeenv, session))


@pytest.mark.slow
async def test_without_conversations_the_result_names_the_session(http_url: str) -> None:
    async with Client(http_url) as client:
        first = await client.call_tool("python_session", {"code": "c = 3"})
        session = first.structured_content["session"]
        assert f'session="{session}"' in text(first)
        second = await client.call_tool("python_session", {"code": "c", "session": session})
        assert text(second) == "3"


@pytest.mark.slow
async def test_a_time_out_is_a_result(http_url: str) -> None:
    async with Client(http_url) as client:
        late = await client.call_tool("python", {"code": "while True: pass"})
        assert late.is_error
        assert late.structured_content["outcome"] == "timeout"
        assert "3 s" in text(late)


SLEEPER = "import time\ntime.sleep(290)"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_cancelled_call_ends_its_program(codeenv: str, http_url: str, mode: str) -> None:
    async with Client(http_url, mode=mode) as client:
        call = asyncio.create_task(client.call_tool("python", {"code": SLEEPER}))
        await until(lambda: health(codeenv)["busy"] == 1)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        await until(lambda: health(codeenv)["busy"] == 0)
        assert text(await client.call_tool("python", {"code": "1"})) == "1"


@pytest.mark.slow
async def test_a_client_that_disconnects_leaves_no_program(codeenv: str, http_url: str) -> None:
    program = (
        "import asyncio, sys; from mcp import Client\n"
        "async def main():\n"
        "    async with Client(sys.argv[1]) as client:\n"
        f"        await client.call_tool('python', {{'code': {SLEEPER!r}}})\n"
        "asyncio.run(main())"
    )
    caller = await asyncio.create_subprocess_exec(sys.executable, "-c", program, http_url)
    try:
        await until(lambda: health(codeenv)["busy"] == 1)
    finally:
        caller.kill()
        await caller.wait()
    await until(lambda: health(codeenv)["busy"] == 0)


@pytest.mark.slow
async def test_http_asks_for_its_token(codeenv: str) -> None:
    arguments = ("mcp", "--http", "--port", "0", "--url", codeenv)
    with codeenv_command(*arguments, RSTAR2_CODEENV_TOKEN="secret") as url:
        async with create_mcp_http_client(headers=BEARER) as http:
            refused = await http.post(url, json={}, headers={"authorization": "Bearer wrong"})
            assert refused.status_code == 401
            assert "Bearer" in refused.json()["error"]["message"]
            assert (await http.get(url.replace("/mcp", "/other"))).status_code == 404
            async with Client(streamable_http_client(url, http_client=http)) as client:
                assert text(await client.call_tool("python", {"code": "1"})) == "1"


@pytest.mark.slow
async def test_http_without_a_token_refuses_web_pages(http_url: str) -> None:
    async with create_mcp_http_client() as http:
        for header in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
            refused = await http.post(http_url, json={}, headers=header)
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "forbidden"


BEARER = {"authorization": "Bearer secret"}


@pytest.mark.slow
@pytest.mark.timeout(START_S)
async def test_the_command_starts_a_code_environment_of_its_own() -> None:
    parameters = StdioServerParameters(
        command=CODEENV[0], args=[*CODEENV[1:], "mcp", "--slots", "1"]
    )
    async with Client(stdio_client(parameters), read_timeout_seconds=START_S) as client:
        assert text(await client.call_tool("python", {"code": "6 * 7"})) == "42"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("mcp", "--http", "--host", "0.0.0.0"), "token"),
        (("mcp", "--url", "http://127.0.0.1:9"), "127.0.0.1:9"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_served_is_one_message(
    arguments: tuple[str, ...],
    part: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadlines, "CONNECT_S", 0.1)
    with pytest.raises(SystemExit) as ended:
        main(["codeenv", *arguments])
    assert ended.value.code
    errors = capfd.readouterr().err
    assert part in errors
    assert "Traceback" not in errors


def test_without_the_extra_the_command_says_so_in_one_line() -> None:
    program = "import sys; sys.modules['mcp'] = None; from rstar2.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "codeenv", "mcp"], capture_output=True, text=True,
        timeout=START_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0
    assert "pip install 'rstar2[mcp]'" in done.stderr


async def test_an_infrastructure_failure_is_an_error_not_a_result(serve: Any) -> None:
    async with serve() as server:
        config = CodeEnvConfig(urls=(server.url,))
        async with (
            await CodeEnvClient.start(config) as client,
            Client(PythonTools(client).server()) as caller,
        ):
            with pytest.raises(MCPError, match="could not execute"):
                await caller.call_tool("python", {"code": "lost"})
            assert text(await caller.call_tool("python", {"code": "echo 1"})) == "1"


# --------------------------------------------------------------------------- sessions in detail


class Conversation:
    """Calls the tools as the MCP server does for one conversation."""

    def __init__(self, tools: PythonTools, name: str) -> None:
        self.tools, self.name = tools, name

    async def run(self, code: str) -> CallToolResult:
        return await self.tools._python_session(self.name, code)


@contextlib.asynccontextmanager
async def fake_tools(serve: Serve, ttl_s: float) -> AsyncIterator[tuple[PythonTools, FakeExecutor]]:
    """Both tools in front of a server that runs the language of FakeExecutor."""
    async with serve() as server:
        config = CodeEnvConfig(urls=(server.url,))
        async with await CodeEnvClient.start(config) as client:
            yield PythonTools(client, session_ttl_s=ttl_s), server.executor


async def test_a_session_does_not_expire_while_a_call_runs_in_it(serve: Serve) -> None:
    async with fake_tools(serve, ttl_s=1e-9) as (tools, executor):
        long = asyncio.create_task(Conversation(tools, "long").run("hang"))
        await until(lambda: bool(executor.running))
        (running,) = executor.sessions
        await Conversation(tools, "other").run("echo 1")  # opens a session: expired ones are closed
        assert running in executor.sessions
        executor.release.set()
        assert not (await long).is_error
        await Conversation(tools, "third").run("echo 1")
        assert running not in executor.sessions  # now it has expired


async def test_conversations_that_have_ended_or_failed_are_forgotten(serve: Serve) -> None:
    async with fake_tools(serve, ttl_s=300.0) as (tools, executor):
        for number in range(5):
            await Conversation(tools, f"ended-{number}").run("echo 1")
            await tools.end(f"ended-{number}")
            with pytest.raises(MCPError, match="could not execute"):
                await Conversation(tools, f"lost-{number}").run("lost")
        assert not tools._conversations
        assert not tools._sessions
        assert not executor.sessions

        async def refuse(session: str | None, ttl_s: float | None) -> SessionInfo:
            raise QueueFullError("no more sessions", 0.1)

        open_session, executor.open_session = executor.open_session, refuse  # type: ignore[method-assign]
        calls = [Conversation(tools, "one").run("echo 1") for _ in range(3)]
        refused = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, QueueFullError) for error in refused)
        assert not tools._conversations
        executor.open_session = open_session  # type: ignore[method-assign]
        await Conversation(tools, "one").run("echo 1")
        assert list(tools._conversations) == ["one"]


async def test_expired_sessions_take_their_conversations_along(serve: Serve) -> None:
    async with fake_tools(serve, ttl_s=1e-9) as (tools, executor):
        for number in range(5):
            await Conversation(tools, f"c{number}").run("echo 1")
        assert list(tools._conversations) == ["c4"]
        assert len(tools._sessions) == len(executor.sessions) == 1


async def test_a_conversation_that_ends_while_its_session_is_opened_leaves_none(
    serve: Serve,
) -> None:
    async with fake_tools(serve, ttl_s=300.0) as (tools, executor):
        opening, opened = asyncio.Event(), asyncio.Event()
        open_session = executor.open_session

        async def slow(session: str | None, ttl_s: float | None) -> SessionInfo:
            opening.set()
            await opened.wait()
            return await open_session(session, ttl_s)

        executor.open_session = slow  # type: ignore[method-assign]
        call = asyncio.create_task(Conversation(tools, "a").run("echo 1"))
        await opening.wait()
        end = asyncio.create_task(tools.end("a"))
        await asyncio.sleep(0)
        opened.set()
        await asyncio.gather(call, end, return_exceptions=True)
        assert not end.exception()
        assert not tools._sessions
        assert not executor.sessions
