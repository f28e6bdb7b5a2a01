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
as a fault of the program and drops the rollout. A reward function is treated as that of every other
environment (`agent.episodes`): a plain function runs in a thread, and what it raises is a Failure.

A limit explains an exception only if the exception is no infrastructure error: after an
InfrastructureError, a lost connection or a time-out (as the error or as its cause), and after a
signal that killed a command, the rollout has a Failure and no reward.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rstar2.agent.episodes import EpisodeError, failure_of, guarded
from rstar2.agent.loop import RolloutSpec
from rstar2.agent.template import Template
from rstar2.child import Child
from rstar2.endpoint.server import MODEL, EndpointServer, RolloutEndpoint
from rstar2.engine.base import Generator
from rstar2.environments.base import as_reward
from rstar2.environments.threads import call_function
from rstar2.errors import DeadlineError, InfrastructureError, RstarError, UserError
from rstar2.types import Failure, Problem, Reward, StopReason, TokenSegment, Trajectory, encode

Program = Callable[[str, str, Problem], Awaitable[Any]]
"""`await program(base_url, api_key, problem)`: one rollout of an agent that knows OpenAI's API."""

GRACE_S = 5.0


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
"""A plain or async function that returns a finite number."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line as a program.

    It reads the problem as one line of JSON from stdin and finds the endpoint in the environment
    variables OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. Its result is the last line that it
    prints, as JSON if it is valid JSON, else as text. An exit code other than 0 is a failure.
    """

    arguments: Sequence[str]
    directory: Path | None = None

    @property
    def scripts(self) -> tuple[Path, ...]:
        """The files among its words, for the record of a run (`environments.identity`)."""
        words = (Path(self.directory or ".", word) for word in self.arguments[1:])
        return tuple(path for path in words if path.is_file())

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
                code = await child.wait()
                if code < 0:  # such as SIGKILL, because the machine has no memory left
                    raise InfrastructureError(child.post_mortem())
                if code > 0:
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
    reward_deadline_s: float,
    reward: ProgramReward | None = None,
    secret: str | None = None,
) -> Trajectory:
    """Run one rollout; the trajectory has a reward or a failure.

    Time in which the model answers does not count against `program_deadline_s`: every turn has its
    own deadline, and waiting for an engine says nothing about the program.
    """
    started_at, clock = time.time(), time.perf_counter()
    rollout = RolloutEndpoint(id, seed, generator, template, spec, generate_deadline_s)
    result: Any = None
    error: Exception | None = None
    async with server.rollout(rollout, secret):
        deadline = asyncio.timeout(program_deadline_s)
        try:
            async with deadline:
                rollout.program = deadline
                result = await program(rollout.base_url, MODEL, problem)
        except Exception as raised:  # noqa: BLE001 - a foreign program may raise anything
            error = raised
        finally:
            rollout.program = None
        if deadline.expired():
            error = DeadlineError(f"the program did not end within {program_deadline_s:g} s")
    if rollout.error is not None:
        raise rollout.error
    failure = None if error is None else _program_failure(error, rollout)
    trajectory = _trajectory(rollout, problem, group_id, template, failure)
    trajectory = replace(trajectory, answer_tags=int(error is None))
    trajectory = replace(trajectory, started_at=started_at, wall_s=time.perf_counter() - clock)
    if trajectory.failure is not None:
        return trajectory
    if error is not None:  # a limit had been reached
        return replace(trajectory, reward=Reward(0.0, grader="limit"))
    answer = result if isinstance(result, str) else None
    trajectory = replace(trajectory, answer=answer)
    try:
        episode = ProgramEpisode(problem, result, trajectory)
        return replace(trajectory, reward=await _reward(reward, episode, reward_deadline_s))
    except EpisodeError as broken:
        return replace(trajectory, failure=broken.failure)


def _program_failure(raised: Exception, rollout: RolloutEndpoint) -> Failure | None:
    """Why the rollout is lost; None if the program raised because a limit had been reached."""
    if isinstance(raised, InfrastructureError):
        return failure_of(raised)
    text = str(raised) if isinstance(raised, ProgramError) else f"{type(raised).__name__}: {raised}"
    if rollout.stop is None:
        if rollout.refused and rollout.refused not in text:
            text = f"{text} (a request was refused: {rollout.refused})"
        return Failure("program", text)
    link: BaseException | None = raised
    while link is not None:
        if isinstance(link, InfrastructureError):
            return Failure(link.name, text)
        if isinstance(link, ConnectionError | TimeoutError):
            return Failure("connection", text)
        link = link.__cause__ or link.__context__  # httpx suppresses the context
    return None


def _trajectory(
    rollout: RolloutEndpoint,
    problem: Problem,
    group_id: str,
    template: Template,
    failure: Failure | None,
) -> Trajectory:
    """What was sampled, without a reward; `failure` is the program's own."""
    segments = rollout.tokens.segments
    stop = rollout.stop or StopReason.ANSWERED
    if failure is None and not segments and rollout.stop is None:
        failure = Failure("program", "the program ended without a reply of the model")
    if rollout.failure is not None:
        stop, failure = StopReason.ENGINE_FAILED, rollout.failure
    elif failure is not None:
        stop = StopReason.ENVIRONMENT_FAILED
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
        text=_text(segments, template),
        failure=failure,
    )


def _text(segments: Sequence[TokenSegment], template: Template) -> str:
    texts = [template.decode(s.token_ids[len(s.prompt_ids) :]) for s in segments[:1]]
    for number, segment in enumerate(segments[1:], start=2):
        texts.append(f"\n=== segment {number} ===\n{template.decode(segment.token_ids)}")
    return "".join(texts)


async def _reward(
    reward: ProgramReward | None, episode: ProgramEpisode, deadline_s: float
) -> Reward:
    """The reward of a finished program; raises EpisodeError if there is none."""
    started = time.perf_counter()
    value = episode.result
    if reward is not None:
        value = await guarded("reward", "reward", call_function(reward, episode), deadline_s)
    elif not isinstance(value, int | float | Reward | Failure):
        text = "the program (it has no reward function) returned"
        raise EpisodeError(Failure("reward", f"{text} {value!r:.200}: expected a finite number"))
    worth = as_reward(value, episode.trajectory.answer, "program")
    if isinstance(worth, Failure):
        raise EpisodeError(worth)
    return replace(worth, wall_s=time.perf_counter() - started)


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
