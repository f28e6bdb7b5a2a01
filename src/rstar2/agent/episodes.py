"""What the agent loops do with an episode: open it, run its calls, ask for replies and the reward,
close it.

User code runs behind these functions, so each wait has a deadline and each error becomes data:

| raised by the environment                   | becomes                                       |
|---------------------------------------------|-----------------------------------------------|
| InfrastructureError, OSError                | a Failure with the error's name               |
| nothing within the deadline                 | Failure("deadline")                           |
| UserError                                   | raised: the run cannot work                   |
| InvariantError                              | raised: a bug of rstar2                       |
| any other exception of open, reply, answer  | Failure("environment")                        |
| any other exception of a call               | Failure("tool")                               |
| any other exception of the reward           | Failure("reward"), as a value that is no      |
|                                             | finite number                                 |

Invariant: an episode that was opened is closed exactly once, also on cancellation, which then
propagates.
"""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import rstar2
from rstar2.config import AgentConfig
from rstar2.environments.base import EnvironmentProtocol, EpisodeProtocol, SandboxClient, as_reward
from rstar2.errors import (
    CodeEnvError,
    DeadlineError,
    InfrastructureError,
    InvariantError,
    UserError,
)
from rstar2.tasks import to_the_end, together
from rstar2.types import (
    Failure,
    Finish,
    Message,
    Outcome,
    Problem,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_S = 5.0
"""A loop waits this much longer than the deadline that it gives to an engine or a tool."""
CLOSE_DEADLINE_S = 10.0
PACKAGE = Path(rstar2.__file__).parent
SHOWN_FRAMES = 3
"""Frames of a traceback in the message of a Failure."""


# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class TurnSampled:
    """The model finished a turn."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolReturned:
    """A tool call returned; `text` is what the model reads."""

    turn: int
    call: ToolCall
    result: ToolResult
    text: str


@dataclass(frozen=True, slots=True)
class Replied:
    """The environment replied to a turn without a call."""

    turn: int
    text: str


LoopEvent = TurnSampled | ToolReturned | Replied
Observer = Callable[[LoopEvent], None]


def result_reporter(
    observer: Observer | None, text_of: Callable[[ToolResult], str]
) -> Callable[[int, ToolCall, ToolResult], None] | None:
    """A callback that sends tool results to the observer, with the text that the model reads."""
    if observer is None:
        return None
    return lambda turn, call, result: observer(ToolReturned(turn, call, result, text_of(result)))


# --------------------------------------------------------------------------- failures


class EpisodeError(Exception):
    """Internal: the environment failed; `failure` says how."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failure_of(error: InfrastructureError | OSError) -> Failure:
    """The error as a Failure with the error's name."""
    name = error.name if isinstance(error, InfrastructureError) else "connection"
    return Failure(name, str(error) or type(error).__name__)


def _broken(name: str, what: str, error: Exception) -> Failure:
    """The Failure of code that the environment's author wrote, with the place in that code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(PACKAGE)]
    frames = traceback.StackSummary.from_list((own or frames)[-SHOWN_FRAMES:])
    places = " > ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
    failure = Failure(name, f"{what} raised {type(error).__name__}: {error} ({places})")
    log.warning("%s", failure.message)
    return failure


async def guarded(name: str, what: str, work: Awaitable[T], deadline_s: float) -> T:
    """Await the environment's code; raises EpisodeError instead of what it raised."""
    try:
        async with asyncio.timeout(deadline_s + GRACE_S):
            return await work
    except TimeoutError as error:
        failure = failure_of(DeadlineError(f"{what}: no result within {deadline_s + GRACE_S:g} s"))
        raise EpisodeError(failure) from error
    except (InfrastructureError, OSError) as error:
        raise EpisodeError(failure_of(error)) from error
    except (UserError, InvariantError, EpisodeError):
        raise
    except Exception as error:
        raise EpisodeError(_broken(name, what, error)) from error


# --------------------------------------------------------------------------- open and close


@asynccontextmanager
async def open_episode(
    environment: EnvironmentProtocol,
    problem: Problem,
    *,
    seed: int,
    sandbox: SandboxClient | None,
    deadline_s: float,
) -> AsyncIterator[EpisodeProtocol]:
    """An episode that is closed when the block ends; raises EpisodeError if it cannot open."""
    opening = environment.open(problem, seed=seed, sandbox=sandbox)
    episode = await guarded("environment", f"{environment.name}: open", opening, deadline_s)
    try:
        yield episode
    finally:
        await to_the_end(_close(environment.name, episode))


async def _close(name: str, episode: EpisodeProtocol) -> None:
    try:
        await guarded("environment", f"{name}: close", episode.close(), CLOSE_DEADLINE_S)
    except EpisodeError as error:  # the rollout has ended, and its reward is known
        log.warning("an episode could not be closed: %s", error)


# --------------------------------------------------------------------------- turns


@dataclass(slots=True)
class CallRunner:
    """Runs the tool calls of one rollout and counts invalid calls in a row.

    The calls of a turn run at the same time, unless one of their tools is stateful; results have
    the order of the calls. A call that could not be parsed returns its error; a call's own failure
    is data for the model; an infrastructure failure ends the rollout and is never shown to the
    model.
    """

    episode: EpisodeProtocol
    agent: AgentConfig
    on_result: Callable[[int, ToolCall, ToolResult], None] | None = None
    invalid: int = 0
    failure: Failure | None = None

    async def run(
        self, turn: int, calls: Sequence[ToolCall], results: list[ToolResult]
    ) -> StopReason | None:
        """Append to `results` in order; returns why the rollout must stop, or None."""
        allowed = calls[: self._executable(calls)]
        done = await self._execute_all(allowed)
        for call, result in zip(allowed, done, strict=False):  # a failure is the last result
            if isinstance(result, Failure):
                self.failure = result
                return StopReason.TOOL_FAILED
            results.append(result)
            if result.outcome is Outcome.INFRASTRUCTURE:
                message = result.message or "a tool call could not be executed"
                self.failure = failure_of(CodeEnvError(message))
                return StopReason.TOOL_FAILED
            self.invalid = self.invalid + 1 if result.outcome.malformed else 0
            if self.on_result is not None:
                self.on_result(turn, call, result)
            if self.invalid >= self.agent.invalid_calls:
                return StopReason.INVALID_CALLS
        return None

    def _executable(self, calls: Sequence[ToolCall]) -> int:
        """How many calls come before the one that ends the rollout as one invalid call too many."""
        invalid = self.invalid
        for number, call in enumerate(calls, start=1):
            invalid = invalid + 1 if call.error is not None else 0
            if invalid >= self.agent.invalid_calls:
                return number
        return len(calls)

    async def _execute_all(self, calls: Sequence[ToolCall]) -> list[ToolResult | Failure]:
        stateful = {tool.name for tool in self.episode.tools if tool.stateful}
        if len(calls) < 2 or any(call.name in stateful for call in calls):
            results: list[ToolResult | Failure] = []
            for call in calls:
                results.append(await self._execute(call))
                if isinstance(results[-1], Failure):
                    break
            return results
        return await together(self._execute(call) for call in calls)

    async def _execute(self, call: ToolCall) -> ToolResult | Failure:
        if call.error is not None:
            return ToolResult(call.id, call.error, message=call.message)
        deadline_s = self.agent.tool_deadline_s
        running = self.episode.call(call, deadline_s)
        try:
            result = await guarded("tool", f"tool {call.name}", running, deadline_s)
        except EpisodeError as error:
            return error.failure
        if result.call_id != call.id:
            return failure_of(
                CodeEnvError(f"requested call {call.id}, got the result of {result.call_id}")
            )
        return result


def stop_before_calls(
    finish: Finish, calls: Sequence[ToolCall], *, last_turn: bool
) -> StopReason | None:
    """Why the rollout ends with this turn, before its calls run; None if it does not."""
    if finish is Finish.LENGTH:
        return StopReason.MAX_LENGTH
    return StopReason.MAX_TURNS if calls and last_turn else None


async def ask_reply(
    episode: EpisodeProtocol, turns: Sequence[Turn], agent: AgentConfig
) -> tuple[Message, ...] | None:
    """The environment's reply to the last turn, which has no call; None ends the episode."""
    deadline_s = agent.tool_deadline_s
    reply = await guarded("environment", "reply", episode.reply(turns), deadline_s)
    if reply is None:
        return None
    if not reply or any(not isinstance(m, Message) or m.role != "user" for m in reply):
        kinds = [m.role if isinstance(m, Message) else type(m).__name__ for m in reply]
        got = ", ".join(kinds) or "no message"
        problem = f"a reply consists of Messages of role user, or is None to end; got {got}"
        raise EpisodeError(Failure("environment", problem))
    return tuple(reply)


def reply_text(reply: Sequence[Message]) -> str:
    """The messages of a reply as one user message."""
    return "\n\n".join(message.content.strip() for message in reply)


# --------------------------------------------------------------------------- the end


async def conclude(
    environment: EnvironmentProtocol,
    episode: EpisodeProtocol,
    trajectory: Trajectory,
    agent: AgentConfig,
    *,
    graded: bool = True,
) -> Trajectory:
    """The trajectory with its answer, format penalty and reward, or with the Failure of these."""

    async def read() -> Trajectory:
        answer = episode.answer(trajectory.turns)
        stop = trajectory.stop
        if stop is StopReason.ANSWERED and not answer.complete:
            stop = StopReason.NO_ANSWER
        read = replace(trajectory, stop=stop, answer=answer.text, answer_tags=answer.count)
        penalty = _penalty(environment.format_penalty(read))
        return replace(read, format_penalty=penalty) if penalty else read

    async def grade(trajectory: Trajectory) -> Trajectory:
        work = episode.reward(trajectory, agent.reward_deadline_s)
        returned = await guarded("reward", "reward", work, agent.reward_deadline_s)
        reward = as_reward(returned, trajectory.answer, environment.name)
        if isinstance(reward, Failure):
            raise EpisodeError(reward)
        return replace(trajectory, reward=reward)

    try:
        name = environment.name
        trajectory = await guarded("environment", f"{name}: answer", read(), GRACE_S)
        if graded and not trajectory.stop.infrastructure:
            trajectory = await grade(trajectory)
    except EpisodeError as error:
        if trajectory.failure is None:
            trajectory = replace(trajectory, failure=error.failure)
    return trajectory


def _penalty(value: float) -> float:
    """A format penalty that RoC can use; its weight 1 / (epsilon + penalty) must be positive."""
    if not 0 <= value < math.inf:
        raise EpisodeError(
            Failure("format_penalty", f"the format penalty must be 0 or more, got {value!r}")
        )
    return float(value)
