"""Connections: their number is bounded, silent callers are disconnected, the log stays small."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from rstar2.codeenv import deadlines
from rstar2.http_server import MAX_PIPELINED_BYTES

POST = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
GET = b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n"
METRICS = GET.replace(b"ping", b"metrics")


@contextlib.asynccontextmanager
async def connected(server: Any, count: int) -> AsyncIterator[list[Any]]:
    pairs = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(count)]
    try:
        yield pairs
    finally:
        for _, writer in pairs:
            writer.close()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """What arrives until the server closes; a reset counts as closed."""
    async with asyncio.timeout(120):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


async def ping(server: Any) -> str:
    async with httpx.AsyncClient(timeout=120) as http:
        return str((await http.get(server.url + "/ping")).json())


async def test_a_new_connection_replaces_the_one_that_has_waited_longest(serve: Any) -> None:
    async with serve(connections=8) as server, connected(server, 8) as pairs:
        assert await ping(server) == "pong"
        assert await read_all(pairs[0][0]) == b""
        pairs[7][1].write(GET)
        async with asyncio.timeout(120):
            assert b"200" in await pairs[7][0].readline()


async def test_a_busy_connection_is_never_replaced(serve: Any) -> None:
    async with serve(connections=8, slots=8) as server, connected(server, 8) as pairs:
        for number, (_, writer) in enumerate(pairs):
            body = json.dumps({"id": f"c{number}", "code": "hang"}).encode()
            writer.write(POST % (b"/v1/run", len(body)) + body)
        async with asyncio.timeout(120):
            while len(server.executor.running) < 8:  # noqa: ASYNC110 (of the executor)
                await asyncio.sleep(0.01)
        async with httpx.AsyncClient(timeout=120) as http:
            refused = await http.get(server.url + "/ping")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "--connections" in refused.json()["error"]["message"]
        server.executor.release.set()
        for reader, _ in pairs:
            async with asyncio.timeout(120):
                assert b"200" in await reader.readline()


@pytest.mark.parametrize("sent", [b"", b"GET /ping HTTP/1.1\r\nhost:", GET + b"GET /pi"])
async def test_a_caller_that_does_not_finish_its_head_is_disconnected(
    serve: Any, sent: bytes
) -> None:
    async with serve(header_read_s=0.5) as server, connected(server, 1) as pairs:
        reader, writer = pairs[0]
        writer.write(sent)
        answer = await read_all(reader)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 200")
        assert await ping(server) == "pong"


async def test_a_trickle_of_header_bytes_does_not_extend_the_deadline(serve: Any) -> None:
    async with serve(header_read_s=0.3) as server, connected(server, 1) as pairs:
        reader, writer = pairs[0]
        closed = asyncio.create_task(read_all(reader))
        writer.write(b"GET /ping HTTP/1.1\r\n")
        async with asyncio.timeout(120):
            while not closed.done():
                with contextlib.suppress(ConnectionError):
                    writer.write(b"x: y\r\n")
                    await writer.drain()
                await asyncio.sleep(0.02)
        assert closed.result() == b""


@contextlib.asynccontextmanager
async def not_reading(server: Any, sent: bytes) -> AsyncIterator[socket.socket]:
    """A caller that sends requests until the server takes no more, and reads no answer."""
    loop = asyncio.get_running_loop()
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.setblocking(False)
        await loop.sock_connect(caller, ("127.0.0.1", server.port))
        sending = asyncio.create_task(loop.sock_sendall(caller, sent))
        try:
            yield caller
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


def runs(count: int, chars: int) -> bytes:
    """Pipelined calls, each with an output of `chars`."""
    bodies = [json.dumps({"id": f"c{n}", "code": f"print {chars}"}).encode() for n in range(count)]
    return b"".join(POST % (b"/v1/run", len(body)) + body for body in bodies)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 (of the server)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("sent", [runs(12, 900_000), 4000 * METRICS], ids=["runs", "metrics"])
async def test_a_caller_that_does_not_read_is_disconnected_while_it_is_busy(
    serve: Any, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "UNREAD_S", 0.1)
    async with serve() as server, not_reading(server, sent):
        await until(lambda: [c for c in server.open_connections if c.flow.write_paused])
        assert server.open_connections[0].busy
        await until(lambda: not server.open_connections)
        assert await ping(server) == "pong"


async def test_a_caller_that_does_not_read_gives_way_to_a_new_one(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "UNREAD_AT_BOUND_S", 0.0)
    async with serve(connections=8) as server, contextlib.AsyncExitStack() as callers:
        for _ in range(8):
            await callers.enter_async_context(not_reading(server, runs(12, 900_000)))
        await until(lambda: sum(u.unread_s > 0 for u in server.unread.values()) == 8)
        assert all(connection.busy for connection in server.open_connections)
        assert await ping(server) == "pong"


async def test_pipelined_requests_wait_outside_the_server(serve: Any) -> None:
    """Every answer let the server read on, and it kept all that it read."""
    async with serve() as server, connected(server, 1) as pairs:
        reader, writer = pairs[0]
        count, most = 300, 0
        writer.write(count * GET.replace(b"\r\n", b"\r\nx: " + 8000 * b"y" + b"\r\n", 1))
        async with asyncio.timeout(120):
            for _ in range(count):
                head = await reader.readuntil(b'"pong"')
                assert b"200 OK" in head
                most = max(most, len(server.open_connections[0].conn.trailing_data[0]))
        assert 0 < most <= 2 * MAX_PIPELINED_BYTES


async def test_accepting_without_descriptors_pauses_and_logs_once(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio's accept loop logged a thousand tracebacks a second."""
    async with serve() as server:
        await ping(server)
        gc.collect()  # or it may close files of earlier tests at any time
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as late:
            late.setblocking(False)
            used = late.fileno() + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
            try:
                with contextlib.suppress(BlockingIOError):
                    late.connect(("127.0.0.1", server.port))
                async with asyncio.timeout(120):
                    while not caplog.records:  # noqa: ASYNC110 (of the log)
                        await asyncio.sleep(0.01)
                await asyncio.sleep(2 * deadlines.ACCEPT_RETRY_S)  # a flood would be seen by then
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 1, messages
        assert "cannot accept connections" in messages[0]
        assert await ping(server) == "pong"


