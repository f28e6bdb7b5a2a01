"""`rstar2 route` in front of two real vLLM servers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from rstar2.engine.vllm import VllmEngine
from rstar2.types import Sampling
from tests.vllm.serving import SEQUENCES

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

IDS = list(range(30, 110))
NEW = 24
CHAT = [{"role": "user", "content": "What is 12 + 30?"}]


class Relay:
    """A TCP port in front of a server that listens on a Unix socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections and break those that are open, as a dead server does."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, ahead = await asyncio.open_unix_connection(str(self.path))
        self._open |= {writer, ahead}
        try:
            await asyncio.gather(_copy(reader, ahead), _copy(behind, writer))
        finally:
            self._open -= {writer, ahead}


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    target.close()


@dataclass
class Routed:
    """A running `rstar2 route`, its client, and the servers behind it."""

    client: httpx.AsyncClient
    engines: tuple[VllmEngine, VllmEngine]
    relays: tuple[Relay, Relay]
    model: str

    async def post(self, path: str, session: str = "", **body: Any) -> dict[str, Any]:
        headers = {"x-session-id": session} if session else {}
        answer = await self.client.post(path, json={"model": self.model} | body, headers=headers)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    async def completion(self, prompt: list[int], session: str = "") -> dict[str, Any]:
        return await self.post(
            "/v1/completions",
            session,
            prompt=prompt,
            max_tokens=NEW,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
        )

    async def direct(self) -> list[list[int]]:
        """What the servers themselves answer to IDS."""
        sampling = Sampling(max_new_tokens=NEW, temperature=0.0)
        made = [
            await engine.client.generate(IDS, sampling, salt="direct", deadline_s=120.0)
            for engine in self.engines
        ]
        return [list(generation.token_ids) for generation in made]

    async def turns(self) -> list[int]:
        """Requests that each server has answered so far."""
        metrics = (await self.client.get("/metrics")).text
        start = "rstar2_router_turns_total"
        return [
            int(metrics.partition(f'{start}{{server="{relay.name}"}} ')[2].split()[0])
            for relay in self.relays
        ]

    async def until_serving(self, count: int) -> None:
        async with asyncio.timeout(120):
            while True:
                states = (await self.client.get("/health")).json()["servers"].values()
                if list(states).count("serves") == count:
                    return
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def routed(engines: tuple[VllmEngine, ...], stage: Path) -> AsyncIterator[Routed]:
    """The command as a user starts it."""
    used = engines[0], engines[1]
    relays: list[Relay] = []
    for engine in used:
        assert engine._server is not None
        relays.append(Relay(engine._server.socket))
        await relays[-1].start()
    command = [sys.executable, "-m", "rstar2", "route", "--port", "0"]
    command += ["--max-sequences", str(SEQUENCES), *(f"http://{relay.name}" for relay in relays)]
    router = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=os.environ
    )
    try:
        assert router.stdout is not None
        url = (await asyncio.wait_for(router.stdout.readline(), 120)).decode().strip()
        async with httpx.AsyncClient(base_url=url, timeout=180) as client:
            fleet = Routed(client, used, (relays[0], relays[1]), str(stage))
            await fleet.until_serving(2)
            yield fleet
    finally:
        router.terminate()
        await asyncio.wait_for(router.wait(), 60)
        for relay in relays:
            await relay.stop()


async def test_completions_are_those_of_the_servers(routed: Routed) -> None:
    answer = await routed.completion(IDS)
    assert answer["choices"][0]["token_ids"] in await routed.direct()
    assert answer["usage"]["completion_tokens"] == NEW


async def test_token_in_token_out_requests_are_those_of_the_servers(routed: Routed) -> None:
    sampling = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    answer = await routed.post("/inference/v1/generate", token_ids=IDS, sampling_params=sampling)
    assert answer["choices"][0]["token_ids"] in await routed.direct()


async def test_a_chat_is_answered_whole_and_as_a_stream(routed: Routed) -> None:
    asked = {"messages": CHAT, "max_tokens": NEW, "temperature": 0}
    whole = await routed.post("/v1/chat/completions", "chat", **asked)
    text = whole["choices"][0]["message"]["content"]
    assert text
    body = {"model": routed.model, "stream": True} | asked
    headers = {"x-session-id": "chat"}  # the same server, which may have other weights
    parts, last = [], ""
    async with routed.client.stream(
        "POST", "/v1/chat/completions", json=body, headers=headers
    ) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            last = line.removeprefix("data: ") or last
            if line and last != "[DONE]":
                parts += [c["delta"].get("content") or "" for c in json.loads(last)["choices"]]
    assert ("".join(parts), last) == (text, "[DONE]")


async def test_the_turns_of_a_session_reuse_their_prefix(routed: Routed) -> None:
    before, prompt = await routed.turns(), [*IDS, 7]
    for turn in range(3):
        answer = await routed.completion(prompt, "problem/rollout")
        cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        assert (cached >= len(prompt) // 2) == (turn > 0), (turn, cached, len(prompt))
        prompt += [*answer["choices"][0]["token_ids"], 40, 41, 42]
    after = await routed.turns()
    assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 3]
    assert (await routed.client.delete("/sessions/problem/rollout")).status_code == 200
    assert (await routed.client.delete("/sessions/problem/rollout")).status_code == 404


async def test_many_sessions_are_divided_between_the_servers(routed: Routed) -> None:
    before = await routed.turns()
    answers = await asyncio.gather(
        *(routed.completion([10 + i, *IDS], f"many/{i}") for i in range(2 * SEQUENCES))
    )
    assert all(len(answer["choices"][0]["token_ids"]) == NEW for answer in answers)
    after = await routed.turns()
    assert min(b - a for a, b in zip(before, after, strict=True)) > 0


async def test_a_lost_server_serves_again_once_it_answers(routed: Routed) -> None:
    await routed.relays[0].stop()
    answers = await asyncio.gather(*(routed.completion([10 + i, *IDS]) for i in range(4)))
    assert all(len(answer["choices"][0]["token_ids"]) == NEW for answer in answers)
    await routed.until_serving(1)
    await routed.relays[0].start()
    await routed.until_serving(2)
