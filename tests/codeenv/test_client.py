"""The client: every call gets its own result once, whatever its servers do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from rstar2.codeenv import deadlines
from rstar2.codeenv.client import dispatch
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.protocol import RunRequest, VerifyRequest
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, InvariantError, UserError
from rstar2.types import Limits, Outcome, ToolResult


def connect(*servers: Any, **settings: Any) -> Any:
    return CodeEnvClient.start(CodeEnvConfig(urls=tuple(s.url for s in servers), **settings))


async def run(client: CodeEnvClient, call_id: str, code: str, **more: Any) -> ToolResult:
    return await client.run(RunRequest(call_id, code, **{"deadline_s": 20.0, **more}))


async def until(condition: Any) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 (conditions of several objects)
            await asyncio.sleep(0.01)


async def test_calls_submitted_together_travel_in_batches(serve: Any) -> None:
    async with serve() as server, await connect(server) as client:
        results = await asyncio.gather(*(run(client, f"c{i}", f"echo {i}") for i in range(300)))
        assert [r.stdout for r in results] == [str(i) for i in range(300)]
        assert [r.call_id for r in results] == [f"c{i}" for i in range(300)]
        assert client.stats.batches <= 12
        assert server.executor.executed.total() == 300


async def test_verify_brings_its_value_back(serve: Any) -> None:
    async with serve() as server, await connect(server) as client:
        result = await client.verify(VerifyRequest("v", "f", {"x": {"deep": [1]}}))
        assert result.value == {"deep": [1]}


async def test_a_slow_call_does_not_delay_the_others_of_its_batch(serve: Any) -> None:
    async with serve() as server, await connect(server) as client:
        slow = asyncio.create_task(run(client, "slow", "hang"))
        quick = await asyncio.gather(*(run(client, f"q{i}", "echo 1") for i in range(20)))
        assert all(r.outcome is Outcome.OK for r in quick)
        assert not slow.done()
        server.executor.release.set()
        assert (await slow).outcome is Outcome.OK


async def test_work_is_spread_over_servers(serve: Any) -> None:
    async with serve() as one, serve() as two, await connect(one, two, batch=8) as client:
        await asyncio.gather(*(run(client, f"c{i}", "sleep 0.02") for i in range(64)))
        assert one.executor.executed.total() >= 16
        assert two.executor.executed.total() >= 16


async def test_what_is_in_flight_is_bounded(serve: Any) -> None:
    async with serve() as server, await connect(server, batch=4) as client:
        calls = [asyncio.create_task(run(client, f"c{i}", "hang")) for i in range(200)]
        await until(lambda: server.table.active == 16)
        await asyncio.sleep(0.1)
        assert server.table.active == 16  # the window: 4 batches of 4
        server.executor.release.set()
        assert all(r.outcome is Outcome.OK for r in await asyncio.gather(*calls))


async def test_back_pressure_is_waited_out(serve: Any) -> None:
    async with serve(slots=1, queue=1) as server, await connect(server) as client:
        results = await asyncio.gather(*(run(client, f"c{i}", "sleep 0.01") for i in range(30)))
        assert all(r.outcome is Outcome.OK for r in results)
        assert client.stats.retries["queue_full"] > 0
        assert set(server.executor.executed.values()) == {1}


async def test_infrastructure_results_are_retried_and_counted(serve: Any) -> None:
    async with serve() as server, await connect(server) as client:
        result = await run(client, "a", "flaky 2")
        assert result.outcome is Outcome.OK
        assert result.attempts == 3
        assert server.executor.executed["a"] == 3


async def test_retries_end_and_the_result_says_so(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "ATTEMPTS", 2)
    async with serve() as server, await connect(server) as client:
        result = await run(client, "a", "flaky 99")
        assert result.outcome is Outcome.INFRASTRUCTURE
        assert result.attempts == 2
        assert "worker died" in result.message
        crashed = await run(client, "b", "crash")
        assert crashed.outcome is Outcome.INFRASTRUCTURE
        assert "2 attempts" in crashed.message


async def test_a_retry_prefers_another_server(serve: Any) -> None:
    async with serve() as one, serve() as two, await connect(one, two) as client:
        result = await run(client, "a", "flaky 1")
        assert result.outcome is Outcome.INFRASTRUCTURE or result.attempts >= 1
        assert one.executor.executed["a"] >= 1
        assert two.executor.executed["a"] >= 1


async def test_calls_of_a_dead_server_move_to_a_living_one(serve: Any) -> None:
    async with serve() as one, serve() as two, await connect(one, two, batch=8) as client:
        calls = [asyncio.create_task(run(client, f"c{i}", "sleep 0.05")) for i in range(64)]
        await until(lambda: one.table.active > 0)
        await one.kill()
        results = await asyncio.gather(*calls)
        assert all(r.outcome is Outcome.OK for r in results)
        assert client.stats.retries["lost"] > 0
        assert not client.endpoints[0].healthy


async def test_a_server_that_comes_back_is_used_again(serve: Any) -> None:
    async with serve() as one, await connect(one) as client:
        assert (await run(client, "a", "echo 1")).outcome is Outcome.OK
        await one.kill()
        waiting = asyncio.create_task(run(client, "b", "echo 2"))
        await until(lambda: not client.endpoints[0].healthy)
        async with serve(port=one.port):
            result = await waiting
            assert (result.outcome, result.stdout) == (Outcome.OK, "2")


async def test_an_idle_connection_that_the_server_closed_is_no_failure(serve: Any) -> None:
    async with serve() as server, await connect(server) as client:
        for index in range(3):
            assert (await run(client, f"c{index}", "echo 1")).outcome is Outcome.OK
            for connection in list(server._server.server_state.connections):
                connection.transport.close()
        assert client.stats.retries["lost"] == 0
        assert set(server.executor.executed.values()) == {1}


async def test_no_server_in_time_is_an_outcome_not_an_exception(serve: Any) -> None:
    async with serve() as server, await connect(server) as client:
        await server.kill()
        result = await run(client, "a", "echo 1", deadline_s=0.3)
        assert result.outcome is Outcome.INFRASTRUCTURE
        assert "deadline of 0.3 s" in result.message
        verify = await client.verify(VerifyRequest("v", "f", deadline_s=0.1))
        assert verify.infrastructure


async def test_a_call_that_outlives_its_deadline_does_not_hold_the_server(serve: Any) -> None:
    async with serve(slots=1) as server, await connect(server) as client:
        result = await run(client, "a", "hang", deadline_s=0.2)
        assert result.outcome is Outcome.INFRASTRUCTURE
        await until(lambda: server.table.active == 0)
        assert server.executor.cancelled == ["a"]


async def test_cancelling_a_call_cancels_it_on_the_server(serve: Any) -> None:
    async with serve() as server, await connect(server) as client:
        call = asyncio.create_task(run(client, "a", "hang"))
        await until(lambda: server.table.active == 1)
        call.cancel()
        await until(lambda: server.table.active == 0)
        assert client.endpoints[0].outstanding == 0


async def test_the_same_request_twice_shares_one_execution(serve: Any) -> None:
    async with serve() as server, await connect(server) as client:
        twins = await asyncio.gather(*(run(client, "a", "sleep 0.05") for _ in range(3)))
        assert twins[0] == twins[1] == twins[2]
        assert server.executor.executed["a"] == 1


async def test_an_id_under_way_cannot_be_used_for_another_request(serve: Any) -> None:
    async with serve() as server, await connect(server) as client:
        call = asyncio.create_task(run(client, "a", "sleep 0.1"))
        await asyncio.sleep(0)
        with pytest.raises(UserError, match="id"):
            await run(client, "a", "echo 2")
        await call


async def test_bad_input_is_the_callers_and_raised(serve: Any) -> None:
    async with serve() as server, await connect(server) as client:
        with pytest.raises(UserError, match=r"limits\.wall_s"):
            await run(client, "a", "echo 1", limits=Limits(wall_s=1e6))
        with pytest.raises(UserError, match="arguments"):
            await client.verify(VerifyRequest("v", "f", {"x": object()}))


@pytest.mark.parametrize("code", ["x" * 2_000_000, "'\ud800'"])
async def test_code_that_cannot_be_sent_is_the_models_failure(serve: Any, code: str) -> None:
    async with serve() as server, await connect(server) as client:
        bad, good = await asyncio.gather(run(client, "a", code), run(client, "b", "echo 1"))
        assert bad.outcome is Outcome.BAD_ARGUMENTS
        assert bad.message
        assert good.outcome is Outcome.OK


async def test_sessions_stay_with_their_server(serve: Any) -> None:
    async with serve() as one, serve() as two, await connect(one, two) as client:
        info = await client.open_session("s", ttl_s=20)
        branch = await client.branch_session("s")
        for name in (info.id, branch.id):
            assert (await run(client, f"in-{name}", "echo 1", session=name)).outcome is Outcome.OK
        assert {one.executor.executed.total(), two.executor.executed.total()} == {0, 2}
        await client.close_session("s")
        with pytest.raises(UserError, match="not opened"):
            await run(client, "late", "echo 1", session="s")


async def test_a_session_object_makes_its_own_ids_and_closes_once(serve: Any) -> None:
    async with serve() as server, await connect(server) as client:
        async with await client.open(ttl_s=20) as session, await session.branch() as branch:
            results = [await session.run("echo 1"), await session.run("echo 1")]
            results.append(await branch.run("echo 2", call_id="mine"))
            assert [result.stdout for result in results] == ["1", "1", "2"]
            assert results[2].call_id == "mine"
            assert set(server.executor.sessions) == {session.id, branch.id}
            await branch.close()
        assert not server.executor.sessions


@pytest.mark.parametrize("name", ["a/b", "x" * 257, "", "..", "a b", "é"])
async def test_a_session_id_that_fits_no_url_is_refused(serve: Any, name: str) -> None:
    async with serve() as server, await connect(server) as client:
        with pytest.raises(UserError, match="session id"):
            await client.open(name)
        async with await client.open() as session:
            with pytest.raises(UserError, match="session id"):
                await session.branch(name)


async def test_a_session_lost_with_its_server_is_infrastructure(serve: Any) -> None:
    async with serve() as one, await connect(one) as client:
        await client.open_session("s")
        await one.kill()
        async with serve(port=one.port):
            result = await run(client, "a", "echo 1", session="s")
            assert result.outcome is Outcome.INFRASTRUCTURE
            assert "session" in result.message
            with pytest.raises((CodeEnvError, UserError), match="session"):
                await client.branch_session("s")
            await client.close_session("s")


async def test_a_session_closes_before_the_client_has_noticed_that_its_server_is_gone(
    serve: Any,
) -> None:
    async with serve() as one, await connect(one) as client:
        await client.open_session("s")
        await one.kill()
        await client.close_session("s")
        with pytest.raises(UserError, match="not opened"):
            await client.close_session("s")


class SessionBreaker:
    """A server that opens sessions and breaks the connection of every batch, `after` some bytes."""

    def __init__(self, after: bytes) -> None:
        self.after = after
        self.batches: list[list[str]] = []
        self.url = ""

    async def __aenter__(self) -> SessionBreaker:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, OSError), contextlib.closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().partition("content-length:")[2].split()[0])
                body = await reader.readexactly(length)
                answer: dict[str, Any] = {"status": "ok", "server": "breaker", "slots": 1}
                if "/v1/batch" in head:
                    self.batches.append([call["id"] for call in json.loads(body)["calls"]])
                    writer.write(self.after)
                    break
                if "/v1/sessions" in head:
                    answer = {"id": json.loads(body)["id"], "ttl_s": 60.0}
                text = json.dumps(answer).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text) + text)


@pytest.mark.parametrize("after", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"])
async def test_a_call_of_a_session_is_sent_once(after: bytes) -> None:
    """The connection breaks before or after the head of the answer, fresh or used before."""
    async with SessionBreaker(after) as server, await connect(server) as client:
        await client.open_session("s")
        for call_id in ("a", "b"):
            await until(lambda: client.endpoints[0].healthy)
            lost = await run(client, call_id, "1", session="s")
            assert lost.outcome is Outcome.INFRASTRUCTURE
            assert "a call of a session is never sent twice" in lost.message
        assert server.batches == [["a"], ["b"]]
        await client.close_session("s")


async def test_a_connection_that_was_idle_for_long_is_not_used_again(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may be about to close it, and a call on its way would be lost."""
    monkeypatch.setattr(deadlines, "HEALTH_EVERY_S", 600.0)  # no other request meanwhile
    async with serve() as server, await connect(server) as client:
        pool = client.endpoints[0].connections
        await run(client, "a", "echo 1")
        (first,) = pool.idle
        await run(client, "b", "echo 1")
        assert list(pool.idle) == [first]
        pool.idle_s = -1.0
        await run(client, "c", "echo 1")
        (second,) = pool.idle
        assert (first is second, second.used) == (False, 1)


