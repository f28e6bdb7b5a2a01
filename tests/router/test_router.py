"""The router over real HTTP, in front of scripted servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import httpx
import pytest
import uvicorn

from rstar2.config import SchedulerConfig
from rstar2.http_server import SignalFreeServer, bind
from rstar2.router import backend as backend_module
from rstar2.router.app import RouterApp
from rstar2.router.backend import Backend
from rstar2.router.router import Router, RouterLimits
from tests.router.scripted_vllm import ScriptedVllm

PROMPT = {"model": "m", "prompt": [1, 2, 3, 4], "max_tokens": 20}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}

LIMITS = RouterLimits()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the deadline is for a hang, not for a slow machine."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@dataclass
class Routed:
    """A running router, and a client of it."""

    url: str
    router: Router
    client: httpx.AsyncClient

    async def turn(
        self, path: str = "/v1/completions", body: Any = PROMPT, session: str = ""
    ) -> httpx.Response:
        headers = {"x-session-id": session} if session else {}
        return await self.client.post(path, json=body, headers=headers)


@asynccontextmanager
async def routed(
    *servers: ScriptedVllm,
    policy: str = "reserve",
    limits: RouterLimits = LIMITS,
    key: str | None = None,
    started: bool = True,
) -> AsyncIterator[Routed]:
    """A router in front of these servers; `started` starts them first."""
    for scripted in servers:
        await scripted.start()
        if not started:
            await scripted.stop()
    config = SchedulerConfig.model_validate({"policy": policy})
    router = Router([Backend(s.url, 64) for s in servers], config, limits, poll_s=0.01)
    app = RouterApp(router, session_header="x-session-id", key=key)
    with bind("127.0.0.1", 0) as sock:
        server = SignalFreeServer(
            uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        )
        await router.start()
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                yield Routed(url, router, client)
        finally:
            server.should_exit = True
            await serving
            await router.close()
            for scripted in servers:
                await scripted.stop()


def value(metrics: str, name: str) -> float:
    line = next(x for x in metrics.splitlines() if x.startswith(f"rstar2_router_{name} "))
    return float(line.split(" ")[1])


# --------------------------------------------------------------------------- passing through


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", PROMPT),
        ("/v1/chat/completions", CHAT),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5}}),
    ],
)
async def test_requests_and_answers_are_not_changed(path: str, body: dict[str, Any]) -> None:
    server = ScriptedVllm()
    async with routed(server) as fleet:
        headers = {"authorization": "Bearer k", "x-request-id": "r1"}
        answer = await fleet.client.post(path, json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.content == server.answer(path)
        [seen] = server.turns
        assert (seen.path, json.loads(seen.body)) == (path, body)
        assert seen.headers["authorization"] == "Bearer k"
        assert seen.headers["x-request-id"] == "r1"
        assert value((await fleet.client.get("/metrics")).text, "sampled_tokens_total") == 3


async def test_a_stream_passes_event_by_event() -> None:
    server = ScriptedVllm()
    server.gate.clear()
    async with (
        routed(server) as fleet,
        fleet.client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()
        assert '"t0"' in await anext(lines)  # the server waits before its second event
        server.gate.set()
        rest = [line async for line in lines if line]
        assert [json.loads(x[6:])["choices"][0]["delta"]["content"] for x in rest[:-1]] == [
            "t1",
            "t2",
        ]
        assert rest[-1] == "data: [DONE]"


async def test_refusals_of_a_server_reach_the_client() -> None:
    server = ScriptedVllm()
    async with routed(server) as fleet:
        for status in (400, 429, 500):
            server.status = status
            answer = await fleet.turn()
            assert (answer.status_code, answer.json()["error"]["message"]) == (status, "scripted")
        assert fleet.router.serving == (server.name,)
        assert fleet.router.scheduler.state.sessions == {}


async def test_models_come_from_a_server_that_serves() -> None:
    dead, alive = ScriptedVllm(), ScriptedVllm()
    async with routed(dead, alive) as fleet:
        await dead.stop()
        assert (await fleet.client.get("/v1/models")).json()["data"][0]["id"] == "m"


# --------------------------------------------------------------------------- scheduling


async def test_the_turns_of_a_session_stay_on_one_server() -> None:
    servers = [ScriptedVllm(), ScriptedVllm()]
    async with routed(*servers) as fleet:
        for _ in range(3):
            await asyncio.gather(*(fleet.turn(session=f"g/{i}") for i in range(4)))
        assert fleet.router.sessions == 4
        homes = [fleet.router.scheduler.engine_of(f"@g/{i}") for i in range(4)]
        assert sorted(homes) == sorted(2 * [s.name for s in servers])  # type: ignore[type-var]
        assert {len(s.turns) for s in servers} == {6}


async def test_requests_wait_for_room() -> None:
    """`worst_case` reserves 24 tokens, in blocks 32, for each request: two fit in 64."""
    server = ScriptedVllm(blocks=4)
    server.gate.clear()
    async with routed(server, policy="worst_case") as fleet:
        turns = [asyncio.create_task(fleet.turn()) for _ in range(5)]
        await until(lambda: server.running == 2 and fleet.router.scheduler.waiting == 3)
        assert value((await fleet.client.get("/metrics")).text, "waiting") == 3
        server.gate.set()
        assert [t.status_code for t in await asyncio.gather(*turns)] == 5 * [200]
        assert server.peak == 2


async def test_two_requests_of_one_session_run_at_once() -> None:
    server = ScriptedVllm()
    server.gate.clear()
    async with routed(server) as fleet:
        turns = [asyncio.create_task(fleet.turn(session="s")) for _ in range(2)]
        await until(lambda: server.running == 2)
        server.gate.set()
        assert [t.status_code for t in await asyncio.gather(*turns)] == [200, 200]
        assert list(fleet.router.scheduler.state.sessions) == ["@s"]


async def test_sessions_end_on_request_or_when_they_are_idle() -> None:
    server = ScriptedVllm()
    async with routed(server) as fleet:
        await fleet.turn(session="a/b c")
        assert (await fleet.client.delete("/sessions/a/b%20c")).json() == {"ended": "a/b c"}
        assert fleet.router.scheduler.state.sessions == {}
        gone = await fleet.client.delete("/sessions/a")
        assert (gone.status_code, gone.json()["error"]["message"]) == (
            404,
            "there is no session 'a'",
        )
    async with routed(server, limits=RouterLimits(session_idle_s=0.01)) as fleet:
        await fleet.turn(session="a")
        await until(lambda: fleet.router.sessions == 0)
        assert fleet.router.scheduler.state.sessions == {}


async def test_a_client_that_leaves_cancels_its_request() -> None:
    server = ScriptedVllm()
    server.gate.clear()
    async with routed(server) as fleet:
        turn = asyncio.create_task(fleet.turn())
        await until(lambda: server.running == 1)
        turn.cancel()
        await until(lambda: server.cancelled == 1)
        await until(lambda: not fleet.router.scheduler.state.sessions)
        server.gate.set()


# --------------------------------------------------------------------------- failures


async def test_a_dead_server_is_skipped_until_it_answers() -> None:
    server, late = ScriptedVllm(), ScriptedVllm()
    async with routed(server, late) as fleet:
        await late.stop()
        await until(lambda: fleet.router.serving == (server.name,))
        health = await fleet.client.get("/health")
        assert health.status_code == 200
        states = health.json()["servers"]
        assert states[server.name] == "serves"
        assert "cannot connect" in states[late.name]
        await late.start()
        await until(lambda: len(fleet.router.serving) == 2)


@pytest.mark.parametrize("failure", ["breaks", "unhealthy"])
async def test_a_request_whose_server_dies_goes_to_another(failure: str) -> None:
    servers = [ScriptedVllm(), ScriptedVllm()]
    async with routed(*servers) as fleet:
        await fleet.turn(session="s")
        home = next(s for s in servers if s.turns)
        other = next(s for s in servers if s is not home)
        if failure == "breaks":
            home.breaks = "first"
        else:
            home.status, home.healthy = 500, False
        answer = await fleet.turn(session="s")
        assert answer.content == other.answer("/v1/completions")
        assert len(other.turns) == 1
        metrics = (await fleet.client.get("/metrics")).text
        assert value(metrics, "retried_total") == 1
        assert value(metrics, "servers_lost_total") >= 1
        assert fleet.router.scheduler.engine_of("@s") == other.name


async def test_a_silent_server_loses_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [ScriptedVllm(), ScriptedVllm()]
    async with routed(*servers) as fleet:
        await fleet.turn(session="s")
        home = next(s for s in servers if s.turns)
        other = next(s for s in servers if s is not home)
        home.silent = True
        monkeypatch.setattr(backend_module, "CONTROL_S", 0.05)
        answer = await fleet.turn(session="s")
        assert answer.content == other.answer("/v1/completions")


async def test_a_request_that_kills_servers_is_given_up() -> None:
    servers = [ScriptedVllm() for _ in range(4)]
    async with routed(*servers) as fleet:
        for server in servers:
            server.breaks = "first"
        answer = await fleet.turn()
        assert answer.status_code == 502
        error = answer.json()["error"]
        assert error["code"] == "engine"
        assert error["message"].startswith("3 servers failed before they answered, the last one")
        assert sum(len(server.turns) for server in servers) == 3


async def test_a_stream_that_breaks_ends_with_a_named_error() -> None:
    server = ScriptedVllm()
    server.breaks = "middle"
    async with routed(server) as fleet:
        answer = await fleet.turn("/v1/chat/completions", CHAT | {"stream": True})
        events = [line[6:] for line in answer.text.splitlines() if line]
        assert '"t0"' in events[0]
        error = json.loads(events[-1])["error"]
        assert error["code"] == "engine"
        assert "failed during its answer" in error["message"]


async def test_waits_end_with_a_named_failure() -> None:
    server = ScriptedVllm()
    async with routed(server, started=False, limits=RouterLimits(wait_s=0.05)) as fleet:
        answer = await fleet.turn()
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline"
        assert "no server took the request within 0.05 s (--wait-s): 0 of 1 serve" in answer.text
        assert (await fleet.client.get("/health")).status_code == 503
        models = await fleet.client.get("/v1/models")
        assert (models.status_code, models.json()["error"]["code"]) == (502, "engine")
    server = ScriptedVllm()
    server.gate.clear()
    async with routed(server, limits=RouterLimits(answer_s=0.05)) as fleet:
        answer = await fleet.turn()
        assert answer.status_code == 504
        assert "sent nothing for 0.05 s (--answer-s)" in answer.text


async def test_bad_requests_get_one_sentence() -> None:
    async with routed(ScriptedVllm()) as fleet:
        bad = await fleet.client.post("/v1/completions", content=b"{")
        assert bad.status_code == 400
        assert "/v1/completions: the body is not a valid request" in bad.text
        unknown = await fleet.client.post("/v1/embeddings", json={})
        assert unknown.status_code == 404
        assert "POST /v1/embeddings is not routed" in unknown.text


async def test_the_routers_key_is_required_and_stays_here() -> None:
    server = ScriptedVllm()
    async with routed(server, key="secret") as fleet:
        assert (await fleet.turn()).status_code == 401
        assert (await fleet.client.get("/health")).status_code == 200
        fleet.client.headers["authorization"] = "Bearer secret"
        assert (await fleet.turn()).status_code == 200
        assert "authorization" not in server.turns[0].headers


# --------------------------------------------------------------------------- the real client


async def test_the_openai_client_works_through_the_router() -> None:
    openai = import_module("openai")
    servers = [ScriptedVllm(), ScriptedVllm()]
    async with routed(*servers) as fleet:
        headers = {"x-session-id": "g/1"}
        async with openai.AsyncOpenAI(
            base_url=f"{fleet.url}/v1", api_key="k", default_headers=headers, max_retries=0
        ) as client:
            assert [m.id async for m in await client.models.list()] == ["m"]
            reply = await client.chat.completions.create(**CHAT)
            assert reply.usage.completion_tokens == 3
            stream = await client.chat.completions.create(**CHAT, stream=True)
            text = [event.choices[0].delta.content async for event in stream]
            assert text == ["t0", "t1", "t2"]
            assert sorted(len(server.turns) for server in servers) == [0, 2]
            for server in servers:
                server.breaks = "middle"
            stream = await client.chat.completions.create(**CHAT, stream=True)
            with pytest.raises(openai.APIError, match="failed during its answer"):
                _ = [event async for event in stream]
