"""Sessions whose callers leave, whose leases end and whose processes die, in the real jail."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from rstar2.codeenv.jail import confine
from rstar2.codeenv.protocol import RunRequest
from rstar2.codeenv.server.calls import CallTable
from rstar2.codeenv.server.executor import WorkerExecutor
from rstar2.codeenv.server.workers import WorkerLink
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, SessionLostError, UserError
from rstar2.types import Limits, Outcome, ToolResult
from tests.codeenv.levels import levels

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
LONG = Limits(wall_s=60, cpu_s=60)
_ids = itertools.count()


@pytest_asyncio.fixture(params=levels(), scope="module", loop_scope="module")
async def executor(request: pytest.FixtureRequest) -> AsyncIterator[WorkerExecutor]:
    executor = WorkerExecutor(CodeEnvConfig(slots=1, warm_up="never"), request.param)
    await executor.start()
    yield executor
    await executor.close()


@pytest_asyncio.fixture(loop_scope="module")
async def table(executor: WorkerExecutor) -> AsyncIterator[CallTable]:
    table = CallTable(executor, executor.config, "test")
    yield table
    await table.close(1.0)
    left = list(executor._sessions._live)
    for session in left:
        await executor.close_session(session)
    assert left == []


def submit(table: CallTable, code: str, session: str | None = None) -> asyncio.Task[ToolResult]:
    request = RunRequest(f"c{next(_ids)}", code, limits=LONG, session=session)
    return asyncio.create_task(table.call(request))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(90):
        while not condition():  # noqa: ASYNC110 (processes offer no event)
            await asyncio.sleep(0.01)


def worker_of(executor: WorkerExecutor) -> WorkerLink:
    """The worker of the only family."""
    (link,) = [link for link in executor.workers.links if link.spec.session]
    return link


def processes(worker: WorkerLink) -> list[int]:
    """The processes of a worker's members, the oldest first."""
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == str(worker.pid) and fields[0] != "Z":
                children.append((int(fields[19]), int(entry.name)))
    return [pid for _, pid in sorted(children)]


async def test_close_is_carried_out_although_its_caller_has_left(
    table: CallTable, executor: WorkerExecutor
) -> None:
    trunk = (await executor.open_session("trunk", None)).id
    branch = (await executor.branch_session(trunk, None)).id
    worker = worker_of(executor)
    endless = submit(table, "import time; time.sleep(1000)", branch)
    await until(lambda: worker.busy)
    closing = asyncio.create_task(executor.close_session(trunk))
    await until(lambda: "trunk" not in executor._sessions._live)
    closing.cancel()
    assert isinstance((await asyncio.gather(closing, return_exceptions=True))[0], BaseException)
    assert worker.busy  # the call of the branch still runs, so the trunk's process is still there
    endless.cancel()
    await until(lambda: not worker.busy and len(processes(worker)) == 1)
    assert (await submit(table, "print(1)", branch)).stdout == "1\n"
    await executor.close_session(branch)


async def test_branch_whose_caller_has_left_is_ended(
    table: CallTable, executor: WorkerExecutor
) -> None:
    trunk = (await executor.open_session(None, None)).id
    await submit(table, "x = 1", trunk)
    worker = worker_of(executor)
    os.kill(worker.pid, signal.SIGSTOP)  # it makes the branch after the caller has left
    branching = asyncio.create_task(executor.branch_session(trunk, "limb"))
    await until(lambda: worker.busy)
    branching.cancel()
    branching.cancel()
    os.kill(worker.pid, signal.SIGCONT)
    assert isinstance((await asyncio.gather(branching, return_exceptions=True))[0], BaseException)
    await until(lambda: not executor._sessions._closing)
    assert len(processes(worker)) == 1
    assert (await executor.branch_session(trunk, "limb")).id == "limb"
    assert (await submit(table, "x", "limb")).value == "1"
    await executor.close_session("limb")
    await executor.close_session(trunk)


async def test_call_that_was_left_twice_does_not_mix_up_the_next_one(
    table: CallTable, executor: WorkerExecutor
) -> None:
    """The next call waits until the worker has ended the first one."""
    session = (await executor.open_session(None, None)).id
    worker = worker_of(executor)
    code = RunRequest("left", "import time; time.sleep(1000)", limits=LONG, session=session)
    deadline = asyncio.get_running_loop().time() + 60
    left = asyncio.create_task(executor.run(code, deadline))
    await until(lambda: worker.busy)
    os.kill(worker.pid, signal.SIGSTOP)
    left.cancel()
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    following = submit(table, "print('mine')", session)
    await until(lambda: table.busy == 1)
    os.kill(worker.pid, signal.SIGCONT)
    result = await following
    assert (result.outcome, result.stdout) == (Outcome.OK, "mine\n")
    await executor.close_session(session)