async def test_a_wrong_token_is_one_clear_error(serve: Any) -> None:
    async with serve(token="right") as server:
        with pytest.raises(UserError, match=r"codeenv\.token"):
            await connect(server, token="wrong")
        async with await connect(server, token="right") as client:
            assert (await run(client, "a", "echo 1")).outcome is Outcome.OK


async def test_a_token_can_be_part_of_the_url(serve: Any) -> None:
    async with serve(token="right") as server:
        url = server.url.replace("http://", "http://token:right@")
        async with await CodeEnvClient.start(CodeEnvConfig(urls=(url,))) as client:
            assert (await run(client, "a", "echo 1")).outcome is Outcome.OK


@pytest.mark.parametrize("url", ["localhost:80", "ftp://x", "http://"])
async def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="urls"):
        await CodeEnvClient.start(CodeEnvConfig(urls=(url,)))


async def test_nobody_listening_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "CONNECT_S", 0.1)
    with pytest.raises(CodeEnvError, match="cannot connect to"):
        await CodeEnvClient.start(CodeEnvConfig(urls=("http://127.0.0.1:9",)))


async def test_closing_answers_what_is_open(serve: Any) -> None:
    async with serve() as server:
        client = await connect(server)
        call = asyncio.create_task(run(client, "a", "hang"))
        await until(lambda: server.table.active == 1)
        await client.close()
        assert (await call).outcome is Outcome.INFRASTRUCTURE
        with pytest.raises(UserError, match="closed"):
            await run(client, "b", "echo 1")


