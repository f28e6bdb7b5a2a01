"""What answers the problems of an evaluation: engines behind the scheduler, or a chat endpoint.

`open_fleet` and `open_endpoint` start an answerer together with the code environment, and close
both when the block ends.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rstar2.agent.chat_loop import ChatLoop, ChatModel, opening_messages
from rstar2.agent.episodes import EpisodeError, conclude, open_episode
from rstar2.agent.loop import AgentLoop, RolloutSpec
from rstar2.config import (
    AgentConfig,
    EnvironmentConfig,
    Recipe,
    SchedulerConfig,
    TemplateConfig,
)
from rstar2.descriptors import raise_descriptor_limit
from rstar2.engine.base import Engine
from rstar2.engine.openai import ChatReply, OnText
from rstar2.environments.base import EnvironmentProtocol, SandboxClient
from rstar2.environments.load import load_environment
from rstar2.environments.open import open_environment
from rstar2.malloc import rare_collections
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.groups import GroupRunner
from rstar2.rollout.scheduler import Scheduler
from rstar2.rollout.starting import start_engines
from rstar2.rollout.watchdog import Watchdog
from rstar2.tasks import cancel_all, together
from rstar2.types import Finish, Message, Problem, StopReason, Trajectory, WeightVersion

if TYPE_CHECKING:
    from rstar2.agent.template import Template

EDGE = 1 << 20
"""Bytes at each end of a weight file that its fingerprint covers, in addition to its size."""


@dataclass(frozen=True, slots=True)
class Task:
    """One answer to generate."""

    benchmark: str
    problem: Problem
    group_id: str
    sample: int
    seed: int


class Answerer(Protocol):
    """Generates and grades one answer; returns it with the number of completion tokens."""

    async def answer(self, task: Task, spec: RolloutSpec) -> tuple[Trajectory, int]: ...


@dataclass(frozen=True, slots=True)
class FleetAnswerer:
    """Answers with the agent loop, fleet and grader of training."""

    runner: GroupRunner

    async def answer(self, task: Task, spec: RolloutSpec) -> tuple[Trajectory, int]:
        trajectory = await self.runner.rollout(
            task.problem,
            group_id=task.group_id,
            index=task.sample,
            seed=task.seed,
            spec=spec,
        )
        return trajectory, trajectory.completion_tokens


# --------------------------------------------------------------------------- endpoints


@dataclass(slots=True)
class MeteredChat:
    """A chat model with one token budget for all turns of a rollout, tool responses included.

    The server counts the tokens: the growth of the prompt since the first turn is what was added.
    If a server reports no counts, only the limit of each turn applies.
    """

    model: ChatModel
    budget: int
    first_prompt: int = 0
    used: int = 0

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | None,
        deadline_s: float,
        on_text: OnText | None,
    ) -> ChatReply:
        """Generate one turn within the remaining budget."""
        left = self.budget - self.used
        if left <= 0:
            return ChatReply("", Finish.LENGTH)
        reply = await self.model.complete(
            messages,
            max_tokens=min(max_tokens, left),
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            deadline_s=deadline_s,
            on_text=on_text,
        )
        self.first_prompt = self.first_prompt or reply.prompt_tokens
        counted = reply.prompt_tokens - self.first_prompt + reply.completion_tokens
        self.used = max(self.used, counted)
        return reply


@dataclass(frozen=True, slots=True)
class EndpointAnswerer:
    """Answers with the same parser and environment over a chat endpoint.

    `spec.max_length` bounds the completion here: the endpoint's tokenizer is not ours, so the
    length of its prompt is known only afterwards.
    """

    model: ChatModel
    environment: EnvironmentProtocol
    sandbox: SandboxClient | None
    agent: AgentConfig
    template: TemplateConfig = field(default_factory=TemplateConfig)

    async def answer(self, task: Task, spec: RolloutSpec) -> tuple[Trajectory, int]:
        for attempt in range(1, self.agent.retries + 2):
            model = MeteredChat(self.model, spec.max_length)
            trajectory = await self._rollout(task, spec, model, attempt)
            if trajectory.failure is None:
                break
        return replace(trajectory, attempts=attempt), model.used

    async def _rollout(
        self, task: Task, spec: RolloutSpec, model: MeteredChat, attempt: int
    ) -> Trajectory:
        id = f"{task.group_id}/{task.sample}~{attempt}"
        opening = open_episode(
            self.environment,
            task.problem,
            seed=task.seed,
            sandbox=self.sandbox,
            deadline_s=self.agent.tool_deadline_s,
        )
        try:
            async with opening as episode:
                chat_loop = ChatLoop(
                    model,
                    self.agent,
                    spec.sampling,
                    opening_messages(episode, self.template),
                    spec.max_length,
                    spec.max_turns,
                )
                trajectory = await chat_loop.run(
                    episode, task.problem, id=id, group_id=task.group_id, seed=task.seed
                )
                return await conclude(self.environment, episode, trajectory, self.agent)
        except EpisodeError as error:
            stop = StopReason.ENVIRONMENT_FAILED
            return Trajectory(
                id, task.problem.id, task.group_id, task.seed, (), (), stop, failure=error.failure
            )


# --------------------------------------------------------------------------- opening


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """An OpenAI-compatible endpoint."""

    url: str
    model: str | None = None
    api_key: str | None = None


def fingerprint(directory: Path) -> str:
    """Identify the weights of a checkpoint without reading them completely."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as data:
            digest.update(data.read(EDGE))
            data.seek(max(0, size - EDGE))
            digest.update(data.read(EDGE))
    return digest.hexdigest()[:16]


