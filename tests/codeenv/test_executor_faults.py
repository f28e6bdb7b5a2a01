"""Executor and call table when workers die: calls are answered, nothing is left behind."""

# ruff: noqa: ASYNC220, ASYNC240
from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from rstar2.codeenv.jail import cgroups
from rstar2.codeenv.protocol import RunRequest
from rstar2.codeenv.server import probe, selfcheck
from rstar2.codeenv.server.calls import CallTable
from rstar2.codeenv.server.executor import WorkerExecutor
from rstar2.codeenv.server.workers import WorkerLink
from rstar2.codeenv.wire import Refusal
from rstar2.config import CodeEnvConfig
from rstar2.errors import IsolationError
from rstar2.types import Limits, Outcome, ToolResult
from tests.codeenv.levels import PATIENT, levels

pytestmark = pytest.mark.slow
WAITING = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
signal.sigwait({signal.SIGCONT})
print('ok')
"""
"""Ends when `released` sends SIGCONT, which has no effect on a program that does not wait yet."""

SERVER = """
import asyncio, os, sys
from rstar2.codeenv.server.calls import CallTable
from rstar2.codeenv.server.executor import WorkerExecutor
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits

async def main():
    executor = WorkerExecutor(CodeEnvConfig(slots=2, warm_up="never"), sys.argv[1])
    await executor.start()
    table = CallTable(executor, executor.config, "test")
    session = await executor.open_session(None, None)
    for name, where in (("a", None), ("b", session.id)):
        table.submit(RunRequest(
            name, "while True: pass", limits=Limits(wall_s=60, cpu_s=60), session=where))
    workers = executor.workers
    while len([l for l in workers.links if l.busy]) < 2:
        await asyncio.sleep(0.05)
    pids = [z.pid for z in workers.zygotes.values()] + [l.pid for l in workers.links]
    print(workers.directory, *pids, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest_asyncio.fixture(params=levels())
async def executor(request: pytest.FixtureRequest) -> AsyncIterator[WorkerExecutor]:
    config = CodeEnvConfig(slots=2, warm_up="never", default=PATIENT)
    executor = WorkerExecutor(config, request.param)
    await executor.start()
    yield executor
    await executor.close()


@pytest_asyncio.fixture
async def table(executor: WorkerExecutor) -> AsyncIterator[CallTable]:
    table = CallTable(executor, executor.config, "test")
    yield table
    await table.close(1.0)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def all_ended(pids: list[int], within_s: float = 120.0) -> bool:
    end = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.05)
    return True


