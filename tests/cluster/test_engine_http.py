"""A real engine behind HTTP: results and errors equal those of the engine itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn

from rstar2.cluster.engine_http import EngineApp, EngineClient
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.errors import DeadlineError, EngineError, UserError
from rstar2.learner.tiny import make_tiny
from rstar2.types import Sampling

PROMPT = tuple(range(5, 25))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)


async def until_load(engine: EmbeddedEngine, *, running: int, waiting: int = 0) -> None:
    """Wait until this many requests run and wait."""
    async with asyncio.timeout(60):
        while True:
            load = await engine.load()
            if (load.running, load.waiting) == (running, waiting):
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[tuple[EmbeddedEngine, EngineClient, str]]:
    engine = EmbeddedEngine(
        model, kv_tokens=4096, max_sequences=8, max_length=256, process=False, name="one"
    )
    await engine.start()
    config = uvicorn.Config(
        EngineApp(engine, "secret"), host="127.0.0.1", port=0, log_level="error", lifespan="off"
    )
    server = uvicorn.Server(config)
    task = asyncio.ensure_future(server.serve())
    await until(lambda: server.started)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    client = EngineClient("one", url, "secret")
    try:
        yield engine, client, url
    finally:
        await client.close()
        server.should_exit = True
        await task
        await engine.close()


async def test_generation_over_http_equals_generation_here(tiny_dir: Path) -> None:
    async with served(tiny_dir) as (engine, client, _):
        sampling = Sampling(max_new_tokens=24, seed=7)
        there = await client.generate(PROMPT, sampling, session="a/1", deadline_s=60)
        await client.release("a/1")
        here = await engine.generate(PROMPT, sampling, session="a/2", deadline_s=60)
        assert there.token_ids == here.token_ids
        assert there.logprobs == here.logprobs
        assert there.versions == ((0, 24),)
        assert await client.score(PROMPT, 60) == pytest.approx(await engine.score(PROMPT))
        assert await client.capacity() == engine.capacity()
        assert (await client.load()).version == 0


async def test_weights_arrive_and_are_held_until_resume(tiny_dir: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "other", 1)
    async with served(tiny_dir) as (engine, client, _):
        before = await client.score(PROMPT, 60)
        await client.weights(3, tmp_path / "other", hold=True)
        assert (await client.load()).version == 3
        assert await client.score(PROMPT, 60) != before
        generation = asyncio.ensure_future(
            client.generate(PROMPT, Sampling(4), session="a/1", deadline_s=60)
        )
        await until_load(engine, running=0, waiting=1)
        await client.score(PROMPT, 60)  # the worker handled another message and did not step
        await until_load(engine, running=0, waiting=1)
        assert not generation.done(), "nothing is sampled before the weights are verified"
        await client.resume()
        assert (await generation).versions == ((3, 4),)


async def test_errors_keep_their_names(tiny_dir: Path) -> None:
    async with served(tiny_dir) as (engine, client, url):
        with pytest.raises(UserError):
            await client.generate((), Sampling(4), session="a/1", deadline_s=60)
        with pytest.raises(DeadlineError):
            await client.generate(PROMPT, Sampling(200), session="a/2", deadline_s=0.0001)
        stranger = EngineClient("one", url, "guess")
        with pytest.raises(UserError, match="token"):
            await stranger.load()
        await stranger.close()
        await engine.close()
        with pytest.raises(EngineError, match="not started"):
            await client.load()
    with pytest.raises(EngineError):
        await client.load()


async def test_a_client_that_disconnects_frees_the_engine(tiny_dir: Path) -> None:
    async with served(tiny_dir) as (engine, client, _):
        generation = asyncio.ensure_future(
            client.generate(PROMPT, Sampling(230), session="a/1", deadline_s=60)
        )
        await until_load(engine, running=1)
        generation.cancel()
        await asyncio.gather(generation, return_exceptions=True)
        await until_load(engine, running=0)
