"""Environments whose agent is a program: rollouts come from its requests, not from the agent loop.

    env = ProgramEnvironment(
        program=my_agent,                    # async def my_agent(base_url, api_key, problem)
        problems=make_problems,              # file, list, or callable(split, seed)
        reward=lambda episode: float(episode.result == episode.problem.answer),
    )

`rollout.groups.GroupRunner` asks the environment for whole rollouts (`rollout`). The endpoint's
server starts with the first one and ends with the environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rstar2.agent.episodes import failure_of
from rstar2.agent.loop import RolloutSpec
from rstar2.agent.template import Template
from rstar2.config import AgentConfig
from rstar2.endpoint.program import Program, ProgramReward, check_program, run_program
from rstar2.endpoint.server import EndpointServer, new_secret
from rstar2.engine.base import Generator
from rstar2.environments.base import EpisodeProtocol, SandboxClient
from rstar2.environments.problems import ProblemList, ProblemSource
from rstar2.errors import InfrastructureError, UserError
from rstar2.types import Conversation, Problem, Split, StopReason, Trajectory

Demonstrate = Callable[[int, int], Iterator[Conversation]]
"""(count, seed) -> conversations for SFT, rendered as the program's requests are."""

PROGRAM_DEADLINE_S = 600.0


class ProgramEnvironment:
    """Problems, a program that works on one of them, and what its result is worth.

    `program` is an async function of (base_url, api_key, problem), or a command line as a list of
    words. Without `reward` the program must return a number.
    """

    needs_sandbox = False
    prefill = ""
    reuses_urls = False
    """Give the URL of a rollout without a failure to a later rollout: for programs that keep a
    client per URL and leave no request behind. After a failure the program may still be running,
    so its URL is never used again."""

    def __init__(
        self,
        program: Program | Sequence[str],
        problems: ProblemSource,
        *,
        reward: ProgramReward | None = None,
        demonstrations: Demonstrate | None = None,
        deadline_s: float = PROGRAM_DEADLINE_S,
        name: str = "program",
    ) -> None:
        self.name = name
        self.program: Program = check_program(program)
        self.reward = reward
        self.deadline_s = deadline_s
        self.made_from: Mapping[str, Any] = {
            "program": self.program,
            "reward": reward,
            "demonstrations": demonstrations,
        }
        """For the record of a run (`environments.identity`)."""
        self._problems = ProblemList(problems, name)
        self._demonstrations = demonstrations
        self._free_secrets: list[str] = []
        self._server: EndpointServer | None = None
        self._starting = asyncio.Lock()

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """At most `count` problems of a split."""
        return self._problems.take(split, count, seed)

    def demonstrations(self, count: int, seed: int) -> Iterator[Conversation]:
        """Conversations for SFT, if there are any."""
        return iter(()) if self._demonstrations is None else self._demonstrations(count, seed)

    async def open(
        self, problem: Problem, *, seed: int, sandbox: SandboxClient | None
    ) -> EpisodeProtocol:
        """A program takes its turns itself, so there is no episode to open."""
        raise UserError(
            f"environment {self.name}: its agent is a program, which cannot be run turn by turn; "
            "train or evaluate it"
        )

    def format_penalty(self, trajectory: Trajectory) -> float:
        """A program has its own format."""
        return 0.0

    async def rollout(
        self,
        problem: Problem,
        *,
        id: str,
        group_id: str,
        seed: int,
        generator: Generator,
        template: Template,
        agent: AgentConfig,
        spec: RolloutSpec,
    ) -> Trajectory:
        """One rollout, with its reward or a failure."""
        try:
            server = await self._started()
        except (InfrastructureError, OSError) as error:
            stop, failure = StopReason.ENVIRONMENT_FAILED, failure_of(error)
            return Trajectory(id, problem.id, group_id, seed, (), (), stop, failure=failure)
        secret = self._free_secrets.pop() if self._free_secrets else new_secret()
        trajectory = await run_program(
            self.program,
            problem,
            id=id,
            group_id=group_id,
            seed=seed,
            server=server,
            generator=generator,
            template=template,
            spec=spec,
            generate_deadline_s=agent.generate_deadline_s,
            program_deadline_s=self.deadline_s,
            reward_deadline_s=agent.reward_deadline_s,
            reward=self.reward,
            secret=secret,
        )
        if self.reuses_urls and trajectory.failure is None:
            self._free_secrets.append(secret)
        return trajectory

    async def _started(self) -> EndpointServer:
        async with self._starting:
            if self._server is None:
                server = EndpointServer()
                await server.start()
                self._server = server
            return self._server

    async def close(self) -> None:
        """End the endpoint; a later rollout starts it again."""
        server, self._server = self._server, None
        self._starting = asyncio.Lock()  # a lock belongs to one event loop
        if server is not None:
            await server.close()
