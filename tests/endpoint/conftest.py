"""A tiny model with random weights behind a real embedded engine and a real HTTP endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rstar2.agent.template import Template
from rstar2.agent.tokenizer import load_tokenizer
from rstar2.config import TemplateConfig
from rstar2.endpoint.server import EndpointServer
from rstar2.engine.embedded import EmbeddedEngine


@pytest.fixture(scope="session")
def template(tiny_dir: Path) -> Template:
    tokenizer = load_tokenizer(tiny_dir)
    return Template(tokenizer, TemplateConfig(system="none", instruction="none"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(tiny_dir: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(tiny_dir, kv_tokens=16384, max_sequences=16, max_length=512)
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server() -> AsyncIterator[EndpointServer]:
    async with EndpointServer() as server:
        yield server
