"""What answers the problems of an evaluation: engines behind the scheduler, or a chat endpoint.

`open_fleet` and `open_endpoint` start an answerer together with the code environment, and close
both when the block ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rstar2.agent.chat_loop import ChatLoop, ChatModel, opening_messages
from rstar2.agent.loop import RolloutSpec, ToolRunner
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.config import AgentConfig, Recipe, SchedulerConfig, TemplateConfig
from rstar2.engine.base import Engine
from rstar2.engine.openai import ChatReply, OnText
from rstar2.errors import UserError
from rstar2.reward.grade import Verifier, grade
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.groups import GRADE_DEADLINE_S, GroupRunner, together
from rstar2.rollout.scheduler import Scheduler
from rstar2.types import Finish, Message, Problem, Trajectory, WeightVersion

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
        return trajectory, len(trajectory.completion_ids)


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
    """Answers with the same parser, tools and grader over a chat endpoint.

    `spec.max_length` bounds the completion here: the endpoint's tokenizer is not ours, so the
    length of its prompt is known only afterwards.
    """

    model: ChatModel
    tools: ToolRunner
    verifier: Verifier
    agent: AgentConfig
    template: TemplateConfig = field(default_factory=TemplateConfig)

    async def answer(self, task: Task, spec: RolloutSpec) -> tuple[Trajectory, int]:
        for attempt in range(1, self.agent.retries + 2):
            model = MeteredChat(self.model, spec.max_length)
            chat_loop = ChatLoop(
                model,
                self.tools,
                self.agent,
                spec.sampling,
                opening_messages(task.problem, self.template),
                spec.max_length,
                spec.max_turns,
            )
            trajectory = await chat_loop.run(
                task.problem,
                id=f"{task.group_id}/{task.sample}~{attempt}",
                group_id=task.group_id,
                seed=task.seed,
            )
            if trajectory.failure is None:
                trajectory = await grade(trajectory, task.problem, self.verifier, GRADE_DEADLINE_S)
            if trajectory.failure is None:
                break
        return replace(trajectory, attempts=attempt), model.used


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


def load_template(directory: Path, asked: TemplateConfig | None) -> Template:
    """The template of a checkpoint: as requested, else as trained, else the paper's."""
    from transformers import AutoTokenizer  # slow to import: only on use

    from rstar2.agent.template import Template, settings_of

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{directory}: no tokenizer there: {error}") from error
    return Template(tokenizer, asked or settings_of(tokenizer) or TemplateConfig())


@asynccontextmanager
async def open_fleet(
    recipe: Recipe, scheduler: SchedulerConfig, directory: Path, template: Template
) -> AsyncIterator[Answerer]:
    """Start engines with the weights of a directory, behind the scheduler."""
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
    """Connect to a chat endpoint."""
    from rstar2.engine.openai import OpenAIChat

    async with AsyncExitStack() as stack:
        chat = OpenAIChat(endpoint.url, model=endpoint.model, api_key=endpoint.api_key)
        model = await stack.enter_async_context(chat)
        tools = await CodeEnvClient.start(recipe.codeenv)
        stack.push_async_callback(tools.close)
        yield EndpointAnswerer(model, tools, tools, recipe.agent, template)
