"""A rollout whose agent is a program: it gets a base URL, and the tokens come from its requests.

    program(base_url, api_key, problem) -> result
    Command([...])                       the same for a command line: see its docstring

How a rollout ends, in the order of the checks:

| event                                              | StopReason         | reward              |
|----------------------------------------------------|--------------------|---------------------|
| an engine failed                                   | ENGINE_FAILED      | none: a Failure     |
| the program did not end within its deadline        | ENVIRONMENT_FAILED | none: a Failure     |
| the program raised, and a limit had been reached   | MAX_LENGTH, _TURNS | 0                   |
| the program raised                                 | ENVIRONMENT_FAILED | none: a Failure     |
| the program never called the model                 | ENVIRONMENT_FAILED | none: a Failure     |
| the program returned                               | ANSWERED, or limit | `reward` or result  |

A program that fails because of what the model wrote should return a low reward: an exception counts
as a fault of the program and drops the rollout.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rstar2.agent.loop import RolloutSpec
from rstar2.agent.template import Template
from rstar2.child import Child
from rstar2.endpoint.server import MODEL, EndpointServer, RolloutEndpoint
from rstar2.engine.base import Generator
from rstar2.errors import InfrastructureError, RstarError, UserError
from rstar2.types import Failure, Problem, Reward, StopReason, TokenSegment, Trajectory, encode

Program = Callable[[str, str, Problem], Awaitable[Any]]
"""`await program(base_url, api_key, problem)`: one rollout of an agent that knows OpenAI's API."""

GRACE_S = 5.0
REWARD_DEADLINE_S = 60.0


class ProgramError(RstarError):
    """An agent program failed: the rollout is dropped and counted."""


@dataclass(frozen=True, slots=True)
class ProgramEpisode:
    """A finished program, for its reward."""

    problem: Problem
    result: Any
    """What the program returned."""
    trajectory: Trajectory


ProgramReward = Callable[[ProgramEpisode], Any]
"""Returns a finite number, or an awaitable of one."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line as a program.

    It reads the problem as one line of JSON from stdin and finds the endpoint in the environment
    variables OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. Its result is the last line that it
    prints, as JSON if it is valid JSON, else as text. An exit code other than 0 is a failure.
    """

    arguments: Sequence[str]
    directory: Path | None = None

    async def __call__(self, base_url: str, api_key: str, problem: Problem) -> Any:
        with tempfile.TemporaryDirectory(prefix="rstar2-program-") as scratch:
            child = Child(
                f"program {self.arguments[0]}",
                self.arguments,
                parent_death_signal=signal.SIGKILL,
                grace_s=GRACE_S,
                environment={
                    **os.environ,
                    "OPENAI_BASE_URL": base_url,
                    "OPENAI_API_KEY": api_key,
                    "OPENAI_MODEL": MODEL,
                },
                directory=self.directory,
                stdin=encode(problem) + b"\n",
                reads_line=True,
                log=Path(scratch) / "stderr",
            )
            try:
                last = b""
                while line := await child.read_line():
                    last = line.strip() or last
                if await child.wait() != 0:
                    raise ProgramError(child.post_mortem())
            finally:
                await child.stop()
        text = last.decode("utf-8", "replace")
        try:
            return json.loads(text)
        except ValueError:
            return text


async def run_program(
    program: Program,
    problem: Problem,
    *,
    id: str,
    group_id: str,
    seed: int,
    server: EndpointServer,
    generator: Generator,
    template: Template,
    spec: RolloutSpec,
    generate_deadline_s: float,
    program_deadline_s: float,
    reward: ProgramReward | None = None,
    secret: str | None = None,
) -> Trajectory:
    """Run one rollout; the trajectory has a reward or a failure."""
    started_at, clock = time.time(), time.perf_counter()
    rollout = RolloutEndpoint(id, seed, generator, template, spec, generate_deadline_s)
    result: Any = None
    error: ProgramError | None = None
    async with server.rollout(rollout, secret):
        deadline = asyncio.timeout(program_deadline_s)
        try:
            async with deadline:
                result = await program(rollout.base_url, MODEL, problem)
        except Exception as raised:  # noqa: BLE001 - a foreign program may raise anything
            error = _program_error(raised, rollout)
        if deadline.expired():
            text = f"the program did not end within {program_deadline_s:g} s"
            rollout.failure = rollout.failure or Failure("deadline", text)
    if rollout.error is not None:
        raise rollout.error
    trajectory = _trajectory(rollout, problem, group_id, template, error)
    trajectory = replace(trajectory, started_at=started_at, wall_s=time.perf_counter() - clock)
    if trajectory.failure is not None:
        return trajectory
    if error is not None:  # a limit had been reached
        return replace(trajectory, reward=Reward(0.0, grader="limit"))
    answer = result if isinstance(result, str) else None
    trajectory = replace(trajectory, answer=answer)
    worth = await _reward(reward, ProgramEpisode(problem, result, trajectory))
    if isinstance(worth, Failure):
        return replace(trajectory, failure=worth)
    return replace(trajectory, reward=worth)


