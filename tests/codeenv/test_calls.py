"""The call table alone, and the judgement of the self-check, with hand-written executors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rstar2.codeenv.protocol import RunRequest
from rstar2.codeenv.server import calls, selfcheck
from rstar2.codeenv.server.calls import CallTable
from rstar2.codeenv.server.executor import WorkerExecutor
from rstar2.codeenv.wire import Refusal
from rstar2.config import CodeEnvConfig
from rstar2.errors import IsolationError
from rstar2.types import Outcome, ToolResult
from tests.codeenv.conftest import FakeExecutor


async def test_calls_get_slots_in_order_of_arrival() -> None:
    executor = FakeExecutor(slots=1)
    table = CallTable(executor, CodeEnvConfig(), "test")
    names = [str(i) for i in range(20)]
    await asyncio.gather(*(table.call(RunRequest(name, "sleep 0.001")) for name in names))
    assert list(executor.executed) == names
    assert (table.busy, table.queued, table.active) == (0, 0, 0)


async def test_an_abandoned_id_is_free_at_once() -> None:
    executor = FakeExecutor(slots=1)
    table = CallTable(executor, CodeEnvConfig(), "test")
    first = RunRequest("a", "hang")
    table.submit(first)
    table.leave(first)
    again = await table.call(RunRequest("a", "echo now"))
    assert again.stdout == "now"
    assert table.metrics.abandoned == 1


async def test_admission_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ADMITTED_BYTES", 20)
    table = CallTable(FakeExecutor(), CodeEnvConfig(), "test")
    table.submit(RunRequest("a", "hang"))
    with pytest.raises(Refusal) as caught:
        table.submit(RunRequest("b", "echo " + 20 * "x"))
    assert caught.value.wire.code == "queue_full"
    assert (caught.value.wire.retry_after_s or 0) > 0
    assert (await table.call(RunRequest("c", "echo 1"))).stdout == "1"
    await table.close(0.0)


async def test_a_queued_call_that_is_cancelled_takes_no_slot() -> None:
    executor = FakeExecutor(slots=1)
    table = CallTable(executor, CodeEnvConfig(), "test")
    holding = asyncio.create_task(table.call(RunRequest("holds", "hang")))
    queued = asyncio.create_task(table.call(RunRequest("queued", "echo 1")))
    while table.queued < 1:  # noqa: ASYNC110 (the table offers no event)
        await asyncio.sleep(0)
    queued.cancel()
    await asyncio.wait([queued])
    executor.release.set()
    await holding
    assert (await table.call(RunRequest("next", "echo 2"))).stdout == "2"
    assert (table.busy, executor.executed["queued"]) == (0, 0)


class JudgedExecutor:
    """Passes every self-check; `failing` has another outcome the first `times` times."""

    def __init__(self, failing: str, outcome: Outcome, times: int) -> None:
        self.isolation, self.slots = "strict", 2
        self.failing, self.outcome, self.left = failing, outcome, times
        group = SimpleNamespace(pids="")
        self.link = SimpleNamespace(spec=SimpleNamespace(group=group, forks=True))
        self.workers = self
        self.first, self.directory = "base", ""

    async def take(self, flavour: str, limits: object) -> Any:
        return self.link

    def give_back(self, link: object) -> None:
        return

    async def run(self, request: RunRequest, deadline: float) -> ToolResult:
        programs = selfcheck.checks("strict", True, True, f"{self.directory}/canary")
        check = next(c for c in programs if (c.code, c.limits) == (request.code, request.limits))
        if check.name == self.failing and self.left:
            self.left -= 1
            return ToolResult(request.id, self.outcome)
        return ToolResult(request.id, check.outcomes[0], stdout="checked")


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.INFRASTRUCTURE])
async def test_one_slow_self_check_is_repeated(outcome: Outcome, tmp_path: Path) -> None:
    executor = JudgedExecutor("memory", outcome, times=1)
    executor.directory = str(tmp_path)
    await selfcheck.check(cast(WorkerExecutor, executor))
    assert executor.left == 0


@pytest.mark.parametrize(("outcome", "times"), [(Outcome.OK, 1), (Outcome.TIMEOUT, 2)])
async def test_a_self_check_that_fails_names_the_limit(
    outcome: Outcome, times: int, tmp_path: Path
) -> None:
    executor = JudgedExecutor("memory", outcome, times)
    executor.directory = str(tmp_path)
    with pytest.raises(IsolationError, match="memory"):
        await selfcheck.check(cast(WorkerExecutor, executor))