async def test_branch_that_is_closed_while_it_is_made_is_refused_by_name(
    executor: WorkerExecutor, table: CallTable
) -> None:
    trunk = (await executor.open_session(None, None)).id
    worker = worker_of(executor)
    os.kill(worker.pid, signal.SIGSTOP)
    branching = asyncio.create_task(executor.branch_session(trunk, "limb"))
    await until(lambda: worker.busy)
    closing = asyncio.create_task(executor.close_session("limb"))
    await until(lambda: "limb" not in executor._sessions._live)
    os.kill(worker.pid, signal.SIGCONT)
    await closing
    with pytest.raises(UserError, match="no session 'limb'"):
        await branching
    await until(lambda: not executor._sessions._closing)
    assert len(processes(worker)) == 1
    await executor.close_session(trunk)


async def test_session_does_not_expire_while_its_call_waits_for_a_slot(
    table: CallTable, executor: WorkerExecutor
) -> None:
    endless = submit(table, "import time; time.sleep(1000)")
    await until(lambda: table.busy == 1)
    waiting = (await executor.open_session(None, 60)).id
    call = submit(table, "print('ran')", waiting)
    lease = executor._sessions._live[waiting]
    await until(lambda: lease.users == 1)
    lease.info = replace(lease.info, ttl_s=0.1)  # not before: it could expire first
    lease.expires = 0.0
    unused = (await executor.open_session(None, 0.1)).id
    await until(lambda: unused not in executor._sessions._live)
    assert not call.done()
    endless.cancel()
    assert (await call).stdout == "ran\n"
    await until(lambda: len(executor._sessions) == 0)  # the lease ends as usual after the call


async def test_loss_names_the_session_that_was_used(
    table: CallTable, executor: WorkerExecutor
) -> None:
    await executor.open_session("first", None)
    await executor.branch_session("first", "second")
    worker = worker_of(executor)
    os.kill(worker.pid, signal.SIGKILL)
    result = await submit(table, "1", "second")
    assert result.outcome is Outcome.INFRASTRUCTURE
    assert "session 'second' is lost" in result.message
    with pytest.raises(SessionLostError, match="session 'first' is lost"):
        await executor.branch_session("first", None)


async def test_branch_without_descriptors_is_refused_and_loses_nothing(
    table: CallTable, executor: WorkerExecutor
) -> None:
    trunk = (await executor.open_session(None, None)).id
    await submit(table, "x = 1", trunk)
    worker = worker_of(executor)
    try:
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (66, 66))
    except PermissionError:
        await executor.close_session(trunk)
        pytest.skip("limits of a worker cannot be changed here (needs CAP_SYS_RESOURCE)")
    branch = (await executor.branch_session(trunk, None)).id
    with pytest.raises(CodeEnvError, match="Too many open files; its state is unchanged"):
        await executor.branch_session(trunk, None)
    for name in (branch, trunk):
        assert (await submit(table, "x", name)).value == "1"
        await executor.close_session(name)


async def test_member_that_the_kernel_killed_leaves_nothing_in_its_worker(
    table: CallTable, executor: WorkerExecutor
) -> None:
    trunk = (await executor.open_session(None, None)).id
    await submit(table, "1", trunk)
    worker = worker_of(executor)
    opened = f"/proc/{worker.pid}/fd"
    descriptors = len(os.listdir(opened))  # noqa: PTH208
    branch = (await executor.branch_session(trunk, None)).id
    await submit(table, "open('file', 'w').write('x')", branch)
    await submit(table, "1", trunk)  # its files are in place now, those of the branch in the store
    os.kill(processes(worker)[1], signal.SIGKILL)
    await until(lambda: len(processes(worker)) == 1)
    if worker.spec.forks:
        await submit(table, "1", trunk)  # processes that ended are reaped after a call
    else:
        result = await submit(table, "1", branch)
        assert result.outcome is Outcome.INFRASTRUCTURE
        await submit(table, "1", trunk)
    assert len(os.listdir(opened)) == descriptors  # noqa: PTH208
    scratch = (
        f"{opened}/{confine.HOLDER_FD}" if worker.spec.level == "strict" else (worker.spec.scratch)
    )
    assert os.listdir(f"{scratch}/store") == ["1"]  # noqa: PTH208
    with pytest.raises(SessionLostError, match=f"session '{branch}' is lost"):
        await executor.branch_session(branch, None)
    await executor.close_session(trunk)