def test_connections_take_at_most_half_of_the_descriptors() -> None:
    program = (
        "import resource, logging; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200));"
        "from rstar2.codeenv.server.connections import connection_bound as bound;"
        "print(bound(4096), bound(50), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split() == ["100", "50", "200"]
    assert "ulimit -Hn" in done.stderr


# --------------------------------------------------------------------------- odd requests


async def exchange(server: Any, sent: bytes) -> bytes:
    """Send bytes, end the sending direction, and read the whole answer."""
    async with connected(server, 1) as pairs:
        reader, writer = pairs[0]
        writer.write(sent)
        return await read_all(reader)


CLOSE = b"host: localhost\r\nconnection: close\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "part"),
    [
        (b"GET /ping HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", 400, b"Invalid HTTP"),
        (b"\x16\x03\x01 not HTTP\r\n\r\n", 400, b"Invalid HTTP"),
        (b"HEAD /ping HTTP/1.1\r\n" + CLOSE + b"\r\n", 200, b""),
        (b"OPTIONS /v1/run HTTP/1.1\r\n" + CLOSE + b"\r\n", 405, b"allow: POST"),
        (b"GET /v1/run HTTP/1.1\r\n" + CLOSE + b"\r\n", 405, b"it takes POST"),
        (b"GET /%ff HTTP/1.1\r\n" + CLOSE + b"\r\n", 404, b"no such path"),
        (
            b"GET /v1/run HTTP/1.1\r\nhost: localhost\r\nconnection: close, upgrade\r\n"
            b"upgrade: websocket\r\n\r\n",
            405,
            b"it takes POST",
        ),
        (
            b"POST /v1/run HTTP/1.1\r\n" + CLOSE + b"content-encoding: gzip\r\n"
            b"content-length: 2\r\n\r\n{}",
            400,
            b"send plain JSON",
        ),
        (
            b"POST /v1/run HTTP/1.1\r\n" + CLOSE + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
            400,
            b"Invalid HTTP",
        ),
        (
            b"POST /v1/run HTTP/1.1\r\n" + CLOSE + b"content-type: text/plain\r\n"
            b'content-length: 28\r\n\r\n{"id": "a", "code": "echo 1"}'[:-1],
            400,
            b"not JSON",
        ),
    ],
    ids=["head-size", "not-http", "head", "options", "get", "path", "upgrade", "gzip", "chunk",
         "truncated"],
)  # fmt: skip
async def test_odd_requests_get_an_answer_and_no_log_line(
    serve: Any, sent: bytes, status: int, part: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as server:
        answer = await exchange(server, sent)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
        assert part in answer
        assert await ping(server) == "pong"
    assert not caplog.records


async def test_a_request_with_two_lengths_ends_its_connection(serve: Any) -> None:
    """The rest was served as a second request, which a proxy in front may not have seen."""
    async with serve() as server:
        answer = await exchange(
            server,
            POST[:-2] % (b"/v1/run", 3) + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + GET,
        )
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"send one of them" in answer
        assert b"pong" not in answer


PAGE = {"origin": "https://evil.example", "content-type": "text/plain"}


@pytest.mark.parametrize(
    ("headers", "status"), [({}, 200), (PAGE, 403), ({"host": "evil.example"}, 403)]
)
@pytest.mark.parametrize("token", [None, "secret"])
async def test_a_server_without_a_token_refuses_web_pages(
    serve: Any, headers: dict[str, str], status: int, token: str | None
) -> None:
    async with serve(token=token) as server, httpx.AsyncClient(timeout=120) as http:
        if token:
            headers, status = {**headers, "authorization": f"Bearer {token}"}, 200
        body = json.dumps({"id": "a", "code": "echo 1"})
        answer = await http.post(server.url + "/v1/run", content=body, headers=headers)
        assert answer.status_code == status
        assert server.executor.executed["a"] == (status == 200)
        if status == 403:
            assert answer.json()["error"]["code"] == "forbidden"


async def test_pipelined_requests_are_answered_in_order(serve: Any) -> None:
    async with serve() as server, connected(server, 1) as pairs:
        reader, writer = pairs[0]
        for text in (b"one", b"two"):
            body = b'{"id": "%b", "code": "echo %b"}' % (text, text)
            writer.write(POST % (b"/v1/run", len(body)) + body)
        writer.write(b"GET /ping HTTP/1.1\r\n" + CLOSE + b"\r\n")
        answer = await read_all(reader)
        assert answer.count(b"HTTP/1.1 200") == 3
        assert answer.index(b'"one"') < answer.index(b'"two"') < answer.index(b'"pong"')


async def test_bodies_that_are_being_read_share_a_budget(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rstar2.codeenv.server import app

    monkeypatch.setattr(app, "MAX_BODIES_BYTES", 100_000)
    async with serve() as server, connected(server, 2) as pairs:
        for _, writer in pairs:
            writer.write(POST % (b"/v1/run", 90_000) + b" " * 80_000)
        heads = [asyncio.create_task(reader.readuntil(b"\r\n\r\n")) for reader, _ in pairs]
        done, waiting = await asyncio.wait(heads, timeout=120, return_when=asyncio.FIRST_COMPLETED)
        assert [b"429" in head.result() for head in done] == [True]
        assert len(waiting) == 1
        for head in waiting:
            head.cancel()
