"""Faults of the code environment, with the real pool: whatever dies, calls are answered once and
nothing is left behind."""

from __future__ import annotations

import asyncio
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

import pytest

from rstar2.codeenv.client import endpoint
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits, Outcome, ToolResult

pytestmark = pytest.mark.timeout(170)

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
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, todo = set(), [root]
    while todo:
        pid = todo.pop()
        born = start_time(pid)
        if born is not None:
            found.add((pid, born))
        todo += parents.get(pid, [])
    return found


def alive(processes: set[Process]) -> set[Process]:
    return {p for p in processes if start_time(p[0]) == p[1]}


async def until_gone(processes: set[Process], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while left := alive(processes):
        assert time.monotonic() < deadline, f"still alive: {left}"
        await asyncio.sleep(0.05)


def traces(pid: int) -> list[Path]:
    """Runtime directories and control groups named after a server's pid."""
    roots = [Path(tempfile.gettempdir()), Path("/sys/fs/cgroup")]
    patterns = (f"rstar2-codeenv-{pid}-*", f"*/rstar2-codeenv-{pid}-*")
    return [path for root in roots for pattern in patterns for path in root.glob(pattern)]


@pytest.fixture
async def client() -> AsyncIterator[CodeEnvClient]:
    client = await CodeEnvClient.start(CodeEnvConfig(slots=2))
    try:
        yield client
    finally:
        await client.close()


def server_pid(client: CodeEnvClient) -> int:
    owned = client.endpoints[0].owned
    assert owned is not None
    assert owned.pid is not None
    return owned.pid


async def run(client: CodeEnvClient, call_id: str, code: str, **more: Any) -> ToolResult:
    return await client.run(RunRequest(call_id, code, **{"deadline_s": 120.0, **more}))


def flood(client: CodeEnvClient, count: int) -> list[asyncio.Task[ToolResult]]:
    return [
        asyncio.create_task(run(client, f"call-{i}", f"import time; time.sleep(0.02); print({i})"))
        for i in range(count)
    ]


async def check(calls: list[asyncio.Task[ToolResult]]) -> None:
    for index, result in enumerate(await asyncio.gather(*calls)):
        assert (result.outcome, result.stdout) == (Outcome.OK, f"{index}\n"), result


async def some(calls: list[asyncio.Task[ToolResult]], count: int) -> None:
    async with asyncio.timeout(60):
        while sum(call.done() for call in calls) < count:  # noqa: ASYNC110 (tasks, no event)
            await asyncio.sleep(0.01)


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


async def test_killing_workers_and_zygotes_loses_no_call(client: CodeEnvClient) -> None:
    calls = flood(client, 80)
    server = server_pid(client)
    for wanted in (10, 30):
        await some(calls, wanted)
        for pid, _ in family(server) - {(server, start_time(server) or "")}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    await check(calls)
    assert server_pid(client) == server


async def test_closing_leaves_nothing() -> None:
    client = await CodeEnvClient.start(CodeEnvConfig(slots=2))
    endless = asyncio.create_task(run(client, "endless", "while True: pass"))
    assert (await run(client, "a", "print(1)")).outcome is Outcome.OK
    server = server_pid(client)
    processes = family(server)
    await client.close()
    assert (await endless).outcome is Outcome.INFRASTRUCTURE
    await until_gone(processes, 10.0)
    assert not traces(server)


async def test_killing_the_owner_ends_the_server_and_all_its_children() -> None:
    program = """
import asyncio, sys
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import CodeEnvConfig
async def main():
    client = await CodeEnvClient.start(CodeEnvConfig(slots=1))
    asyncio.create_task(client.run(RunRequest("endless", "while True: pass")))
    await asyncio.sleep(0.5)
    print(client.endpoints[0].owned.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    owner = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    try:
        server = int(await asyncio.to_thread(owner.stdout.readline))
        processes = family(owner.pid)
        assert len(processes) > 3
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    await until_gone(processes)
    assert not traces(server)


def serve(*args: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", "from rstar2.cli import main; main()", "codeenv", "serve",
         "--port", "0", "--slots", "1", "--json", *args],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_the_running_call_finish(number: signal.Signals) -> None:
    process, url = await asyncio.to_thread(serve)
    async with await CodeEnvClient.start(CodeEnvConfig(urls=(url,))) as client:
        code = "import time; time.sleep(1); print('done')"
        call = asyncio.create_task(run(client, "a", code))
        await asyncio.sleep(0.5)
        processes = family(process.pid)
        process.send_signal(number)
        assert (await call).stdout == "done\n"
    assert await asyncio.to_thread(process.wait, 20) == 0
    assert process.stdout is not None
    process.stdout.close()
    await until_gone(processes, 10.0)
    assert not traces(process.pid)


async def test_a_second_signal_ends_the_running_call_at_once() -> None:
    process, url = await asyncio.to_thread(serve)
    async with await CodeEnvClient.start(CodeEnvConfig(urls=(url,))) as client:
        limits = Limits(wall_s=60.0, cpu_s=60.0)
        call = asyncio.create_task(run(client, "a", "while True: pass", limits=limits))
        await asyncio.sleep(0.5)
        processes = family(process.pid)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
        assert time.monotonic() - started < 9.0  # the grace alone is 10 s
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert process.stdout is not None
    process.stdout.close()
    await until_gone(processes, 10.0)
    assert not traces(process.pid)


async def test_a_hung_server_is_replaced(
    client: CodeEnvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await run(client, "before", "print(1)")).outcome is Outcome.OK
    monkeypatch.setattr(endpoint, "HEALTH_EVERY_S", 0.1)
    monkeypatch.setattr(endpoint, "HEALTH_DEADLINE_S", 1.0)
    monkeypatch.setattr("rstar2.codeenv.client.owned.STOP_DEADLINE_S", 0.5)
    first = server_pid(client)
    processes = family(first)
    os.kill(first, signal.SIGSTOP)
    result = await run(client, "after", "print(2)")
    assert (result.outcome, result.stdout) == (Outcome.OK, "2\n")
    assert server_pid(client) != first
    await until_gone(processes)


async def test_a_caller_that_goes_away_frees_the_slot(client: CodeEnvClient) -> None:
    limits = Limits(wall_s=60.0, cpu_s=60.0)
    hogs = [
        asyncio.create_task(run(client, f"hog-{i}", "while True: pass", limits=limits))
        for i in range(6)
    ]
    await asyncio.sleep(0.5)
    for hog in hogs:
        hog.cancel()
    result = await run(client, "next", "print(3)", deadline_s=30.0)
    assert (result.outcome, result.stdout) == (Outcome.OK, "3\n")
