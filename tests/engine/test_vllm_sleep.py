"""Sleep and wake of a vLLM engine, against a server that records what it is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rstar2.config import Recipe, load_recipe
from rstar2.engine.base import WeightUpdate
from rstar2.engine.make import GpuDevice, server_settings
from rstar2.engine.vllm import VllmEngine
from rstar2.engine.vllm_client import VllmClient
from rstar2.engine.vllm_server import ServerSettings, arguments_of
from rstar2.errors import EngineError
from rstar2.types import Sampling

SETTINGS = ServerSettings("m", kv_tokens=None, max_sequences=4, max_length=64, sleep_mode=True)
GENERATED = {
    "choices": [
        {
            "token_ids": [5],
            "finish_reason": "stop",
            "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]},
            "weight_versions": [{"version": "1", "start": 0, "end": 1}],
        }
    ]
}


class RecordingServer:
    """Answers every request as vLLM would, and keeps the order of paths."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.broken = ""
        """Path that is answered with 500."""
        self.url = ""
        self._server: asyncio.Server | None = None
        self._ended = asyncio.Event()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        assert self._server is not None
        await self._ended.wait()
        self._server.close()

    def unused(self) -> None:
        """Nobody will connect."""
        self._ended.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            path = head.split()[1].decode()
            length = 0
            while line := (await reader.readline()).lower().strip():
                if line.startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            await reader.readexactly(length)
            self.calls.append(path)
            where = urlsplit(path).path
            body = json.dumps(GENERATED if "generate" in where else {"success": True}).encode()
            status = b"500 broken" if where == self.broken else b"200 OK"
            writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
            await writer.drain()
        writer.close()
        self._ended.set()


@pytest.fixture
async def server() -> AsyncIterator[RecordingServer]:
    made = RecordingServer()
    await made.start()
    yield made
    await made.close()


def connected(server: RecordingServer, settings: ServerSettings = SETTINGS) -> VllmEngine:
    """An engine as after `start`, whose server is the recording one."""
    engine = VllmEngine("one", server=settings)
    engine._client = VllmClient("one", url=server.url)
    engine._open.set()
    return engine


async def test_a_sleeping_engine_answers_after_it_was_woken(server: RecordingServer) -> None:
    engine = connected(server)
    await engine.update_weights(WeightUpdate(1, path=Path("/w")))
    server.calls.clear()
    await engine.sleep()
    await engine.sleep()
    assert server.calls == ["/sleep?level=1&mode=abort"]
    waiting = asyncio.ensure_future(
        engine.generate((1, 2), Sampling(4), session="s", deadline_s=60)
    )
    await asyncio.sleep(0)
    await engine.wake()
    await engine.wake()
    made = await waiting
    assert made.token_ids == (5,)
    assert server.calls == [
        "/sleep?level=1&mode=abort",
        "/wake_up",
        "/reset_prefix_cache?reset_running_requests=true",
        "/inference/v1/generate",
    ]
    await engine.client.close()


async def test_an_engine_without_sleep_mode_is_left_alone(server: RecordingServer) -> None:
    engine = connected(server, replace(SETTINGS, sleep_mode=False))
    await engine.sleep()
    await engine.wake()
    assert server.calls == []
    server.unused()
    await engine.client.close()


@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
async def test_a_server_that_cannot_is_an_engine_error(server: RecordingServer, path: str) -> None:
    engine = connected(server)
    server.broken = path

    async def sleep_and_wake() -> None:
        await engine.sleep()
        await engine.wake()

    with pytest.raises(EngineError, match=path):
        await sleep_and_wake()
    await engine.client.close()


def sleeping() -> Recipe:
    return load_recipe("tiny-vllm", ["engine.sleep=true"]).recipe


def test_servers_beside_the_learner_can_sleep() -> None:
    gpus = [GpuDevice("0", 24.0)]
    beside = server_settings(sleeping(), "/m", 0, gpus, lambda memory_gb: 0.5)
    assert "--enable-sleep-mode" in arguments_of(beside, Path("/s"))
    alone = server_settings(sleeping(), "/m", 0, gpus)
    assert "--enable-sleep-mode" not in arguments_of(alone, Path("/s"))
    on_cpu = server_settings(sleeping(), "/m", 0, (), lambda memory_gb: 0.5)
    assert "--enable-sleep-mode" not in arguments_of(on_cpu, Path("/s"))