def load_task(
    directory: Path,
    asked: TemplateConfig | None,
    environment: EnvironmentConfig | EnvironmentProtocol,
) -> tuple[Template, EnvironmentProtocol]:
    """The template of a checkpoint, with the prefill of an environment, and that environment.

    The template is as requested, else as trained, else the paper's.
    """
    from rstar2.agent.template import Template, settings_of
    from rstar2.agent.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(directory)
    config = asked or settings_of(tokenizer) or TemplateConfig()
    if isinstance(environment, EnvironmentConfig):
        environment = load_environment(environment, config)
    return Template(tokenizer, config, environment.prefill), environment


@asynccontextmanager
async def open_fleet(
    recipe: Recipe,
    scheduler: SchedulerConfig,
    directory: Path,
    template: Template,
    environment: EnvironmentProtocol,
) -> AsyncIterator[FleetAnswerer]:
    """Start engines with the weights of a directory, behind the scheduler."""
    from rstar2.engine.make import make_engines

    raise_descriptor_limit()
    engines = make_engines(recipe, directory)
    late: dict[str, asyncio.Task[None]] = {}

    async def recover(engine: Engine) -> WeightVersion:
        start = late.pop(engine.name, None)
        await (engine.start() if start is None else start)
        return (await engine.load()).version

    async with AsyncExitStack() as stack:
        fleet = Fleet(engines, Scheduler(scheduler), recover=recover)
        stack.push_async_callback(fleet.close)
        tools = await stack.enter_async_context(open_environment(environment, recipe.codeenv))
        started = await start_engines(engines, recipe.engine.hang_s)
        late.update(started.late)
        for engine, load in zip(
            started.running, await together(e.load() for e in started.running), strict=True
        ):
            fleet.require(load.version)
            fleet.join(engine.name, load.version)
        fleet.restart_missing()
        probe = template.prompt_ids([Message("user", "What is 6 times 7?")])
        dog = asyncio.ensure_future(Watchdog(fleet, probe, hang_s=recipe.engine.hang_s).run())
        stack.push_async_callback(cancel_all, [dog])
        loop = AgentLoop(environment, fleet, tools, template, recipe.agent)
        with rare_collections():
            yield FleetAnswerer(GroupRunner(loop))


@asynccontextmanager
async def open_endpoint(
    recipe: Recipe, endpoint: ChatEndpoint, template: TemplateConfig
) -> AsyncIterator[Answerer]:
    """Connect to a chat endpoint."""
    from rstar2.engine.openai import OpenAIChat

    async with AsyncExitStack() as stack:
        chat = OpenAIChat(endpoint.url, model=endpoint.model, api_key=endpoint.api_key)
        model = await stack.enter_async_context(chat)
        environment = load_environment(recipe.environment, template)
        tools = await stack.enter_async_context(open_environment(environment, recipe.codeenv))
        yield EndpointAnswerer(model, environment, tools, recipe.agent, template)
