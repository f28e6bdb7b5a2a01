"""The HTTP server: routes, refusals, streaming, idempotence, back-pressure, disconnects."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from rstar2.codeenv import wire
from rstar2.codeenv.server.calls import CallTable


def run(call_id: str, code: str, **more: Any) -> dict[str, Any]:
    return {"kind": "run", "id": call_id, "code": code, **more}


async def post(url: str, path: str, body: Any, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=120) as http:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await http.post(url + path, content=content, **more)


async def until(condition: Any) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 (conditions of several objects)
            await asyncio.sleep(0.01)


def waiters(server: Any) -> list[int]:
    return [entry.waiters for entry in server.table._entries.values()]


async def test_run_answers_with_the_result_of_its_id(serve: Any) -> None:
    async with serve() as server:
        response = await post(server.url, "/v1/run", run("a", "echo hi"))
        assert response.status_code == 200
        result = response.json()
        assert (result["call_id"], result["outcome"], result["stdout"]) == ("a", "ok", "hi")
        assert result["server"] == server.table.server


async def test_verify_answers_with_the_value(serve: Any) -> None:
    async with serve() as server:
        body = {"id": "v", "function": "f", "arguments": {"x": [1, 2]}}
        assert (await post(server.url, "/v1/verify", body)).json()["value"] == [1, 2]


async def test_a_batch_streams_each_result_as_it_finishes(serve: Any) -> None:
    async with serve() as server, httpx.AsyncClient(timeout=120) as http:
        calls = [run("slow", "hang"), run("quick", "echo 1")]
        seen = []
        async with http.stream("POST", server.url + "/v1/batch", json={"calls": calls}) as response:
            async for line in response.aiter_lines():
                seen.append(json.loads(line)["id"])
                server.executor.release.set()  # slow ends only after quick was seen
        assert seen == ["quick", "slow"]


async def test_a_bad_call_does_not_affect_its_batch(serve: Any) -> None:
    async with serve() as server:
        calls = [
            run("big", "echo 1", limits={"wall_s": 1e6}),
            run("good", "echo 1"),
            {"kind": "verify", "id": "v", "function": "f", "arguments": {"x": 3}},
        ]
        response = await post(server.url, "/v1/batch", {"calls": calls})
        lines = {line["id"]: line for line in map(json.loads, response.text.splitlines())}
        assert lines["big"]["error"]["field"] == "limits.wall_s"
        assert lines["good"]["run"]["stdout"] == "1"
        assert lines["v"]["verify"]["value"] == 3


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("/v1/run", b"{", 400, "JSON"),
        ("/v1/run", b"\xff\xfe", 400, "UTF-8"),
        ("/v1/run", b'{"id": "a", "code": "\xff"}', 400, "UTF-8"),
        ("/v1/verify", b'{"id": "v", "function": "f", "arguments": {"x": ' + DEEP, 400, "nested"),
        ("/v1/run", run("a", "x", limits={"memory_mb": 10**400}), 422, "memory_mb"),
        ("/v1/run", run("a", "x", limits={"wall_s": -1}), 422, "above 0"),
        ("/v1/run", b'{"id": "a", "code": "x", "limits": {"wall_s": NaN}}', 400, "JSON"),
        ("/v1/run", {"id": "a"}, 422, "code"),
        ("/v1/run", {"id": "a", "code": 7}, 422, "$.code"),
        ("/v1/run", run("a", "x", limits={"walls": 1}), 422, "wall_s"),
        ("/v1/run", run("a", "x", limits={"wall_s": 1e6}), 422, "cap of 60.0"),
        ("/v1/run", run("a", "x" * 2_000_000), 413, "code"),
        ("/v1/verify", {"id": "v", "function": ""}, 422, "function"),
        ("/v1/batch", {"calls": []}, 422, "calls"),
        ("/v1/batch", {"calls": [run("a", "1"), run("a", "2")]}, 422, "same id"),
        ("/v1/batch", {"calls": [{"kind": "walk", "id": "a"}]}, 422, "walk"),
        ("/v1/sessions", {"ttl_s": -1}, 422, "ttl_s"),
        ("/v1/sessions", {"id": "a/b"}, 422, "session id"),
        ("/v1/sessions", {"id": "x" * 5000}, 422, "5000 characters"),
        ("/v1/sessions", {"id": ".."}, 422, "session id"),
        ("/v1/sessions", {"id": ""}, 422, "session id"),
        ("/v1/sessions/s/branch", {"id": "a/b"}, 422, "session id"),
        ("/v1/run", run("a", "x", session="a/b"), 422, "session id"),
        ("/v1/runn", {}, 404, "/v1/run"),
        ("/metrics", {}, 405, "POST"),
    ],
)
async def test_bad_input_is_refused_by_name(
    serve: Any, path: str, body: Any, status: int, part: str
) -> None:
    async with serve() as server:
        response = await post(server.url, path, body)
        assert response.status_code == status
        assert part in response.json()["error"]["message"]
        assert not server.executor.executed


async def test_a_body_above_the_limit_is_refused_unread(serve: Any) -> None:
    async with serve() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/run HTTP/1.1\r\nhost: [::1]\r\ncontent-length: 999999999\r\n\r\n")
        head = await reader.readuntil(b"\r\n")
        writer.close()
        await writer.wait_closed()
        assert b"413" in head


async def test_the_same_id_is_executed_once(serve: Any) -> None:
    async with serve() as server:
        both = [post(server.url, "/v1/run", run("a", "sleep 0.2")) for _ in range(2)]
        first, second = await asyncio.gather(*both)
        third = await post(server.url, "/v1/run", run("a", "sleep 0.2"))
        assert first.json() == second.json() == third.json()
        assert server.executor.executed["a"] == 1


async def test_the_same_id_with_other_code_is_a_conflict(serve: Any) -> None:
    async with serve() as server:
        await post(server.url, "/v1/run", run("a", "echo 1"))
        response = await post(server.url, "/v1/run", run("a", "echo 2"))
        assert response.status_code == 409
        assert "id" in response.json()["error"]["message"]


async def test_infrastructure_results_are_not_remembered(serve: Any) -> None:
    async with serve() as server:
        outcomes = [
            (await post(server.url, "/v1/run", run("a", "flaky 1"))).json()["outcome"]
            for _ in range(2)
        ]
        assert outcomes == ["infrastructure", "ok"]


async def test_what_is_remembered_is_bounded(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rstar2.codeenv.server.calls.REMEMBERED", 3)
    async with serve() as server:
        for index in range(6):
            await post(server.url, "/v1/run", run(str(index), "echo x"))
        table: CallTable = server.table
        assert list(table._finished) == ["3", "4", "5"]


async def test_a_result_with_a_foreign_id_is_never_returned(serve: Any) -> None:
    async with serve() as server:
        response = await post(server.url, "/v1/batch", {"calls": [run("a", "swap")]})
        error = json.loads(response.text)["error"]
        assert error["code"] == "infrastructure"
        assert "another" in error["message"]


async def test_a_full_queue_answers_429_with_retry_after(serve: Any) -> None:
    async with serve(slots=1, queue=1) as server:
        waiting = [
            asyncio.create_task(post(server.url, "/v1/run", run(name, "hang")))
            for name in ("runs", "queued")
        ]
        await until(lambda: server.table.active == 2)
        response = await post(server.url, "/v1/run", run("refused", "echo 1"))
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["retry_after_s"] > 0
        batch = await post(server.url, "/v1/batch", {"calls": [run("also", "echo 1")]})
        assert batch.status_code == 429
        server.executor.release.set()
        assert [r.status_code for r in await asyncio.gather(*waiting)] == [200, 200]


async def test_a_batch_larger_than_the_room_is_answered_in_part(serve: Any) -> None:
    async with serve(slots=1, queue=1) as server:
        calls = [run(str(i), "sleep 0.05") for i in range(4)]
        response = await post(server.url, "/v1/batch", {"calls": calls})
        lines = [json.loads(line) for line in response.text.splitlines()]
        assert sum("run" in line for line in lines) == 2
        assert sum(line.get("error", {}).get("code") == "queue_full" for line in lines) == 2


async def test_the_executors_own_back_pressure_is_passed_on(serve: Any) -> None:
    async with serve() as server:
        response = await post(server.url, "/v1/run", run("a", "full"))
        assert response.status_code == 429
        assert response.json()["error"]["retry_after_s"] == 0.05


async def test_the_deadline_counts_time_in_the_queue(serve: Any) -> None:
    async with serve(slots=1) as server:
        holding = asyncio.create_task(post(server.url, "/v1/run", run("holds", "hang")))
        await until(lambda: server.table.active == 1)
        late = await post(server.url, "/v1/run", run("late", "echo 1", deadline_s=0.1))
        assert late.json()["outcome"] == "infrastructure"
        assert "deadline" in late.json()["message"]
        assert server.executor.executed["late"] == 0
        server.executor.release.set()
        await holding


async def test_a_disconnecting_caller_cancels_its_queued_calls(serve: Any) -> None:
    async with serve(slots=1) as server:
        body = wire.join_batch([json.dumps(run(str(i), "hang")).encode() for i in range(3)])
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = f"POST /v1/batch HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: server.table.active == 3)
        writer.close()
        await until(lambda: server.table.active == 0)
        assert server.table.metrics.abandoned == 3
        assert server.executor.cancelled == ["0"]
        assert server.executor.executed.total() == 1
        del reader


async def test_a_shared_call_survives_the_disconnect_of_one_caller(serve: Any) -> None:
    async with serve() as server:
        first = asyncio.create_task(post(server.url, "/v1/run", run("a", "hang")))
        second = asyncio.create_task(post(server.url, "/v1/run", run("a", "hang")))
        await until(lambda: waiters(server) == [2])
        first.cancel()
        await until(lambda: waiters(server) == [1])
        server.executor.release.set()
        assert (await second).json()["outcome"] == "ok"


async def test_an_executors_bug_is_infrastructure(serve: Any) -> None:
    async with serve() as server:
        response = await post(server.url, "/v1/batch", {"calls": [run("a", "crash")]})
        assert json.loads(response.text)["error"]["code"] == "infrastructure"


async def test_draining_finishes_what_runs_and_refuses_the_rest(serve: Any) -> None:
    async with serve() as server:
        running = asyncio.create_task(post(server.url, "/v1/run", run("runs", "hang")))
        await until(lambda: server.table.active == 1)
        draining = asyncio.create_task(server.table.drain(10.0))
        await until(lambda: server.table.shutting_down)
        refused = await post(server.url, "/v1/run", run("late", "echo 1"))
        assert refused.status_code == 503
        assert (await post(server.url, "/v1/batch", {"calls": [run("b", "")]})).status_code == 503
        server.executor.release.set()
        assert (await running).json()["outcome"] == "ok"
        await draining


async def test_callers_of_aborted_calls_learn_that_the_server_shuts_down(serve: Any) -> None:
    async with serve() as server:
        single = asyncio.create_task(post(server.url, "/v1/run", run("a", "hang")))
        batch = asyncio.create_task(post(server.url, "/v1/batch", {"calls": [run("b", "hang")]}))
        await until(lambda: server.table.active == 2)
        server.table.abort()
        assert (await single).status_code == 503
        assert json.loads((await batch).text)["error"]["code"] == "shutting_down"


async def test_sessions_are_opened_branched_and_closed(serve: Any) -> None:
    async with serve() as server, httpx.AsyncClient(timeout=120) as http:
        opened = await http.post(server.url + "/v1/sessions", json={"id": "s", "ttl_s": 20})
        assert opened.json()["id"] == "s"
        branched = await http.post(server.url + "/v1/sessions/s/branch", json={"id": "t"})
        assert branched.json()["parent"] == "s"
        assert (await http.delete(server.url + "/v1/sessions/t")).json() == {"closed": "t"}
        assert list(server.executor.sessions) == ["s"]


async def test_an_unknown_session_is_not_found(serve: Any) -> None:
    async with serve() as server, httpx.AsyncClient(timeout=120) as http:
        for answer in (
            await http.post(server.url + "/v1/run", json=run("a", "echo 1", session="gone")),
            await http.post(server.url + "/v1/sessions/gone/branch", json={}),
            await http.delete(server.url + "/v1/sessions/gone"),
        ):
            assert answer.status_code == 404
            assert "gone" in answer.json()["error"]["message"]


async def test_health_reports_level_limits_and_load(serve: Any) -> None:
    async with serve() as server, httpx.AsyncClient(timeout=120) as http:
        health = (await http.get(server.url + "/health")).json()
        assert health["status"] == "ok"
        assert health["isolation"] == "portable"
        assert health["cap"]["wall_s"] == 60.0


async def test_metrics_are_prometheus_text(serve: Any) -> None:
    async with serve() as server, httpx.AsyncClient(timeout=120) as http:
        await post(server.url, "/v1/run", run("a", "echo 1"))
        await post(server.url, "/v1/run", b"{")
        text = (await http.get(server.url + "/metrics")).text
        assert 'rstar2_codeenv_calls_total{kind="run",outcome="ok"} 1' in text
        assert 'rstar2_codeenv_refused_total{code="bad_json"} 1' in text
        assert 'rstar2_codeenv_latency_seconds_bucket{le="+Inf"} 1' in text
        assert 'isolation="portable"' in text
        families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(families) == len(set(families))


async def test_a_token_is_required_except_for_the_status_in_health(serve: Any) -> None:
    async with serve(token="secret") as server, httpx.AsyncClient(timeout=120) as http:
        assert (await http.get(server.url + "/health")).json() == {"status": "ok"}
        for path in ("/metrics", "/status"):
            assert (await http.get(server.url + path)).status_code == 401
        for path in ("/v1/run", "/v1/batch", "/run_code", "/run/batch"):
            response = await http.post(server.url + path, json=run("a", "echo 1"))
            assert response.status_code == 401
            assert "Bearer" in response.json()["error"]["message"]
        assert not server.executor.executed


@pytest.mark.parametrize(
    ("auth", "status"),
    [
        ({"headers": {"authorization": "Bearer secret"}}, 200),
        ({"auth": ("token", "secret")}, 200),
        ({"headers": {"authorization": "Bearer secretx"}}, 401),
        ({"headers": {"authorization": "Bearer sécret".encode()}}, 401),
        ({"headers": {"authorization": "Basic ???"}}, 401),
        ({"headers": {"authorization": "secret"}}, 401),
    ],
)
async def test_only_the_right_token_opens(serve: Any, auth: Any, status: int) -> None:
    async with serve(token="secret") as server:
        response = await post(server.url, "/v1/run", run("a", "echo 1"), **auth)
        assert response.status_code == status
