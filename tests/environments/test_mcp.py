"""Tools of a real MCP server, over stdio and HTTP: schemas, errors, time-outs, lifetimes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import rstar2
from rstar2.environments.mcp import McpConnection, McpTool, ToolServerError, mcp_tools
from rstar2.errors import UserError
from rstar2.types import Outcome, ToolCall, ToolResult

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = f"mcp:stdio:{sys.executable} {SERVER}"
DEADLINE_S = 120.0

Tools = dict[str, McpTool]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tools() -> AsyncIterator[Tools]:
    made = {tool.spec.name: tool for tool in mcp_tools(COMMAND, timeout_s=DEADLINE_S)}
    yield made
    await made["population"].shutdown()


async def call(tools: Tools, name: str, deadline_s: float = DEADLINE_S, **given: Any) -> ToolResult:
    opened = tools[name].open(None)
    return await opened.call(ToolCall("c", name, given), deadline_s)


async def test_the_schemas_are_the_servers_own(tools: Tools) -> None:
    specs = {name: tool.spec for name, tool in tools.items()}
    assert set(specs) >= {"population", "slow", "leave"}
    spec = specs["population"]
    assert spec.description == "How many people live in a city of Norway."
    assert spec.parameters["properties"]["city"]["type"] == "string"
    assert spec.fault({}) == '"city" is missing.'
    assert spec.fault({"city": "Oslo"}) is None


async def test_a_call_returns_the_text_of_the_result(tools: Tools) -> None:
    result = await call(tools, "population", city="Oslo")
    assert (result.outcome, result.stdout, result.call_id) == (Outcome.OK, "709037", "c")
    assert (await call(tools, "nothing")).outcome is Outcome.NO_OUTPUT


async def test_an_error_of_the_tool_is_data_for_the_model(tools: Tools) -> None:
    result = await call(tools, "population", city="Atlantis")
    assert result.outcome is Outcome.EXCEPTION
    assert "Atlantis" in result.message


async def test_calls_run_at_the_same_time_and_keep_their_results(tools: Tools) -> None:
    cities = ["Oslo", "Bergen"] * 8
    results = await asyncio.gather(*(call(tools, "population", city=c) for c in cities))
    assert [r.stdout for r in results] == ["709037", "291940"] * 8


async def test_a_long_result_is_cut_in_the_middle(tools: Tools) -> None:
    result = await call(tools, "huge")
    assert result.outcome is Outcome.OK
    assert len(result.stdout) < 30_000
    assert "[...]" in result.stdout


async def test_a_json_rpc_error_is_the_tools_and_the_connection_stays(tools: Tools) -> None:
    before = (await call(tools, "process")).stdout
    result = await call(tools, "over_quota")
    assert result.outcome is Outcome.EXCEPTION
    assert result.message == "the quota is used up"
    assert (await call(tools, "process")).stdout == before


async def test_a_server_that_was_started_for_a_problem_ends_with_its_episodes() -> None:
    def make(episode: rstar2.EpisodeView) -> list[str]:
        return [COMMAND]

    env = rstar2.Environment([{"prompt": "?"}], lambda episode: 1.0, tools=make)
    (problem,) = env.problems("train", 1, 0)
    episode = await env.open(problem, seed=0, sandbox=None)
    process = await episode.call(ToolCall("c", "process", {}), DEADLINE_S)
    assert alive(int(process.stdout))
    await episode.close()
    assert not alive(int(process.stdout))


async def test_a_server_shared_by_the_episodes_of_a_problem_ends_with_the_last(
    tools: Tools,
) -> None:
    connection = McpConnection(COMMAND.removeprefix("mcp:"))
    own = replace(tools["process"], connection=connection)
    env = rstar2.Environment([{"prompt": "?"}], lambda episode: 1.0, tools=lambda episode: [own])
    (problem,) = env.problems("train", 1, 0)
    first, second = [await env.open(problem, seed=0, sandbox=None) for _ in range(2)]
    process = int((await first.call(ToolCall("c", "process", {}), DEADLINE_S)).stdout)
    await first.close()
    assert int((await second.call(ToolCall("d", "process", {}), DEADLINE_S)).stdout) == process
    await second.close()
    assert not alive(process)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_time_out_is_an_outcome_and_the_end_of_the_server_a_failure(tools: Tools) -> None:
    connection = McpConnection(COMMAND.removeprefix("mcp:"))
    own = {name: replace(tool, connection=connection) for name, tool in tools.items()}
    first = int((await call(own, "process")).stdout)
    assert (await call(own, "slow", deadline_s=0.1)).outcome is Outcome.TIMEOUT
    with pytest.raises(ToolServerError):
        await call(own, "leave")
    second = int((await call(own, "process")).stdout)
    assert first != second
    await own["process"].shutdown()
    assert not alive(first)
    assert not alive(second)


OWNER = """
import asyncio, sys
from rstar2.environments.mcp import mcp_tools
from rstar2.types import ToolCall

async def main():
    tools = {tool.spec.name: tool for tool in mcp_tools(sys.argv[1])}
    result = await tools["process"].call(ToolCall("c", "process", {}), 120)
    print(result.stdout, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_the_server_dies_with_its_owner() -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, COMMAND, stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    server = int(await owner.stdout.readline())
    assert alive(server)
    descriptor = os.pidfd_open(server)
    owner.kill()
    await owner.wait()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    await ended.wait()
    loop.remove_reader(descriptor)
    os.close(descriptor)


@contextlib.asynccontextmanager
async def http_server() -> AsyncIterator[str]:
    """The server on a socket that listens before it starts: nobody else can take the port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, descriptor = listening.getsockname()[1], listening.fileno()
        program = (
            f"import sys, uvicorn; sys.path.insert(0, {str(SERVER.parent)!r})\n"
            "from mcp_server import server\n"
            f"uvicorn.run(server.streamable_http_app(), fd={descriptor})\n"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(descriptor,),
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        await process.wait()


async def test_a_server_by_url() -> None:
    async with http_server() as url:
        own = {tool.spec.name: tool for tool in await asyncio.to_thread(mcp_tools, url)}
        assert (await call(own, "population", city="Bergen")).stdout == "291940"
        await own["population"].shutdown()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("ftp://x", "names no MCP server"),
        ("stdio:", "needs the command"),
        ("stdio:no-such-command-here", "cannot be started"),
        (f"stdio:{sys.executable} -c 'raise SystemExit(\"broken\")'", "broken"),
        ("http://127.0.0.1:9/mcp", "cannot be reached"),
    ],
)
async def test_a_server_that_cannot_be_used_is_the_users_error(target: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mcp_tools(target)