async def until(condition: Callable[[], bool], within_s: float = 120.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "the condition was never met"
        await asyncio.sleep(0.02)


def idle(link: WorkerLink) -> bool:
    return not link.busy


async def running(executor: WorkerExecutor) -> WorkerLink:
    """The worker that runs a call; waits until there is one."""
    await until(lambda: any(link.busy for link in executor.workers.links))
    return next(link for link in executor.workers.links if link.busy)


async def released(executor: WorkerExecutor, call: asyncio.Task[ToolResult]) -> ToolResult:
    """The result of a call of WAITING, which this lets end."""

    def ended() -> bool:
        for link in executor.workers.links:
            for children in Path(f"/proc/{link.pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    for pid in children.read_text().split():
                        os.kill(int(pid), signal.SIGCONT)
        return call.done()

    await until(ended)
    return await call


async def test_killed_worker_is_replaced_and_its_call_answered(
    table: CallTable, executor: WorkerExecutor
) -> None:
    call = asyncio.create_task(table.call(RunRequest("w", WAITING)))
    os.kill((await running(executor)).pid, signal.SIGKILL)
    result = await released(executor, call)
    assert (result.outcome, result.stdout, result.attempts) == (Outcome.OK, "ok\n", 2)
    assert table.health().restarts >= 1


async def test_killed_zygote_is_replaced_and_its_calls_answered(
    table: CallTable, executor: WorkerExecutor
) -> None:
    call = asyncio.create_task(table.call(RunRequest("z", WAITING)))
    link = await running(executor)
    workers = [other.pid for other in executor.workers.links if other.flavour == link.flavour]
    os.kill(executor.workers.zygotes[link.flavour].pid, signal.SIGKILL)
    await until(lambda: link not in executor.workers.links)
    result = await released(executor, call)
    assert (result.outcome, result.stdout, result.attempts) == (Outcome.OK, "ok\n", 2)
    assert await all_ended(workers)


async def test_call_whose_worker_dies_twice_is_infrastructure(
    table: CallTable, executor: WorkerExecutor
) -> None:
    call = asyncio.create_task(
        table.call(RunRequest("t", "while True: pass", limits=Limits(wall_s=20, cpu_s=20)))
    )
    for _ in range(2):
        link = await running(executor)
        os.kill(link.pid, signal.SIGKILL)
        await link.exited
        await until(functools.partial(idle, link))
    result = await call
    assert result.outcome is Outcome.INFRASTRUCTURE
    again = await table.call(RunRequest("t", "print('now')"))
    assert again.stdout == "now\n"


async def test_hung_worker_is_replaced(
    table: CallTable, executor: WorkerExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One second is enough to find that a stopped worker hangs; the next one has all its time."""
    await table.call(RunRequest("h0", "1"))
    for link in list(executor.workers.links):
        os.kill(link.pid, signal.SIGSTOP)
        monkeypatch.setattr(
            link, "ask", functools.partial(link.ask, grace_s=1.0 - (PATIENT.wall_s or 0.0))
        )
    result = await table.call(RunRequest("h1", "print('ok')"))
    assert (result.outcome, result.stdout, result.attempts) == (Outcome.OK, "ok\n", 2)


async def test_lost_session_is_reported_as_infrastructure(
    table: CallTable, executor: WorkerExecutor
) -> None:
    session = await executor.open_session(None, None)
    for link in list(executor.workers.links):
        os.kill(link.pid, signal.SIGKILL)
    result = await table.call(RunRequest("s", "1", session=session.id))
    assert result.outcome is Outcome.INFRASTRUCTURE
    assert table.health().sessions == 0


async def test_call_without_waiters_is_cancelled_and_may_be_asked_again(
    table: CallTable, executor: WorkerExecutor
) -> None:
    endless = RunRequest("c", "while True: pass", limits=Limits(wall_s=50, cpu_s=50))
    first = asyncio.create_task(table.call(endless))
    link = await running(executor)
    first.cancel()
    await asyncio.wait([first])
    again = await table.call(RunRequest("c", "print('afresh')"))
    assert again.stdout == "afresh\n"
    assert await all_ended([link.pid])
    assert first.cancelled()


async def test_call_continues_while_one_of_two_waits_for_it(
    table: CallTable, executor: WorkerExecutor
) -> None:
    request = RunRequest("d", WAITING)
    first, second = (asyncio.create_task(table.call(request)) for _ in range(2))
    await running(executor)
    first.cancel()
    assert (await released(executor, second)).stdout == "ok\n"
    assert table.health().completed == {"ok": 1}


@pytest.mark.parametrize("level", levels())
async def test_closing_leaves_nothing(level: str) -> None:
    executor = WorkerExecutor(CodeEnvConfig(slots=2, warm_up="never"), level)
    await executor.start()
    table = CallTable(executor, executor.config, "test")
    await executor.open_session(None, None)
    endless = asyncio.create_task(
        table.call(RunRequest("e", "while True: pass", limits=Limits(wall_s=50, cpu_s=50)))
    )
    await running(executor)
    directory = Path(executor.workers.directory)
    pids = [z.pid for z in executor.workers.zygotes.values()] + [
        x.pid for x in executor.workers.links
    ]
    assert directory.exists()
    await table.close(0.1)
    await executor.close()
    with pytest.raises(Refusal, match="shutting down"):
        await endless
    assert await all_ended(pids)
    assert not directory.exists()
    assert not groups_of(os.getpid())


def groups_of(pid: int) -> list[Path]:
    name = cgroups.owner_name(pid) if alive(pid) else f"rstar2-codeenv-{pid}-"
    return [p for h in cgroups.hierarchies() for p in Path(h.parent).glob(f"{name}*")]


@pytest.mark.parametrize("level", levels())
async def test_killed_service_leaves_no_process_and_no_trace(level: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, level], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        directory, *pids = line.split()
        assert all(alive(int(pid)) for pid in pids)
        assert len(pids) >= 3
        process.kill()
        process.wait(120)
        assert await all_ended([int(pid) for pid in pids])
        probe.sweep_runtime()
        for hierarchy in cgroups.hierarchies():
            cgroups.sweep(hierarchy.parent)
        assert not Path(directory).exists()
        assert not groups_of(process.pid)
    finally:
        process.kill()
        process.wait(120)
        if process.stdout is not None:
            process.stdout.close()


async def test_unknown_level_is_refused() -> None:
    with pytest.raises(IsolationError, match="strict or portable"):
        WorkerExecutor(CodeEnvConfig(), "none")


@pytest.mark.parametrize("asked", ["auto", "strict"])
async def test_jail_that_does_not_hold_is_never_served(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "strict" not in levels():
        pytest.skip("strict is unavailable here")
    real = selfcheck.check

    async def leaky(executor: WorkerExecutor) -> None:
        if executor.isolation == "strict":
            raise IsolationError("the strict jail does not hold here: memory")
        await real(executor)

    monkeypatch.setattr(selfcheck, "check", leaky)
    config = CodeEnvConfig.model_validate({"slots": 1, "warm_up": "never", "isolation": asked})
    executor = WorkerExecutor(config, "strict")
    if asked == "strict":
        with pytest.raises(IsolationError, match="memory"):
            await executor.start()
        return
    await executor.start()
    table = CallTable(executor, executor.config, "test")
    result = await table.call(RunRequest("f", "print(1)"))
    await table.close(1.0)
    await executor.close()
    assert (result.isolation, table.health().isolation) == ("portable", "portable")
    assert "memory" in executor.fallback
