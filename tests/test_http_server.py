"""What the HTTP servers share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn

from rstar2.http_server import (
    MAX_PIPELINED_BYTES,
    READ_ON_BYTES,
    SignalFreeServer,
    UnreadAnswer,
    bind,
    foreign_site,
)

STEP = READ_ON_BYTES


@pytest.mark.parametrize(
    ("left", "unread_s"),
    [
        ([0, 0, 0], [0, 0, 0]),
        ([900_000, 900_000, 900_000], [0, 1, 2]),  # reads nothing
        ([900_000, 899_000, 898_000], [0, 1, 2]),  # reads too little to count
        ([5 * STEP, 4 * STEP, 3 * STEP], [0, 0, 0]),
        ([5 * STEP, 4 * STEP + 1, 4 * STEP], [0, 1, 0]),  # a slow network
        ([100, 100, 0, 100], [0, 1, 0, 0]),
        ([80_000, 30_000, 70_000, 70_000], [0, 1, 0, 1]),  # read, and written again
    ],
)
def test_since_when_a_caller_has_not_read_on(left: list[int], unread_s: list[float]) -> None:
    answer = UnreadAnswer()
    seen = []
    for second, size in enumerate(left):
        answer.look(size, 100.0 + second)
        seen.append(answer.unread_s)
    assert seen == unread_s


@pytest.mark.parametrize("origin", [None, "http://localhost:6274", "https://127.0.0.1"])
@pytest.mark.parametrize(
    "host", ["127.0.0.1:8088", "localhost", "LOCALHOST:80", "[::1]:1", "[::1]", "127.0.1.1", None]
)
def test_programs_and_pages_of_this_machine_may_call(host: str | None, origin: str | None) -> None:
    assert foreign_site(headers(host, origin)) is None


@pytest.mark.parametrize(
    ("host", "origin", "named"),
    [
        ("evil.example", None, "host: 'evil.example'"),
        ("127.0.0.1.evil.example:8088", None, "host: "),
        ("localhost.evil:1", None, "host: "),
        ("192.0.2.1:8088", None, "host: "),
        ("", None, "host: ''"),
        ("[::1", None, "host: "),
        ("localhost", "https://evil.example", "origin: pages of 'https://evil.example'"),
        ("localhost", "http://localhost@evil.example", "origin: "),
        ("localhost", "null", "origin: pages of 'null'"),
        ("localhost", "chrome-extension://abc", "origin: "),
    ],
)
def test_pages_of_other_sites_may_not(host: str, origin: str | None, named: str) -> None:
    why = foreign_site(headers(host, origin))
    assert why is not None
    assert why.startswith(named)
    assert "set" in why
    assert "token" in why


def headers(host: str | None, origin: str | None) -> list[tuple[bytes, bytes]]:
    pairs = {b"accept": "*/*", b"host": host, b"origin": origin}
    return [(name, value.encode()) for name, value in pairs.items() if value is not None]


async def answer_pong(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await asyncio.sleep(0.001)  # the server may read on meanwhile
    head = [(b"content-length", b"4")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": b"pong"})


async def test_pipelined_requests_wait_outside_every_server() -> None:
    """uvicorn's own connection reads on after every answer, and keeps all that it has read."""
    request = b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + 8000 * b"y" + b"\r\n\r\n"
    count, most = 300, 0
    with bind("127.0.0.1", 0) as sock:
        server = SignalFreeServer(uvicorn.Config(answer_pong, lifespan="off", log_config=None))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        async with asyncio.timeout(120):
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(count * request)
            for _ in range(count):
                await reader.readuntil(b"pong")
                (connection,) = server.server_state.connections
                most = max(most, len(connection.conn.trailing_data[0]))  # type: ignore[union-attr]
            writer.close()
            server.should_exit = True
            await serving
    assert 0 < most <= 2 * MAX_PIPELINED_BYTES
