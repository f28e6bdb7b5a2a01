"""Faults of the code environment with real servers: whichever process dies, every call is answered
once and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rstar2.codeenv import deadlines
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.client.owned import LocalServer
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits, Outcome, ToolResult

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

LONG = Limits(wall_s=60.0, cpu_s=60.0)
"""Limits of programs that end by themselves, or run until the test ends them."""
PATIENCE_S = 120.0
"""How long a wait for an event may take on a busy machine."""

Process = tuple[int, str]
"""A pid and its start time, so that a reused pid is not taken for the same process."""


def start_time(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]


def family(root: int) -> set[Process]:
    """A process and all its living descendants."""
    return {process for level in generations(root) for process in level}


def generations(root: int) -> list[set[Process]]:
    """A living process, its children, their children, and so on."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    levels, pids = [], [root]
    while pids:
        started = {pid: start_time(pid) for pid in pids}
        levels.append({(pid, began) for pid, began in started.items() if began is not None})
        pids = [child for pid in pids for child in parents.get(pid, [])]
    return levels


def alive(processes: set[Process]) -> set[Process]:
    return {p for p in processes if start_time(p[0]) == p[1]}


async def until_gone(processes: set[Process]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := alive(processes):
        assert time.monotonic() < deadline, f"still alive: {left}"
        await asyncio.sleep(0.05)


async def until_health(url: str, token: str | None = None, **wanted: object) -> None:
    """Wait until the server's health has the given values."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(headers=headers) as http:
        while True:
            health = (await http.get(f"{url}/health", timeout=PATIENCE_S)).json()
            if all(health.get(key) == value for key, value in wanted.items()):
                return
            await asyncio.sleep(0.02)


def traces(pid: int) -> list[Path]:
    """Runtime directories and control groups named after a server's pid."""
    roots = [Path(tempfile.gettempdir()), Path("/sys/fs/cgroup")]
    patterns = (f"rstar2-codeenv-{pid}-*", f"*/rstar2-codeenv-{pid}-*")
    return [path for root in roots for pattern in patterns for path in root.glob(pattern)]


@pytest.fixture(params=["never"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[CodeEnvClient]:
    """A client with a server of its own; the parameter says when other interpreters start."""
    client = await CodeEnvClient.start(CodeEnvConfig(slots=2, warm_up=request.param))
    try:
        yield client
    finally:
        await client.close()


all_interpreters = pytest.mark.parametrize("client", ["before"], indirect=True)


def server_pid(client: CodeEnvClient) -> int:
    owned = client.endpoints[0].owned
    assert isinstance(owned, LocalServer)
    assert owned.pid is not None
    return owned.pid


async def run(client: CodeEnvClient, call_id: str, code: str, **more: Any) -> ToolResult:
    given: dict[str, Any] = {"deadline_s": 200.0, "limits": LONG, **more}
    return await client.run(RunRequest(call_id, code, **given))


def flood(client: CodeEnvClient, count: int) -> list[asyncio.Task[ToolResult]]:
    return [
        asyncio.create_task(run(client, f"call-{i}", f"import time; time.sleep(0.02); print({i})"))
        for i in range(count)
    ]


async def check(calls: list[asyncio.Task[ToolResult]]) -> None:
    for index, result in enumerate(await asyncio.gather(*calls)):
        assert (result.outcome, result.stdout) == (Outcome.OK, f"{index}\n"), result


async def some(calls: list[asyncio.Task[ToolResult]], count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sum(call.done() for call in calls) < count:  # noqa: ASYNC110 (tasks, no event)
            await asyncio.sleep(0.01)


async def zygotes_and_workers(server: int) -> set[Process]:
    """Those of a server, once it has workers: after a kill it takes a while to have new ones."""
    async with asyncio.timeout(PATIENCE_S):
        while len(levels := generations(server)) < 3:  # noqa: ASYNC110 (processes, no event)
            await asyncio.sleep(0.01)
    return levels[1] | levels[2]


@all_interpreters
async def test_killing_the_server_loses_no_call_and_leaves_no_orphan(client: CodeEnvClient) -> None:
    calls = flood(client, 80)
    await some(calls, 10)
    first = server_pid(client)
    processes = family(first)
    assert len(processes) > 2
    os.kill(first, signal.SIGKILL)
    await check(calls)
    assert server_pid(client) != first
    await until_gone(processes)
    assert not traces(first)


@all_interpreters
async def test_killing_workers_and_zygotes_loses_no_call(client: CodeEnvClient) -> None:
    """The programs themselves are not killed: that would be their own outcome."""
    calls = flood(client, 80)
    server = server_pid(client)
    for wanted in (10, 30):
        await some(calls, wanted)
        for pid, _ in await zygotes_and_workers(server):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    await check(calls)
    assert server_pid(client) == server


async def test_closing_leaves_nothing() -> None:
    client = await CodeEnvClient.start(CodeEnvConfig(slots=2, warm_up="never"))
    endless = asyncio.create_task(run(client, "endless", "while True: pass"))
    assert (await run(client, "a", "print(1)")).outcome is Outcome.OK
    server = server_pid(client)
    processes = family(server)
    await client.close()
    assert (await endless).outcome is Outcome.INFRASTRUCTURE
    await until_gone(processes)
    assert not traces(server)


async def test_killing_the_owner_ends_the_server_and_all_its_children() -> None:
    program = """
import asyncio, sys
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits
async def main():
    client = await CodeEnvClient.start(CodeEnvConfig(slots=1, warm_up="never"))
    limits = Limits(wall_s=60, cpu_s=60)
    asyncio.create_task(client.run(RunRequest("endless", "while True: pass", limits=limits)))
    owned = client.endpoints[0].owned
    print(owned.pid, client.endpoints[0].url, owned.token, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    owner = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    try:
        pid, url, token = (await asyncio.to_thread(owner.stdout.readline)).split()
        server = int(pid)
        await until_health(url, token, busy=1)
        processes = family(owner.pid)
        assert len(processes) > 3
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    await until_gone(processes)
    assert not traces(server)


COMMAND = """
import sys
from rstar2.cli import main
sys.argv[1:] = "codeenv serve --port 0 --slots 1 --json".split()
main()
"""
PATIENT = """
import asyncio, dataclasses, json
from rstar2.codeenv.server.serve import serve
from rstar2.config import CodeEnvConfig
cap = dataclasses.replace(CodeEnvConfig().cap, wall_s=1000.0, cpu_s=1000.0)
config = CodeEnvConfig(slots=1, cap=cap, warm_up="never")
def on_ready(ready):
    print(json.dumps({"url": ready.url}), flush=True)
asyncio.run(serve(config, on_ready=on_ready, grace_s=1000.0))
"""
"""A server that waits long for running calls when it is asked to stop."""
WAITING = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
signal.sigwait({signal.SIGCONT})
print('done')
"""
"""A program that ends when it gets SIGCONT, which harms no process."""


def serve(program: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server on a free port and wait until it serves."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"]


@pytest.mark.parametrize(
    ("number", "program"),
    [(signal.SIGTERM, PATIENT), (signal.SIGINT, COMMAND)],
    ids=["SIGTERM", "SIGINT"],
)
async def test_a_signal_lets_the_running_call_finish(number: signal.Signals, program: str) -> None:
    process, url = await asyncio.to_thread(serve, program)
    async with await CodeEnvClient.start(CodeEnvConfig(urls=(url,))) as client:
        call = asyncio.create_task(run(client, "a", WAITING))
        await until_health(url, busy=1)
        processes = family(process.pid)
        process.send_signal(number)
        async with asyncio.timeout(PATIENCE_S):
            while not call.done():  # SIGCONT has an effect on the waiting program only
                for pid, _ in family(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                await asyncio.sleep(0.02)
        assert (await call).stdout == "done\n"
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    assert process.stdout is not None
    process.stdout.close()
    await until_gone(processes)
    assert not traces(process.pid)


async def test_a_second_signal_ends_the_running_call_at_once() -> None:
    """Neither the program's limits nor the grace period would end this server in time."""
    process, url = await asyncio.to_thread(serve, PATIENT)
    async with await CodeEnvClient.start(CodeEnvConfig(urls=(url,))) as client:
        limits = Limits(wall_s=1000.0, cpu_s=1000.0)
        call = asyncio.create_task(run(client, "a", "while True: pass", limits=limits))
        await until_health(url, busy=1)
        processes = family(process.pid)
        process.send_signal(signal.SIGTERM)
        await until_health(url, status="shutting_down")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert process.stdout is not None
    process.stdout.close()
    await until_gone(processes)
    assert not traces(process.pid)


async def test_a_hung_server_is_replaced(
    client: CodeEnvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await run(client, "before", "print(1)")).outcome is Outcome.OK
    monkeypatch.setattr(deadlines, "HEALTH_EVERY_S", 0.1)
    monkeypatch.setattr(deadlines, "HEALTH_REPLY_S", 3.0)
    owned = client.endpoints[0].owned
    assert isinstance(owned, LocalServer)
    assert owned.child is not None
    owned.child.grace_s = 1.0
    first = server_pid(client)
    processes = family(first)
    os.kill(first, signal.SIGSTOP)
    result = await run(client, "after", "print(2)")
    assert (result.outcome, result.stdout) == (Outcome.OK, "2\n")
    assert server_pid(client) != first
    await until_gone(processes)


async def test_a_caller_that_goes_away_frees_the_slot(client: CodeEnvClient) -> None:
    """The deadline is shorter than the six programs would take on two slots."""
    hogs = [asyncio.create_task(run(client, f"hog-{i}", "while True: pass")) for i in range(6)]
    server = client.endpoints[0]
    assert server.owned is not None
    await until_health(server.url, server.owned.token, busy=2)
    for hog in hogs:
        hog.cancel()
    result = await run(client, "next", "print(3)", deadline_s=100.0)
    assert (result.outcome, result.stdout) == (Outcome.OK, "3\n")
