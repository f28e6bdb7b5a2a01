"""Connections to engines: their number is bounded, and waiting for one is not the engine's time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rstar2 import http_client
from rstar2.config import SchedulerConfig
from rstar2.descriptors import RESERVED_DESCRIPTORS
from rstar2.engine.http import CONTROL_CONNECTIONS
from rstar2.engine.vllm import VllmEngine
from rstar2.engine.vllm_client import VllmClient
from rstar2.errors import EngineError
from rstar2.http_client import Address, Connections, LocalResourceError
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.scheduler import Scheduler
from rstar2.types import Generation, Sampling
from tests.engine.test_vllm_parts import METRICS
from tests.rollout.scripted import until


class ScriptedServer:
    """Answers health, metrics and control at once, generations when it may."""

    def __init__(self) -> None:
        self.open = self.peak = self.metrics = 0
        self.generations: list[str] = []
        self.may_answer = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.peak = max(self.peak, self.open)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = int(head.lower().partition("content-length:")[2].split()[0])
                await reader.readexactly(size)
                body = await self.answer(head.split()[1])
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.open -= 1

    async def answer(self, path: str) -> bytes:
        if path.startswith("/inference"):
            self.generations.append(path)
            await self.may_answer.wait()
        if path != "/metrics":
            return b""
        self.metrics += 1
        return METRICS.replace('waiting{engine="0",model_name="/m"} 2.0', "waiting 0.0").encode()


@asynccontextmanager
async def scripted_server() -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer()
    async with await asyncio.start_server(scripted.serve, "127.0.0.1", 0) as server:
        scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield scripted
        finally:
            scripted.may_answer.set()
        await until(lambda: not scripted.open)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many more connections this process may open for turns."""

    def allow(count: int) -> None:
        limit = RESERVED_DESCRIPTORS + Connections.count + count
        monkeypatch.setattr(http_client, "descriptor_limit", lambda: limit)

    return allow


async def test_a_burst_does_not_open_more_connections_than_allowed(room: Any) -> None:
    room(10)
    async with scripted_server() as server:
        client = VllmClient("e", url=server.url)
        asked = [client._ask("POST", "/inference", 60.0, patient=True) for _ in range(200)]
        burst = asyncio.ensure_future(asyncio.gather(*asked))
        await until(lambda: len(server.generations) == 10)
        assert client.unsent == 190
        await client.health(60.0)  # control does not wait behind turns
        server.may_answer.set()
        assert len(await burst) == 200
        assert server.peak == 11, "ten turns and one health check"
        assert client.unsent == 0
        await client.close()


async def test_failed_and_cancelled_attempts_take_no_place(room: Any) -> None:
    room(1)
    before = Connections.count
    nobody = Connections(Address("127.0.0.1", free_port()), EngineError)
    for _ in range(3):
        with pytest.raises(EngineError, match="cannot connect"):
            await nobody.open()
    nowhere = Connections(Address("127.0.0.1", free_port()), EngineError)
    opening = asyncio.ensure_future(nowhere.open())
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert Connections.count == before


async def test_closing_a_client_fails_all_turns_that_wait_for_a_connection(room: Any) -> None:
    room(0)
    async with scripted_server() as server:
        client = VllmClient("e", url=server.url)
        turns = [
            asyncio.ensure_future(client._ask("GET", "/", 60.0, patient=True)) for _ in range(100)
        ]
        await until(lambda: client.unsent == 100)
        await client.close()
        for _ in range(3):  # not one after the other: a round of the event loop may take long
            await asyncio.sleep(0)
        assert sum(turn.done() for turn in turns) >= 99, "all but the one that is connecting"
        results = await asyncio.gather(*turns, return_exceptions=True)
        assert {str(r).rpartition(": ")[2] for r in results} == {"the client was closed"}


async def test_turns_get_connections_in_their_order_and_end_with_the_client(room: Any) -> None:
    room(0)
    async with scripted_server() as server:
        client = VllmClient("e", url=server.url)
        ended: list[int] = []

        async def ask(number: int) -> None:
            try:
                await client._ask("GET", f"/{number}", 60.0, patient=True)
            finally:
                ended.append(number)

        tasks = [asyncio.ensure_future(ask(number)) for number in range(5)]
        await until(lambda: client.unsent == 5)
        room(1)
        await asyncio.gather(*tasks)
        assert ended == [0, 1, 2, 3, 4]
        await client.close()
        late = asyncio.ensure_future(ask(9))
        with pytest.raises(EngineError, match="closed"):
            await late


async def test_waiting_for_a_connection_does_not_count_against_the_deadline(room: Any) -> None:
    async with scripted_server() as server:
        engine = VllmEngine("e", url=server.url, max_sequences=64, max_length=1000)
        await engine.start()
        fleet = Fleet([engine], Scheduler(SchedulerConfig(policy="worst_case")), load_poll_s=0.001)
        fleet.join("e", -1)
        fleet.require(-1)
        room(3)

        async def turn(number: int, deadline_s: float) -> Generation:
            sampling, session = Sampling(99), f"g/{number}"
            return await fleet.generate((1,), sampling, session=session, deadline_s=deadline_s)

        tasks = [asyncio.ensure_future(turn(number, 600.0)) for number in range(6)]
        try:
            await until(lambda: engine.client.unsent > 0 and bool(server.generations))
            tasks += [asyncio.ensure_future(turn(number, 0.001)) for number in range(6, 12)]
            await until(lambda: engine.client.unsent >= 6)
            enough = server.metrics + 20
            await until(lambda: server.metrics >= enough)
            assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await fleet.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --------------------------------------------------------------------------- several addresses

LOCAL, REFUSED = errno.EADDRNOTAVAIL, errno.ECONNREFUSED


@pytest.mark.parametrize(
    ("reached", "first", "second", "local"),
    [
        ("", LOCAL, LOCAL, True),
        ("", errno.ENETUNREACH, LOCAL, True),
        ("", LOCAL, REFUSED, False),  # a machine without IPv6, and a server that is gone
        ("::1", LOCAL, REFUSED, True),
        ("127.0.0.1", LOCAL, REFUSED, False),
    ],
)
async def test_the_address_that_worked_tells_whose_failure_it_is(
    monkeypatch: pytest.MonkeyPatch, reached: str, first: int, second: int, local: bool
) -> None:
    errors = {"::1": first, "127.0.0.1": second}

    async def resolve(*args: object, **kwargs: object) -> list[Any]:
        return [(0, 0, 0, "", (host, 80)) for host in errors]

    async def fail(made: object, host: str, *args: object, **kwargs: object) -> None:
        raise OSError(errors[host], f"Connect call failed {host}")

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    monkeypatch.setattr(loop, "create_connection", fail)
    connections = Connections(Address("two.example", 80), EngineError, reached=reached)
    with pytest.raises(LocalResourceError if local else EngineError, match="Connect call failed"):
        await connections.open(CONTROL_CONNECTIONS)


async def test_a_name_is_connected_to() -> None:
    async with scripted_server() as server:
        client = VllmClient("e", url=server.url.replace("127.0.0.1", "localhost"))
        await client.health(60.0)
        assert client._http._connections.reached == "127.0.0.1"
        await client.close()
