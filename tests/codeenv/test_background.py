"""The clients that sandboxes share: who keeps them, who drops them, whatever fails or is cancelled.

The starts are hand-written: each test decides when one ends, and how.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar, cast

import pytest

from rstar2.codeenv.client import background
from rstar2.codeenv.client.background import BackgroundLoop
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError

T = TypeVar("T")
CONFIG = CodeEnvConfig(urls=("http://127.0.0.1:9",))
"""A client of other people's servers is closed as soon as nobody uses it."""


class StartedClient(CodeEnvClient):
    """A client without servers that records when it is closed."""

    def __init__(self) -> None:
        super().__init__(CONFIG, [])
        self.closed = asyncio.Event()

    async def close(self) -> None:
        self.closed.set()


class Starts:
    """Replaces CodeEnvClient.start; a start ends when the test sets the result of its future."""

    def __init__(self) -> None:
        self.futures: list[asyncio.Future[StartedClient]] = []

    async def start(self, config: CodeEnvConfig) -> StartedClient:
        self.futures.append(asyncio.get_running_loop().create_future())
        return await self.futures[-1]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    starts = Starts()
    monkeypatch.setattr(CodeEnvClient, "start", starts.start)
    return starts


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.close()


def on(loop: BackgroundLoop, work: Coroutine[Any, Any, T]) -> T:
    return loop.submit(work).result(60)


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def acquire(loop: BackgroundLoop) -> asyncio.Task[StartedClient]:
    return cast("asyncio.Task[StartedClient]", asyncio.create_task(loop.acquire(CONFIG)))


def test_a_sandbox_that_is_cancelled_does_not_drop_a_client_that_has_just_started(
    loop: BackgroundLoop, starts: Starts
) -> None:
    async def scenario() -> None:
        kept, cancelled = acquire(loop), acquire(loop)
        await some_turns()
        client = StartedClient()
        # The start is done, and the cancelled sandbox has not noticed it yet.
        loop._clients[CONFIG].starting.add_done_callback(lambda _: cancelled.cancel())
        starts.futures[0].set_result(client)
        await asyncio.wait({cancelled})
        assert cancelled.cancelled()
        assert await kept is client
        assert await acquire(loop) is client
        assert len(starts.futures) == 1
        loop.release(CONFIG)
        await some_turns()
        assert not client.closed.is_set()
        loop.release(CONFIG)
        async with asyncio.timeout(60):
            await client.closed.wait()

    on(loop, scenario())


def test_a_failed_start_takes_nothing_from_the_next_one(
    loop: BackgroundLoop, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sandboxes wait for a start that fails; a third starts again before both have noticed."""

    async def scenario() -> None:
        noticed = asyncio.Event()
        announced = background._announced

        async def late(starting: asyncio.Task[CodeEnvClient]) -> CodeEnvClient:
            await asyncio.wait({starting})
            await noticed.wait()
            return await announced(starting)

        first = acquire(loop)
        await some_turns()
        monkeypatch.setattr(background, "_announced", late)
        second = acquire(loop)
        await some_turns()
        monkeypatch.setattr(background, "_announced", announced)
        starts.futures[0].set_exception(CodeEnvError("no server"))
        await asyncio.wait({first})
        third = acquire(loop)
        await some_turns()
        assert len(starts.futures) == 2
        noticed.set()
        await asyncio.wait({second})
        assert isinstance(first.exception(), CodeEnvError)
        assert isinstance(second.exception(), CodeEnvError)
        assert (loop._clients[CONFIG].users, loop._clients[CONFIG].expiry) == (1, None)
        client = StartedClient()
        starts.futures[1].set_result(client)
        assert await third is client

    on(loop, scenario())


def test_the_last_sandbox_that_is_cancelled_during_a_start_ends_it(
    loop: BackgroundLoop, starts: Starts
) -> None:
    async def scenario() -> None:
        only = acquire(loop)
        await some_turns()
        only.cancel()
        await asyncio.wait({only})
        async with asyncio.timeout(60):
            await asyncio.wait({starts.futures[0]})
        assert starts.futures[0].cancelled()
        assert not loop._clients

    on(loop, scenario())
