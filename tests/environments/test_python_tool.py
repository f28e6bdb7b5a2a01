"""The Python tool and sandboxed functions against the real jail, of one server."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

import rstar2
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.client.owned import LocalServer
from rstar2.config import CodeEnvConfig
from rstar2.environments.base import OpenTool
from rstar2.errors import SessionLostError
from rstar2.types import Outcome, ToolCall, ToolResult
from tests.codeenv.levels import PATIENT

_numbers = itertools.count()  # the checks share one server, which runs each id once


async def run(tool: OpenTool, code: str) -> ToolResult:
    return await tool.call(ToolCall(f"c-{next(_numbers)}", "python", {"code": code}), 60.0)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_python_and_sandboxed_functions_in_the_real_jail() -> None:
    config = CodeEnvConfig(slots=2, warm_up="never", default=PATIENT)
    server = LocalServer(config)
    async with await CodeEnvClient.start(config, [server]) as sandbox:
        await check_fresh(sandbox)
        await check_session(sandbox)
        await check_sandboxed(sandbox)
        await check_lost_session(sandbox, server)


async def check_fresh(sandbox: CodeEnvClient) -> None:
    """Without a session every call starts afresh."""
    tool = rstar2.python().open(sandbox)
    assert (await run(tool, "x = 5\nprint(x)")).stdout == "5\n"
    assert (await run(tool, "print(x)")).outcome is Outcome.EXCEPTION
    await tool.close()


async def check_session(sandbox: CodeEnvClient) -> None:
    """A session keeps its state, and is private to its episode."""
    python = rstar2.python(session=True)
    assert python.spec.stateful
    assert "kept between calls" in python.spec.description
    first, second = python.open(sandbox), python.open(sandbox)
    assert (await run(first, "x = 5")).outcome is Outcome.NO_OUTPUT
    assert (await run(first, "print(x)")).stdout == "5\n"
    assert (await run(second, "print(x)")).outcome is Outcome.EXCEPTION
    await first.close()
    await second.close()
    await python.open(sandbox).close()  # without a call there is no session to close


async def check_sandboxed(sandbox: CodeEnvClient) -> None:
    """The source of the function runs in the jail, under its own time limit."""

    @rstar2.tool(sandboxed=True, timeout_s=60.0)
    def describe(n: int) -> dict[str, object]:
        """Describe a number."""
        import math

        return {"n": n, "root": math.sqrt(n), "one": n / n}

    @rstar2.tool(sandboxed=True, timeout_s=0.5)
    def loop() -> None:
        """Never return."""
        while True:
            pass

    env = rstar2.Environment([{"prompt": "?"}], lambda episode: 1.0, tools=[describe, loop])
    assert env.needs_sandbox
    episode = await env.open(env.problems("train", 1, 0)[0], seed=0, sandbox=sandbox)
    good = await episode.call(ToolCall("s-0", "describe", {"n": 4}), 60.0)
    assert good.stdout == '{"n": 4, "root": 2.0, "one": 1.0}\n'
    assert good.isolation
    failed = await episode.call(ToolCall("s-1", "describe", {"n": 0}), 60.0)
    assert failed.outcome is Outcome.EXCEPTION
    assert "ZeroDivisionError" in failed.traceback
    slow = await episode.call(ToolCall("s-2", "loop", {}), 60.0)
    assert slow.outcome is Outcome.TIMEOUT
    await episode.close()


async def check_lost_session(sandbox: CodeEnvClient, server: LocalServer) -> None:
    """After its server was killed, a session is lost: no call runs in a fresh state."""
    tool = rstar2.python(session=True).open(sandbox)
    assert (await run(tool, "x = 5")).outcome is Outcome.NO_OUTPUT
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(SessionLostError) as lost:
        await run(tool, "print(x)")
    assert lost.value.name == "session_lost"
    await tool.close()