def _program_error(raised: Exception, rollout: RolloutEndpoint) -> ProgramError:
    text = str(raised) if isinstance(raised, ProgramError) else f"{type(raised).__name__}: {raised}"
    if rollout.refused and rollout.refused not in text:
        text = f"{text} (a request was refused: {rollout.refused})"
    return ProgramError(text)


def _trajectory(
    rollout: RolloutEndpoint,
    problem: Problem,
    group_id: str,
    template: Template,
    error: ProgramError | None,
) -> Trajectory:
    segments = rollout.tokens.segments
    stop, failure = rollout.stop or StopReason.ANSWERED, rollout.failure
    if failure is not None:
        engine = failure.name != "deadline"
        stop = StopReason.ENGINE_FAILED if engine else StopReason.ENVIRONMENT_FAILED
    elif error is not None and rollout.stop is None:
        stop, failure = StopReason.ENVIRONMENT_FAILED, Failure(error.name, str(error))
    elif not segments and rollout.stop is None:
        text = "the program ended without a reply of the model"
        stop, failure = StopReason.ENVIRONMENT_FAILED, Failure("program", text)
    first = segments[0] if segments else TokenSegment((), ())
    return Trajectory(
        id=rollout.id,
        problem_id=problem.id,
        group_id=group_id,
        seed=rollout.seed,
        prompt_ids=first.prompt_ids,
        turns=first.turns,
        more_segments=segments[1:],
        stop=stop,
        answer_tags=int(error is None),
        text=_text(segments, template),
        failure=failure,
    )


def _text(segments: Sequence[TokenSegment], template: Template) -> str:
    texts = [template.decode(segment.completion_ids) for segment in segments[:1]]
    for number, segment in enumerate(segments[1:], start=2):
        texts.append(f"\n=== segment {number} ===\n{template.decode(segment.token_ids)}")
    return "".join(texts)


async def _reward(reward: ProgramReward | None, episode: ProgramEpisode) -> Reward | Failure:
    """The reward of a finished program; anything but a finite number is a Failure."""
    started = time.perf_counter()
    value = episode.result
    if reward is not None:
        deadline = asyncio.timeout(REWARD_DEADLINE_S)
        try:
            async with deadline:
                value = reward(episode)
                if inspect.isawaitable(value):
                    value = await value
        except InfrastructureError as error:
            return Failure(error.name, str(error))
        except Exception as error:  # noqa: BLE001 - a foreign function may raise anything
            if deadline.expired():
                return Failure("reward", f"no reward within {REWARD_DEADLINE_S:g} s")
            return Failure("reward", f"{type(error).__name__}: {error}")
    if isinstance(value, int | float) and math.isfinite(value):
        wall_s = time.perf_counter() - started
        return Reward(float(value), episode.trajectory.answer, "program", wall_s)
    source = "the reward" if reward is not None else "the program (it has no reward function)"
    return Failure("reward", f"{source} returned {value!r}: expected a finite number")


def check_program(program: object) -> Program:
    """A program as it is given in Python or in a recipe: an async function or a command line."""
    if isinstance(program, str):
        raise UserError(f"program {program!r}: give the words of a command line as a list")
    if isinstance(program, list | tuple):
        if not program or not all(isinstance(word, str) for word in program):
            raise UserError(f"program {program!r}: a command line is a list of strings")
        return Command(tuple(program))
    if not callable(program):
        raise UserError(f"program {program!r}: expected an async function or a command line")
    return program
