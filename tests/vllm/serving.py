"""The engines of these tests, and helpers that wait for their state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rstar2.engine.vllm import VllmEngine
from rstar2.engine.vllm_server import ServerSettings
from rstar2.types import EngineLoad

KV_TOKENS = 4096
MAX_LENGTH = 512
SEQUENCES = 32


def engine_of(name: str, model: Path, *, packed_linears: bool = False) -> VllmEngine:
    """An engine with its own server, not started."""
    settings = ServerSettings(
        model=str(model),
        kv_tokens=KV_TOKENS,
        max_sequences=SEQUENCES,
        max_length=MAX_LENGTH,
        packed_linears=packed_linears,
    )
    return VllmEngine(name, server=settings)


async def until(
    engine: VllmEngine,
    condition: Callable[[EngineLoad], bool],
    unless: asyncio.Future[Any] | None = None,
) -> EngineLoad:
    """Wait until the engine's load meets a condition or `unless` is done; returns that load."""
    async with asyncio.timeout(180):
        while True:
            load = await engine.load()
            if condition(load) or (unless is not None and unless.done()):
                return load
            await asyncio.sleep(0.05)


async def eventually(condition: Callable[[], bool], deadline_s: float) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
