"""What answers an evaluation: engines behind the scheduler, or an endpoint; opened and closed
together with the code environment, whatever happens in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.config import Recipe, SchedulerConfig, TemplateConfig
from rstar2.engine.base import Engine
from rstar2.errors import UserError
from rstar2.evaluate.sweep import Answerer, EndpointAnswerer, FleetAnswerer
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.groups import GroupRunner, together
from rstar2.rollout.scheduler import Scheduler
from rstar2.types import WeightVersion

if TYPE_CHECKING:
    from rstar2.agent.template import Template

EDGE = 1 << 20
"""Bytes at each end of a weight file that its fingerprint covers, besides its size."""


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """An OpenAI-compatible endpoint."""

    url: str
    model: str | None = None
    api_key: str | None = None


def fingerprint(directory: Path) -> str:
    """What tells two checkpoints apart, without reading them whole."""
    found = hashlib.sha256((directory / "config.json").read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        found.update(f"{file.name} {size}".encode())
        with file.open("rb") as data:
            found.update(data.read(EDGE))
            data.seek(max(0, size - EDGE))
            found.update(data.read(EDGE))
    return found.hexdigest()[:16]


def load_template(directory: Path, asked: TemplateConfig | None) -> Template:
    """The template of a checkpoint: as asked, else as it was trained, else the paper's."""
    from transformers import AutoTokenizer  # heavy, like torch: only when it is needed

    from rstar2.agent.template import Template, settings_of

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{directory}: no tokenizer found there: {error}") from error
    return Template(tokenizer, asked or settings_of(tokenizer) or TemplateConfig())


@asynccontextmanager
async def open_fleet(
    recipe: Recipe, scheduler: SchedulerConfig, directory: Path, template: Template
) -> AsyncIterator[Answerer]:
    """Engines with the weights of a directory, behind the scheduler."""
    from rstar2.engine.make import make_engines

    engines = make_engines(recipe, directory)

    async def recover(engine: Engine) -> WeightVersion:
        await engine.start()
        return (await engine.load()).version

    async with AsyncExitStack() as stack:
        fleet = Fleet(engines, Scheduler(scheduler), recover=recover)
        stack.push_async_callback(fleet.close)
        tools = await CodeEnvClient.start(recipe.codeenv)
        stack.push_async_callback(tools.close)
        await together(engine.start() for engine in engines)
        loads = await together(engine.load() for engine in engines)
        fleet.require(loads[0].version)
        for engine, load in zip(engines, loads, strict=True):
            fleet.join(engine.name, load.version)
        yield FleetAnswerer(GroupRunner(fleet, tools, tools, template, recipe.agent))


@asynccontextmanager
async def open_endpoint(
    recipe: Recipe, endpoint: ChatEndpoint, template: TemplateConfig
) -> AsyncIterator[Answerer]:
    """An endpoint that speaks text."""
    from rstar2.engine.openai import OpenAIChat

    async with AsyncExitStack() as stack:
        chat = OpenAIChat(endpoint.url, model=endpoint.model, api_key=endpoint.api_key)
        model = await stack.enter_async_context(chat)
        tools = await CodeEnvClient.start(recipe.codeenv)
        stack.push_async_callback(tools.close)
        yield EndpointAnswerer(model, tools, tools, recipe.agent, template)