async def test_a_server_that_hangs_is_left(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "HEALTH_EVERY_S", 0.05)
    monkeypatch.setattr(deadlines, "HEALTH_REPLY_S", 1.0)
    async with serve() as one, serve() as two, await connect(one, two) as client:

        async def mute(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(600)

        calls = [asyncio.create_task(run(client, f"c{i}", "sleep 0.3")) for i in range(8)]
        await until(lambda: one.table.active + two.table.active > 0)
        stuck, well = (one, two) if one.table.active else (two, one)
        stuck.app._dispatch = mute  # from now on it accepts and never answers
        stuck.executor.obey = lambda request: asyncio.sleep(600)
        more = [asyncio.create_task(run(client, f"d{i}", "echo 1")) for i in range(8)]
        results = await asyncio.gather(*calls, *more)
        assert all(r.outcome is Outcome.OK for r in results)
        assert well.executor.executed.total() >= 8


class Liar:
    """A server that breaks the protocol in a chosen way."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.url = ""

    async def __aenter__(self) -> Liar:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    async def _serve(self, reader: Any, writer: Any) -> None:
        health = json.dumps({"status": "ok", "server": "liar", "slots": 1, "isolation": "strict"})
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().partition("content-length:")[2].split()[0])
                body = await reader.readexactly(length)
                answer = health.encode()
                if "/v1/batch" in head:
                    answer = self.answer([c["id"] for c in json.loads(body)["calls"]])
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer))
                writer.write(answer)
        except (EOFError, OSError):
            writer.close()


def line(call_id: str, result_id: str) -> bytes:
    return (
        json.dumps({"id": call_id, "run": {"call_id": result_id, "outcome": "ok"}}).encode() + b"\n"
    )


@pytest.mark.parametrize(
    "answer",
    [
        lambda ids: line("stranger", "stranger"),
        lambda ids: line(ids[0], ids[1]),
        lambda ids: line(ids[0], ids[0]) + line(ids[0], ids[0]),
        lambda ids: json.dumps({"id": ids[0], "verify": {"id": ids[0]}}).encode() + b"\n",
    ],
    ids=["unknown id", "swapped", "duplicate", "another kind"],
)
async def test_a_mixed_up_answer_is_never_believed(answer: Any) -> None:
    async with Liar(answer) as server, await connect(server) as client:
        results = await asyncio.gather(
            run(client, "a", "1"), run(client, "b", "1"), return_exceptions=True
        )
        assert any(isinstance(r, InvariantError) for r in results)
        for call_id, result in zip("ab", results, strict=True):
            if not isinstance(result, InvariantError):
                assert isinstance(result, ToolResult)
                assert result.call_id == call_id


async def test_nonsense_and_missing_lines_are_infrastructure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "ATTEMPTS", 2)
    for answer in (b"<html>\n", b"", b'{"id": "a", "run"'):
        async with Liar(lambda ids, a=answer: a) as server, await connect(server) as client:
            assert (await run(client, "a", "1")).outcome is Outcome.INFRASTRUCTURE
